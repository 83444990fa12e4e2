"""Shapes of models: presets, overrides, counts, and shapes that cannot be."""

import dataclasses

import pytest
import torch

from thinwire.errors import ConfigError
from thinwire.model import PRESETS, ModelConfig, Stage, architecture


def count_of(config):
    with torch.device("meta"):
        return sum(p.numel() for p in Stage(architecture(config).layers()).parameters())


@pytest.mark.parametrize("preset", PRESETS)
def test_the_count_is_that_of_a_llama_with_an_untied_head(preset):
    config = ModelConfig(preset=preset).resolved()
    attention = 2 * config.dim**2 + 2 * config.dim * config.kv_heads * config.head_dim
    block = attention + 3 * config.dim * config.ffn + 2 * config.dim
    ends = 2 * config.vocab * config.dim + config.dim
    assert count_of(config) == config.layers * block + ends


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 130}, "must be even.* model.dim = 130 / model.heads = 4"),
        ({"heads": 3, "kv_heads": 3}, "model.heads = 3"),
        ({"dim": 20}, "even"),  # heads of width 5: no pairs to turn
        ({"kv_heads": 3}, "model.heads = 4 must be a multiple of model.kv_heads = 3"),
        ({"kv_heads": 8}, "model.heads = 4 must be a multiple of model.kv_heads = 8"),
        ({"rope_scaling": "linear(2)"},
         r'must be empty or look like "llama3\(factor=8, low=1, high=4, context=8192'),
        ({"rope_scaling": "llama3(factor=8, low=4, high=4, context=8192)"}, "low below high"),
        ({"rope_scaling": "llama3(factor=1e999, low=1, high=4, context=8192)"},
         "factor at least 1"),
        ({"rope_scaling": "llama3(factor=8, low=1, high=4, context=0)"}, "original context"),
    ],
)  # fmt: skip
def test_heads_that_do_not_divide_and_scaling_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**changes).resolved()
    ModelConfig().resolved()


SIZES = {"layers": 2, "dim": 20, "heads": 2, "kv_heads": 1, "ffn": 8, "vocab": 50, "context": 16}


def test_a_custom_model_says_all_its_sizes_and_differs_from_nothing():
    config = ModelConfig(preset="custom", **SIZES).resolved()
    assert config.unlike_preset() == {}
    with pytest.raises(ConfigError, match=r'"custom" has no sizes of its own: set .*model.context'):
        ModelConfig(preset="custom", layers=2).resolved()


def test_biases_and_norms_are_counted_and_start_without_effect():
    plain = ModelConfig(preset="custom", **SIZES)
    full = dataclasses.replace(plain, qkv_bias=True, qk_norm=True).resolved()
    extra = SIZES["layers"] * (20 + 10 + 10 + 2 * 10)
    family = architecture(full)
    count = count_of(plain.resolved())
    assert count_of(full) == count + extra
    stage = Stage(family.layers())
    stage.initialise(full, 3)
    values = stage.global_parameters()
    assert {name for name in values if name.endswith("bias")} == {
        f"model.layers.{block}.self_attn.{each}_proj.bias" for block in (0, 1) for each in "qkv"
    }
    assert all((p == 0).all() for name, p in values.items() if name.endswith("bias"))
    assert all((p == 1).all() for name, p in values.items() if "norm" in name)
    assert not stage.roles().keys() & {name for name, p in values.items() if p.ndim < 2}


@pytest.mark.parametrize(
    "changes",
    [{}, {"kv_heads": 1}, {"head_dim": 32}, {"kv_heads": 1, "head_dim": 32, "qk_norm": True}],
    ids=str,
)
def test_what_a_block_keeps_for_its_backward_is_told_before(changes):
    sizes = {"layers": 1, "dim": 64, "heads": 4, "kv_heads": 4, "ffn": 96, "vocab": 9, "context": 8}
    config = ModelConfig(preset="custom", **{**sizes, **changes}).resolved()
    family = architecture(config)
    block = family.layers()[1].make()
    own = {t.data_ptr() for t in (*block.parameters(), *block.buffers())}
    kept: dict[int, int] = {}

    def pack(saved):
        storage = saved.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        block(torch.randn(2, 8, 64, requires_grad=True))
    assert family.kept_bytes(range(1), 2, 4, 4) == pytest.approx(sum(kept.values()), rel=0.03)
