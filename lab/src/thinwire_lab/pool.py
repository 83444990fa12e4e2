"""Trains arms in processes of their own, several at a time, and logs each as it ends.

Arms that are in the log already are not trained again: a grid can be finished over several calls. A
line of the log is JSON: the arm, the ground it stood on, and the figures that came out; null stands
for a number that is none, of a run that diverged.
"""

import argparse
import contextlib
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from thinwire.errors import ConfigError
from thinwire.report.metrics import without_nan
from thinwire.run.signals import heeding
from thinwire_lab.arms import Arm, Ground
from thinwire_lab.experiment import Say

_POLL_SECONDS = 0.2
_FIGURES = "figures: "


@dataclass(frozen=True)
class Trained:
    """An arm with what came out."""

    arm: Arm
    figures: dict[str, Any]
    ground: dict[str, Any] = field(default_factory=dict, compare=False)  # as its log names it

    @property
    def loss(self) -> float | None:
        """The validation loss; None if it diverged."""
        return self.figures["loss"]


@dataclass(frozen=True)
class Session:
    """One call's work on grids."""

    log: Path
    parallel: int  # arms at a time; with 0 only the log is read
    say: Say
    until: float = math.inf
    """No arm is started after this, of the clock time.monotonic."""

    @classmethod
    def of(cls, options: argparse.Namespace, say: Say) -> "Session":
        """The session that the options of an experiment ask for."""
        limit = 60 * options.minutes if options.minutes else math.inf
        parallel = 0 if options.from_log else options.parallel
        return cls(options.out / f"{options.name}.jsonl", parallel, say, time.monotonic() + limit)


def read_log(log: Path, ground: Ground | None = None) -> list[Trained]:
    """The arms that have been trained, on any ground or on this one."""
    found = []
    lines = log.read_text().splitlines() if log.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            trained = Trained(Arm(**row["arm"]), row["figures"], row["ground"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{log}, line {number}: not an arm that this version of thinwire has logged; move "
                "the file, or choose another folder with --out"
            ) from error
        if ground is None or trained.ground == ground.names:
            found.append(trained)
    return found


def train_arms(arms: Sequence[Arm], ground: Ground, session: Session) -> list[Trained]:
    """Train the arms that the log lacks; returns all of the ground, also those of other calls."""
    log = session.log
    before = read_log(log, ground)
    waiting = [arm for arm in arms if not any(arm.is_same(trained.arm) for trained in before)]
    session.say(f"{len(arms)} arms, {len(arms) - len(waiting)} of them in {log} already")
    if not session.parallel:
        return before
    log.parent.mkdir(parents=True, exist_ok=True)
    with _none_left_behind() as running:
        _train_all(waiting, running, ground, session)
    return read_log(log, ground)


def _train_all(
    waiting: list[Arm], running: list["_Process"], ground: Ground, session: Session
) -> None:
    say, total, finished = session.say, len(waiting), 0
    while waiting or running:
        if waiting and time.monotonic() > session.until:
            say(f"time is up: {len(waiting)} arms are left for another call")
            waiting.clear()
        while waiting and len(running) < session.parallel:
            running.append(_Process(waiting.pop(0), ground, session.parallel))
        time.sleep(_POLL_SECONDS)
        for process in [process for process in running if process.poll() is not None]:
            running.remove(process)
            finished += 1
            line, output, ending = process.arm.line, process.said(), process.ending()
            figures = _figures_in(output)
            if figures is None:
                say(f"FAILED {line} ({ending or 'printed no figures'}): {output[-500:]}")
                continue
            if ending:
                say(f"{line} printed its figures and then {ending}")
            row = {"arm": asdict(process.arm), "ground": ground.names, "figures": figures}
            with session.log.open("a") as file:
                file.write(json.dumps(without_nan(row)) + "\n")
            say(f"{finished:3}/{total}  {line:<50}  {_result(figures)}")


@contextlib.contextmanager
def _none_left_behind() -> Iterator[list["_Process"]]:
    """A list of processes that end with us, also when we are asked to end.

    Only the main thread is asked; in another one they end when the work there ends.
    """
    ending = False

    def end(number: int, frame: FrameType | None) -> None:
        if not ending:
            raise KeyboardInterrupt

    running: list[_Process] = []
    is_main = threading.current_thread() is threading.main_thread()
    with heeding(end) if is_main else contextlib.nullcontext():
        try:
            yield running
        finally:
            ending = True
            for process in running:
                process.kill()
            for process in running:
                process.wait()


class _Process(subprocess.Popen[str]):
    """An arm under way. What it prints goes to a file: a pipe that nobody reads would fill up."""

    def __init__(self, arm: Arm, ground: Ground, processes: int):
        self.arm = arm
        shared = {**ground.shared, "processes": processes}
        order = json.dumps({"arm": asdict(arm), "shared": shared})
        self._output: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed with us
        super().__init__(
            [sys.executable, "-P", "-m", "thinwire_lab.pool", ground.trainer, order],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )

    def said(self) -> str:
        """All that it has printed."""
        self._output.seek(0)
        return self._output.read()

    def ending(self) -> str:
        """How it ended, unless as it should."""
        status = self.returncode
        if not status:
            return ""
        return f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"


def _figures_in(output: str) -> dict[str, Any] | None:
    """The figures that an arm's process printed, if it did.

    Who has printed them has trained: what a driver does to a process that is on its way out, and
    what that process says of it, takes no training back.
    """
    lines = [line for line in output.splitlines() if line.startswith(_FIGURES)]
    try:
        return json.loads(lines[-1].removeprefix(_FIGURES))
    except (IndexError, json.JSONDecodeError):  # none, or cut short
        return None


def _result(figures: dict[str, Any]) -> str:
    loss, accuracy = figures["loss"], figures.get("accuracy")
    shown = f"loss {loss:.4f}" if accuracy is None else f"accuracy {accuracy:.2%}"
    return f"{shown}  {figures['seconds']:.0f} s"


def main() -> None:
    """Entry point of an arm's process: train it, print its figures in a line of their own."""
    trainer, text = sys.argv[1:]
    order = json.loads(text)
    figures = importlib.import_module(trainer).train(Arm(**order["arm"]), order["shared"])
    print(f"\n{_FIGURES}{json.dumps(figures)}", flush=True)


if __name__ == "__main__":
    main()
