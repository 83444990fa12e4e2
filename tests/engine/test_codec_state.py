"""Codecs that remember: both ends alike, saved and resumed exactly, refused where that fails."""

import re
import threading

import pytest
from engine_runs import assert_same_course, stop_in_the_first_step
from test_contract import refusal
from test_verdict import poison

from thinwire.codec import Leg
from thinwire.engine.checkpoint import Checkpoint
from thinwire.engine.cut import check_memory
from thinwire.engine.port import Port
from thinwire.engine.worker import Worker
from thinwire.errors import CheckpointError
from thinwire.run.coordinator import disagreement
from thinwire.wire import FrameKind
from waiting import PATIENCE
from whole_state import are_equal


def codec_states(outcome):
    return {
        name: tensor
        for worker in outcome.workers
        for end in worker.state.ends
        for name, tensor in end.state_tensors().items()
    }


def agreements(outcome):
    return {s: [r.agreements for r in reports] for s, reports in outcome.shards().items()}


def neighbour_first(monkeypatch):
    """Every stage saves only after an activation of the next step has come from below."""
    arrived: dict[tuple[int, int], threading.Event] = {}
    on_frame, save = Port._on_frame, Worker._checkpoint

    def event(stage, step):
        return arrived.setdefault((stage, step), threading.Event())

    def seen(port, frame):
        on_frame(port, frame)
        if frame.kind is FrameKind.FORWARD:
            event(port.stage, frame.step).set()

    def late(worker, done):
        if worker.index > 0 and done < worker.settings.train.steps:
            assert event(worker.index, done).wait(PATIENCE), "the neighbour does not go ahead"
        save(worker, done)

    monkeypatch.setattr(Port, "_on_frame", seen)
    monkeypatch.setattr(Worker, "_checkpoint", late)


SEVERAL_EPOCHS = {"train__batch": 128}  # a corpus of 503 examples comes back after four steps


@pytest.mark.parametrize(("schedule", "stages", "forward", "backward", "changes"), [
    ("gpipe", 2, "delta", "delta", {}),
    ("1f1b", 3, "topk(0.2)+ef21", "topk(shared)+ef", {}),
    ("1f1b", 2, "int4+ef21+zstd", "int8+ef21", {}),
    ("gpipe", 2, "randk(0.3)+ef-mixed", "topk(0.3)+ef21", {}),
    ("gpipe", 2, "topk(0.2)+aqsgd", "int8+aqsgd", SEVERAL_EPOCHS),
    ("1f1b", 3, "int4+aqsgd+zstd", "int8", SEVERAL_EPOCHS),
])  # fmt: skip
def test_resumed_equals_uninterrupted(
    schedule, stages, forward, backward, changes, settings_with, saved_run, resumed, monkeypatch
):
    """Also where a neighbour has sent activations of the next step before a stage is saved."""
    codecs = {"codec__forward": forward, "codec__backward": backward, **changes}
    settings = settings_with(pipeline__schedule=schedule, pipeline__stages=stages, **codecs)
    neighbour_first(monkeypatch)
    whole, saved = saved_run(settings)
    again = resumed(settings, saved[3])
    assert_same_course(again, whole, 3)
    assert again.valid_losses()[1:] == whole.valid_losses()[2:]
    assert are_equal(codec_states(again), codec_states(whole))
    assert len(codec_states(whole)) >= 2 * (stages - 1)
    assert agreements(again)[6] == agreements(whole)[6]
    for step, seen in agreements(whole).items():
        assert disagreement(step, seen) == ""


def test_what_codecs_remember_matters(settings_with, saved_run, resumed):
    """The failing side: weights and optimizer alone do not continue the run."""
    whole, saved = saved_run(settings_with())

    def forget(worker):
        for end in worker.state.ends:
            for codec in end.codecs.values():
                codec.last = None

    forgetful = resumed(settings_with(), saved[3], forget)
    assert forgetful.losses() != whole.losses()[3:]


def test_a_refused_step_is_remembered_alike_on_both_ends(settings_with, saved_run, resumed):
    settings = settings_with(train__checkpoint_every=2)
    whole, saved = saved_run(settings, prepare_worker=poison(0, {0}))
    assert [r.committed for r in whole.steps(0)][:2] == [False, True]
    for step, stages in agreements(whole).items():
        assert disagreement(step, stages) == ""
    assert resumed(settings, saved[2]).losses() == whole.losses()[2:]


def disturb(stage, leg, at_step):
    """Change what one end of the first cut remembers, before a step."""

    def prepare(worker):
        if worker.index != stage:
            return
        begin = worker.update.begin

        def disturbed(step):
            if step == at_step:
                end = worker.above if stage == 0 else worker.below
                with worker._ports[0]._gate:  # the step is open, and frames of it may arrive
                    end.codecs[leg].last = end.codecs[leg].last + 1e-3
            begin(step)

        worker.update.begin = disturbed

    return prepare


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("leg", list(Leg))
def test_ends_that_differ_are_found_at_the_next_checkpoint(
    stage, leg, settings_with, run_in_threads
):
    settings = settings_with(train__checkpoint_every=1)
    outcome = run_in_threads(settings, prepare_worker=disturb(stage, leg, at_step=4))
    seen = agreements(outcome)
    for step in (1, 2, 3, 4):
        assert disagreement(step, seen[step]) == ""
    words = rf"after step 5 the two ends of cut 0 .* on the {leg.value} leg"
    assert re.match(words, disagreement(5, seen[5]))


def test_ends_that_differ_after_a_load_do_not_shake_hands(
    settings_with, saved_run, corpus, tmp_path
):
    settings = settings_with(pipeline__stages=3)
    middle = saved_run(settings)[1][3]
    workers = [Worker(settings, stage, corpus, tmp_path / "other", middle) for stage in range(3)]
    lower, upper = workers[1].contract(1), workers[2].contract(1)
    assert refusal(lower, upper) == refusal(upper, lower) == ""
    assert lower["forward_codec"] == "delta"
    for leg in Leg:
        codec = workers[2].below.codecs[leg]
        kept, codec.last = codec.last, codec.last + 1
        upper = workers[2].contract(1)
        codec.last = kept
        for objection in (refusal(lower, upper), refusal(upper, lower)):
            assert f"{leg.value}_codec_memory: this stage has" in objection


@pytest.fixture
def saved(settings_with, saved_run):
    return saved_run(settings_with(train__steps=2, train__checkpoint_every=1))[1][1]


def test_a_cut_elsewhere_has_no_memory_and_says_so(saved, settings_with, resumed):
    elsewhere = settings_with(pipeline__split=[1, 3])
    words = r"the memory of delta on .* before block 2, but .*split = \[2, 2\]"
    with pytest.raises(CheckpointError, match=words):
        check_memory(elsewhere, Checkpoint.open(saved))
    forgetful = settings_with(pipeline__split=[1, 3], codec__forward="fp32", codec__backward="fp32")
    notes = check_memory(forgetful, Checkpoint.open(saved))
    assert [note.partition(":")[0] for note in notes] == [
        f"the memory of delta on the {leg.value} leg of the cut before block 2 is dropped"
        for leg in Leg
    ]
    resumed(forgetful, saved)


def test_a_finer_split_loses_nothing_and_begins_anew_at_the_new_cut(saved, settings_with, resumed):
    split = {"pipeline__stages": 3, "pipeline__split": [1, 1, 2]}
    finer = settings_with(**split)
    notes = check_memory(finer, Checkpoint.open(saved))
    assert [note.partition(" and ")[0] for note in notes] == [
        f"delta is new on the {leg.value} leg of the cut before block 1" for leg in Leg
    ]

    def look(worker):
        for end in worker.state.ends:
            for codec in end.codecs.values():
                assert (codec.last is None) == (end.cut == 0)
        stop_in_the_first_step(worker)

    resumed(finer, saved, look)
    partly = settings_with(**split, codec__cuts=["0: forward=fp32 backward=fp32"])
    assert check_memory(partly, Checkpoint.open(saved)) == []


def test_memory_of_another_shape_is_refused(saved, settings_with, resumed):
    with pytest.raises(CheckpointError, match=r"does not fit this run: last has shape \(2, 16, 32"):
        resumed(settings_with(pipeline__microbatches=2), saved)


@pytest.mark.parametrize("stages", [1, 2])
def test_fewer_stages_do_not_drop_a_memory_in_silence(stages, settings_with, saved_run):
    """The cut in the middle stays, with its memory; those on either side would lose theirs."""
    codecs = {"codec__forward": "int8+ef21", "codec__backward": "fp32"}
    before = settings_with(pipeline__stages=4, train__steps=1, optim__warmup=1, **codecs)
    folder = saved_run(before)[1][1]
    fewer = settings_with(pipeline__stages=stages, **codecs)
    with pytest.raises(CheckpointError, match=r"ef21 on .* leg .* before block 1, but this"):
        check_memory(fewer, Checkpoint.open(folder))
