"""Where a validation stands in a run: after the checkpoint, and beside the steps' times."""

import itertools
import time

import pytest

from thinwire.engine.reports import Evaluation, ShardWritten, Step
from thinwire.engine.worker import Worker
from thinwire.wire import FrameKind, Link
from thinwire.wire import link as link_module

SLOW = {"link__emulate": True, "link__mbps_up": 4.0, "link__mbps_down": 0.0,
        "link__latency_ms": 0.0, "train__steps": 3, "train__eval_every": 1,
        "train__eval_batches": 6}  # fmt: skip


@pytest.fixture
def seen(monkeypatch):
    """Every span that any link hands out, with its link."""
    spans: list[tuple[Link, tuple]] = []
    take = Link.take_spans

    def observed(link):
        taken = take(link)
        spans.extend((link, span) for span in taken)
        return taken

    monkeypatch.setattr(Link, "take_spans", observed)
    return spans


def test_a_slow_link_carries_the_last_validation_to_its_end(
    make_settings, run_in_threads, monkeypatch
):
    """However short the patience of an ordinary close: the end of a run has no limit."""
    monkeypatch.setattr(Link.close, "__defaults__", (0.0,))
    outcome = run_in_threads(make_settings(pipeline__stages=3, **SLOW))
    assert len(outcome.valid_losses()) == 4
    assert {step: len(parts) for step, parts in outcome.shards().items()} == {3: 3}


def test_what_was_trained_is_saved_before_a_validation_that_is_not_billed_as_training(
    make_settings, run_in_threads
):
    """What ends one was a verdict as that of a step, and added to the bytes per token of a cut."""
    outcome = run_in_threads(make_settings(train__checkpoint_every=2, train__eval_every=1))
    reports = [(type(r), r.step) for r in outcome.reports[-1] if not isinstance(r, Step)]
    validated = [(Evaluation, step) for step in range(5)]
    assert reports == [*validated[:2], (ShardWritten, 2), *validated[2:4], (ShardWritten, 4),
                       validated[4]]  # fmt: skip
    sent = outcome.steps(0)[-1].meters["cut-0"]["sent"]
    assert sent["VERDICT"]["frames"] == 4
    assert sent["VALIDATED"]["frames"] == 4, "one before each step so far"


def test_steps_do_not_pay_for_validations_and_have_their_own_spans(
    make_settings, run_in_threads, seen
):
    outcome = run_in_threads(make_settings(**SLOW))
    start = {r.step: r.start for r in outcome.steps(0)}
    validations = [(step, end) for _, (kind, step, _, _, end) in seen if kind == "EVALUATE"]
    before = [(step, end) for step, end in validations if step in start]
    assert {step for step, _ in before} == {0, 1, 2}
    assert all(end <= start[step] for step, end in before)
    times = {(span[3], span[4]): span[:2] for _, span in seen}
    for stage in (0, 1):
        for report in outcome.steps(stage):
            sent = [times[start, end] for lane, _, start, end in report.spans if lane == "send"]
            assert {step for _, step in sent} == {report.step}
            assert "EVALUATE" not in {kind for kind, _ in sent}


def test_a_step_s_last_frames_are_in_its_own_row(make_settings, run_in_threads, monkeypatch):
    """Verdicts were billed to the next step, and their spans lost, when packing took a moment."""
    encode = link_module.encode

    def slow(frame):
        if frame.kind is FrameKind.VERDICT:
            time.sleep(0.05)
        return encode(frame)

    monkeypatch.setattr(link_module, "encode", slow)
    outcome = run_in_threads(make_settings(pipeline__stages=3, train__eval_every=100))
    for stage in (0, 1):
        steps = outcome.steps(stage)
        for report in steps:
            assert [s[:2] for s in report.spans if s[1] == "verdict"] == [("send", "verdict")]
        sent = [r.meters[f"cut-{stage}"]["sent"]["VERDICT"]["frames"] for r in steps]
        assert [after - before for before, after in itertools.pairwise(sent)] == [1, 1, 1]


@pytest.mark.parametrize("told", ["all", "the first", "the last"])
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize(("at", "saved"), [(0, []), (1, [1]), (2, [2])])
def test_a_request_to_stop_ends_a_validation(
    at, saved, stages, told, make_settings, run_in_threads
):
    """The step before is saved, if it was not; no other step follows, and no validation."""
    workers: list[Worker] = []
    computed: list[tuple[int, int]] = []

    def prepare(worker):
        workers.append(worker)
        validation, step = worker.feed.validation, worker.state.step

        def watched(number):
            nonlocal step
            computed.append((worker.index, number))
            if worker.index == 0 and number == 3 and step == at:
                first, last = workers[0], workers[-1]
                for other in {"all": workers, "the first": [first], "the last": [last]}[told]:
                    other.stop_requested.set()
                if told == "the last":  # the first hears of it a little later
                    first.stop_requested.set()
            step += number == worker.feed.validation_count - 1
            return validation(number)

        worker.feed.validation = watched

    settings = make_settings(
        pipeline__stages=stages, train__steps=9, train__eval_every=1, train__eval_batches=0,
        train__checkpoint_every=2, train__batch=4,
    )  # fmt: skip
    outcome = run_in_threads(settings, prepare_worker=prepare)
    batches = workers[0].feed.validation_count
    assert batches > 20
    assert len(outcome.losses()) == at
    assert len(outcome.valid_losses()) == at, "one that was cut short is no result"
    assert sorted(outcome.shards()) == saved
    assert all(len(parts) == stages for parts in outcome.shards().values())
    assert len(computed) <= stages * (at * batches + 20)
