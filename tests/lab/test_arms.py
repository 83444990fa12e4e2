"""Arms in processes of their own: what is logged, what is not trained again, what is told."""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from thinwire.lab import arms as lab
from thinwire.lab.experiment import Row
from thinwire.settings import Settings


@dataclass(frozen=True)
class Arm:
    """An arm whose training is a sum."""

    first: int
    second: int
    extra: str = "none"

    @property
    def label(self) -> str:
        return f"{self.first}+{self.second}"


def train(arm: Row, shared: dict[str, Any]) -> Row:
    """What an arm's process does here."""
    if arm["first"] < 0:
        raise ValueError("a negative arm cannot be trained")
    print("x" * shared["noise"])  # more than a pipe holds
    if arm["extra"] == "long":
        Path(shared["here"]).write_text(str(os.getpid()))
        time.sleep(600)
    if arm["extra"] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if arm["extra"] == "killed later":
        atexit.register(os.kill, os.getpid(), signal.SIGABRT)
    if arm["extra"] == "killed loudly":
        atexit.register(os.kill, os.getpid(), signal.SIGABRT)
        atexit.register(print, "terminate called: out of memory", file=sys.stderr)  # runs first
    if arm["extra"] == "half said":
        print('half a line\nfigures: {"loss": 1', flush=True)
        os._exit(0)
    if arm["extra"] == "unfinished line":
        print("no end of line", end="")
    loss = float("nan") if arm["first"] == 99 else arm["first"] + arm["second"] + shared["add"]
    return {"loss": loss, "seconds": 0.5}


@pytest.fixture
def ground(monkeypatch: pytest.MonkeyPatch) -> lab.Ground:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return lab.Ground("test_arms", {"add": 0.25, "noise": 100_000}, {"base": "b1", "corpus": "c1"})


def test_arms_are_trained_once_and_logged(ground: lab.Ground, tmp_path: Path) -> None:
    log, said = tmp_path / "new" / "arms.jsonl", []
    grid = [Arm(1, 2), Arm(-1, 0), Arm(99, 0)]
    rows = lab.train_arms(grid, ground, lab.Session(log, 2, said.append))
    assert sorted((row["first"], row["loss"]) for row in rows if row["loss"]) == [(1, 3.25)]
    assert [row["loss"] for row in rows if row["first"] == 99] == [None]  # diverged: strict JSON
    assert rows[0]["base"] == "b1" and rows[0]["seconds"] == 0.5
    assert any("FAILED -1+0" in line and "a negative arm" in line for line in said)
    for line in log.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    said.clear()
    again = lab.train_arms([Arm(1, 2)], ground, lab.Session(log, 2, said.append))
    assert said == [f"1 arms, 1 of them in {log} already"]
    assert again == rows


def test_figures_outlast_a_process_that_dies_on_its_way_out(
    ground: lab.Ground, tmp_path: Path
) -> None:
    log, said = tmp_path / "arms.jsonl", []
    endings = ("killed", "killed later", "killed loudly", "half said", "unfinished line")
    grid = [Arm(number, 0, ending) for number, ending in enumerate(endings)]
    rows = lab.train_arms(grid, ground, lab.Session(log, 1, said.append))
    assert [(row["first"], row["loss"]) for row in rows] == [(1, 1.25), (2, 2.25), (4, 4.25)]
    assert said[1].startswith("FAILED 0+0 (was ended by signal 9): ")
    assert said[2] == "1+0 had its figures, and then was ended by signal 6"
    assert said[4] == "2+0 had its figures, and then was ended by signal 6"
    assert said[6].startswith("FAILED 3+0 (printed no figures): ")
    assert lab.train_arms(grid[1:3], ground, lab.Session(log, 1, said.append)) == rows
    assert said[-1] == f"2 arms, 2 of them in {log} already"


def test_a_grid_can_be_trained_in_any_thread(ground: lab.Ground, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        session = lab.Session(tmp_path / "arms.jsonl", 1, print)
        rows = pool.submit(lab.train_arms, [Arm(1, 2)], ground, session).result()
    assert [row["loss"] for row in rows] == [3.25]


def test_other_grounds_do_not_compare(ground: lab.Ground, tmp_path: Path) -> None:
    log = tmp_path / "arms.jsonl"
    other = {"first": 1, "second": 2, "extra": "none", "base": "b2", "corpus": "c1", "loss": 9.0}
    log.write_text(json.dumps(other) + "\n")
    said: list[str] = []
    only_read = lab.Session(log, 0, said.append)
    assert lab.train_arms([Arm(1, 2)], ground, only_read) == []
    assert said == [f"1 arms, 0 of them in {log} already"]
    assert len(lab.read_log(log)) == 1


def test_no_arm_is_started_when_time_is_up(ground: lab.Ground, tmp_path: Path) -> None:
    said: list[str] = []
    session = lab.Session(tmp_path / "log", 2, said.append, until=lab.time.monotonic() - 1)
    assert lab.train_arms([Arm(1, 2), Arm(1, 3)], ground, session) == []
    assert said[1:] == ["time is up: 2 arms are left for another call"]


def test_a_row_from_before_a_field_existed_has_its_default() -> None:
    row = {"first": 1, "second": 2}
    assert lab.is_of(Arm(1, 2), row)
    assert not lab.is_of(Arm(1, 2, "more"), row)
    assert not lab.is_of(Arm(1, 3), row)


def test_an_interrupted_grid_leaves_no_process(
    ground: lab.Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    popen = lab.subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        started.append(popen(*arguments, **options))
        return started[-1]

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lab.subprocess, "Popen", start)
    monkeypatch.setattr(lab.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        lab.train_arms([Arm(1, 2), Arm(1, 3)], ground, lab.Session(tmp_path / "log", 2, print))
    assert len(started) == 2 and all(process.poll() is not None for process in started)


GRID = """
import sys
from pathlib import Path
import test_arms
from thinwire.lab import arms
ground = arms.Ground("test_arms", {"add": 0, "noise": 1, "here": sys.argv[1]}, {})
arms.train_arms([test_arms.Arm(1, 2, "long")], ground, arms.Session(Path("log"), 1, print))
"""


@pytest.mark.parametrize("name", [n for n in ("SIGTERM", "SIGHUP") if hasattr(signal, n)])
def test_a_grid_that_is_asked_to_end_takes_its_processes_along(
    ground: lab.Ground, tmp_path: Path, name: str
) -> None:
    here = tmp_path / "pid"
    number = getattr(signal, name)
    script = f"import signal; signal.signal({number:d}, signal.SIG_DFL)\n{GRID}"  # nohup ignores it
    grid = subprocess.Popen([sys.executable, "-c", script, str(here)], cwd=tmp_path)
    try:
        until = time.monotonic() + 60
        while not (here.exists() and here.read_text()):
            assert grid.poll() is None and time.monotonic() < until, "the arm did not start"
            time.sleep(0.05)
        grid.send_signal(number)
        assert grid.wait(60) != 0
        with pytest.raises(ProcessLookupError):  # it was waited for: not even a zombie is left
            os.kill(int(here.read_text()), 0)
    finally:
        grid.kill()
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(here.read_text()), signal.SIGKILL)


def test_a_ground_is_named_by_what_matters() -> None:
    def named(**values: dict[str, Any]) -> dict[str, Any]:
        return lab.differences(Settings.from_plain(values))

    assert named() == {"run.precision": "fp32"}
    assert named(train={"steps": 70, "keep": 9}, run={"seed": 5, "name": "x"}) == named()
    assert named(optim={"weight_decay": 0.2})["optim.weight_decay"] == 0.2
    assert named(model={"preset": "mini"})["model.dim"] == 256
    assert named(run={"precision": "bf16"}) == {"run.precision": "bf16"}
    assert lab.fingerprint(named()) != lab.fingerprint(named(codec={"forward": "int8"}))


def test_patterns() -> None:
    assert lab.split_patterns("a*, int4(group=64,hadamard)/int8 ,b") == [
        "a*",
        "int4(group=64,hadamard)/int8",
        "b",
    ]
    assert lab.fits("tune/topk10", "topk*") and lab.fits("tune/topk10", "tune/*")
    assert not lab.fits("tune/topk10", "scratch/*") and not lab.fits("tune/topk10", "topk1")
