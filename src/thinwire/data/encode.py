"""Documents to token ids, in batches on all cores and in bounded memory."""

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from thinwire.data.interrupt import interruptible
from thinwire.data.pieces import pieces_of
from thinwire.data.tokenizer import Tokenizer

BATCH_CHARACTERS = 1_000_000


class Passage(NamedTuple):
    """Text for one side of the corpus, a document or a part of one."""

    side: str
    text: str


class Encoded(NamedTuple):
    """The ids of a piece of a passage."""

    side: str
    ids: np.ndarray
    sizes: np.ndarray | None  # UTF-8 bytes that each id stands for; None but in validation
    last: bool  # whether the passage ends here


def encode_passages(tokenizer: Tokenizer, passages: Iterable[Passage]) -> Iterator[Encoded]:
    """The ids of every passage in turn.

    One over 128,000 characters comes in pieces that meet at line ends.
    """
    for batch in _batches(passages):
        yield from interruptible(functools.partial(_encoded, tokenizer, batch))


class _Piece(NamedTuple):
    side: str
    text: str
    last: bool


def _encoded(tokenizer: Tokenizer, batch: list[_Piece]) -> list[Encoded]:
    train = iter(tokenizer.encode_all([p.text for p in batch if p.side == "train"]))
    valid = iter(tokenizer.encode_measured([p.text for p in batch if p.side == "valid"]))
    encoded = []
    for piece in batch:
        ids, sizes = (next(train), None) if piece.side == "train" else next(valid)
        encoded.append(Encoded(piece.side, ids, sizes, piece.last))
    return encoded


def _batches(passages: Iterable[Passage]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = 0
    for side, text in passages:
        for piece, last in pieces_of([text]):
            batch.append(_Piece(side, piece, last))
            size += len(piece)
            if size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
