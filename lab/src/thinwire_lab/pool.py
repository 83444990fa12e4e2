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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

from thinwire.errors import ConfigError
from thinwire.report import PlainDisplay
from thinwire.report.metrics import without_nan
from thinwire.run.signals import heeding
from thinwire.run.start import prepare_data
from thinwire.settings import Settings
from thinwire_lab.arms import Arm, Ground, Values, check_arms, ground_of
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
    known = Settings.from_plain({}).to_plain()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            trained = Trained(_arm_of(row["arm"], known), row["figures"], row["ground"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{log}, line {number}: not an arm that this version of thinwire has logged; move "
                "the file, or choose another folder with --out"
            ) from error
        if ground is None or trained.ground == ground.names:
            found.append(trained)
    return found


def _arm_of(logged: dict[str, Any], known: Values) -> Arm:
    """An arm of a log, without settings that thinwire no longer has where they changed nothing."""
    changes = {
        section: {key: v for key, v in keys.items() if v or key in known.get(section, {})}
        for section, keys in logged.get("changes", {}).items()
    }
    return Arm(**{**logged, "changes": changes})


def train_grid(
    arms: Sequence[Arm], base: Values, overrides: Sequence[str], session: "Session", **shared: Any
) -> list[Trained]:
    """Check the arms, prepare their text and train them as `train_arms` does."""
    check_arms(arms, base, overrides)
    corpus = prepare_data(arms[0].settings(base), PlainDisplay(sys.stderr))
    runs = train_arms(arms, ground_of(arms[0], base, corpus, **shared), session)
    return [run for run in runs if is_known(partial(run.arm.settings, base))]


def is_known(settings: Callable[[], Settings]) -> bool:
    """Whether thinwire still has the settings that an arm of a log trained with."""
    try:
        settings()
    except ConfigError:
        return False
    return True


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
            line, (figures, output, ending) = process.arm.line, process.found()
            if figures is None:
                say(f"FAILED {line} ({ending or 'printed no figures'}): {output[-500:]}")
                continue
            if ending:
                say(f"{line} printed its figures and then {ending}")
            row = {"arm": asdict(process.arm), "ground": ground.names, "figures": figures}
            with session.log.open("a") as file:
                file.write(json.dumps(without_nan(row)) + "\n")
            loss, accuracy = figures["loss"], figures.get("accuracy")
            shown = f"loss {loss:.4f}" if accuracy is None else f"accuracy {accuracy:.2%}"
            say(f"{finished:3}/{total}  {line:<50}  {shown}  {figures['seconds']:.0f} s")


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
        words = [sys.executable, "-P", "-m", "thinwire_lab.pool", ground.trainer, order]
        self._output: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed with us
        unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}
        super().__init__(words, stdout=self._output, stderr=subprocess.STDOUT, env=unbuffered)

    def found(self) -> tuple[dict[str, Any] | None, str, str]:
        """The figures that it printed, if it did, all that it printed, and how it ended, unless as
        it should.

        Who has printed figures has trained: what a driver does to a process that is on its way
        out, and what that process says of it, takes no training back.
        """
        self._output.seek(0)
        output, status = self._output.read(), self.returncode
        ending = f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"
        lines = [line for line in output.splitlines() if line.startswith(_FIGURES)]
        try:
            figures = json.loads(lines[-1].removeprefix(_FIGURES))
        except (IndexError, json.JSONDecodeError):  # none, or cut short
            figures = None
        return figures, output, ending if status else ""


def main() -> None:
    """Entry point of an arm's process: train it, print its figures in a line of their own."""
    trainer, text = sys.argv[1:]
    order = json.loads(text)
    figures = importlib.import_module(trainer).train(Arm(**order["arm"]), order["shared"])
    print(f"\n{_FIGURES}{json.dumps(figures)}", flush=True)


if __name__ == "__main__":
    main()
