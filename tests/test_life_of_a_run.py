"""What may happen to a run under way: readers that stop, suspended processes, stages that stall."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import thinwire as thinwire_package
from programs import gone, long_run
from thinwire.engine.checkpoint import Checkpoint, checkpoints_folder, list_checkpoints, step_of
from waiting import PROCESS_PATIENCE

fcntl = pytest.importorskip("fcntl")
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="looks at processes through /proc"
)


@pytest.fixture
def unread():
    """The writing end of a full pipe: someone holds the other end and does not read."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writing, False)
    try:
        while os.write(writing, b"." * 512):
            pass
    except BlockingIOError:
        os.set_blocking(writing, True)
    yield writing
    os.close(writing)
    os.close(reading)


@pytest.mark.slow
def test_a_reader_that_stops_reading_stops_nothing(thinwire, config, unread, tmp_path):
    """As Ctrl-S, `| less` or a stalled connection do: checkpoints go on, and Ctrl-C ends it."""
    path = config(train__steps=100_000, train__eval_every=0, train__checkpoint_every=2)
    run = thinwire("train", path, into=unread)
    folder = tmp_path / "test"
    run.wait_until(lambda: [p for p in list_checkpoints(folder) if step_of(p) >= 8])
    stages = run.stages()
    run.stop()
    assert gone(stages)
    assert not list(checkpoints_folder(folder).glob(".partial*"))
    Checkpoint.open(folder).verify()
    assert (folder / "summary.json").is_file()


@pytest.mark.parametrize("name", [pytest.param("SIGINT", marks=pytest.mark.slow), "SIGTERM"])
def test_a_request_to_stop_cuts_a_validation_short(name, thinwire, config, tmp_path):
    """Machines that are taken away give half a minute: a validation of many is left at once."""
    slow = {"link__mbps_up": 0.01, "link__mbps_down": 0.0}  # two seconds for each batch
    path = config(train__eval_batches=0, train__batch=4, pipeline__microbatches=4, **slow)
    run = thinwire("train", path)
    folder = tmp_path / "test"
    run.wait_until(lambda: (folder / "metrics.jsonl").exists())
    run.stop(getattr(signal, name))
    assert "Traceback" not in run.text()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["interrupted"] and summary["steps"] == 0 and not summary["valid_losses"]


def test_a_stopped_stage_does_not_outlive_a_killed_coordinator(thinwire, config):
    run = thinwire("train", long_run(config), imports=True)
    run.wait_for(r"\[train\] step +\d")
    stages = run.stages()
    os.kill(stages[1], signal.SIGSTOP)
    run.process.kill()
    run.wait()
    assert gone(stages)


@pytest.mark.parametrize("command", ["peer", "processes thinwire.run.peer"])
@pytest.mark.parametrize("slow", ["numpy", "torch"])
def test_a_stage_is_tied_to_its_coordinator_before_it_imports_what_is_slow(slow, command, tmp_path):
    """Else one that is stopped in its first seconds would outlive a killed coordinator."""
    told = "import ctypes; tied = ctypes.c_int(); PR_GET_PDEATHSIG = 2\n"
    told += "ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(tied))\n"
    (tmp_path / f"{slow}.py").write_text(f"{told}import os; os._exit(tied.value)\n")
    path = os.pathsep.join([str(tmp_path), str(Path(thinwire_package.__file__).parents[1])])
    ours, theirs = socket.socketpair()
    stage = subprocess.run(
        [sys.executable, "-P", "-m", *f"thinwire.run.{command}".split()],
        env={**os.environ, "PYTHONPATH": path},
        stdin=theirs,
        timeout=PROCESS_PATIENCE,
    )
    ours.close()
    theirs.close()
    assert stage.returncode == signal.SIGKILL


@pytest.mark.slow
def test_a_suspended_coordinator_goes_on(thinwire, config):
    """As Ctrl-Z and fg do, for longer than any link waits for an answer."""
    run = thinwire("train", long_run(config), imports=True)
    run.wait_for(r"\[train\] step +\d")
    run.process.send_signal(signal.SIGSTOP)
    time.sleep(13)
    run.process.send_signal(signal.SIGCONT)
    before = len(run.text())
    run.wait_until(lambda: "[train] step" in run.text()[before:])
    run.stop()


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_stage_that_is_frozen_before_it_dials_ends_the_start(stages, thinwire, config):
    """While it imports, that is; two stages have one process that imports for both."""
    settings = ["--set", "run.patience=6", "--set", f"pipeline.stages={stages}"]
    run = thinwire("train", long_run(config), *settings, imports=True)
    importing = run.stages if stages == 1 else lambda: run.forking("thinwire.run.peer")
    run.wait_until(importing)
    frozen = importing()
    os.kill(frozen[0], signal.SIGSTOP)
    assert run.wait() == 6, run.text()
    assert "[note]  no progress for" in run.text()
    assert "error: stage 0 is stuck: no progress for" in run.text()
    assert "stage 0 has said nothing yet" in run.text()
    assert gone(frozen)


def test_a_request_to_end_is_heeded_before_the_stages_are_ready(thinwire, config, tmp_path):
    run = thinwire("train", long_run(config), imports=True)
    run.wait_until(run.forking)
    importing = run.forking()
    run.stop(signal.SIGTERM)
    assert gone(importing)
    assert not (tmp_path / "test" / "scratch").exists()


@pytest.mark.slow
def test_a_stage_that_freezes_alone_is_named(thinwire, config):
    """There is no neighbour that could miss it."""
    settings = ["--set", "run.patience=15", "--set", "pipeline.stages=1"]
    run = thinwire("train", long_run(config), *settings, imports=True)
    run.wait_for(r"\[train\] step +\d")
    stages = run.stages()
    os.kill(stages[0], signal.SIGSTOP)
    assert run.wait() == 6, run.text()
    assert re.search(r"error: stage 0 is stuck: no progress for .* silent for", run.text())
    assert "run.patience" in run.text()
    assert gone(stages)
