"""Under autocast weights are rounded once in a step, and nobody can tell but by time and memory."""

import contextlib
from collections import Counter

import pytest
import torch
from engine_runs import CPU, built
from torch.utils._python_dispatch import TorchDispatchMode

from settings_values import EXACT
from thinwire.engine.passes import autocast_for, weights_rounded_once
from trained import trained_chain

MICROBATCHES = 4


class Roundings(TorchDispatchMode):
    """Counts how often each tensor is rounded to bfloat16."""

    def __init__(self):
        super().__init__()
        self.of: Counter[int] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
            self.of[args[0].data_ptr()] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def bf16(make_settings):
    single = {"pipeline__stages": 1, "pipeline__microbatches": MICROBATCHES, "train__steps": 3}
    return make_settings(**{**EXACT, "run__precision": "bf16"}, **single)


def gradients(settings, keep):
    """All microbatches forward, then backward, as in a pipeline: they are in flight together."""
    _, (stage,) = built(settings)
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(settings.model.vocab, (MICROBATCHES, 2, 16), generator=generator)
    autocast = autocast_for("bf16", CPU)
    with Roundings() as roundings, keep():
        outputs = []
        for microbatch in ids_BT:
            with autocast():
                outputs.append(stage.loss(stage(microbatch), microbatch))
        for output in outputs:
            output.backward()
    found = stage.global_parameters()
    matrices = [p.data_ptr() for name, p in found.items() if p.ndim == 2 and "embed" not in name]
    return [p.grad for p in found.values() if p.grad is not None], roundings.of, matrices


def test_each_weight_is_rounded_once_and_gradients_are_the_same_bits(bf16):
    once, counted, matrices = gradients(bf16, weights_rounded_once)
    assert matrices and {counted[matrix] for matrix in matrices} == {1}
    each, counted, matrices = gradients(bf16, contextlib.nullcontext)
    assert {counted[matrix] for matrix in matrices} == {MICROBATCHES}, "what it is for"
    assert all(torch.equal(a, b) for a, b in zip(once, each, strict=True))


def test_a_step_begins_with_the_weights_of_the_last_update(bf16, corpus, monkeypatch):
    """Held against steps in which autocast forgets its copies after every microbatch."""
    trained = []
    for forgets in (False, True):
        if forgets:
            monkeypatch.setattr("thinwire_lab.chain.weights_rounded_once", contextlib.nullcontext)
        chain = trained_chain(bf16, corpus, 0)
        losses = [chain.train_step(step) for step in range(3)]
        weights = [p.detach() for stage in chain.stages for p in stage.parameters()]
        trained.append((losses, weights))
    (losses, weights), (plain_losses, plain_weights) = trained
    assert losses == plain_losses and losses[0] != losses[2]
    assert all(torch.equal(a, b) for a, b in zip(weights, plain_weights, strict=True))


def test_a_failed_step_leaves_no_copies_behind():
    layer, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
    with pytest.raises(ValueError, match="in a step"), weights_rounded_once():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            before = layer(x)
        raise ValueError("in a step")
    with torch.no_grad():
        layer.weight.add_(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not torch.equal(layer(x), before)
