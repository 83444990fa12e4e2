"""A basis from data: the directions in which activations vary most, and what tokens tell of them.

    x = m[id] + r        m: what is expected of a token, r: what its context adds

Of all bases of rank K the one whose columns span the K leading eigenvectors of R^T R loses least
of R: the principal components of R. Without m that is the best approximation of x itself.

Shapes: N activations of width D, V vocabulary, K rank, W width of a table.
"""

import torch
from torch import Tensor

from thinwire.subspace.random import random_basis

PRIOR = 1.0  # how many activations the mean of all counts for, beside those of a token


def token_means(x_ND: Tensor, ids_N: Tensor, vocab: int) -> Tensor:
    """What is expected of each token (V, D): its mean, drawn towards the mean of all.

    A token seen once tells little of the next time; one never seen has the mean of all.
    """
    mean_D = x_ND.mean(0)
    sums_VD = x_ND.new_zeros(vocab, x_ND.shape[1]).index_add_(0, ids_N, x_ND)
    counts_V1 = torch.bincount(ids_N, minlength=vocab).to(x_ND)[:, None]
    return (sums_VD + PRIOR * mean_D) / (counts_V1 + PRIOR)


def principal_basis(square_DD: Tensor, rank: int) -> Tensor:
    """The K leading eigenvectors (D, K) of a sum of r r^T, turned within their span; in float64.

    Turned, all coordinates are about equally large. Untouched, the first would be far larger than
    the last, and a codec with one scale for a token's coordinates would round the last ones away.
    """
    leading_DK = _leading(square_DD, rank)
    turn_KK = random_basis(rank, rank, seed=0).to(leading_DK)
    return leading_DK @ turn_KK


def narrowed(table_VD: Tensor, counts_V: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """A table as one of fewer columns (V, W) and a matrix that widens its rows (D, W).

    The best such pair for rows that are read as often as the counts say.
    """
    weighted_VD = table_VD * counts_V.to(table_VD)[:, None].sqrt()
    widen_DW = _leading(weighted_VD.T @ weighted_VD, width)
    return table_VD @ widen_DW, widen_DW


def _leading(square_DD: Tensor, count: int) -> Tensor:
    _, vectors_DD = torch.linalg.eigh(square_DD.double())  # smallest first
    return vectors_DD[:, -count:].flip(1)
