"""Delayed updates: microbatches are computed without the update of the step before."""

import itertools
import math

import pytest
from engine_runs import assert_same_course, furthest
from plain import TOLERANCE, plain_loop

from settings_values import narrow
from thinwire.engine.state import BEFORE, names_for_stage, shard_like
from thinwire.errors import WireError
from trained import trained_chain


@pytest.fixture
def delayed(make_settings):
    """Settings of a tiny exact run with delayed updates."""
    return lambda **changes: make_settings(**{"pipeline__delay": 1, **changes})


def chain_of(settings, corpus, refused=-1):
    """A chain and the losses of its steps; the gradients of one step are spoiled."""
    chain, losses = trained_chain(settings, corpus, 0), []
    for step in range(settings.train.steps):
        if step == refused:
            update = chain.updates[0].of_step(step)
            update.squared_norms = lambda: [float("nan")]
        losses.append(chain.train_step(step))
        if step == refused:
            del update.squared_norms
    return chain, losses


def weights_of(chain):
    return {name: p for stage in chain.stages for name, p in stage.global_parameters().items()}


@pytest.mark.parametrize(("stages", "delay"), [(1, 4), (3, 4), (3, 1)])
@pytest.mark.parametrize("refused", [-1, 0, 2])
def test_a_chain_is_a_plain_loop_of_delayed_updates(stages, delay, refused, delayed, corpus):
    settings = delayed(pipeline__stages=stages, pipeline__delay=delay, train__steps=6)
    losses, weights = plain_loop(settings, corpus, delay, refused)
    chain, found = chain_of(settings, corpus, refused)
    assert found == pytest.approx(losses, abs=TOLERANCE)
    assert furthest(weights_of(chain), weights) < TOLERANCE


def test_without_delay_training_differs(delayed, corpus):
    """The failing side: a loop with another delay, or none, begins alike and goes elsewhere."""
    settings = delayed(pipeline__stages=2, train__steps=3)
    chain, found = chain_of(settings, corpus)
    for other in (0, 2):
        losses, weights = plain_loop(settings, corpus, delay=other)
        assert found[0] == pytest.approx(losses[0], abs=TOLERANCE)
        assert min(abs(a - b) for a, b in zip(found[1:], losses[1:], strict=True)) > 1e-6
        assert furthest(weights_of(chain), weights) > 1e-6


def spoil(step):
    """Spoil the gradients of one step on the last stage."""

    def prepare(worker):
        update = worker.update.of_step(step)
        norms, begin = update.squared_norms, update.begin
        now = {"step": -1}
        update.begin = lambda at: (now.update(step=at), begin(at))
        if worker.index == worker.last:
            update.squared_norms = lambda: [*norms(), math.nan] if now["step"] == step else norms()

    return prepare


@pytest.mark.parametrize(
    ("stages", "window", "every", "delay"),
    [(1, 0, 0, 4), (2, 1, 0, 4), (2, 4, 0, 1), (3, 0, 3, 2), (4, 4, 0, 4), (4, 4, 0, 3),
     (4, 2, 2, 1), (3, 1, 0, 1), (1, 0, 0, 2), (4, -1, 1, 4)],
)  # fmt: skip
def test_a_pipeline_is_a_plain_loop_of_delayed_updates(
    stages, window, every, delay, delayed, run_in_threads, corpus
):
    changes = {"pipeline__stages": stages, "pipeline__window": window, "pipeline__delay": delay}
    settings = delayed(**changes, train__steps=7, train__eval_every=every)
    losses, weights = plain_loop(settings, corpus, delay)
    outcome = run_in_threads(settings)
    assert outcome.losses() == pytest.approx(losses, abs=TOLERANCE)
    assert furthest(outcome.weights(), weights) < TOLERANCE
    assert all(worker.mailbox.dropped == 0 for worker in outcome.workers)


@pytest.mark.parametrize(("refused", "delay"), [(0, 2), (1, 4), (3, 1), (6, 4), (6, 1)])
def test_a_refused_step_leaves_the_weights_of_the_next(
    refused, delay, delayed, run_in_threads, corpus
):
    changes = {"pipeline__stages": 3, "pipeline__delay": delay}
    settings = delayed(**changes, train__steps=7, train__eval_every=0)
    losses, weights = plain_loop(settings, corpus, delay, refused)
    outcome = run_in_threads(settings, prepare_worker=spoil(refused))
    for stage in range(3):
        committed = [step.committed for step in outcome.steps(stage)]
        assert [step for step, good in enumerate(committed) if not good] == [refused]
    assert outcome.losses() == pytest.approx(losses, abs=TOLERANCE)
    assert furthest(outcome.weights(), weights) < TOLERANCE


def test_stages_overlap_steps(delayed, run_in_threads):
    """The first stage begins a step before it has ended the one before; without delay it does not,
    nor where a validation comes between.
    """
    for settings, overlaps in (
        (delayed(train__steps=4, train__eval_every=0), [True, True, True]),
        (delayed(train__steps=4, train__eval_every=2), [True, False, True]),
        (delayed(train__steps=4, train__eval_every=0, pipeline__delay=0), [False, False, False]),
    ):
        steps = run_in_threads(settings).steps(0)
        begun = [min(start for lane, _, start, _ in s.spans if lane == "compute") for s in steps]
        ended = [max(end for lane, _, _, end in s.spans if lane == "compute") for s in steps]
        assert [begun[n + 1] < ended[n] for n in range(3)] == overlaps
        assert all(b.start >= a.end for a, b in itertools.pairwise(steps)), "durations add up"


@pytest.mark.parametrize(
    ("case", "before", "after"), [("adamw", 2, 4), ("muon", 4, 1), ("remembering", 3, 3)]
)
def test_resumed_equals_uninterrupted(case, before, after, delayed, saved_run, resumed):
    changes = {"train__steps": 8, "train__checkpoint_every": 3, "train__eval_every": 4}
    if case == "muon":
        changes |= {"optim__name": "muon"}
    if case == "remembering":
        changes |= {"codec__forward": "topk(0.2)+ef21", **narrow("projected", anchor="per-stage")}
    whole, written = saved_run(delayed(pipeline__stages=before, **changes))
    assert [*written] == [3, 6, 8]
    for step in (3, 6):
        assert {part.versions.weight_version for part in whole.shards()[step]} == {step}
        again = resumed(delayed(pipeline__stages=after, **changes), written[step])
        assert_same_course(again, whole, step)


def test_the_weights_before_the_last_update_matter(delayed, saved_run, resumed):
    """The failing side: with the latest weights alone the next step is another."""
    settings = delayed(train__steps=6, train__checkpoint_every=3)
    whole, saved = saved_run(settings)

    def forget(worker):
        worker.update.latest.restore_twin({})
        worker.update.latest.twin.version -= 1

    other = resumed(settings, saved[3], forget)
    assert abs(other.losses()[0] - whole.losses()[3]) > 1e-6


def test_a_stage_with_other_weights_is_found_by_their_version(delayed, run_in_threads):
    def prepare(worker):
        if worker.index == 1:  # computes as if updates were not delayed
            worker.update.of_step = lambda step: worker.update.latest

    words = r"made with weight version \d .* this stage is at weight version \d"
    with pytest.raises(WireError, match=words):
        run_in_threads(delayed(train__steps=4, train__eval_every=0), prepare_worker=prepare)


def test_a_run_goes_on_with_and_without_delay(delayed, saved_run, resumed):
    """From the latest weights: the next step without delay is computed with them, and so is the one
    after it with delay, for which there is no other version.
    """
    changes = {"train__steps": 6, "train__checkpoint_every": 3, "train__eval_every": 3}
    for delay in (0, 1):
        whole, saved = saved_run(delayed(pipeline__delay=delay, **changes), f"from-{delay}")
        again = resumed(delayed(pipeline__delay=1 - delay, **changes), saved[3])
        assert again.valid_losses()[0] == whole.valid_losses()[1], "the same weights"
        assert (again.losses()[0] == whole.losses()[3]) == (delay == 0)
        assert again.losses()[1] != whole.losses()[4]


def test_a_shard_has_the_weights_before_the_last_update(delayed, run_in_threads):
    settings = delayed(train__checkpoint_every=2, boundary__mode="projected", boundary__rank=6)
    outcome = run_in_threads(settings)
    for stage, worker in enumerate(outcome.workers):
        part = outcome.shards()[4][stage]
        needed, _ = shard_like(settings, stage, part.versions)
        assert {*part.shard.tensors} == {*needed}
        before = {name for name in needed if name.startswith(BEFORE)}
        assert before == {BEFORE + name for name in worker.stage.trained_parameters()}
        assert before <= names_for_stage(settings, stage, needed)
