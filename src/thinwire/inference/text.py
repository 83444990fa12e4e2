"""Text from a model: what it reads next, how the next token is chosen, how tokens become text, and
where the text ends. Shapes: V entries of the vocabulary.
"""

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinwire.codec import Leg
from thinwire.data import Tokenizer
from thinwire.data.chat import Chat
from thinwire.engine.checkpoint import Checkpoint
from thinwire.engine.cut import codecs_of
from thinwire.errors import CheckpointError, ConfigError
from thinwire.settings import Settings

COLDEST = 1e-6  # a temperature below is 0: logits divided by it would overflow


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: temperature 0 takes the likeliest, top-k 0 and top-p 1 allow all."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < math.inf and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ConfigError(
                f"temperature {self.temperature} and top-k {self.top_k} must not be negative, and "
                f"top-p {self.top_p} must be above 0 and at most 1"
            )


class Choice:
    """Chooses tokens by their logits, the same ones for the same seed."""

    def __init__(self, sampling: Sampling):
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits_V: Tensor) -> int:
        """The next token."""
        if logits_V.isnan().any():
            raise CheckpointError(
                "the model's output is NaN: its training has diverged; use an earlier checkpoint"
            )
        if self._sampling.temperature < COLDEST:
            return int(logits_V.argmax())
        shares_V = shares(logits_V, self._sampling)
        return int(torch.multinomial(shares_V, 1, generator=self._generator))


def shares(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """The probability of each token: of the top-k likeliest, then of the fewest of these that
    make up top-p together; equal ones at the edge of top-k stay in.
    """
    if sampling.top_k:
        worst = torch.topk(logits_V, min(sampling.top_k, len(logits_V))).values[-1]
        logits_V = logits_V.masked_fill(logits_V < worst, -math.inf)
    shares_V = torch.softmax(logits_V / sampling.temperature, -1)
    if sampling.top_p == 1:
        return shares_V
    sorted_V, order_V = shares_V.sort(descending=True, stable=True)
    # What comes before a token must not be enough by itself: so the likeliest always stays.
    kept_V = sorted_V.cumsum(-1) - sorted_V < sampling.top_p
    shares_V = torch.zeros_like(shares_V).scatter(0, order_V, sorted_V * kept_V)
    return shares_V / shares_V.sum()


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

    slow: str
    """What it costs that a codec reads more than one token."""

    @abstractmethod
    def reader(self, sampling: Sampling) -> Callable[[list[int], int, bool], int]:
        """What chooses the token behind the next ids, given with their number within the text and
        whether they are read with an empty past.
        """

    @property
    def crosses_by_token(self) -> bool:
        """Whether every codec of this model lets each token cross by itself."""
        return crosses_by_token(self.settings)

    def notes(self) -> list[str]:
        """What whoever generates text with this model should know."""
        return [] if self.crosses_by_token else [self.slow]

    def tokens_behind(self, ids: Sequence[int], sampling: Sampling) -> Iterator[int]:
        """The tokens that follow `ids`, without end; each is computed when it is asked for."""
        ids, choose = list(ids), self.reader(sampling)
        parts = extensions(ids, self.settings.model.context, self.crosses_by_token)
        for number, (part, with_empty_past) in enumerate(parts):
            ids.append(choose(part, number, with_empty_past))
            yield ids[-1]

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run; CheckpointError when it trained on bare token ids."""
        if self.checkpoint.tokenizer is None:
            raise CheckpointError(
                f"{self.checkpoint.folder} holds no tokenizer (it was trained on token shards "
                "without one): set data.tokenizer when training to be able to generate text"
            )
        return Tokenizer.load(self.checkpoint.tokenizer)

    @functools.cached_property
    def chat(self) -> Chat:
        """The chat template with which the model is asked; DataError if none fits it."""
        _ = self.tokenizer  # which says why there is none
        return Chat.open(self.checkpoint.folder, self.template)

    def answer(
        self, messages: Sequence[Mapping[str, str]], tokens: int, sampling: Sampling
    ) -> "Writing":
        """The assistant's next message in a conversation."""
        return self.write(self.chat.prompt_ids(messages), tokens, sampling, self.chat.end_ids)

    def encode(self, prompt: str) -> list[int]:
        """The ids of a prompt; an empty one begins a new text."""
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # bytes of another encoding on the command line
            raise ConfigError(f"the prompt is not valid Unicode text: {error.reason}") from None
        if ids := self.tokenizer.encode(prompt):
            return ids
        if self.tokenizer.end_of_text is None:
            raise ConfigError(
                "an empty prompt begins a new text, but the tokenizer of "
                f"{self.checkpoint.folder} has no token between texts: give a prompt"
            )
        return [self.tokenizer.end_of_text]

    def write(
        self,
        ids: list[int],
        tokens: int,
        sampling: Sampling,
        ends: Collection[int] = (),
        stop: Collection[str] = (),
    ) -> "Writing":
        """At most `tokens` tokens behind `ids`, to the end of the text, one of the tokens `ends`,
        or one of the texts `stop`.
        """
        if tokens < 1:
            raise ConfigError("tokens must be at least 1")
        known = {*ends, self.tokenizer.end_of_text}
        chosen = itertools.islice(self.tokens_behind(ids, sampling), tokens)
        return Writing(self.tokenizer, ids, chosen, known, stop)

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
        sampling = Sampling(temperature, top_k, top_p, seed)
        return prompt + "".join(self.write(self.encode(prompt), tokens, sampling))


def crosses_by_token(settings: Settings) -> bool:
    """Whether every codec of a run lets each token cross by itself."""
    return all(codecs[Leg.FORWARD].by_token for codecs in codecs_of(settings).values())


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
        self._tokenizer, self._ids = tokenizer, list(prompt)
        self._before, self._told = max(0, len(prompt) - 1), len(prompt)
        self._chosen = chosen
        self._ends = ends
        self._stops = [string for string in stop if string]
        self._held = ""

    def __iter__(self) -> Iterator[str]:
        for token in self._chosen:
            self.count += 1
            if token in self._ends:
                self.ended_by = "stop"
                break
            self._ids.append(token)
            shown, is_stopped = self._up_to_stop(self._new_text())
            yield shown
            if is_stopped:
                return
        shown, is_stopped = self._up_to_stop(self._new_text(whole_characters=False))
        yield shown if is_stopped else shown + self._held

    def _new_text(self, whole_characters: bool = True) -> str:
        """What has been added, or nothing while its last character is spread over ids to come.

        It is read together with the piece before, since some tokenizers write a token otherwise
        where it stands first.
        """
        known = self._tokenizer.decode(self._ids[self._before : self._told])
        text = self._tokenizer.decode(self._ids[self._before :])[len(known) :]
        if whole_characters and text.endswith("\ufffd"):
            return ""
        self._before, self._told = self._told, len(self._ids)
        return text

    def _up_to_stop(self, piece: str) -> tuple[str, bool]:
        """What can be shown, up to a stop, and whether that came. What may become one is held."""
        text, self._held = self._held + piece, ""
        found = [at for string in self._stops if (at := text.find(string)) >= 0]
        if found:
            self.ended_by = "stop"
            return text[: min(found)], True
        beginnings = (
            length
            for string in self._stops
            for length in range(min(len(string) - 1, len(text)), 0, -1)
            if text.endswith(string[:length])
        )
        keep = len(text) - max(beginnings, default=0)
        self._held = text[keep:]
        return text[:keep], False
