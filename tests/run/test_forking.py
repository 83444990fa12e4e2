"""Stages that are forked from one process: real processes of a module that imports in no time."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import pytest

from programs import gone
from thinwire.errors import StageError
from thinwire.run import spawn
from thinwire.run.order import Order
from thinwire.run.spawn import StageProcess, end, forks, spawn_all
from thinwire.wire import Identity, Routes
from waiting import PATIENCE

pytestmark = pytest.mark.skipif(not forks("cpu"), reason="stages are forked on Linux alone")

STAGE = """
import json, os, sys, threading
print("imported by", os.getpid())

def main():
    order = json.loads(sys.stdin.readline())
    print("stage", order["stage"], "is", os.getpid(), flush=True)
    assert threading.active_count() == 1
    open_files = sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1]
    print("files", open_files, flush=True)
    sys.stdin.read()
    os._exit(10 + order["stage"])
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Starts stages of a module with this text; what is left of them ends with the test."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    nowhere, started = Routes("", "127.0.0.1:1"), []

    def start(text: str = STAGE, count: int = 3, fork: bool = True) -> Sequence[StageProcess]:
        (tmp_path / "stage_of_a_test.py").write_text(text)
        orders = [Order(stage, nowhere, Identity.create(f"{stage}")) for stage in range(count)]
        logs = [tmp_path / f"{stage}.log" for stage in range(count)]
        processes = spawn_all(orders, logs, "stage_of_a_test", fork)
        started.extend(processes)
        return processes

    yield start
    for process in started:
        end(process)


def said(log: Path, words: str) -> str:
    """What a log says, once it says these words."""
    deadline = time.monotonic() + PATIENCE
    while words not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)
    return log.read_text()


def process_of(log: Path) -> int:
    return int(said(log, " is ").split(" is ")[1].split()[0])


def test_each_stage_has_its_own_order_log_and_end(start: Callable, tmp_path: Path) -> None:
    stages = start()
    pids = [process_of(tmp_path / f"{number}.log") for number in range(3)]
    assert len(set(pids)) == 3 and all(stage.poll() is None for stage in stages)
    for number in range(3):
        text = said(tmp_path / f"{number}.log", "files")
        assert f"stage {number} is" in text
        assert ("imported" in text) == (number == 0)  # once, for all
        assert "files [0, 1, 2]" in text  # not those of others
    for number in (1, 0):
        stages[number].stdin.close()
        assert stages[number].wait(PATIENCE) == stages[number].poll() == 10 + number
    assert stages[2].poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        stages[2].wait(0.01)
    stages[2].kill()
    assert stages[2].wait(PATIENCE) == -signal.SIGKILL
    stages[2].kill()  # once more does no harm
    assert gone(pids)


def test_stages_end_with_the_process_that_forked_them(start: Callable, tmp_path: Path) -> None:
    stages = start()
    pids = [process_of(tmp_path / f"{number}.log") for number in range(3)]
    os.kill(pids[0], signal.SIGSTOP)  # one that is stopped, too
    parent = int(Path(f"/proc/{pids[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(parent, signal.SIGKILL)
    assert [stage.wait(PATIENCE) for stage in stages] == [-signal.SIGKILL] * 3
    assert gone(pids)


def test_stages_that_do_not_run_yet_can_be_ended(start: Callable) -> None:
    stages = start("import time; time.sleep(600)")
    assert [stage.poll() for stage in stages] == [None] * 3
    stages[1].kill()
    assert [stage.wait(PATIENCE) for stage in stages] == [-signal.SIGKILL] * 3


def test_why_nothing_could_be_imported_is_in_every_log(start: Callable, tmp_path: Path) -> None:
    stages = start("import a_library_that_is_broken")
    assert [stage.wait(PATIENCE) for stage in stages] == [1, 1, 1]
    for number in range(3):
        assert "No module named 'a_library_that_is_broken'" in (
            (tmp_path / f"{number}.log").read_text()
        )


def test_an_error_of_a_stage_is_in_its_log(start: Callable, tmp_path: Path) -> None:
    stages = start("def main():\n    raise RuntimeError('no luck')")
    assert [stage.wait(PATIENCE) for stage in stages] == [1, 1, 1]
    assert "RuntimeError: no luck" in (tmp_path / "2.log").read_text()


@pytest.mark.parametrize("fork", [True, False])
def test_where_one_log_cannot_be_written_no_stage_is_left(
    fork: bool, start: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "1.log").mkdir()
    run, processes = spawn.run, []

    def run_and_keep(output: BinaryIO, module: str) -> subprocess.Popen[bytes]:
        processes.append(run(output, module))
        return processes[-1]

    monkeypatch.setattr(spawn, "run", run_and_keep)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(StageError, match=r"stage 1 cannot be started with its log in .*1\.log"):
            start(fork=fork)
    assert len(os.listdir("/proc/self/fd")) < before + 10  # of tests before, some may close now
    assert [process.poll() for process in processes] == ([] if fork else [-signal.SIGKILL] * 10)


def test_stages_for_a_gpu_are_not_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "GPU_DRIVERS", (str(tmp_path / "driver"),))
    assert [forks(device) for device in ("cpu", "auto", "cuda", "mps")] == [
        True,
        True,
        False,
        False,
    ]
    (tmp_path / "driver").touch()
    assert [forks(device) for device in ("cpu", "auto", "cuda")] == [True, False, False]
    monkeypatch.setattr(spawn.sys, "platform", "darwin")
    assert not forks("cpu")


def test_without_a_fork_each_stage_imports_for_itself(start: Callable, tmp_path: Path) -> None:
    stages = start(STAGE + "\nif __name__ == '__main__':\n    main()", count=2, fork=False)
    for number in range(2):
        assert "imported" in said(tmp_path / f"{number}.log", "files")
        stages[number].stdin.close()
        assert stages[number].wait(PATIENCE) == 10 + number
