"""Processes that die or freeze while they train: another goes on, and no bit is different."""

import io
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
from test_outages import detour  # noqa: F401

from proxy import Proxy
from settings_values import narrow
from thinwire.engine.checkpoint import checkpoints_folder, partial_folder, step_of
from thinwire.report import PlainDisplay
from thinwire.train import train

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="looks at processes through /proc"
)

BASE = {
    "pipeline__stages": 4, "train__checkpoint_every": 5, "train__eval_every": 8,
    "optim__schedule": "constant",  # a step does not depend on how many there are to be
}  # fmt: skip
# Steps without end, however slow this machine is to disturb them.
LONG = {
    "train__steps": 100_000, "link__emulate": True, "link__latency_ms": 20.0, "link__jitter_ms": 5.0
}  # fmt: skip
MEMORY = {"codec__forward": "int8+aqsgd", "codec__backward": "int4+ef", "train__batch": 160}


def processes_of(folder):
    """The process of each stage of a run, by where it writes its log."""
    found: dict[int, tuple[int, int]] = {}  # when it began, and its number
    for place in Path("/proc").glob("[0-9]*"):
        try:
            log = os.readlink(place / "fd" / "1")
            is_stage = os.readlink(place / "fd" / "0").startswith("socket:")
            is_forker = b"thinwire.run.processes" in (place / "cmdline").read_bytes()
            began = int((place / "stat").read_text().rsplit(")", 1)[1].split()[19])
        except OSError:
            continue
        name = re.fullmatch(r"stage-([\d-]+)\.log", Path(log).name)
        if name and is_stage and Path(log).is_relative_to(folder):
            for stage in name[1].split("-"):
                # The process that forks writes to the log of the first, and was there first. Which
                # number is higher does not say so: the system begins at low ones again.
                if int(stage) not in found or (is_forker and began > found[int(stage)][0]):
                    found[int(stage)] = began, int(place.name)
    return {stage: process for stage, (_, process) in found.items()}


class Disturbing(PlainDisplay):
    """Does something to the processes of stages after some steps, as these are shown; but not
    before those that were lost are back, for what is shown may lag behind what happens. Then it
    asks the run to stop; or with the last deed.
    """

    def __init__(self, folder, deeds, number, stops_with_the_last):
        super().__init__(io.StringIO())
        self.folder, self.deeds, self.number = folder, dict(deeds), number
        self._stops_early, self._has_stopped = stops_with_the_last, False
        self._lost = 0

    def step(self, record):
        super().step(record)
        if self.text().count("trained a step again") < self._lost:
            return
        if not self.deeds:
            self._stop()
        elif record.step >= min(self.deeds):
            stages = self.deeds.pop(min(self.deeds))
            self._lost += len(stages)
            if self._stops_early and not self.deeds:
                self._stop()
            found = processes_of(self.folder)
            for stage in stages:
                os.kill(found[stage], self.number)

    def _stop(self):
        if not self._has_stopped:  # asked twice, it would not end in good order
            os.kill(os.getpid(), signal.SIGINT)
        self._has_stopped = True

    def text(self):
        return " ".join(self._stream.getvalue().split())


@pytest.fixture
def undisturbed(make_settings, run_in_threads, tmp_path):
    """What the stages of an undisturbed run save after so many steps: weights and all else."""

    def run(steps, **changes):
        folder = tmp_path / "undisturbed"
        # A run that ends as planned does not move its basis for steps that do not come.
        changes = {"train__steps": steps + 1, **changes, "train__checkpoint_every": steps}
        run_in_threads(make_settings(**{**BASE, **changes}), folder=folder)
        return shards(partial_folder(folder, steps))

    return run


def shards(folder):
    found = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    assert found, folder
    return found


def steps_of(run):
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["step"] for row in rows if "grad_norm" in row]


@pytest.fixture
def disturbed(make_settings, undisturbed, tmp_path):
    """A run with processes to which something happens after these steps, and which is then asked to
    stop. It leaves what an undisturbed one of as many steps leaves. Its summary, and what it said.
    """

    def run(deeds, number=signal.SIGKILL, stops_with_the_last=False, **changes):
        folder = tmp_path / "test"
        display = Disturbing(folder, deeds, number, stops_with_the_last)
        summary = train(make_settings(**{**BASE, **LONG, **changes}), display)
        assert not display.deeds and summary["interrupted"], display.text()
        assert_undisturbed(folder, undisturbed(summary["steps"], **changes))
        return summary, display.text()

    return run


def assert_undisturbed(run, saved):
    """Its last checkpoint is this, each step was recorded once, and nothing is left over."""
    folder = checkpoints_folder(run)
    *_, newest = sorted(folder.glob("step-*"))
    assert shards(newest) == saved
    assert steps_of(run) == [*range(1, step_of(newest) + 1)]
    assert not list(folder.glob(".partial*")) and not (run / "scratch").exists()


MOVING = narrow("subspace", basis_update_every=2)
TABLES = narrow("projected", anchor="per-stage")
ROWS = narrow("subspace", anchor="embedding", row_tokens=20, row_steps=5)
KILLS = [
    pytest.param({1: [1, 2], 6: [0, 1, 2, 3]}, {}, id="neighbours before any checkpoint, then all"),
    pytest.param({5: [0], 7: [3]}, {}, id="the first, then the last", marks=pytest.mark.slow),
    pytest.param({3: [1], 6: [0]}, {**MOVING, **MEMORY, "pipeline__stages": 2},
                 id="codecs that remember, a basis that moves"),
    pytest.param({3: [1, 2], 7: [0]}, {"pipeline__delay": 1, **TABLES, **MEMORY},
                 id="delayed updates"),
    pytest.param({5: [1]}, {**ROWS, "codec__rows": "fp64", "pipeline__stages": 3},
                 id="rows of the embedding", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("deeds", "changes"), KILLS)
def test_a_run_whose_processes_are_killed_is_the_same_bit_for_bit(deeds, changes, disturbed):
    summary, said = disturbed(deeds, **changes)
    validated = [step for step, _ in summary["valid_losses"]]
    assert validated == [*range(0, 8 * len(validated), 8)] and validated[-1] + 8 >= summary["steps"]
    assert "died at step" in said, "one is named, where several die in one moment"
    for stage in {stage for stages in deeds.values() for stage in stages}:
        assert re.search(rf"stage {stage} is back after .* no other stage trained a step", said)


def test_stages_of_one_process_are_replaced_together(make_settings, detour, undisturbed, tmp_path):  # noqa: F811
    """Killed by the path that their bytes take, so that they cannot be done before. The run ends by
    itself.
    """
    killed, once = list[int](), threading.Lock()  # both ways pass here, on threads of their own

    def kill(data):
        if proxies[1].carried > 100_000 and once.acquire(blocking=False):
            killed.append(processes_of(tmp_path / "test")[3])
            os.kill(killed[0], signal.SIGKILL)
        return data

    proxies = detour(lambda cut, address: Proxy(address, tap=kill))
    log = io.StringIO()
    train(make_settings(**BASE, train__steps=24), PlainDisplay(log), peers=2)
    assert killed and log.getvalue().count("another process takes its place") == 1
    assert_undisturbed(tmp_path / "test", undisturbed(24, train__steps=24))


def test_a_stage_that_is_frozen_is_replaced(disturbed):
    _, said = disturbed({5: [1]}, signal.SIGSTOP, pipeline__stages=2)
    assert "stage 1 got stuck at step" in said
    assert re.search(r"stage 1 is back after \d+\.\d s", said)


@pytest.mark.parametrize("delay", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_run_that_stops_while_its_first_stage_dies_ends_where_all_agreed(delay, disturbed):
    """Whoever takes its place ends the run after the same step, if any stage has heard of that."""
    disturbed({4: [0]}, stops_with_the_last=True, pipeline__stages=2, pipeline__delay=delay)
