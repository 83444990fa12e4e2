"""The coordinator's story of a run, mostly from what real stages reported, told again."""

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch

from thinwire.engine.build import is_emulated
from thinwire.engine.checkpoint import (
    Checkpoint,
    checkpoints_folder,
    list_checkpoints,
    partial_folder,
)
from thinwire.engine.reports import Evaluation, Report, ShardFailed, ShardWritten, Step
from thinwire.engine.worker import PATIENCE
from thinwire.errors import CheckpointError, ConfigError, StageError
from thinwire.report import PlainDisplay
from thinwire.run.checkpoints import open_newest, read_proof
from thinwire.run.coordinator import Coordinator
from thinwire.run.events import Event, Said, StopAsked
from thinwire.run.peers import lead
from thinwire.run.protocol import Finished, Linked, Ready
from thinwire.run.record import RunRecord
from thinwire.run.signals import Interrupted
from thinwire.train import train

BF16_CHECK = "torch.ops.mkldnn._is_mkldnn_bf16_supported"


def kept(run):
    """Everything in a run's folder of checkpoints but the record of which are good."""
    names = {path.name for path in checkpoints_folder(run).iterdir()}
    return sorted(names - {"proven.json"})


def silent():
    return PlainDisplay(StringIO())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without cuda")
def test_a_device_that_is_not_here_is_refused_first(make_settings, tmp_path, monkeypatch):
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="torch finds none on this machine"):
        train(make_settings(run__device="cuda"), silent())
    assert not (tmp_path / "cache").exists(), "nothing was tokenised"
    assert not (tmp_path / "test").exists()


@pytest.mark.parametrize("supported", [True, False])
def test_a_cpu_that_emulates_bf16_is_named(supported, make_settings, tmp_path, monkeypatch):
    monkeypatch.setattr(BF16_CHECK, lambda: supported, raising=False)
    cpu = torch.device("cpu")
    assert is_emulated("bf16", cpu) is not supported
    assert not is_emulated("fp32", cpu) and not is_emulated("bf16", torch.device("cuda"))
    stream = StringIO()
    settings = make_settings(run__precision="bf16", run__device="cpu")
    with pytest.raises(CheckpointError):  # which is looked for after that
        train(settings, PlainDisplay(stream), resume=tmp_path / "none")
    assert ("emulates it" in stream.getvalue()) is not supported


class Replay:
    """Peers that are done already: they say again what real stages reported."""

    def __init__(self, outcome):
        workers, stages = outcome.workers, range(len(outcome.workers))
        ready = [Ready("", one.stage.describe(), str(one.device)) for one in workers]
        linked = [Linked() for _ in stages]
        self.first = [Said(s, said[s]) for said in (ready, linked) for s in stages]
        self.script: list[tuple[int, Report]] = [
            (stage, report)
            for step in range(-1, 9)
            for stage, reports in enumerate(outcome.reports)
            for report in reports
            if report.step - (not isinstance(report, Step)) == step
        ]
        self.goodbyes = [Said(s, Finished(outcome.steps(s)[-1].meters)) for s in stages]
        self.before_each: Callable[[int], None] = lambda position: None
        self.notes: list[Event] = []
        self.asked = 0
        self._events: Iterator[Event] | None = None

    def start(self, *_):
        """They have been, did, and have heard it all before; there are no processes."""

    on_begin = tell = start

    def next_event(self, coordinator):
        self._events = self._events or self._all_events()
        return next(self._events)

    def _all_events(self):
        yield from self.first
        for position, (stage, report) in enumerate(self.script):
            self.before_each(position)
            while self.notes:
                yield self.notes.pop()
            yield Said(stage, report)
        yield from self.goodbyes

    def ask_to_stop(self):
        self.asked += 1
        self.notes.append(StopAsked())


class Run:
    """A run about to be led, its record, and what is shown of it."""

    def __init__(self, settings, folder, corpus, peers):
        self.stream = StringIO()
        self.folder, self.peers = folder, peers
        self.coordinator = Coordinator(settings.pipeline.stages, 100.0)
        folder.mkdir(exist_ok=True)
        self.record = RunRecord(settings, folder, corpus, None, PlainDisplay(self.stream))

    def follow(self):
        lead(self.coordinator, self.peers, self.record)

    def finish(self, started=0.0, draws=False):
        if not draws:  # which takes a second
            self.record._in_haste = True
        sent, is_stopped = 1000 * len(self.peers.script), self.coordinator.stop_asked
        tell = lambda: self.stream.write("all is well\n")  # noqa: E731
        return self.record.finish(sent, is_stopped, started, tell=tell)

    def stopping(self):
        return self.record.stopping(self.peers.ask_to_stop)


@pytest.fixture
def replay(make_settings, run_in_threads, corpus, tmp_path):
    """A run about to follow what real stages reported, `planned` to have so many steps."""

    def make(planned=4, **changes):
        outcome = run_in_threads(make_settings(train__checkpoint_every=2, **changes))
        settings = make_settings(train__steps=planned, train__checkpoint_every=2, **changes)
        run = Run(settings, tmp_path / "run", corpus, Replay(outcome))
        return run, run.peers, run.stream

    return make


def test_plots_and_logs_that_fail_cost_no_run_and_a_summary_is_json(replay, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run, _, stream = replay(run__wandb="wires")
    run.follow()
    (run.folder / "plots").write_text("a file where the folder should be")
    run.record.ledger._validations[0] = math.inf

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    assert run.finish(math.nan, draws=True)["steps"] == 4
    before, said, _ = stream.getvalue().partition("plots could not be drawn")
    assert said and "all is well" in before
    assert 'training continues: run.wandb = "wires" needs wandb, which is not' in before
    written = json.loads((run.folder / "summary.json").read_text(), parse_constant=refuse)
    assert written["valid_losses"][0] == [0, None]
    assert (written["steps"], written["total_seconds"]) == (4, None)


@pytest.mark.parametrize("moment", ["before the plots", "while they are drawn"])
def test_who_asks_to_end_once_a_run_is_over_does_not_wait_for_plots(moment, replay, monkeypatch):
    """The second Ctrl-C may come when the stages are done: results are kept, plots can wait."""
    run, _, stream = replay()

    def ask_again(*values):
        os.kill(os.getpid(), signal.SIGINT)

    with run.stopping():
        run.follow()
        if moment == "before the plots":
            ask_again()
        monkeypatch.setattr("thinwire.report.plots.loss_figure", ask_again)
        assert run.finish(draws=True)["steps"] == 4
    assert "the plots were skipped" in stream.getvalue()
    assert json.loads((run.folder / "summary.json").read_text())["steps"] == 4
    assert not list((run.folder / "plots").glob("*.png"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_metrics_on_a_full_disk_cost_no_run(replay):
    run, peers, stream = replay()

    def fill_the_disk(position):
        metrics = run.record._metrics
        if position == 0:
            disks.append(metrics._file)
            metrics._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        elif position == len(peers.script) // 2:
            metrics._file = disks[0]

    disks = []
    peers.before_each = fill_the_disk
    run.follow()
    assert run.finish()["steps"] == 4
    text = " ".join(stream.getvalue().split())
    assert text.count("metrics could not be written, training continues") == 1
    assert (run.folder / "metrics.jsonl").stat().st_size > 0
    assert [p.name[-1] for p in list_checkpoints(run.folder)] == ["2", "4"]


def fail_parts(peers, stage, step):
    """Have a stage report that it could not write its part of a checkpoint."""
    peers.script = [
        (s, ShardFailed(step, "disk full"))
        if (s, report.step) == (stage, step) and isinstance(report, ShardWritten)
        else (s, report)
        for s, report in peers.script
    ]


def test_a_failed_part_leaves_nothing_and_costs_no_other_checkpoint(replay):
    """Stage 0 fails; stage 1 writes all the same, and the next checkpoint is on its way."""
    run, peers, stream = replay()
    fail_parts(peers, stage=0, step=2)
    states: list[tuple[bool, bool]] = []

    def look(position):
        states.append(tuple(partial_folder(run.folder, step).is_dir() for step in (2, 4)))

    peers.before_each = look
    run.follow()
    assert states[0] == (True, True) and (False, True) in states
    assert [p.name[-1] for p in list_checkpoints(run.folder)] == ["4"]
    Checkpoint.open(run.folder).verify()
    assert stream.getvalue().count("checkpoint of step 2 not written") == 1


@pytest.mark.parametrize("planned", [4, 8])
def test_a_checkpoint_lost_at_the_end_is_an_error_after_the_summary(planned, replay):
    """But where a peer leaves, the run of the others goes on."""
    run, peers, _ = replay(planned)
    fail_parts(peers, stage=1, step=4)
    run.follow()
    if planned > 4:
        run.record.pause()
    else:
        with pytest.raises(CheckpointError, match="disk full"):
            run.finish()
        assert (run.folder / "summary.json").is_file()
    assert kept(run.folder) == ["step-00000002"]


def spoil(peers, kind, step, **values):
    """Have the stages report these values from `step` on; the loss where there is one."""

    def spoiled(report):
        if not isinstance(report, kind) or report.step < step:
            return report
        has_loss = getattr(report, "loss", None) is not None
        return replace(report, **{k: v for k, v in values.items() if k != "loss" or has_loss})

    peers.script = [(stage, spoiled(report)) for stage, report in peers.script]


@pytest.mark.parametrize(("kind", "step", "values", "good"), [
    # a finite loss of a refused step, or of a validation, shows nothing about the weights
    (Step, 3, {"committed": False}, "step-00000002"),
    (Step, 2, {"committed": False}, None),
    (Step, 2, {"committed": False, "loss": math.nan}, None),
    (Evaluation, 4, {"loss": math.nan}, "step-00000002"),
])  # fmt: skip
def test_a_run_that_ends_badly_points_to_the_last_good_weights(kind, step, values, good, replay):
    run, peers, stream = replay()
    spoil(peers, kind, step, **values)
    run.follow()
    with pytest.raises(StageError, match="not finite") as caught:
        run.finish()
    assert "all is well" not in stream.getvalue()
    none = "no good checkpoint exists. Start a new run"
    assert (f"{good}. Resume from there with" if good else none) in str(caught.value)
    assert json.loads((run.folder / "summary.json").read_text())["interrupted"] is False


def test_the_stage_where_non_finite_values_first_appeared_is_named(replay):
    run, peers, _ = replay()
    spoil(peers, Step, 2, committed=False, not_finite="backward")
    run.follow()
    origin = "non-finite values first appeared in stage 1, in its own backward pass"
    with pytest.raises(StageError, match=f": {origin}; no good checkpoint exists"):
        run.finish()
    run.record.ledger.refused = PATIENCE
    with pytest.raises(StageError, match=f"in {PATIENCE} steps in a row, up to step 4: {origin}"):
        run.finish()
    first, second = (n for n in run.stream.getvalue().splitlines() if "gradients are not" in n)
    assert origin in first and origin not in second


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_asks_once_and_costs_no_results(name, replay, request):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    request.addfinalizer(lambda: signal.signal(number, before))
    signal.signal(number, signal.default_int_handler)  # under nohup it would be ignored
    run, peers, stream = replay(planned=9)
    peers.before_each = lambda position: os.kill(os.getpid(), number) if position == 3 else None
    with run.stopping():
        run.follow()
        os.kill(os.getpid(), number)  # while results are written it must not cost them
        os.kill(os.getpid(), number)
        summary = run.finish()
    assert peers.asked == 1
    assert (summary["interrupted"], summary["steps"], summary["steps_planned"]) == (True, 4, 9)
    assert json.loads((run.folder / "summary.json").read_text())["interrupted"] is True
    assert "stopping after this step" in stream.getvalue()


def test_a_second_signal_leaves_at_once_and_nohup_is_respected(replay, request):
    run, peers, _ = replay()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, before))
    with run.stopping():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    peers.before_each = lambda position: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught, run.stopping():
        run.follow()
    assert isinstance(caught.value, Interrupted)
    assert not isinstance(caught.value, Exception), "no broad handler may swallow it"


def test_a_run_goes_on_in_its_own_folder(make_settings, tmp_path):
    """Real processes: a launch that failed costs nothing; a resume leaves one course to follow."""
    folder = tmp_path / "test"
    with pytest.raises(StageError, match=r"192\.0\.2\.1"):
        train(make_settings(link__listen="192.0.2.1"), silent())
    assert not (folder / "metrics.jsonl").exists()
    train(make_settings(pipeline__stages=1, train__checkpoint_every=1, train__steps=3), silent())
    middle = checkpoints_folder(folder) / "step-00000001"
    stream = StringIO()
    settings = make_settings(pipeline__stages=1, train__steps=2, train__keep=1)
    summary = train(settings, PlainDisplay(stream), resume=middle)
    assert (summary["first_step"], summary["steps"]) == (1, 2)
    assert [step for step, _ in summary["valid_losses"]] == [0, 1, 2], "of the whole run"
    assert Path(summary["paths"]["logs"]).is_dir()
    # One beyond train.keep = 1: no step was trained from the newer one yet.
    abandoned = ["abandoned-step-00000002", "abandoned-step-00000003"]
    assert kept(folder) == [*abandoned, "step-00000001", "step-00000002"]
    assert "abandoned-step-00000003" in stream.getvalue()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [r["step"] for r in map(json.loads, lines) if r["kind"] == "step"] == [1, 2]


@pytest.mark.parametrize("on_explosion", ["warn", "stop"])
def test_a_finite_explosion_costs_no_good_checkpoint_and_is_an_error(replay, on_explosion):
    """The loss of all steps and validations after the second is 99, with the least kept."""
    run, peers, stream = replay(train__keep=1, run__on_explosion=on_explosion)
    for kind, first in ((Step, 2), (Evaluation, 3)):
        spoil(peers, kind, first, loss=99.0)
    run.follow()
    with pytest.raises(StageError, match="the loss has exploded by step 4") as caught:
        run.finish()
    best = checkpoints_folder(run.folder) / "step-00000002"
    assert f"best validation are in {best}. Resume from there" in str(caught.value)
    assert "the loss has exploded by step 4: that of validation is 99" in stream.getvalue()
    stops = on_explosion == "stop"
    assert run.coordinator.stop_asked == stops
    assert ('run.on_explosion = "stop": the run stops' in stream.getvalue()) == stops
    assert kept(run.folder) == ["step-00000002", "step-00000004"]
    proof = read_proof(run.folder)
    assert (proof.best, proof.step, proof.ended) == (2, 2, 0)
    assert open_newest(run.folder)[0].folder == best
