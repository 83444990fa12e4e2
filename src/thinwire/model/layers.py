"""Layers that write into a subspace S of the stream, for the constrained and the reparametrised
model; and low-rank adapters (LoRA): a frozen matrix W becomes W + (alpha / rank) B A. These are
children of the layer that they stand beside, as peft names them. What a layer of S writes must stay
there, so the B of its adapter is a writer of the same kind.

Shapes: B sequences, T positions, D model width, K rank, V vocabulary, N inputs of a writer.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.model.config import LoraConfig
from thinwire.model.subspace import Space

DOWN, UP = "lora_A", "lora_B"


@dataclass(frozen=True)
class Narrow:
    """How a model is narrowed: the space, and how many of its first blocks write into it. So does
    the embedding, beside a fixed table, unless all stages have copies of it.
    """

    space: Space
    blocks: int
    reparam: bool
    free_embedding: bool = False

    def writer(self, inputs: int, dim: int) -> nn.Module:
        """A matrix that writes into the space."""
        if self.reparam:
            return ReparamLinear((dim, inputs), self.space)
        return HeldLinear(inputs, dim, bias=False)

    def embedding(self, vocab: int, dim: int) -> nn.Module:
        """A token table whose trainable part lies in the space."""
        kind = ReparamEmbedding if self.reparam else SplitEmbedding
        return kind((vocab, dim), self.space)


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
    """T_fixed[id] + T_S[id]: a frozen table, and a part that a constraint holds in S."""

    axis = 1

    def __init__(self, shape: tuple[int, int], space: Space):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.space = space

    def forward(self, ids_BT: Tensor) -> Tensor:
        return F.embedding(ids_BT, self.weight) + self.space.anchors(ids_BT)


class Reparametrised(InSpace, ABC):
    """A layer whose full matrix is made from coordinates, so it is in S under any optimizer."""

    def __init__(self, full_shape: tuple[int, int], space: Space):
        super().__init__()
        self.full_shape, self.space = full_shape, space
        shape = list(full_shape)
        shape[self.axis] = space.basis_DK.shape[1]
        self.weight = nn.Parameter(torch.empty(shape))

    @abstractmethod
    def set_full(self, full: Tensor) -> None:
        """Take the part of a full matrix that lies in S; a table keeps rows beyond it."""


class ReparamEmbedding(Reparametrised):
    """T_fixed[id] + E[id] U^T, with E (V, K) trainable."""

    axis = 1

    def forward(self, ids_BT: Tensor) -> Tensor:
        with torch.autocast(ids_BT.device.type, enabled=False):
            part_BTD = F.embedding(ids_BT, self.weight) @ self.space.basis_DK.T
            return part_BTD + self.space.anchors(ids_BT)

    def set_full(self, full: Tensor) -> None:
        self.weight[: len(full)].copy_(full @ self.space.basis_DK.to(full))


class ReparamLinear(Reparametrised):
    """x (U A)^T, with A (K, N) trainable: a writer in S by construction, and cheaper."""

    axis = 0

    def forward(self, x_BTN: Tensor) -> Tensor:
        coordinates_BTK = F.linear(x_BTN, self.weight)
        with torch.autocast(x_BTN.device.type, enabled=False):
            return coordinates_BTK.to(self.space.basis_DK.dtype) @ self.space.basis_DK.T

    def set_full(self, full: Tensor) -> None:
        self.weight.copy_(self.space.basis_DK.to(full).T @ full)


def is_adapter(name: str) -> bool:
    """Whether a tensor belongs to an adapter, by its global name; also the moments of one."""
    return not {DOWN, UP}.isdisjoint(name.split("."))


def attach_adapters(layers: nn.Module, config: LoraConfig) -> None:
    """Freeze all parameters of these layers, and give their target matrices adapters."""
    for parameter in layers.parameters():
        parameter.requires_grad_(False)
    targets = [m for name, m in layers.named_modules() if name.split(".")[-1] in config.targets]
    for base in targets:
        _attach(base, config)


def round_frozen(layers: nn.Module) -> None:
    """Hold frozen matrices in bfloat16, the numbers that autocast would compute with: of a weight
    without a gradient it would make a copy for every microbatch in flight.
    """
    for layer in layers.modules():
        if isinstance(layer, nn.Linear | ReparamLinear) and not layer.weight.requires_grad:
            layer.weight.data = layer.weight.data.to(torch.bfloat16)


def _attach(base: nn.Module, config: LoraConfig) -> None:
    """A hook and not a layer around this one: it works on every kind, and renames nothing."""
    assert isinstance(base, nn.Linear | ReparamLinear)
    scale = config.scale
    base.add_module(DOWN, nn.Linear(base.weight.shape[1], config.rank, bias=False))
    base.add_module(UP, _writer_like(base, config.rank))

    def add(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        added: Tensor = layer.lora_B(layer.lora_A(inputs[0]))  # type: ignore[operator]
        return output + added * scale

    base.register_forward_hook(add)


def _writer_like(base: nn.Linear | ReparamLinear, rank: int) -> nn.Module:
    """A matrix that writes where this layer does."""
    if isinstance(base, ReparamLinear):
        return ReparamLinear((base.full_shape[0], rank), base.space)
    kind = HeldLinear if isinstance(base, HeldLinear) else nn.Linear
    return kind(rank, base.out_features, bias=False)
