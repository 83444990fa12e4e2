"""Small whole numbers and positions without gaps, as streams of bytes, on any device."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.errors import WireError

_WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}

# Code i occupies bits i*bits to (i+1)*bits of a stream, from the lowest bit of the first byte. Two
# neighbours are joined within a word of twice their size, and so on until they fill whole bytes.


def packed_bytes(count: int, bits: int) -> int:
    """The length of the stream for so many codes."""
    return (count * bits + 7) // 8


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """The stream of `codes`, a flat uint8 tensor of numbers below 2**bits."""
    count, period = len(codes), _period(bits)
    words = F.pad(codes, (0, -count % period)) if count % period else codes.contiguous()
    width, lane = bits, 8
    while width % 8:
        words = words.view(_WORDS[2 * lane])
        words = words - (words >> lane).mul_((1 << lane) - (1 << width))
        width, lane = 2 * width, 2 * lane
    if width == 8:
        return words.to(torch.uint8)
    kept = words.view(torch.uint8).view(len(words), lane // 8)[:, : width // 8]
    return kept.reshape(-1)[: packed_bytes(count, bits)]


def unpack_bits(packed: Tensor, count: int, bits: int) -> Tensor:
    """The inverse: so many codes as uint8, from a stream of exactly `packed_bytes`."""
    period = _period(bits)
    width, lane, total = bits * period, 8 * period, -(-count // period)
    if width == 8:
        words = packed.to(_WORDS[lane])
    else:
        whole = F.pad(packed, (0, total * width // 8 - len(packed))).view(total, width // 8)
        words = F.pad(whole, (0, (lane - width) // 8)).view(-1).view(_WORDS[lane])
    while lane > 8:
        width, lane = width // 2, lane // 2
        words = words + (words >> width).mul_((1 << lane) - (1 << width))
        words = words.view(_WORDS[lane])
    return words[:count]


def _period(bits: int) -> int:
    """How many codes fill whole bytes."""
    return 8 // math.gcd(bits, 8)


@dataclass(frozen=True)
class PositionCode:
    """How k increasing positions below n become bits: a bitmap, or the code of Elias and Fano.

    With `low` = 0 there is one mark for each of the n positions. Otherwise the lowest `low` bits of
    every position are written as they are, the lowest first, and the rest in unary: the i-th
    position p sets mark i + p // 2^low. The marks of all B samples are one stream of bits, their
    low bits another.
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
