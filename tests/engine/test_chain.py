"""The chain in one process trains what the pipeline trains, bit for bit."""

from types import SimpleNamespace

import pytest
import torch
from engine_runs import CPU, are_equal
from test_narrow import MODES
from test_verdict import poison

from settings_values import EXACT
from thinwire.engine.feed import Feed
from thinwire_lab.chain import Chain

DELAYED = {**EXACT, "pipeline__delay": 1}
CASES = {
    "dense": EXACT,
    "lossy": {**EXACT, "codec__forward": "int8", "codec__backward": "int4"},
    "remembering": {**EXACT, "codec__forward": "topk(0.2)+ef21"},
    "bf16": {"run__precision": "bf16", "codec__forward": "bf16", "codec__backward": "bf16"},
    "muon": {**EXACT, "optim__name": "muon"},
    "delayed": {**DELAYED, "pipeline__microbatches": 4},
    "delayed-muon": {**DELAYED, "optim__name": "muon"},
    "delayed-lossy": {**DELAYED, "run__precision": "bf16", "codec__forward": "topk(0.2)+ef21",
                      "codec__backward": "int4"},
    "delayed-projected-own-tables": {**DELAYED, **MODES["projected-own-tables"]},
    **{mode: {**EXACT, **MODES[mode]} for mode in MODES if "moving" in mode or "own" in mode},
}  # fmt: skip


def trained(settings, feed, refused=None):
    """What a chain and its steps give: losses, weights with statistics, moments, the last score."""
    chain = Chain(settings, feed)
    for index, stage in enumerate(chain.stages):
        worker = SimpleNamespace(index=index, settings=settings, stage=stage)
        poison(1, refused or set())(worker)
    losses = [chain.train_step(step) for step in range(settings.train.steps)]
    latest = [update.latest for update in chain.updates]
    return losses, *state(chain.stages, latest), chain.evaluate()


def state(stages, updates):
    weights, moments = {}, {}
    for stage, update in zip(stages, updates, strict=True):
        weights |= stage.global_parameters()
        moments |= update.optimizer.state_tensors()
    return weights, moments


def assert_same(outcome, chain):
    losses, weights, moments, valid = chain
    assert outcome.losses() == losses
    updates = [worker.update.latest for worker in outcome.workers]
    theirs = state([update.stage for update in updates], updates)
    for ours, others in zip((weights, moments), theirs, strict=True):
        assert are_equal(ours, others)
    assert outcome.valid_losses()[-1] == valid


@pytest.mark.parametrize("case", CASES)
def test_a_chain_is_its_pipeline(case, make_settings, run_in_threads, corpus):
    settings = make_settings(pipeline__stages=3, train__steps=5, **CASES[case])
    outcome = run_in_threads(settings)
    norms = [step.grad_norm for step in outcome.steps(0)]
    assert min(norms) > settings.optim.clip, "the norm of all stages decides every update"
    assert_same(outcome, trained(settings, Feed(corpus, settings, CPU)))


@pytest.mark.parametrize("case", ["dense", "subspace-moving", "projected-own-tables", "muon"])
def test_both_refuse_the_same_step(case, make_settings, run_in_threads, corpus):
    settings = make_settings(pipeline__stages=3, train__steps=5, **CASES[case])
    outcome = run_in_threads(settings, prepare_worker=poison(1, {1}))
    committed = [step.committed for step in outcome.steps(0)]
    assert committed == [True, False, True, True, True]
    feed = Feed(corpus, settings, CPU)
    assert_same(outcome, trained(settings, feed, {1}))
    _, weights, *_ = trained(settings, feed)
    assert not torch.equal(weights["lm_head.weight"], outcome.weights()["lm_head.weight"])
