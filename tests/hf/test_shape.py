"""Shapes of Hugging Face models: config.json in and out, and the model behind it computes the same.

For each shape our model and the class of transformers get the same weights: logits agree in
float32, gradients in float64 (where their norms, which round to float32, are exchanged).
"""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from thinwire.errors import ConfigError
from thinwire.hf.shape import config_of, is_tied, shape_of
from thinwire.model import ModelConfig, Stage, architecture

SIZES = {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "ffn": 40, "vocab": 61, "context": 64}
SHAPES = {
    "llama": {"rope_theta": 700.0, "norm_eps": 1e-3}, "all heads": {"kv_heads": 4},
    "one key head": {"heads": 8, "kv_heads": 1}, "wide heads": {"head_dim": 12},
    "llama3": {"rope_scaling": "llama3(factor=8, low=1, high=4, context=32)", "rope_theta": 1e3},
    "qwen2": {"qkv_bias": True, "norm_eps": 1e-6},
    "qwen3": {"qk_norm": True, "head_dim": 16, "rope_theta": 1e6},
}  # fmt: skip


def model_of(shape):
    return ModelConfig(preset="custom", **{**SIZES, **SHAPES[shape]}).resolved()


def lively(config):
    """The whole model in float64, with weights large enough that every part of it matters."""
    stage = Stage(architecture(config).layers()).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in stage.global_parameters().items():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
            parameter.copy_(1 + noise if "norm" in name else noise)
    return stage


def library_config(config):
    plain = config_of(config)
    return AutoConfig.for_model(plain.pop("model_type"), **plain)


def theirs(config, stage):
    wanted = library_config(config)
    model = AutoModelForCausalLM.from_config(wanted, attn_implementation="sdpa").double()
    assert [type(model).__name__] == config_of(config)["architectures"]
    weights = {name: p.detach() for name, p in stage.global_parameters().items()}
    assert model.load_state_dict(weights, strict=True)
    return model.eval()


def widen_norms(model):
    """Exchange transformers' RMSNorms, which round to float32; how many there were."""
    modules = [*model.named_modules()]
    narrow = [(name, child) for name, child in modules if type(child).__name__.endswith("RMSNorm")]
    for name, child in narrow:
        wide = nn.RMSNorm(len(child.weight), eps=child.variance_epsilon)
        wide.weight = child.weight
        model.set_submodule(name, wide)
    return len(narrow)


def distance(ours, expected):
    assert ours.shape == expected.shape
    return ((ours - expected).abs().max() / expected.abs().max()).item()


def slopes(logits, targets, weights):
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_model_computes_what_transformers_does(shape):
    config = model_of(shape)
    stage = lively(config)
    model = theirs(config, stage)
    ids = torch.randint(config.vocab, (3, config.context - 10), generator=torch.Generator())
    inputs, targets = ids[:, :-1], ids[:, 1:]
    assert widen_norms(model) == (4 if config.qk_norm else 2) * config.layers + 1
    ours, expected = stage(inputs), model(inputs).logits
    assert distance(ours, expected) < 1e-10
    wrong = dataclasses.replace(config, rope_theta=1.1 * config.rope_theta)
    assert distance(lively(wrong)(inputs), expected) > 1e-5, "the comparison sees it"
    found = slopes(ours, targets, stage.global_parameters())
    wanted = slopes(expected, targets, dict(model.named_parameters()))
    for name, slope in found.items():
        assert distance(slope, wanted[name]) < 1e-9 or name.endswith("k_proj.bias"), name
        # Attention is blind to a bias of all keys but for rotary positions: slopes near zero.
        assert (slope - wanted[name]).abs().max() < 1e-10, name
    model = theirs(config, stage).float()
    assert distance(stage.float()(inputs), model(inputs).logits) < 1e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_written_is_read_back(shape):
    config = model_of(shape)
    plain = config_of(config)
    assert shape_of(plain) == config and not is_tied(plain)
    new = {key: value for key, value in plain.items() if key not in ("rope_theta", "rope_scaling")}
    old = {key: value for key, value in plain.items() if key != "rope_parameters"}
    assert shape_of(new) == shape_of(old) == config
    assert shape_of(library_config(config).to_dict()) == config


def test_context_is_ours_to_choose_and_defaults_are_theirs():
    plain = config_of(model_of("llama"))
    assert shape_of(plain, context=16).context == 16
    for key in ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_parameters"):
        del plain[key]
    config = shape_of(plain)
    assert (config.kv_heads, config.head_dim, config.norm_eps) == (4, 8, 1e-6)
    assert config.rope_theta == 10000.0
    mistral = {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None}
    assert shape_of({**plain, **mistral}).kv_heads == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, r'model_type = "gpt2" is not supported\. Supported are llama'),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window = 4096"),
        ({"use_sliding_window": True, "sliding_window": 8}, "sliding_window = 8"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": [None, {}]}, 'layer_types has "None"'),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': its activation must be silu"),
        ({"attention_bias": True}, "attention_bias = True: biases on all four"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, 'rope_type = "yarn"'),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, 'rope_type = "yarn"'),  # beside it
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4}}, "has no low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_key_value_heads": 3}, "must be a multiple of model.kv_heads"),
    ],
    ids=str,
)
def test_what_our_model_does_not_do_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        shape_of({**config_of(model_of("llama")), **change})


def test_a_model_without_a_class_of_theirs_is_refused():
    config = ModelConfig(preset="custom", **SIZES, qkv_bias=True, qk_norm=True).resolved()
    with pytest.raises(ConfigError, match=r"both model.qkv_bias and model.qk_norm"):
        config_of(config)
