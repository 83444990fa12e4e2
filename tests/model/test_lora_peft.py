"""Adapters are those of the peft library: the same outputs and gradients on the same weights."""

import pytest
import torch
from torch.nn import functional as F

from thinwire.model.layers import is_adapter
from thinwire_lab.chain import Chain

RANK, ALPHA = 3, 6.0


def stock_llama(shape, targets):
    """A Llama of transformers with peft's LoRA layers, in float64."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from thinwire.hf.shape import config_of

    plain = config_of(shape)
    config = AutoConfig.for_model(plain.pop("model_type"), **plain, use_cache=False)
    llama = AutoModelForCausalLM.from_config(config)
    norms = [name for name, _ in llama.named_modules() if name.endswith("norm")]
    for name in norms:  # theirs rounds to float32
        llama.set_submodule(name, torch.nn.RMSNorm(shape.dim, shape.norm_eps))
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, lora_dropout=0.0)
    return get_peft_model(llama.double(), lora)


def name_here(theirs):
    short = theirs.removeprefix("base_model.model.")
    return short.replace(".default.", ".").replace(".base_layer.", ".")


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], None], ids=["two", "all"])
def test_outputs_and_gradients_are_those_of_peft(targets, make_settings):
    changes = {"lora__targets": targets} if targets else {}
    settings = make_settings(lora__rank=RANK, lora__alpha=ALPHA, pipeline__stages=3, **changes)
    chain = Chain(settings)
    ours = {n: p for stage in chain.stages for n, p in stage.global_parameters().items()}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in ours.items():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    stock = stock_llama(settings.model, settings.lora.targets)
    theirs = {name_here(name): parameter for name, parameter in stock.named_parameters()}
    assert theirs.keys() == ours.keys()
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(ours[name])
    ids = torch.randint(settings.model.vocab, (2, 16), generator=generator)
    logits, expected = chain.logits(ids), stock(ids).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    for output in (logits, expected):
        F.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    for name, parameter in theirs.items():
        gradient = ours[name].grad
        assert (parameter.grad is None) == (gradient is None) == (not is_adapter(name)), name
        if gradient is not None:
            assert parameter.grad is not None and bool(gradient.any())
            torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=1e-12)
