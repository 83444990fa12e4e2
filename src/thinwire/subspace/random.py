"""Random numbers that are the same bits on every machine.

Library generators promise a stream per version and platform at best, and sums may be taken in any
order by a vector unit. Here the bits come from a counter-based generator, values are small
integers times a power of two (exact in every float format used), and sums are taken in a fixed
order by elementwise additions alone. So a basis or a table is a function of its seed, full stop.
"""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

_STEPS_STD = 127 / math.sqrt(3)  # of whole numbers, uniform in -127..127


def fixed_table(vocab: int, dim: int, seed: int, std: float) -> Tensor:
    """T_fixed: a frozen random row per token (vocab, dim), in bfloat16, full rank.

    Each entry is a whole number, uniform in -127..127, times a power of two, which bfloat16 holds
    exactly: of all powers the one that comes nearest to the standard deviation asked for.
    """
    scale = 2.0 ** round(math.log2(std / _STEPS_STD))
    raw = np.frombuffer(_bits(seed, "table", vocab * dim).tobytes(), dtype=np.uint8)
    steps = np.maximum(raw[: vocab * dim].view(np.int8), -127)
    table = torch.from_numpy(steps.copy()).to(torch.bfloat16) * scale
    return table.reshape(vocab, dim)


def random_basis(dim: int, rank: int, seed: int) -> Tensor:
    """U: an orthonormal basis (dim, rank) of a random subspace, in float64 on the CPU."""
    raw = np.frombuffer(_bits(seed, "basis", 4 * dim * rank).tobytes(), dtype=np.int32)
    columns_DK = raw[: dim * rank].reshape(dim, rank).astype(np.float64) * 2.0**-31
    return torch.from_numpy(_orthonormal(_orthonormal(columns_DK)))


def _bits(seed: int, purpose: str, size: int) -> np.ndarray:
    """At least `size` bytes from a stream of its own for each seed and purpose."""
    key = hashlib.sha256(f"thinwire/{purpose}/{seed}".encode()).digest()
    generator = np.random.Philox(key=np.frombuffer(key[:16], dtype="<u8"))
    return generator.random_raw(-(-size // 8)).astype("<u8")


def _orthonormal(columns_DK: np.ndarray) -> np.ndarray:
    """Gram-Schmidt with every sum in a defined order. Twice is enough for rounding's sake."""
    basis_DK = columns_DK.copy()
    for k in range(basis_DK.shape[1]):
        column_D = basis_DK[:, k]
        column_D /= np.sqrt(_sum(column_D * column_D))
        rest_DR = basis_DK[:, k + 1 :]
        if rest_DR.shape[1]:
            rest_DR -= column_D[:, None] * _sum(column_D[:, None] * rest_DR)
    return basis_DK


def _sum(values: np.ndarray) -> np.ndarray:
    """The sum over the first axis, by halving: the same additions on every machine."""
    while len(values) > 1:
        half = len(values) // 2
        folded = values[:half] + values[half : 2 * half]
        values = np.concatenate([folded, values[2 * half :]]) if len(values) % 2 else folded
    return values[0]
