"""The shape of a model as Hugging Face writes it in config.json, and as thinwire does.

Pure functions of plain data: neither torch nor transformers is needed. What a config.json says
that our model does not do is refused by name; keys about other things are left alone.
"""

from collections.abc import Mapping
from typing import Any

from thinwire.errors import ConfigError
from thinwire.model import ModelConfig
from thinwire.model.config import CUSTOM, KIND, RopeScaling
from thinwire.typed import from_plain

KINDS = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` that can be imported; SmolLM and SmolLM2 are of the type llama."""
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
KEYS = {
    "vocab": "vocab_size",
    "dim": "hidden_size",
    "ffn": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "context": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
_SCALING = {
    "factor": "factor",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "context": "original_max_position_embeddings",
}
_PLAIN: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish"), "its activation must be silu"),
    "attention_bias": ((False,), "biases on all four matrices of attention are not supported"),
    "mlp_bias": ((False,), "biases in the feed-forward are not supported"),
    "rope_interleaved": ((False,), "interleaved rotary positions are not supported"),
    "partial_rotary_factor": ((1, 1.0), "every channel of a head must have rotary positions"),
    "num_experts": ((0, 1), "mixtures of experts are not supported"),
    "num_local_experts": ((0, 1), "mixtures of experts are not supported"),
    "no_rope_layers": (([],), "layers without positions (NoPE) are not supported"),
    "quantization_config": (
        ({},),
        "its weights are quantised in a way of their own: take the folder of the full weights",
    ),
}
"""Keys with the values under which the model is ours; absent or null is one of them too."""


def shape_of(config: Mapping[str, Any], context: int = 0) -> ModelConfig:
    """The model of a config.json, or ConfigError; a `context` of 0 is all of its positions."""
    kind = config.get("model_type")
    if kind not in KINDS:
        raise ConfigError(
            f'config.json: model_type = "{kind}" is not supported. Supported are {", ".join(KINDS)}'
        )
    _check_plain(config)
    _check_windows(config)
    defaults = {
        "kv_heads": config.get("num_attention_heads") if kind == "llama" else None,
        "head_dim": 128 if kind == "qwen3" else 0,
        "norm_eps": 1e-6,
    }
    found = {ours: _given(config, theirs, defaults.get(ours)) for ours, theirs in KEYS.items()}
    theta, scaling = _positions(config)
    values = {
        "preset": CUSTOM,
        **found,
        "context": context or found["context"],
        "qkv_bias": kind == "qwen2",
        "qk_norm": kind == "qwen3",
        "rope_theta": theta,
        "rope_scaling": str(scaling or ""),
    }
    return from_plain(ModelConfig, values, "model").resolved()


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether embedding and head are one matrix."""
    return bool(config.get("tie_word_embeddings", False))


def kind_of(model: ModelConfig) -> str:
    """The `model_type` whose class computes what this model does; ConfigError: there is none."""
    if model.qkv_bias and model.qk_norm:
        raise ConfigError("no class of transformers has both model.qkv_bias and model.qk_norm")
    return "qwen2" if model.qkv_bias else "qwen3" if model.qk_norm else "llama"


def config_of(model: ModelConfig) -> dict[str, Any]:
    """The config.json of a resolved model, untied; its tokens and dtype are the writer's to add."""
    kind = kind_of(model)
    stretch: dict[str, Any] = {}
    if (scaling := RopeScaling.parse(model.rope_scaling)) is not None:
        named = {theirs: getattr(scaling, ours) for ours, theirs in _SCALING.items()}
        stretch = {"rope_type": KIND, **named}
    config = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        **{theirs: getattr(model, ours) for ours, theirs in KEYS.items()},
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rope_theta": model.rope_theta,  # as before version 5 of transformers, and elsewhere
        "rope_scaling": stretch or None,
        "rope_parameters": {"rope_theta": model.rope_theta, "rope_type": "default", **stretch},
        "tie_word_embeddings": False,
    }
    if kind != "qwen2":
        config["attention_bias"] = False
    if kind == "llama":
        return {**config, "mlp_bias": False}
    return {**config, "use_sliding_window": False, "sliding_window": None}


def _check_plain(config: Mapping[str, Any]) -> None:
    """Refuse other values of keys than those that our model has."""
    for key, (allowed, reason) in _PLAIN.items():
        if config.get(key) is not None and config[key] not in allowed:
            raise ConfigError(f"config.json: {key} = {config[key]!r}: {reason}")


def _check_windows(config: Mapping[str, Any]) -> None:
    """Refuse attention that does not see all earlier positions."""
    types = config.get("layer_types")
    others = [each for each in types if each != "full_attention"] if isinstance(types, list) else []
    if others:
        raise ConfigError(f'config.json: layer_types has "{others[0]}", all must be full_attention')
    # Qwen says whether the window is used. Mistral uses it, and has one where none is named.
    is_mistral = config.get("model_type") == "mistral"
    window = config.get("sliding_window", 4096 if is_mistral else None)
    is_used = config.get("use_sliding_window", is_mistral)
    if window is not None and is_used:
        raise ConfigError(f"config.json: sliding_window = {window}: this is not supported")


def _positions(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and stretching of the rotary positions, in the form of transformers 5 or before it."""
    now, before = config.get("rope_parameters"), config.get("rope_scaling")
    found = before or now or {}  # as transformers: who stretches a model adds rope_scaling
    if not isinstance(found, dict):
        raise ConfigError(f"config.json: rope_parameters = {found!r} must be a table of keys")
    if any(isinstance(value, dict) for value in found.values()):
        raise ConfigError("config.json: rope_parameters differ by kind of layer: not supported")
    _check_plain(found)
    theta = found.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != KIND:
        raise ConfigError(
            f'config.json: rope_type = "{kind}" is not supported, only default and {KIND}'
        )
    defaults = {"context": config.get("max_position_embeddings")}
    scaling = {ours: _given(found, key, defaults.get(ours)) for ours, key in _SCALING.items()}
    return theta, from_plain(RopeScaling, scaling, "config.json: rope_parameters")


def _given(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise ConfigError(f"config.json has no {key}")
    return value
