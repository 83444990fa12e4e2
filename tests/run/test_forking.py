"""Stages that are forked from one process: real processes of a module that imports in no time."""

import contextlib
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from programs import gone
from thinwire.errors import StageError
from thinwire.run import processes
from thinwire.run.processes import Forked, Forker, forks, start_process
from waiting import PATIENCE, wait_until

pytestmark = pytest.mark.skipif(not forks("cpu"), reason="stages are forked on Linux alone")

STAGE = """
import os, socket, threading
print("imported by", os.getpid())

def main():
    end = socket.socket(fileno=os.dup(0))
    stage = int(end.recv(1))
    os.write(1, f"stage {stage} is {os.getpid()}\\n".encode())  # at once, or not at all
    assert threading.active_count() == 1
    open_files = sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1]
    print("files", open_files, flush=True)
    assert end.recv(1) == b""
    os._exit(10 + stage)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts stages of a module with this text; what is left of them ends with the test."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    started, forkers = [], []

    def start(text=STAGE, count=3):
        (tmp_path / "stage_of_a_test.py").write_text(text)
        forkers.append(Forker("stage_of_a_test"))
        return [start.one(tmp_path / f"{stage}.log", stage) for stage in range(count)]

    def start_one(log, number):
        process, ours = start_process(log, forkers[-1])
        started.append((process, ours))
        with contextlib.suppress(BrokenPipeError):
            ours.sendall(str(number).encode())
        return SimpleNamespace(process=process, ours=ours, wait=process.wait, kill=process.kill)

    start.one = start_one
    yield start
    for process, ours in started:
        process.kill()
        process.wait()
        ours.close()
    for forker in forkers:
        forker.close()


def said(log, words):
    """What a log says, once it says these words."""
    wait_until(lambda: words in log.read_text())
    return log.read_text()


def process_of(log):
    return int(said(log, " is ").split(" is ")[1].split()[0])


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_each_stage_has_its_own_order_log_and_end(start, tmp_path):
    stages = start()
    pids = [process_of(tmp_path / f"{number}.log") for number in range(3)]
    assert len(set(pids)) == 3 and all(stage.process.poll() is None for stage in stages)
    for number in range(3):
        text = said(tmp_path / f"{number}.log", "]")
        assert f"stage {number} is" in text
        assert ("imported" in text) == (number == 0)  # once, for all
        assert "files [0, 1, 2, 3]" in text  # not those of others
    for number in (1, 0):
        stages[number].ours.close()
        assert stages[number].wait(PATIENCE) == stages[number].process.poll() == 10 + number
    assert stages[2].process.poll() is None
    with pytest.raises(TimeoutError):
        stages[2].wait(0.01)
    stages[2].kill()
    assert stages[2].wait(PATIENCE) == -signal.SIGKILL
    stages[2].kill()  # once more does no harm
    assert gone(pids)


def test_another_is_forked_in_no_time_while_the_forker_lives_and_all_end_with_it(start, tmp_path):
    """For one that is lost; a forker that is gone itself is started anew."""
    first = start()
    wait_until(lambda: first[1].process.pid)
    first[1].kill()
    assert first[1].wait(PATIENCE) == -signal.SIGKILL
    second = start.one(tmp_path / "1.log", 7)
    said(tmp_path / "1.log", "stage 7 is")
    assert "imported" not in (tmp_path / "1.log").read_text()
    pids = [process_of(tmp_path / f"{number}.log") for number in range(3)]
    os.kill(pids[0], signal.SIGSTOP)  # one that is stopped ends, too
    os.kill(parent_of(parent_of(pids[0])), signal.SIGKILL)  # between them is who watches it
    assert [stage.wait(PATIENCE) for stage in (first[0], second, first[2])] == [-signal.SIGKILL] * 3
    assert gone(pids)
    start.one(tmp_path / "1.log", 8)
    said(tmp_path / "1.log", "stage 8 is")


def test_why_nothing_could_be_imported_is_in_every_log(start, tmp_path):
    stages = start("import a_library_that_is_broken")
    assert [stage.wait(PATIENCE) for stage in stages] == [1, 1, 1]
    logs = [(tmp_path / f"{number}.log").read_text() for number in range(3)]
    assert all("No module named 'a_library_that_is_broken'" in log for log in logs)


def test_the_others_live_on_where_one_cannot_be_forked():
    with open(os.devnull, "rb") as said:  # nobody says which process it is
        forked = Forked(said, SimpleNamespace(kill=lambda: pytest.fail("it forks the others")))
        assert forked.wait(PATIENCE) == -signal.SIGKILL
    forked.kill()


def test_where_a_log_cannot_be_written_nothing_stays_open(tmp_path):
    (tmp_path / "1.log").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(StageError, match=r"cannot be started with its log in .*1\.log"):
            start_process(tmp_path / "1.log")
    assert len(os.listdir("/proc/self/fd")) < before + 10  # of tests before, some may close now


def test_stages_for_a_gpu_are_not_forked(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "GPU_DRIVERS", (str(tmp_path / "driver"),))
    devices = ("cpu", "auto", "cuda", "mps")
    assert [device for device in devices if forks(device)] == ["cpu", "auto"]
    (tmp_path / "driver").touch()
    assert [device for device in devices if forks(device)] == ["cpu"]
    monkeypatch.setattr(processes.sys, "platform", "darwin")
    assert not forks("cpu")
