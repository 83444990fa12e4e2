"""Conversations to token ids, and which of them are learned: by a tokenizer and its chat template.

    chat = Chat.open(checkpoint.folder)            # or any folder with a tokenizer.json
    ids = chat.prompt_ids([{"role": "user", "content": "Hello"}])   # the model answers behind them
    ids[-1] in chat.end_ids                        # an answer ends with one of these

What the template writes may hold special tokens; what a message holds never becomes one.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from thinwire.data.conversations import (
    ASSISTANT,
    Conversation,
    NotAConversation,
    checked,
    is_learned,
)
from thinwire.data.template import BEGIN, CHATML, CHATML_TOKENS, END, GUARD, ChatTemplate, Specials
from thinwire.data.tokenizer import PIECE_CHARACTERS, Tokenizer, pieces_of
from thinwire.errors import DataError

Span = tuple[int, int]


class Encoded(NamedTuple):
    """The ids of a conversation; of each, whether it is learned and the bytes it stands for."""

    ids: np.ndarray
    learned: np.ndarray
    sizes: np.ndarray
    text: str


class Chat:
    """A tokenizer with a chat template that its vocabulary fits."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        missing = [token for token in CHATML_TOKENS if tokenizer.id_of(token) is None]
        if template.source == CHATML and missing:
            raise DataError(
                f"the chat template ChatML needs {' and '.join(CHATML_TOKENS)} as special tokens, "
                f"and the tokenizer has no {missing[0]}: put the chat template of the tokenizer "
                "beside it (tokenizer_config.json), or name one: data.template in training, "
                "--template for text"
            )
        self.tokenizer = tokenizer
        self.template = template
        self._specials = Specials(tokenizer.special_tokens)

    @classmethod
    def open(cls, folder: Path, template: str = "") -> "Chat":
        """What a prepared corpus, a checkpoint or an imported model is asked with.

        `template` chooses one as data.template does.
        """
        path = folder / "tokenizer.json"
        return cls(Tokenizer.load(path), ChatTemplate.chosen(template, path))

    def prompt_ids(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None = None
    ) -> list[int]:
        """The ids of a conversation up to where the assistant's next answer begins."""
        try:
            guarded = self._specials.guard(checked(messages))
        except NotAConversation as error:
            raise DataError(f"these messages are no conversation: {error}") from None
        text = _without_marks(self.template.render(guarded, self._specials.guard(tools), True))
        encoded = self.tokenizer.encode_rendered(self._parts(text))
        return [int(i) for ids, _, _ in encoded for i in ids]

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Ids that end an answer: by the template, by its config, or between texts."""
        said = Conversation([{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "a"}])
        text, spans = self._rendered(said)
        names = {self.template.end_token}
        for start, stop in spans:
            last = self._specials.last(text[start:stop])
            names.add(last[0] if last else None)
        ids = {self.tokenizer.id_of(name) for name in names if name is not None}
        return frozenset(i for i in (*ids, self.tokenizer.end_of_text) if i is not None)

    def encode_all(self, conversations: list[Conversation], learn_all: bool) -> list[Encoded]:
        """The ids of each conversation, computed on all cores; without `learn_all` only those of
        the assistant's answers, and of the token that ends each, are learned.
        """
        rendered = [self._rendered(each, not learn_all) for each in conversations]
        parts = [self._parts(text) for text, _ in rendered]
        flat = iter(self.tokenizer.encode_rendered([part for own in parts for part in own]))
        found = []
        for (text, spans), own in zip(rendered, parts, strict=True):
            plain = text.replace(GUARD, "")
            is_answer = np.full(len(plain) + 1, learn_all)  # the last is for what ends before it
            for span in spans:
                start, stop = (place - text.count(GUARD, 0, place) for place in span)
                is_answer[start:stop] = True
            found.append(self._joined(plain, own, [next(flat) for _ in own], is_answer))
        return found

    def _joined(
        self,
        plain: str,
        parts: list[str],
        encoded: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
        is_answer: np.ndarray,
    ) -> Encoded:
        starts = np.cumsum([0, *map(len, parts)])
        ids = np.concatenate([np.empty(0, np.uint32), *(ids for ids, _, _ in encoded)])
        sizes = np.concatenate([np.empty(0, np.uint32), *(sizes for _, _, sizes in encoded)])
        # A token belongs to where its last character stands.
        lasts = [start + ends - 1 for start, (_, ends, _) in zip(starts, encoded, strict=False)]
        learned = is_answer[np.concatenate([np.empty(0, np.int64), *lasts])].astype(np.uint8)
        sizes[np.isin(ids, self.tokenizer.special_ids)] = 0
        return Encoded(ids, learned, sizes, plain)

    def _parts(self, text: str) -> list[str]:
        """Parts of a rendered text to encode one by one: split at guards, and where it is long."""
        found = []
        for part in text.split(GUARD):
            if len(part) <= PIECE_CHARACTERS:
                found.append(part)
                continue
            for piece in self._specials.split(part):
                found += [text for text, _ in pieces_of(piece)]
        return [part for part in found if part]

    def _rendered(self, conversation: Conversation, marked: bool = True) -> tuple[str, list[Span]]:
        """The text with its guards, and where in it the answers are that shall be learned."""
        messages = self._specials.guard(conversation.messages)
        tools = self._specials.guard(conversation.tools)
        text = self.template.render(messages, tools)
        if not marked:
            return _without_marks(text), []
        if self.template.marks_answers:
            return self._marked(text, messages)
        spans = [
            self._span(text, messages, tools, number)
            for number, message in enumerate(conversation.messages)
            if is_learned(message)
        ]
        return text, spans

    def _marked(self, text: str, messages: list[dict[str, Any]]) -> tuple[str, list[Span]]:
        """Answers as the template marks them."""
        answers = [message for message in messages if message["role"] == ASSISTANT]
        pieces = text.split(BEGIN)
        if len(pieces) - 1 != len(answers) or any(piece.count(END) != 1 for piece in pieces[1:]):
            raise DataError(
                f"the chat template ({self.template.name}) marks {len(pieces) - 1} answers of "
                f"{len(answers)} with {{% generation %}}: correct it, or choose another "
                "data.template"
            )
        spans, plain = [], pieces[0]
        for message, piece in zip(answers, pieces[1:], strict=True):
            answer, rest = piece.split(END)
            if is_learned(message):
                spans.append((len(plain), len(plain) + len(answer)))
            plain += answer + rest
        return plain, spans

    def _span(
        self, text: str, messages: list[dict[str, Any]], tools: list[Any] | None, number: int
    ) -> Span:
        """Where message `number` stands: from behind its prompt to the token that ends it."""
        before = self.template.render(messages[:number], tools, prompts=True)
        if not text.startswith(before):
            raise self._unclear("what it writes ahead of an answer changes with what follows")
        start = len(before)
        stop = self._end_of_content(text, messages, tools, number)
        if stop is None or stop <= start:
            stop = self._end_of_message(text, messages, tools, number, start)
        return start, stop

    def _end_of_content(
        self, text: str, messages: list[dict[str, Any]], tools: list[Any] | None, number: int
    ) -> int | None:
        """Behind the special token that follows the content of a message, if one does.

        A mark at the end of that content shows where it is. Some templates end a conversation with
        a token more, or write the last answer in another way: what follows is of no help.
        """
        message = messages[number]
        if message.get("tool_calls"):
            return None
        marked = {**message, "content": message["content"].rstrip() + END}
        others = messages[:number], messages[number + 1 :]
        shown = self.template.render([*others[0], marked, *others[1]], tools)
        at = shown.find(END)
        if at < 0 or shown[:at] != text[:at]:
            return None
        return self._specials.end_of_next(text, at)

    def _end_of_message(
        self,
        text: str,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        number: int,
        start: int,
    ) -> int:
        """Where a message ends by what the conversation up to it has in common with all of it."""
        through = self.template.render(messages[: number + 1], tools)
        pairs = enumerate(zip(text, through, strict=False))
        common = text[: next((at for at, (a, b) in pairs if a != b), len(through))]
        last = self._specials.last(common[start:])
        if last is not None:
            return start + last[1]
        if common != through or len(through) <= start:
            raise self._unclear("it writes an answer otherwise when more follows")
        return len(through)

    def _unclear(self, why: str) -> DataError:
        return DataError(
            f"the chat template ({self.template.name}) does not show which tokens are the "
            f"assistant's: {why}. Put {{% generation %}} and {{% endgeneration %}} around the "
            "answer in a copy of it and name that with data.template, set data.template = "
            '"chatml", or learn from all tokens with data.learn = "all"'
        )


def _without_marks(text: str) -> str:
    return text.replace(BEGIN, "").replace(END, "")
