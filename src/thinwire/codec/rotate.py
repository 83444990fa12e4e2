"""Rotation before quantizing: a Walsh-Hadamard transform with random signs, block by block.

It spreads an outlier over its whole block, so that the largest magnitude, which sets the scale,
comes down towards the typical one. Shapes: R rows, D wide; S the size of a block.

Blocks are powers of four: 1/sqrt(S) is then a power of two, and turning back whole numbers below
2**8 is exact, in whatever order a device adds them up. So both ends of a link decode alike.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.codec.noise import random_words

_SIZES = (256, 64, 16, 4)
_SIGNS_KEY = 0x5157


def rotate(x_RD: Tensor, largest: int, back: bool = False) -> Tensor:
    """Each row turned, in blocks of `largest` at most; `back` undoes it. Lengths are kept."""
    turned = []
    with torch.autocast(x_RD.device.type, enabled=False):
        for start, stop, size in blocks(x_RD.shape[1], largest):
            piece = x_RD[:, start:stop]
            if size > 1:
                piece = _turn(piece.reshape(-1, size), back)
            turned.append(piece.reshape(len(x_RD), stop - start))
    return turned[0] if len(turned) == 1 else torch.cat(turned, dim=1)


def blocks(width: int, largest: int) -> list[tuple[int, int, int]]:
    """How a row is split: (start, stop, size) of runs of equal blocks, the largest first."""
    found, start = [], 0
    for size in (*(size for size in _SIZES if size <= largest), 1):
        stop = width - (width - start) % size
        if stop > start:
            found.append((start, stop, size))
            start = stop
    return found


def _turn(x_NS: Tensor, back: bool) -> Tensor:
    """N blocks turned: 256 as a square of 16 by 16, along both sides, for an eighth of the work."""
    if x_NS.shape[1] < 256:
        return F.linear(x_NS, _matrix(x_NS.shape[1], back, x_NS.device))
    matrix = _matrix(16, back, x_NS.device)
    squares = F.linear(x_NS.reshape(-1, 16), matrix).view(-1, 16, 16)
    return F.linear(squares.transpose(1, 2).reshape(-1, 16), matrix)


@lru_cache(maxsize=64)
def _matrix(size: int, back: bool, device: torch.device) -> Tensor:
    """An orthogonal matrix of elements ±1/sqrt(size): signs, then the transform; or its inverse."""
    matrix_SS = torch.ones(1, 1)
    while len(matrix_SS) < size:
        matrix_SS = torch.kron(torch.tensor([[0.5, 0.5], [0.5, -0.5]]), matrix_SS)
        matrix_SS = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix_SS)
    is_negative_S = random_words(size, _SIGNS_KEY, torch.device("cpu")) < 0
    signs_S = 1.0 - 2.0 * is_negative_S.float()
    return (matrix_SS * (signs_S[:, None] if back else signs_S)).to(device)
