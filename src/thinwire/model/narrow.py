"""Layers that write into a subspace S of the stream: the constrained and the reparametrised model.

Shapes: B sequences, T positions, D model width, K rank, V vocabulary, N inputs of a writer.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.model.subspace import Space


@dataclass(frozen=True)
class Narrow:
    """How a model is narrowed: the space, and how many of its first blocks write into it.

    The embedding is in it too, beside a fixed table, unless all stages have copies of it.
    """

    space: Space
    blocks: int
    reparam: bool
    free_embedding: bool = False

    def writer(self, inputs: int, dim: int) -> nn.Module:
        """A matrix that writes into the space."""
        if self.reparam:
            return ReparamLinear(inputs, dim, self.space)
        return HeldLinear(inputs, dim, bias=False)

    def embedding(self, vocab: int, dim: int) -> nn.Module:
        """A token table whose trainable part lies in the space."""
        kind = ReparamEmbedding if self.reparam else SplitEmbedding
        return kind(vocab, dim, self.space)


class InSpace(nn.Module):
    """A layer whose output lies in S (a fixed table aside), whatever it reads."""

    weight: nn.Parameter
    axis: int
    """Of its weight: where the model dimension is, or coordinates in its place."""


class HeldLinear(InSpace, nn.Linear):
    """A writer whose columns a constraint holds in S."""

    weight: nn.Parameter
    axis = 0


class SplitEmbedding(InSpace):
    """T_fixed[id] + T_S[id]: a frozen table that every stage has, and a part that a constraint
    holds in S.
    """

    axis = 1

    def __init__(self, vocab: int, dim: int, space: Space):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, dim))
        self.space = space

    def forward(self, ids_BT: Tensor) -> Tensor:
        return F.embedding(ids_BT, self.weight) + self.space.anchors(ids_BT)


class Reparametrised(InSpace, ABC):
    """A layer whose full matrix is made from coordinates, so it is in S under any optimizer."""

    full_shape: tuple[int, int]

    @abstractmethod
    def set_full(self, full: Tensor) -> None:
        """Take the part of a full matrix that lies in S; a table keeps rows beyond it."""


class ReparamEmbedding(Reparametrised):
    """T_fixed[id] + E[id] U^T, with E (V, K) trainable."""

    axis = 1

    def __init__(self, vocab: int, dim: int, space: Space):
        super().__init__()
        self.full_shape = (vocab, dim)
        self.weight = nn.Parameter(torch.empty(vocab, space.basis_DK.shape[1]))
        self.space = space

    def forward(self, ids_BT: Tensor) -> Tensor:
        with torch.autocast(ids_BT.device.type, enabled=False):
            part_BTD = F.embedding(ids_BT, self.weight) @ self.space.basis_DK.T
            return part_BTD + self.space.anchors(ids_BT)

    def set_full(self, full: Tensor) -> None:
        self.weight[: len(full)].copy_(full @ self.space.basis_DK.to(full))


class ReparamLinear(Reparametrised):
    """x (U A)^T, with A (K, N) trainable: a writer in S by construction, and cheaper."""

    axis = 0

    def __init__(self, inputs: int, dim: int, space: Space):
        super().__init__()
        self.full_shape = (dim, inputs)
        self.weight = nn.Parameter(torch.empty(space.basis_DK.shape[1], inputs))
        self.space = space

    def forward(self, x_BTN: Tensor) -> Tensor:
        coordinates_BTK = F.linear(x_BTN, self.weight)
        with torch.autocast(x_BTN.device.type, enabled=False):
            return coordinates_BTK.to(self.space.basis_DK.dtype) @ self.space.basis_DK.T

    def set_full(self, full: Tensor) -> None:
        self.weight.copy_(self.space.basis_DK.to(full).T @ full)
