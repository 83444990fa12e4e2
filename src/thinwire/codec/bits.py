"""Small whole numbers without gaps: codes of 1 to 8 bits as one stream of bytes.

Code i occupies bits i*bits to (i+1)*bits of the stream, counted from the lowest bit of the first
byte. Two neighbours are joined within a word of twice their size, then two of those, until
the codes in a word fill whole bytes: a few passes over one byte per code, on any device.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

_WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


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
