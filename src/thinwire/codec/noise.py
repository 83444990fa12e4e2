"""Random numbers without a generator: a hash of a key and a counter.

The same key gives the same numbers on every device and in any order of calls, so runs repeat
exactly and no state has to be saved.
"""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from thinwire.codec.place import Leg, Place

_STRIDE = -0x61C88647  # 2**32 over the golden ratio, modulo 2**32: neighbours land far apart
_FACTORS = (-0x7A143595, -0x3D4D51CB)  # those of MurmurHash3's last mix, as signed numbers
_ROUNDS = 4


def random_words(count: int, key: int, device: torch.device) -> Tensor:
    """int32 numbers, uniform over all 32 bits, decided by the key and their index alone."""
    start, summand = _spread(key)
    words = torch.add(start, torch.arange(count, dtype=torch.int32, device=device), alpha=_STRIDE)
    _fold(words)
    words = torch.add(summand, words, alpha=_FACTORS[0])
    _fold(words)
    return words.mul_(_FACTORS[1])


def round_at(values: Tensor, place: Place) -> Tensor:
    """Round in place to whole numbers: to nearest forward, stochastically backward.

    A gradient is rounded up or down so that its mean is kept: x becomes x's floor plus one with
    the probability of x's fraction, to within 2**-16 and half a place of x in float32. Whole
    numbers up to 255 stay as they are; for larger ones float32's places are too coarse to promise.
    """
    if place.leg is Leg.BACKWARD:
        count = values.numel()
        words = random_words((count + 1) // 2, place.key, values.device)
        # Odd multiples of 2**-16 lie symmetrically within (-1/2, 1/2) and never on its ends.
        dither = words.bitwise_or_(0x00010001).view(torch.int16)[:count].to(values.dtype)
        values.add_(dither.view(values.shape), alpha=2.0**-16)
    return values.round_()


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


def _fold(words: Tensor) -> None:
    """words ^= words >>> 16, in one pass: the lower half takes in the upper (little-endian)."""
    halves = words.view(torch.int16).view(len(words), 2)
    halves[:, 0].bitwise_xor_(halves[:, 1])


def _spread(key: int) -> tuple[Tensor, Tensor]:
    """Two numbers of 32 bits from a key of 64, by SplitMix64: near keys give far numbers."""
    key = (key + 0x9E3779B97F4A7C15) % 2**64
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    key = (key ^ key >> 27) * 0x94D049BB133111EB % 2**64
    key ^= key >> 31
    low, high = torch.tensor([key % 2**32 - 2**31, (key >> 32) - 2**31], dtype=torch.int32)
    return low, high
