"""Low-rank adapters (LoRA): a frozen matrix W becomes W + (alpha / rank) B A.

A (rank, inputs) is drawn and B (outputs, rank) is zero, so a model with fresh adapters computes
what it did without them. Both are children of the layer that they stand beside, as peft names
them: `q_proj.lora_A.weight`, `q_proj.lora_B.weight`. The layer's own names stay as they are.

What a constrained layer writes must stay in its subspace, so the B of its adapter is a writer of
the same kind: held there by the constraint, or made of coordinates.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.model.config import LoraConfig
from thinwire.model.narrow import HeldLinear, ReparamLinear

DOWN, UP = "lora_A", "lora_B"


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
    """Hold frozen matrices in bfloat16: the same numbers that autocast would compute with.

    It keeps no rounded copy of a weight without a gradient, so every microbatch in flight would
    have a copy of its own.
    """
    for layer in layers.modules():
        if isinstance(layer, nn.Linear | ReparamLinear) and not layer.weight.requires_grad:
            layer.weight.data = layer.weight.data.to(torch.bfloat16)


@torch.no_grad()
def initialise_adapter(name: str, parameter: Tensor, seed: int) -> bool:
    """Fill a parameter of an adapter; False where it is something else.

    A is uniform with the spread that torch gives a linear layer, as peft has it.
    """
    kind = name.rpartition(".")[0].rpartition(".")[2]
    if kind == UP:
        parameter.zero_()
    elif kind == DOWN:
        drawn = torch.rand(parameter.shape, generator=generator_of(name, seed))
        parameter.copy_((2 * drawn - 1) / parameter.shape[1] ** 0.5)
    return kind in (DOWN, UP)


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
        return ReparamLinear(rank, base.full_shape[0], base.space)
    kind = HeldLinear if isinstance(base, HeldLinear) else nn.Linear
    return kind(rank, base.out_features, bias=False)


def generator_of(name: str, seed: int) -> torch.Generator:
    """Random numbers for one parameter, whatever is made before it or beside it."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
