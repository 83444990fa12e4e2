"""Layers that write into a subspace of the stream: the constrained and the reparametrised model.

Shapes: B sequences, T positions, D model width, K rank, V vocabulary, N inputs of a writer.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.subspace import Space


@dataclass(frozen=True)
class Narrow:
    """How a model is narrowed: the space, and how many of its first blocks write into it."""

    space: Space
    blocks: int
    reparam: bool


class SplitEmbedding(nn.Module):
    """T_fixed[id] + T_S[id]: a frozen table that every stage has, and a trainable part in S."""

    def __init__(self, vocab: int, dim: int, space: Space):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, dim))
        self.space = space

    def forward(self, ids_BT: Tensor) -> Tensor:
        """The stream at its start."""
        return F.embedding(ids_BT, self.weight) + self.space.anchors(ids_BT)


class Reparametrised(nn.Module, ABC):
    """A layer whose full matrix is made from coordinates, so it is in S under any optimizer."""

    weight: nn.Parameter
    full_shape: tuple[int, int]
    coordinate_axis: int

    @abstractmethod
    def set_full(self, full: Tensor) -> None:
        """Take the part of a full matrix that lies in S."""


class ReparamEmbedding(Reparametrised):
    """T_fixed[id] + E[id] U^T, with E (V, K) trainable."""

    coordinate_axis = 1

    def __init__(self, vocab: int, dim: int, space: Space):
        super().__init__()
        self.full_shape = (vocab, dim)
        self.weight = nn.Parameter(torch.empty(vocab, space.basis_DK.shape[1]))
        self.space = space

    def forward(self, ids_BT: Tensor) -> Tensor:
        """The stream at its start."""
        with torch.autocast(ids_BT.device.type, enabled=False):
            part_BTD = F.embedding(ids_BT, self.weight) @ self.space.basis_DK.T
            return part_BTD + self.space.anchors(ids_BT)

    def set_full(self, full: Tensor) -> None:
        """Take the part of a full table that lies in S."""
        self.weight.copy_(full @ self.space.basis_DK.to(full))


class ReparamLinear(Reparametrised):
    """x (U A)^T, with A (K, N) trainable: a writer in S by construction, and cheaper."""

    coordinate_axis = 0

    def __init__(self, inputs: int, dim: int, space: Space):
        super().__init__()
        self.full_shape = (dim, inputs)
        self.weight = nn.Parameter(torch.empty(space.basis_DK.shape[1], inputs))
        self.space = space

    def forward(self, x_BTN: Tensor) -> Tensor:
        """What this writer adds to the stream."""
        coordinates_BTK = F.linear(x_BTN, self.weight)
        with torch.autocast(x_BTN.device.type, enabled=False):
            return coordinates_BTK.to(self.space.basis_DK.dtype) @ self.space.basis_DK.T

    def set_full(self, full: Tensor) -> None:
        """Take the part of a full matrix that lies in S."""
        self.weight.copy_(self.space.basis_DK.to(full).T @ full)
