"""A step is committed on all stages or on none."""

import itertools
import math

import pytest
import torch
from engine_runs import built

from settings_values import EXACT
from thinwire.engine.worker import PATIENCE
from thinwire.errors import StageError
from whole_state import are_equal


def poison(stage, calls):
    """Make a stage produce a NaN gradient in the given steps."""

    def prepare(worker):
        if worker.index != stage:
            return
        count = {"backwards": 0}

        def hook(gradient):
            step = count["backwards"] // worker.settings.pipeline.microbatches
            count["backwards"] += 1
            return gradient * math.nan if step in calls else gradient

        trained = (p for p in worker.stage.parameters() if p.requires_grad)
        next(trained).register_hook(hook)

    return prepare


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_nan_anywhere_refuses_the_step_everywhere(stage, make_settings, run_in_threads):
    """Nor does it leave a checkpoint: what may be lost already must not push an earlier one out."""
    settings = make_settings(pipeline__stages=4, train__checkpoint_every=1)
    outcome = run_in_threads(settings, prepare_worker=poison(stage, {1}))
    assert sorted(outcome.shards()) == [1, 3, 4]
    for stage in range(len(outcome.workers)):
        assert [r.committed for r in outcome.steps(stage)] == [True, False, True, True]
    assert all(math.isfinite(loss) for loss in outcome.losses())
    assert all(bool(torch.isfinite(w).all()) for w in outcome.weights().values())


def test_a_refused_step_changes_no_weight(make_settings, run_in_threads):
    settings = make_settings(pipeline__stages=2, train__steps=2)
    refused = run_in_threads(settings, prepare_worker=poison(0, {0, 1}))
    untouched = [stage.global_parameters().items() for stage in built(settings)[1]]
    assert are_equal(refused.weights(), dict(itertools.chain(*untouched)))


def test_a_stop_during_a_refused_step_leaves_no_checkpoint(make_settings, run_in_threads):
    def prepare(worker):
        poison(1, {0})(worker)
        next(worker.stage.parameters()).register_hook(lambda _: worker.stop_requested.set())

    outcome = run_in_threads(make_settings(), prepare_worker=prepare)
    assert len(outcome.losses()) == 1
    assert outcome.shards() == {}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_end_the_run(value, make_settings, run_in_threads, tmp_path):
    """The update itself may overflow where every gradient was finite."""

    def prepare(worker):
        if worker.index != 1:
            return
        update, name = worker.update.optimizer.step, "lm_head.weight"

        def overflow(lr):
            update(lr)
            if worker.update.optimizer.state_tensors()[f"{name}/step"] == 2:
                with torch.no_grad():
                    worker.stage.owned_parameters()[name].view(-1)[7] = value

        worker.update.optimizer.step = overflow

    settings = make_settings(train__checkpoint_every=1)
    expected = r"weights of lm_head.weight are not finite after step 2: .* lower optim\.lr"
    with pytest.raises(StageError, match=expected):
        run_in_threads(settings, prepare_worker=prepare, folder=tmp_path / "run")
    written = [p.parent.name for p in (tmp_path / "run").rglob("stage-1.safetensors")]
    assert written == [".partial-step-00000001"]


def test_an_infinite_second_moment_ends_the_run(make_settings, run_in_threads, tmp_path):
    """A gradient may be finite and its square not: then the weight would be frozen for good."""

    def prepare(worker):
        if worker.index == 1:
            head = worker.stage.global_parameters()["lm_head.weight"]
            head.register_hook(lambda gradient: gradient * 1e25)

    settings = make_settings(**EXACT, optim__clip=0.0, train__checkpoint_every=1)
    expected = r"state lm_head.weight/exp_avg_sq is not finite after step 1: .* optim\.clip"
    with pytest.raises(StageError, match=expected):
        run_in_threads(settings, prepare_worker=prepare, folder=tmp_path / "run")
    assert not [*(tmp_path / "run").rglob("stage-1.safetensors")]


def test_a_run_that_stays_lost_ends(make_settings, run_in_threads):
    settings = make_settings(train__steps=20)
    outcome = run_in_threads(settings, prepare_worker=poison(1, set(range(20))))
    assert len(outcome.losses()) == PATIENCE
    assert outcome.shards() == {}
