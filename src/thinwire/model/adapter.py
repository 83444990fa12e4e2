"""Low-rank adapters (LoRA): a frozen matrix W becomes W + (alpha / rank) B A.

A (rank, inputs) is drawn and B (outputs, rank) is zero at the start. Both are children of the layer
that they stand beside, as peft names them: `q_proj.lora_A.weight`, `q_proj.lora_B.weight`. What a
constrained layer writes must stay in its subspace, so the B of its adapter is a writer of the same
kind.
"""

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
        return ReparamLinear(rank, base.full_shape[0], base.space)
    kind = HeldLinear if isinstance(base, HeldLinear) else nn.Linear
    return kind(rank, base.out_features, bias=False)
