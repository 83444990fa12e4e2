"""Which elements of a tensor travel, said in few bits or in none: for sparse codecs.

Shapes: B samples with k positions below n in each.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from thinwire.codec.bits import pack_bits, packed_bytes, unpack_bits
from thinwire.errors import WireError

_ROUNDS = 4


@dataclass(frozen=True)
class PositionCode:
    """How k increasing positions below n become bits: a bitmap, or the code of Elias and Fano.

    With `low` = 0 there is one mark for each of the n positions. Otherwise the lowest `low` bits of
    every position are written as they are, the lowest first, and the rest in unary: the i-th
    position p sets mark i + p // 2^low out of k + (n - 1) // 2^low. The marks of all samples are
    one stream of bits, their low bits another, each filled up with zeros to whole bytes.
    """

    n: int
    k: int
    low: int

    @staticmethod
    @lru_cache(maxsize=64)
    def cheapest(n: int, k: int) -> "PositionCode":
        """The one with the fewest bits; of equals, the one with the fewest low bits."""
        codes = [PositionCode(n, k, low) for low in range(max(1, n.bit_length()))]
        return min(codes, key=lambda code: code.marks + code.k * code.low)

    @property
    def marks(self) -> int:
        """Marks of one sample, set or not."""
        return self.n if self.low == 0 else self.k + ((self.n - 1) >> self.low)

    def sizes(self, B: int) -> tuple[int, int]:
        """Bytes of the two streams for B samples."""
        return packed_bytes(B * self.marks, 1), packed_bytes(B * self.k * self.low, 1)

    def write(self, index_Bk: Tensor) -> tuple[Tensor, Tensor]:
        """The two streams for increasing positions."""
        device = index_Bk.device
        mark_Bk = (index_Bk >> self.low) + self._turns(device)
        marks = torch.zeros(len(index_Bk) * self.marks, dtype=torch.uint8, device=device)
        starts_B1 = row_starts(len(index_Bk), self.marks, device)
        marks.scatter_(0, (mark_Bk + starts_B1).view(-1), 1)
        lows = (index_Bk.to(torch.int32).unsqueeze(-1) >> self._places(device)) & 1
        return pack_bits(marks, 1), pack_bits(lows.to(torch.uint8).view(-1), 1)

    def read(self, marks: Tensor, lows: Tensor, B: int) -> Tensor:
        """The inverse of `write`; WireError when the streams are not k increasing positions."""
        device = marks.device
        ones = unpack_bits(marks, 8 * len(marks), 1).nonzero().view(-1)
        if len(ones) != B * self.k:
            raise WireError(f"{len(ones)} positions are marked, but {B * self.k} were agreed")
        mark_Bk = ones.view(B, self.k) - row_starts(B, self.marks, device)
        bits = unpack_bits(lows, 8 * len(lows), 1)
        used, unused = bits[: B * self.k * self.low], bits[B * self.k * self.low :]
        low_Bk = (used.view(B, self.k, self.low).to(torch.int32) << self._places(device)).sum(-1)
        index_Bk = ((mark_Bk - self._turns(device)) << self.low) + low_Bk
        # Where one sample has too many marks, another takes over those that are not its own.
        wrong = ((mark_Bk < 0) | (mark_Bk >= self.marks) | (index_Bk >= self.n)).any()
        wrong |= (index_Bk[:, 1:] <= index_Bk[:, :-1]).any() | (unused != 0).any()
        if wrong:
            raise WireError("the marked positions are not in order, or not within the tensor")
        return index_Bk

    def _turns(self, device: torch.device) -> Tensor | int:
        """The i of the i-th mark; a bitmap needs none."""
        return torch.arange(self.k, device=device) if self.low else 0

    def _places(self, device: torch.device) -> Tensor:
        return torch.arange(self.low, dtype=torch.int32, device=device)


def row_starts(rows: int, width: int, device: torch.device) -> Tensor:
    """The flat position at which each row begins, as a column."""
    return (torch.arange(rows, device=device) * width).view(rows, 1)


def drawn(count: int, k: int, key: int, device: torch.device) -> Tensor:
    """The first k of the positions 0..count-1 in a random order that the key decides.

    A position is a pair of numbers below ceil(sqrt(count)), and the order a Feistel network over
    such pairs, with tables of random numbers that SHAKE-256 makes of the key. Pairs past the end
    (few: they lie in the last rows) go through it again until they are inside. So k positions cost
    k evaluations, no sorting, and are the same on every device.
    """
    if k == 0:
        return torch.zeros(0, dtype=torch.int64, device=device)
    side = math.isqrt(count - 1) + 1
    noise = hashlib.shake_256(key.to_bytes(8, "little")).digest(4 * _ROUNDS * side)
    numbers = (np.frombuffer(noise, dtype="<u4") % side).astype(np.int64)
    tables = torch.from_numpy(numbers).to(device).view(_ROUNDS, side)

    def shuffled(positions: Tensor) -> Tensor:
        left = positions.div(side, rounding_mode="floor")
        right = positions - left * side
        for table in tables:
            total = left + table[right]
            left, right = right, total - side * (total >= side)
        return left * side + right

    positions = shuffled(torch.arange(k, device=device))
    while len(outside := (positions >= count).nonzero().view(-1)):
        positions[outside] = shuffled(positions[outside])
    return positions
