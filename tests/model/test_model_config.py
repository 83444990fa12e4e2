"""Shapes of models: presets, overrides, counts, and shapes that cannot be."""

import dataclasses

import pytest
import torch

from thinwire.errors import ConfigError
from thinwire.model import PRESETS, ModelConfig, llama_layers, parameter_count

presets = pytest.mark.parametrize("preset", PRESETS)


@presets
def test_every_preset_resolves_to_itself(preset: str) -> None:
    config = ModelConfig(preset=preset).resolved()
    shape = (config.layers, config.dim, config.heads, config.kv_heads)
    assert (*shape, config.ffn, config.vocab, config.context) == PRESETS[preset]
    assert config.head_dim * config.heads == config.dim
    assert config.resolved() == config


@presets
def test_the_count_is_that_of_the_real_layers(preset: str) -> None:
    config = ModelConfig(preset=preset).resolved()
    with torch.device("meta"):
        layers = [plan.make() for plan in llama_layers(config)]
    assert parameter_count(config) == sum(p.numel() for m in layers for p in m.parameters())


def test_8b_is_llama_3_8b() -> None:
    count = parameter_count(ModelConfig(preset="8b").resolved())
    assert count == 8_030_261_248  # as published
    assert round(count / 1e9, 2) == 8.03


@pytest.mark.parametrize(
    "change", ["layers", "dim", "heads", "kv_heads", "ffn", "vocab", "context"]
)
def test_a_key_overrides_its_preset_and_nothing_else(change: str) -> None:
    base = ModelConfig(preset="mini").resolved()
    doubled = 2 * getattr(base, change)
    config = ModelConfig(preset="mini", **{change: doubled}).resolved()
    assert config == dataclasses.replace(base, **{change: doubled})


@pytest.mark.parametrize(
    "change", ["layers", "dim", "heads", "kv_heads", "ffn", "vocab", "context"]
)
def test_negative_sizes_are_refused(change: str) -> None:
    with pytest.raises(ConfigError, match=rf"model.{change} = -1 must not be negative"):
        ModelConfig(**{change: -1}).resolved()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 130}, "model.dim = 130 must split into model.heads = 4"),
        ({"heads": 3, "kv_heads": 3}, "model.heads = 3"),
        ({"dim": 20}, "even"),  # heads of width 5: no pairs to turn
        ({"kv_heads": 3}, "model.heads = 4 must be a multiple of model.kv_heads = 3"),
        ({"kv_heads": 8}, "model.heads = 4 must be a multiple of model.kv_heads = 8"),
    ],
)
def test_heads_that_do_not_divide_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**changes).resolved()
    ModelConfig().resolved()
