"""Arms in processes of their own: what is logged, what is not trained again, what is told."""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from thinwire.errors import ConfigError
from thinwire_lab import pool as lab
from thinwire_lab.arms import Arm, Ground

if TYPE_CHECKING:  # the processes of arms import this file, and need not wait for torch
    from thinwire_lab.outcome import Row


def summed(first: int, second: int, extra: str = "none") -> Arm:
    """An arm whose training is a sum."""
    return Arm(f"{first}+{second}", first, second, {"codec": {"forward": extra}})


def train(arm: Arm, shared: dict[str, Any]) -> "Row":
    """What an arm's process does here."""
    extra = arm.get("codec.forward")
    if arm.seed < 0:
        raise ValueError("a negative arm cannot be trained")
    print("x" * shared["noise"])  # more than a pipe holds
    if extra == "long":
        Path(shared["here"]).write_text(str(os.getpid()))
        time.sleep(600)
    if extra == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if extra == "killed later":
        atexit.register(os.kill, os.getpid(), signal.SIGABRT)
    if extra == "killed loudly":
        atexit.register(os.kill, os.getpid(), signal.SIGABRT)
        atexit.register(print, "terminate called: out of memory", file=sys.stderr)  # runs first
    if extra == "half said":
        print('half a line\nfigures: {"loss": 1', flush=True)
        os._exit(0)
    if extra == "unfinished line":
        print("no end of line", end="")
    loss = float("nan") if arm.seed == 99 else arm.seed + arm.steps + shared["add"]
    return {"loss": loss, "seconds": 0.5}


@pytest.fixture
def ground(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    return Ground({"data": "c1"}, {"add": 0.25, "noise": 100_000}, "test_pool")


def test_arms_are_trained_once_and_logged(ground, tmp_path):
    log, said = tmp_path / "new" / "arms.jsonl", []
    grid = [summed(1, 2), summed(-1, 0), summed(99, 0)]
    rows = lab.train_arms(grid, ground, lab.Session(log, 2, said.append))
    assert sorted((row.arm.label, row.loss) for row in rows) == [("1+2", 3.25), ("99+0", None)]
    assert rows[0].figures["seconds"] == 0.5
    assert any("FAILED -1+0" in line and "a negative arm" in line for line in said)
    for line in log.read_text().splitlines():
        row = json.loads(line, parse_constant=pytest.fail)  # what diverged is null
        assert row["ground"] == {"data": "c1"}
    said.clear()
    again = lab.train_arms([summed(1, 2)], ground, lab.Session(log, 2, said.append))
    assert said == [f"1 arms, 1 of them in {log} already"]
    assert again == rows


def test_figures_outlast_a_process_that_dies_on_its_way_out(ground, tmp_path):
    log, said = tmp_path / "arms.jsonl", []
    endings = ("killed", "killed later", "killed loudly", "half said", "unfinished line")
    grid = [summed(number, 0, ending) for number, ending in enumerate(endings)]
    rows = lab.train_arms(grid, ground, lab.Session(log, 1, said.append))
    assert [(row.arm.seed, row.loss) for row in rows] == [(1, 1.25), (2, 2.25), (4, 4.25)]
    assert said[1].startswith("FAILED 0+0  seed 0  0 steps (was ended by signal 9): ")
    assert said[2] == "1+0  seed 1  0 steps printed its figures and then was ended by signal 6"
    assert said[4] == "2+0  seed 2  0 steps printed its figures and then was ended by signal 6"
    assert said[6].startswith("FAILED 3+0  seed 3  0 steps (printed no figures): ")
    assert lab.train_arms(grid[1:3], ground, lab.Session(log, 1, said.append)) == rows
    assert said[-1] == f"2 arms, 2 of them in {log} already"


def test_other_grounds_do_not_compare(ground, tmp_path):
    log = tmp_path / "arms.jsonl"
    other = {"arm": {"label": "x", "seed": 1, "steps": 2}, "figures": {"loss": 9.0}}
    log.write_text(json.dumps({**other, "ground": {"data": "c2"}}) + "\n")
    said: list[str] = []
    only_read = lab.Session(log, 0, said.append)
    assert lab.train_arms([summed(1, 2)], ground, only_read) == []
    assert said == [f"1 arms, 0 of them in {log} already"]
    assert len(lab.read_log(log)) == 1


@pytest.mark.parametrize(
    "line", ['{"mode": "dense", "loss": 4.5}', '{"arm": {', "7", '{"arm": {"x": 1}}']
)
def test_a_log_in_another_format_is_refused(ground, tmp_path, line):
    log = tmp_path / "arms.jsonl"
    log.write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=r"arms\.jsonl, line 1: .* move the file, or"):
        lab.train_arms([summed(1, 2)], ground, lab.Session(log, 1, print))


def test_no_arm_is_started_when_time_is_up(ground, tmp_path):
    said: list[str] = []
    session = lab.Session(tmp_path / "log", 2, said.append, until=lab.time.monotonic() - 1)
    assert lab.train_arms([summed(1, 2), summed(1, 3)], ground, session) == []
    assert said[1:] == ["time is up: 2 arms are left for another call"]


GRID = """
import sys
from pathlib import Path
import test_pool
from thinwire_lab import arms, pool
ground = arms.Ground({}, {"add": 0, "noise": 1, "here": sys.argv[1]}, "test_pool")
pool.train_arms([test_pool.summed(1, 2, "long")], ground, pool.Session(Path("log"), 1, print))
"""


@pytest.mark.parametrize("name", [n for n in ("SIGTERM", "SIGHUP") if hasattr(signal, n)])
def test_a_grid_that_is_asked_to_end_takes_its_processes_along(ground, tmp_path, name):
    here = tmp_path / "pid"
    number = getattr(signal, name)
    script = f"import signal; signal.signal({number:d}, signal.SIG_DFL)\n{GRID}"  # nohup ignores it
    grid = subprocess.Popen([sys.executable, "-c", script, str(here)], cwd=tmp_path)
    try:
        until = time.monotonic() + 240
        while not (here.exists() and here.read_text()):
            assert grid.poll() is None and time.monotonic() < until, "the arm did not start"
            time.sleep(0.05)
        grid.send_signal(number)
        assert grid.wait(240) != 0
        with pytest.raises(ProcessLookupError):  # it was waited for: not even a zombie is left
            os.kill(int(here.read_text()), 0)
    finally:
        grid.kill()
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(here.read_text()), signal.SIGKILL)
