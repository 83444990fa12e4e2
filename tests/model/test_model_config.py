"""Shapes of models: presets, overrides, counts, and shapes that cannot be."""

import dataclasses

import pytest

from thinwire.errors import ConfigError
from thinwire.model import PRESETS, ModelConfig, architecture
from thinwire.model.task import IMAGES, TEXT
from thinwire.typed import from_plain

presets = pytest.mark.parametrize("preset", PRESETS)


@presets
def test_every_preset_resolves_to_itself(preset: str) -> None:
    config = ModelConfig(preset=preset).resolved()
    assert {key: getattr(config, key) for key in PRESETS[preset]} == PRESETS[preset]
    assert config.resolved() == config
    assert (config.task is IMAGES) == (preset == "resnet18")
    if config.task is TEXT:
        assert config.head_dim * config.heads == config.dim


def counted(preset: str) -> int:
    return architecture(ModelConfig(preset=preset).resolved()).parameter_count()


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "resnet18"])
def test_the_count_is_that_of_a_llama_with_an_untied_head(preset: str) -> None:
    config = ModelConfig(preset=preset).resolved()
    attention = 2 * config.dim**2 + 2 * config.dim * config.kv_heads * config.head_dim
    block = attention + 3 * config.dim * config.ffn + 2 * config.dim
    ends = 2 * config.vocab * config.dim + config.dim
    assert counted(preset) == config.layers * block + ends


def test_counts_are_those_that_were_published() -> None:
    assert counted("8b") == 8_030_261_248
    assert counted("resnet18") == 11_173_962  # with a 3x3 stem, ten classes


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
    with pytest.raises(ConfigError, match=rf"model.{change} = -1 must be at least 0"):
        from_plain(ModelConfig, {change: -1}, "model")


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


# --- images ---


@pytest.mark.parametrize("change", ["dim", "classes", "side"])
def test_an_image_model_has_its_own_keys(change: str) -> None:
    base = ModelConfig(preset="resnet18").resolved()
    config = ModelConfig(preset="resnet18", **{change: 7}).resolved()
    assert config == dataclasses.replace(base, **{change: 7})
    assert (base.heads, base.kv_heads, base.ffn, base.vocab, base.context) == (0,) * 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"heads": 4},
            'model.heads = 4 has no effect with model.preset = "resnet18": leave it at 0',
        ),
        ({"vocab": 300}, "model.vocab = 300 has no effect"),
        ({"context": 8}, "model.context = 8 has no effect"),
        ({"norm_eps": 1e-3}, "model.norm_eps = 0.001 has no effect .* leave it at 1e-05"),
        ({"layers": 4}, "model.layers = 4, but resnet18 has 8 blocks"),
        ({"channels": 2}, "model.channels = 2 must be 3, or 1 for grey images"),
        ({"preset": "tiny", "classes": 10}, 'model.classes = 10 has no effect .*preset = "tiny"'),
        ({"preset": "8b", "side": 32}, "model.side = 32 has no effect"),
        ({"side": -1}, "model.side = -1 must be at least 0"),
    ],
)
def test_keys_of_the_other_family_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_plain(ModelConfig, {"preset": "resnet18", **changes}, "model").resolved()
