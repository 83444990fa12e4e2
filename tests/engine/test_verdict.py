"""A step is committed on all stages or on none."""

import math
from collections.abc import Callable

import pytest
import torch

from thinwire.engine.runner import Verdict
from thinwire.engine.worker import PATIENCE, check_divergence
from thinwire.errors import StageError


def poison(stage: int, calls: set[int]) -> Callable:
    """Make a stage produce a NaN gradient in the given steps."""

    def prepare(worker) -> None:
        if worker.index != stage:
            return
        count = {"backwards": 0}

        def hook(gradient):
            step = count["backwards"] // worker.settings.pipeline.microbatches
            count["backwards"] += 1
            return gradient * math.nan if step in calls else gradient

        next(worker.stage.parameters()).register_hook(hook)

    return prepare


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_nan_anywhere_refuses_the_step_everywhere(
    stage: int, make_settings: Callable, run_in_threads: Callable
) -> None:
    settings = make_settings(pipeline__stages=4)
    outcome = run_in_threads(settings, prepare_worker=poison(stage, {1}))
    for reports in outcome.reports:
        assert [r["committed"] for r in reports if r["type"] == "step"] == [True, False, True, True]
    assert all(math.isfinite(loss) for loss in outcome.losses())
    assert all(bool(torch.isfinite(w).all()) for w in outcome.weights().values())


def test_a_refused_step_changes_no_weight(
    make_settings: Callable, run_in_threads: Callable
) -> None:
    settings = make_settings(pipeline__stages=2, train__steps=2)
    refused = run_in_threads(settings, prepare_worker=poison(0, {0, 1}))
    untouched = {
        name: parameter.detach().clone()
        for worker in refused.workers
        for name, parameter in _fresh(worker).items()
    }
    assert all(torch.equal(w, untouched[name]) for name, w in refused.weights().items())


def _fresh(worker) -> dict:
    stage = worker.builder.build(worker.index)
    worker.builder.initialise(stage)
    return stage.global_parameters()


def test_a_run_that_stays_lost_ends(make_settings: Callable, run_in_threads: Callable) -> None:
    settings = make_settings(train__steps=20)
    outcome = run_in_threads(settings, prepare_worker=poison(1, set(range(20))))
    assert len(outcome.losses()) == PATIENCE
    assert outcome.shards() == {}
    with pytest.raises(StageError, match=r"lower optim\.lr"):
        check_divergence(PATIENCE, 5, None)
    check_divergence(PATIENCE - 1, 5, None)


def test_verdict_bytes() -> None:
    verdict = Verdict(1.5, True, False, True)
    assert Verdict.from_bytes(verdict.to_bytes()) == verdict
    with pytest.raises(StageError, match="11 bytes"):
        Verdict.from_bytes(verdict.to_bytes()[:-1])
