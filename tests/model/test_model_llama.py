"""The model is Llama: names, logits and gradients agree with transformers.

Its RMSNorm computes in float32 whatever its input, so in float64 the two agree only to float32's
rounding, 2^-24 per norm, which the matrices behind each norm amplify: 1e-5 of the largest value is
asked for. With those norms exchanged for torch.nn.RMSNorm, which stays in float64, nothing else in
it is narrower and 1e-10 is asked for.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from thinwire.model import ModelConfig, Stage, architecture, token_loss
from thinwire.model.llama import rotary_tables

EXACT, FLOAT32 = 1e-10, 1e-5
SHAPES = {
    "multi-head": {"heads": 4, "kv_heads": 4, "rope_theta": 10000.0, "norm_eps": 1e-6},
    "grouped": {"heads": 4, "kv_heads": 2, "rope_theta": 500000.0, "norm_eps": 1e-5},
    "one key head": {"heads": 8, "kv_heads": 1, "rope_theta": 700.0, "norm_eps": 1e-3},
}


def small_config(shape: str) -> ModelConfig:
    sizes = {"layers": 3, "dim": 32, "ffn": 40, "vocab": 61, "context": 16}
    return ModelConfig(**sizes, **SHAPES[shape]).resolved()


def lively_stage(config: ModelConfig) -> Stage:
    """The whole model in float64, with weights large enough that every part of it matters."""
    stage = Stage(architecture(config).layers()).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in stage.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * 0.3 if parameter.ndim > 1 else 1 + noise * 0.3)
    return stage


def transformers_model(config: ModelConfig, weights: dict[str, Tensor]) -> LlamaForCausalLM:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.dim,
            intermediate_size=config.ffn,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.context,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=False,
            attn_implementation="sdpa",  # its eager attention takes the softmax in float32
        )
    ).double()
    model.load_state_dict({name: weight.detach() for name, weight in weights.items()})
    return model


def widen_norms(model: nn.Module) -> int:
    """Exchange transformers' RMSNorms, which round to float32; how many there were."""
    narrow = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child).__name__ == "LlamaRMSNorm"
    ]
    for parent, name, child in narrow:
        wide = nn.RMSNorm(len(child.weight), eps=child.variance_epsilon)
        wide.weight = child.weight
        setattr(parent, name, wide)
    return len(narrow)


def tokens(config: ModelConfig, context: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(config.vocab, (3, (context or config.context) + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def gradients(logits: Tensor, targets_BT: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    loss = F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


def distance(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == torch.float64
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def largest_distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(distance(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("context", [16, 11])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_model_is_transformers_llama(shape: str, context: int) -> None:
    config = small_config(shape)
    stage = lively_stage(config)
    ours = stage.global_parameters()
    model = transformers_model(config, ours)
    theirs = dict(model.named_parameters())
    assert ours.keys() == theirs.keys() == model.state_dict().keys()
    assert {n: p.shape for n, p in ours.items()} == {n: p.shape for n, p in theirs.items()}

    ids_BT, targets_BT = tokens(config, context)
    logits = stage(ids_BT)
    slopes = gradients(logits, targets_BT, ours)
    for tolerance in (FLOAT32, EXACT):
        expected = model(ids_BT).logits
        assert distance(logits, expected) < tolerance
        assert largest_distance(slopes, gradients(expected, targets_BT, theirs)) < tolerance
        if tolerance == FLOAT32:
            assert widen_norms(model) == 2 * config.layers + 1


def test_float32_weights_give_transformers_float32_logits() -> None:
    """In the type people train in, where both take their norms in float32."""
    config = small_config("grouped")
    stage = lively_stage(config)
    model = transformers_model(config, stage.global_parameters()).float()
    ids_BT, _ = tokens(config)
    ours, theirs = stage.float()(ids_BT), model(ids_BT).logits
    assert ours.dtype == theirs.dtype == torch.float32
    assert distance(ours.double(), theirs.double()) < FLOAT32


def exact_angles(config: ModelConfig) -> Tensor:
    """Angle of each position and channel pair, (T, E/2), in float64."""
    pairs = range(config.head_dim // 2)
    speeds = [config.rope_theta ** (-2 * pair / config.head_dim) for pair in pairs]
    return torch.tensor(
        [[position * speed for speed in speeds] for position in range(config.context)],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("change", [{"rope_theta": 1000.0}, {"norm_eps": 1e-4}])
def test_the_comparison_sees_a_wrong_constant(change: dict[str, float]) -> None:
    config = small_config("grouped")
    stage = lively_stage(config)
    other = ModelConfig(**{**vars(config), **change}).resolved()
    model = transformers_model(other, stage.global_parameters())
    ids_BT, _ = tokens(config)
    assert distance(stage(ids_BT), model(ids_BT).logits) > FLOAT32


@pytest.mark.parametrize("shape", SHAPES)
def test_rotary_tables_are_exact_to_float32(shape: str) -> None:
    config = small_config(shape)
    cos_TE, sin_TE = rotary_tables(config.context, config.head_dim, config.rope_theta)
    angle_TE = exact_angles(config).repeat(1, 2)
    assert cos_TE.shape == (config.context, config.head_dim)
    assert cos_TE.dtype == sin_TE.dtype == torch.float32
    # an angle is off by its own rounding, so the bound grows with the position
    bound_T1 = 2.0**-23 * (1 + torch.arange(config.context)[:, None])
    assert ((cos_TE.double() - angle_TE.cos()).abs() <= bound_T1).all()
    assert ((sin_TE.double() - angle_TE.sin()).abs() <= bound_T1).all()


def test_no_position_sees_a_later_token() -> None:
    config = small_config("grouped")
    stage = lively_stage(config)
    ids_BT, _ = tokens(config)
    changed_BT = ids_BT.clone()
    changed_BT[:, 9] = (changed_BT[:, 9] + 1) % config.vocab
    before, after = stage(ids_BT), stage(changed_BT)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(-1).all()


def test_the_loss_is_the_mean_over_tokens_in_float32_at_least() -> None:
    generator = torch.Generator().manual_seed(1)
    logits_BTV = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    targets_BT = torch.randint(5, (2, 3), generator=generator)
    chosen = [
        logits_BTV[b, t].softmax(-1)[targets_BT[b, t]].log() for b in range(2) for t in range(3)
    ]
    assert abs(token_loss(logits_BTV, targets_BT) + sum(chosen) / 6) < 1e-14
    narrow = logits_BTV.bfloat16()
    assert token_loss(narrow, targets_BT).dtype == torch.float32
    assert torch.equal(token_loss(narrow, targets_BT), token_loss(narrow.float(), targets_BT))
