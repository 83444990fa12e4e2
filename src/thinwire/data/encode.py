"""Documents to token ids, in batches on all cores and in bounded memory."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from thinwire.data.chat import Chat
from thinwire.data.conversations import Conversation
from thinwire.data.corpus import TokenChunk
from thinwire.data.tokenizer import Tokenizer, interruptible, pieces_of
from thinwire.errors import DataError

ItemT = TypeVar("ItemT")

BATCH_CHARACTERS = 1_000_000
_JUDGED_CHARACTERS = 10_000_000  # enough to know a tokenizer that loses most of a text


class LostCharacters:
    """Counts the characters that a tokenizer loses: those that do not come back from its ids.

    A tokenizer may lack some characters or bytes, and leaves them out silently.
    """

    def __init__(self) -> None:
        self.characters = 0  # of all texts
        self._lost: Counter[str] = Counter()

    def add(self, texts: Iterable[str], decoded: Iterable[str]) -> None:
        """Compare texts with what their ids decode to; losing most of a text is an error."""
        for text, back in zip(texts, decoded, strict=True):
            self.characters += len(text)
            if back != text:
                self._lost += Counter(text) - Counter(back)
        if self.characters >= _JUDGED_CHARACTERS:
            self.check()

    def check(self) -> None:
        """Refuse a tokenizer that loses more than half of the text."""
        if 2 * self._lost.total() > self.characters:
            raise DataError(f"the tokenizer does not fit this text: it {self.summary()}")

    def summary(self) -> str:
        """What is lost, for the user; empty if nothing is."""
        lost = self._lost.total()
        if not lost:
            return ""
        most = ", ".join(
            f"{character!r} {count:,}" for character, count in self._lost.most_common(5)
        )
        return (
            f"loses {lost:,} of {self.characters:,} characters ({lost / self.characters:.2%}), "
            f"most often {most}: decoding its ids does not restore them. A byte-level "
            "tokenizer loses none; leave data.tokenizer empty to train one"
        )


class _Piece(NamedTuple):
    side: str
    text: str
    last: bool  # whether its text ends here


def encode_passages(
    tokenizer: Tokenizer, passages: Iterable[tuple[str, str]], losses: LostCharacters
) -> Iterator[TokenChunk]:
    """The ids of every (side, text) in turn, each followed by the end of text.

    What is lost on the way is counted. A text over 128,000 characters comes in pieces that meet at
    line ends.
    """

    def encoded(batch: list[_Piece]) -> list[TokenChunk]:
        train = iter(tokenizer.encode_all([p.text for p in batch if p.side == "train"]))
        valid = iter(tokenizer.encode_measured([p.text for p in batch if p.side == "valid"]))
        chunks = [
            TokenChunk("train", next(train))
            if p.side == "train"
            else TokenChunk("valid", *next(valid)[:2])
            for p in batch
        ]
        decoded = tokenizer.decode_all([chunk.ids for chunk in chunks])
        losses.add([piece.text for piece in batch], decoded)
        return [_ended(c, tokenizer) if p.last else c for p, c in zip(batch, chunks, strict=True)]

    pieces = (_Piece(side, *piece) for side, text in passages for piece in pieces_of(text))
    yield from _in_batches(pieces, lambda piece: len(piece.text), encoded)
    losses.check()


def encode_conversations(
    chat: Chat, passages: Iterable[tuple[str, str]], learn_all: bool, losses: LostCharacters
) -> Iterator[TokenChunk]:
    """The ids of every (side, conversation as JSON) in turn, and which of them are learned.

    The end of text follows each, unless it ends with that already. It is not learned: an answer
    has an end of its own.
    """
    tokenizer = chat.tokenizer

    def encoded(batch: list[tuple[str, str]]) -> list[TokenChunk]:
        found = chat.encode_all([Conversation.from_json(text) for _, text in batch], learn_all)
        losses.add([f.text for f in found], tokenizer.decode_all([f.ids for f in found]))
        chunks = []
        for (side, _), (ids, learned, sizes, _) in zip(batch, found, strict=True):
            of_valid, of_answers = side == "valid", not learn_all
            chunk = TokenChunk(
                side, ids, sizes if of_valid else None, learned if of_answers else None
            )
            is_ended = ids[-1:].tolist() == [tokenizer.end_of_text]
            chunks.append(chunk if is_ended else _ended(chunk, tokenizer))
        return chunks

    yield from _in_batches(passages, lambda passage: len(passage[1]), encoded)
    losses.check()


def _in_batches(
    items: Iterable[ItemT],
    length: Callable[[ItemT], int],
    encoded: Callable[[list[ItemT]], list[TokenChunk]],
) -> Iterator[TokenChunk]:
    batch: list[ItemT] = []
    size = 0
    for item in items:
        batch.append(item)
        size += length(item)
        if size >= BATCH_CHARACTERS:
            yield from interruptible(lambda fed: encoded(list(fed)), batch)
            batch, size = [], 0
    if batch:
        yield from interruptible(lambda fed: encoded(list(fed)), batch)


def _ended(chunk: TokenChunk, tokenizer: Tokenizer) -> TokenChunk:
    if tokenizer.end_of_text is None:
        return chunk
    ids = np.append(chunk.ids, np.uint32(tokenizer.end_of_text))
    sizes = None if chunk.sizes is None else np.append(chunk.sizes, np.uint32(0))
    learned = None if chunk.learned is None else np.append(chunk.learned, np.uint8(0))
    return chunk._replace(ids=ids, sizes=sizes, learned=learned)
