"""The chain in one process trains what the pipeline trains, bit for bit."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from engine_runs import CPU
from test_narrow import MODES
from test_verdict import poison

from settings_values import EXACT
from thinwire.codec import Leg
from thinwire.engine.feed import Feed
from thinwire_lab.chain import Chain
from whole_state import are_equal

DELAYED = {**EXACT, "pipeline__delay": 1}
CASES = {
    "dense": EXACT,
    "lossy": {**EXACT, "codec__forward": "int8", "codec__backward": "int4"},
    "remembering": {**EXACT, "codec__forward": "topk(0.2)+ef21", "codec__backward": "int8+ef21",
                    "pipeline__schedule": "gpipe"},
    "remembering-by-cut": {**EXACT, "codec__forward": "int4+ef21+zstd",
                           "codec__backward": "topk(0.2)+ef", "codec__cuts": ["1: forward=bf16"]},
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
    """A chain after its steps, and their losses."""
    chain = Chain(settings, feed)
    for index, stage in enumerate(chain.stages):
        worker = SimpleNamespace(index=index, settings=settings, stage=stage)
        poison(1, refused or set())(worker)
    return chain, [chain.train_step(step) for step in range(settings.train.steps)]


def state(stages, updates):
    """Weights with statistics, and moments."""
    found = {}
    for stage, update in zip(stages, updates, strict=True):
        found |= stage.global_parameters() | update.optimizer.state_tensors()
    return found


def assert_same(outcome, chain, losses):
    """Losses, weights, moments and the last score to the bit, and the bytes that each cut takes."""
    assert outcome.losses() == losses
    updates = [worker.update.latest for worker in outcome.workers]
    theirs = state([update.stage for update in updates], updates)
    assert are_equal(state(chain.stages, [update.latest for update in chain.updates]), theirs)
    assert outcome.valid_losses()[-1] == chain.evaluate()
    for cut, leg in itertools.product(range(len(chain.cuts)), Leg):
        last = outcome.steps(cut + (leg is Leg.BACKWARD))[-1]
        sent = last.meters[f"cut-{cut}"]["sent"][leg.name]["payload_bytes"]
        per_token = sent / (len(losses) * chain.settings.tokens_per_step)
        assert chain.cuts[cut].payload_bytes_per_token(leg) == pytest.approx(per_token, rel=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_a_chain_is_its_pipeline(case, make_settings, run_in_threads, corpus):
    settings = make_settings(pipeline__stages=3, train__steps=5, **CASES[case])
    outcome = run_in_threads(settings)
    norms = [step.grad_norm for step in outcome.steps(0)]
    assert min(norms) > settings.optim.clip, "the norm of all stages decides every update"
    chain, losses = trained(settings, Feed(corpus, settings, CPU))
    assert_same(outcome, chain, losses)
    if "codec__cuts" in CASES[case]:
        assert abs(chain.evaluate(compressed=False) - chain.evaluate()) > 1e-7


@pytest.mark.parametrize("case", ["dense", "subspace-moving", "projected-own-tables", "muon"])
def test_both_refuse_the_same_step(case, make_settings, run_in_threads, corpus):
    settings = make_settings(pipeline__stages=3, train__steps=5, **CASES[case])
    outcome = run_in_threads(settings, prepare_worker=poison(1, {1}))
    committed = [step.committed for step in outcome.steps(0)]
    assert committed == [True, False, True, True, True]
    feed = Feed(corpus, settings, CPU)
    assert_same(outcome, *trained(settings, feed, {1}))
    head = trained(settings, feed)[0].stages[-1].global_parameters()["lm_head.weight"]
    assert not torch.equal(head, outcome.weights()["lm_head.weight"])
