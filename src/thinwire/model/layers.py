"""Layers that write into a subspace S of the stream, for the constrained and the reparametrised
model; and low-rank adapters (LoRA): a frozen matrix W becomes W + (alpha / rank) B A. These are
children of the layer that they stand beside, as peft names them. What a layer of S writes must stay
there, so the B of its adapter is a writer of the same kind.

Shapes: B sequences, T positions, D model width, K rank, V vocabulary, N inputs of a writer.
"""

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
    """How a model is narrowed: the space, and how many of its first blocks write into it, held
    there or by construction (`reparam`). So does the embedding, beside a fixed table, unless all
    stages have copies of it.
    """

    space: Space
    blocks: int
    reparam: bool
    free_embedding: bool = False


class InSpace(nn.Module):
    """A layer whose output lies in S (a fixed table aside), whatever it reads: a constraint holds
    its weight there. With `reparam` the weight is coordinates, in S under any optimizer.
    """

    axis: int  # of its weight: where the model dimension is, or coordinates in its place

    def __init__(self, full_shape: tuple[int, int], space: Space, reparam: bool):
        super().__init__()
        self.full_shape, self.space, self.reparam = full_shape, space, reparam
        shape = list(full_shape)
        if reparam:
            shape[self.axis] = space.basis_DK.shape[1]
        self.weight = nn.Parameter(torch.empty(shape))

    def set_full(self, full: Tensor) -> None:
        """Take the coordinates of a full matrix; a table keeps rows beyond it."""
        basis_DK = self.space.basis_DK.to(full)
        coordinates = basis_DK.T @ full if self.axis == 0 else full @ basis_DK
        self.weight[: len(coordinates)].copy_(coordinates)


class InSpaceEmbedding(InSpace):
    """T_fixed[id] + T_S[id]; with `reparam` T_S = E U^T, with E (V, K) trainable."""

    axis = 1

    def forward(self, ids_BT: Tensor) -> Tensor:
        with torch.autocast(ids_BT.device.type, enabled=False):
            part = F.embedding(ids_BT, self.weight)
            part_BTD = part @ self.space.basis_DK.T if self.reparam else part
            return part_BTD + self.space.anchors(ids_BT)


class InSpaceLinear(InSpace):
    """x W^T; with `reparam` x (U A)^T, with A (K, N) trainable, which is cheaper."""

    axis = 0

    def forward(self, x_BTN: Tensor) -> Tensor:
        written = F.linear(x_BTN, self.weight)
        if not self.reparam:
            return written
        with torch.autocast(x_BTN.device.type, enabled=False):
            return written.to(self.space.basis_DK.dtype) @ self.space.basis_DK.T


def writer(inputs: int, dim: int, narrow: Narrow | None) -> nn.Module:
    """A matrix that writes to the stream, or into a subspace of it."""
    if narrow is None:
        return nn.Linear(inputs, dim, bias=False)
    return InSpaceLinear((dim, inputs), narrow.space, narrow.reparam)


def is_adapter(name: str) -> bool:
    """Whether a tensor belongs to an adapter, by its global name; also the moments of one."""
    return not {DOWN, UP}.isdisjoint(name.split("."))


def attach_adapters(layers: nn.Module, config: LoraConfig) -> None:
    """Freeze these layers and give target matrices adapters: by hooks, which rename nothing."""
    scale = config.scale

    def add(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        added: Tensor = layer.lora_B(layer.lora_A(inputs[0]))  # type: ignore[operator]
        return output + added * scale

    for parameter in layers.parameters():
        parameter.requires_grad_(False)
    targets = [m for name, m in layers.named_modules() if name.split(".")[-1] in config.targets]
    for base in targets:
        assert isinstance(base, nn.Linear | InSpaceLinear)
        base.add_module(DOWN, nn.Linear(base.weight.shape[1], config.rank, bias=False))
        if isinstance(base, InSpaceLinear):
            shape = base.full_shape[0], config.rank
            base.add_module(UP, InSpaceLinear(shape, base.space, base.reparam))
        else:
            base.add_module(UP, nn.Linear(config.rank, base.out_features, bias=False))
        base.register_forward_hook(add)


def round_frozen(layers: nn.Module) -> None:
    """Hold frozen matrices in bfloat16, the numbers that autocast would compute with: of a weight
    without a gradient it would make a copy for every microbatch in flight.
    """
    for layer in layers.modules():
        if isinstance(layer, nn.Linear | InSpaceLinear) and not layer.weight.requires_grad:
            layer.weight.data = layer.weight.data.to(torch.bfloat16)
