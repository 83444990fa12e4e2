"""Text from a model: what it reads next, how its tokens become text, and when the text ends."""

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from thinwire.codec import Leg, build_codecs
from thinwire.data import Tokenizer
from thinwire.data.chat import Chat
from thinwire.engine import Checkpoint
from thinwire.errors import CheckpointError, ConfigError
from thinwire.inference.choice import Sampling
from thinwire.settings import Settings


class TextModel(ABC):
    """Whatever writes text: the model of a checkpoint in this process, or in those of its stages.

    A model sees its context at most: of a longer prompt the last part. When the window is full its
    older half is dropped, and the rest is computed anew. Each stage keeps what attention has
    computed of a window (a key-value cache), where codecs let each token cross by itself.
    """

    checkpoint: Checkpoint
    settings: Settings
    template = ""
    """The chat template to ask it with, as data.template chooses one; empty: its own."""

    @abstractmethod
    def notes(self) -> list[str]:
        """What whoever generates text with this model should know."""

    @abstractmethod
    def tokens_behind(
        self, ids: Sequence[int], sampling: Sampling, cache: bool = True
    ) -> Iterator[int]:
        """The tokens that follow `ids`, without end; each is computed when it is asked for.

        Without `cache` the whole window is computed for each; that changes no token.
        """

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        if self.checkpoint.tokenizer is None:
            raise CheckpointError(
                f"{self.checkpoint.folder} holds no tokenizer (it was trained on token shards "
                "without one): set data.tokenizer when training to be able to generate text"
            )
        return Tokenizer.load(self.checkpoint.tokenizer)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run; CheckpointError when it trained on bare token ids."""
        return self._tokenizer

    @functools.cached_property
    def _chat(self) -> Chat:
        self.tokenizer()  # which says why there is none
        return Chat.open(self.checkpoint.folder, self.template)

    def chat(self) -> Chat:
        """The chat template with which the model is asked; DataError if none fits it."""
        return self._chat

    def answer(
        self, messages: Sequence[Mapping[str, str]], tokens: int, sampling: Sampling
    ) -> "Writing":
        """The assistant's next message in a conversation."""
        chat = self.chat()
        return self.write(chat.prompt_ids(messages), tokens, sampling, chat.end_ids)

    def encode(self, prompt: str) -> list[int]:
        """The ids of a prompt; an empty one begins a new text."""
        tokenizer = self.tokenizer()
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # bytes of another encoding on the command line
            raise ConfigError(f"the prompt is not valid Unicode text: {error.reason}") from None
        if ids := tokenizer.encode(prompt):
            return ids
        if tokenizer.end_of_text is None:
            raise ConfigError(
                "an empty prompt begins a new text, but the tokenizer of "
                f"{self.checkpoint.folder} has no token between texts: give a prompt"
            )
        return [tokenizer.end_of_text]

    def write(
        self,
        ids: list[int],
        tokens: int,
        sampling: Sampling,
        ends: Collection[int] = (),
        stop: Collection[str] = (),
        cache: bool = True,
    ) -> "Writing":
        """At most `tokens` tokens behind `ids`, to the end of the text, one of the tokens `ends`,
        or one of the texts `stop`.
        """
        if tokens < 1:
            raise ConfigError("tokens must be at least 1")
        tokenizer = self.tokenizer()
        known = {*ends, tokenizer.end_of_text}
        chosen = itertools.islice(self.tokens_behind(ids, sampling, cache), tokens)
        return Writing(tokenizer, ids, chosen, known, stop)

    def stream(
        self,
        prompt: str,
        tokens: int,
        temperature: float,
        top_k: int,
        seed: int,
        cache: bool = True,
        top_p: float = 1.0,
    ) -> Iterator[str]:
        """The prompt, then its continuation in pieces of whole characters, as they are chosen."""
        sampling = Sampling(temperature, top_k, top_p, seed)
        writing = self.write(self.encode(prompt), tokens, sampling, cache=cache)
        return itertools.chain([prompt], writing)

    def generate(
        self,
        prompt: str,
        tokens: int,
        temperature: float,
        top_k: int,
        seed: int,
        top_p: float = 1.0,
    ) -> str:
        """The prompt and its continuation. The same seed gives the same text on a machine."""
        return "".join(self.stream(prompt, tokens, temperature, top_k, seed, top_p=top_p))


def crosses_by_token(settings: Settings) -> bool:
    """Whether every codec of a run lets each token cross by itself."""
    cuts = range(settings.pipeline.stages - 1)
    return all(build_codecs(*settings.codec.names(cut))[Leg.FORWARD].by_token for cut in cuts)


def extensions(ids: list[int], context: int, cached: bool) -> Iterator[tuple[list[int], bool]]:
    """What a model reads next, each time that `ids` have grown, and whether with an empty past."""
    first = seen = max(0, len(ids) - context)  # the window's first id; ids that the past holds
    is_new = True
    while True:
        if len(ids) - first > context:
            first = seen = len(ids) - max(1, context // 2)
            is_new = True
        read, with_empty_past = ids[seen if cached else first :], is_new or not cached
        seen, is_new = len(ids), False
        yield read, with_empty_past


class Writing:
    """A text as it is written: iterate once over its pieces of whole characters.

    Pieces may be empty, one for each token: whoever waits can look around.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: list[int],
        chosen: Iterable[int],
        ends: Collection[int | None],
        stop: Collection[str],
    ):
        self.count = 0  # tokens so far, with the one that ended the text
        self.ended_by: Literal["length", "stop"] = "length"
        self._ids = list(prompt)
        self._text = _TextOf(tokenizer, self._ids)
        self._chosen = chosen
        self._ends = ends
        self._stops = _Stops(stop)

    def __iter__(self) -> Iterator[str]:
        for token in self._chosen:
            self.count += 1
            if token in self._ends:
                self.ended_by = "stop"
                break
            self._ids.append(token)
            yield self._stops.passed(self._text.whole_characters())
            if self._stops.found:
                self.ended_by = "stop"
                return
        rest = self._stops.passed(self._text.rest())
        if self._stops.found:
            self.ended_by = "stop"
        else:
            rest += self._stops.held
        yield rest


class _Stops:
    """Lets text pass up to the first of some strings; holds back what may become one of them."""

    def __init__(self, strings: Collection[str]):
        self.held = ""
        self.found = False
        self._strings = [string for string in strings if string]

    def passed(self, piece: str) -> str:
        """What of the text so far can be shown."""
        text, self.held = self.held + piece, ""
        found = [at for string in self._strings if (at := text.find(string)) >= 0]
        if found:
            self.found = True
            return text[: min(found)]
        beginnings = (
            length
            for string in self._strings
            for length in range(min(len(string) - 1, len(text)), 0, -1)
            if text.endswith(string[:length])
        )
        keep = len(text) - max(beginnings, default=0)
        self.held = text[keep:]
        return text[:keep]


class _TextOf:
    """The text of ids as they come: a character may be spread over several of them.

    Each piece is read together with the one before, since some tokenizers write a token otherwise
    where it stands first.
    """

    def __init__(self, tokenizer: Tokenizer, ids: list[int]):
        self._tokenizer = tokenizer
        self._ids = ids
        self._before, self._told = max(0, len(ids) - 1), len(ids)

    def whole_characters(self) -> str:
        """What has been added, or nothing while its last character is not complete."""
        return "" if self._untold().endswith("\ufffd") else self.rest()

    def rest(self) -> str:
        """What has been added, complete or not."""
        untold = self._untold()
        self._before, self._told = self._told, len(self._ids)
        return untold

    def _untold(self) -> str:
        known = self._tokenizer.decode(self._ids[self._before : self._told])
        return self._tokenizer.decode(self._ids[self._before :])[len(known) :]
