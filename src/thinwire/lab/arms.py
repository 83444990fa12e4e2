"""Arms: the training runs of an experiment, each in a process of its own, several at a time.

An arm is logged as it ends, and arms that are in the log already are not trained again: a grid can
be finished over several calls. A line of the log is the arm, the ground it stood on, and what came
out, as JSON; null stands for a number that is none, of a run that diverged.
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import hashlib
import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, ClassVar, Protocol

from thinwire.errors import ConfigError
from thinwire.lab.experiment import Row
from thinwire.report.metrics import without_nan
from thinwire.settings import Settings
from thinwire.train import heeding

Values = dict[str, dict[str, Any]]
Say = Callable[[str], None]

_POLL_SECONDS = 0.2
_FIGURES = "figures: "
_COMMA = re.compile(r",(?![^(]*\))")  # not within a codec's parentheses
_GROUND = ("model", "data", "boundary", "codec", "optim", "train", "pipeline")
_NO_GROUND = {
    *("data.source", "data.path", "data.tokenizer", "data.valid_fraction"),
    *("data.valid_path", "data.text_key"),
    *("train.steps", "train.eval_every", "train.checkpoint_every", "train.keep"),
    *("pipeline.schedule", "pipeline.window"),
}
_OPTIONS = {
    "optim.lr": "--lrs",
    "train.steps": "--steps",
    "run.seed": "--seed or --seeds",
    "pipeline.stages": "--stages",
    "boundary.mode": "--modes or --arms",
    "boundary.rank": "--ranks or --arms",
    "codec.forward": "--arms",
    "codec.backward": "--arms",
    "link.mbps_up": "--mbps",
    "link.mbps_down": "--mbps",
}
"""What to use where an experiment chooses a setting itself."""


class Arm(Protocol):
    """One training run of a grid: a frozen dataclass of plain values."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def label(self) -> str:
        """The arm in a few words, for a line of progress."""


class TrainingArm(ABC):
    """An arm that changes some settings of a base model, data set and batch."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The arm in a line of progress."""

    @abstractmethod
    def changes(self) -> Values:
        """The settings that this arm has and the base has not."""

    def settings(self, base: Values) -> Settings:
        """The settings of this arm on a base."""
        return Settings.from_plain(merged(base, self.changes()))


@dataclass(frozen=True)
class Ground:
    """What the arms of a grid share. Only figures from the same ground compare."""

    module: str
    """Trains an arm: `train(arm, shared)` there takes plain values and returns figures."""
    shared: dict[str, Any]
    names: dict[str, str]
    """What is written into every row and sets this ground apart from others in the log."""


@dataclass(frozen=True)
class Session:
    """One call's work on grids."""

    log: Path
    parallel: int  # arms at a time; with 0 only the log is read
    say: Say
    until: float = math.inf
    """No arm is started after this, of the clock time.monotonic."""


def train_arms(arms: Sequence[Arm], ground: Ground, session: Session) -> list[Row]:
    """Train the arms that the log lacks; returns the ground's rows, also those of other arms."""
    log = session.log
    before = rows_of(log, ground)
    waiting = [arm for arm in arms if not any(is_of(arm, row) for row in before)]
    session.say(f"{len(arms)} arms, {len(arms) - len(waiting)} of them in {log} already")
    if not session.parallel:
        return before
    log.parent.mkdir(parents=True, exist_ok=True)
    with _none_left_behind() as running:
        _train_all(waiting, running, ground, session)
    return rows_of(log, ground)


def _train_all(
    waiting: list[Arm], running: list["_Process"], ground: Ground, session: Session
) -> None:
    say, total, finished = session.say, len(waiting), 0
    while waiting or running:
        if waiting and time.monotonic() > session.until:
            say(f"time is up: {len(waiting)} arms are left for another call")
            waiting.clear()
        while waiting and len(running) < session.parallel:
            running.append(_Process(waiting.pop(0), ground))
        time.sleep(_POLL_SECONDS)
        for process in [process for process in running if process.is_over()]:
            running.remove(process)
            finished += 1
            row = process.row()
            if row is None:
                how, said = process.ending() or "printed no figures", process.output()[-500:]
                say(f"FAILED {process.arm.label} ({how}): {said}")
                continue
            if process.ending():
                say(f"{process.arm.label} had its figures, and then {process.ending()}")
            with session.log.open("a") as file:
                file.write(json.dumps(without_nan(row)) + "\n")
            say(f"{finished:3}/{total}  {process.arm.label:<50}  {_result(row)}")


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


def read_log(log: Path) -> list[Row]:
    """The arms that have been trained."""
    if not log.exists():
        return []
    return [json.loads(line) for line in log.read_text().splitlines() if line.strip()]


def rows_of(log: Path, ground: Ground) -> list[Row]:
    """The rows of a log that stood on this ground."""
    return [row for row in read_log(log) if ground.names.items() <= row.items()]


def is_of(arm: Arm, row: Row) -> bool:
    """Whether a row is of this arm; what a field was called after the row was written has its
    default there.
    """
    return all(
        row.get(field.name, field.default) == getattr(arm, field.name)
        for field in dataclasses.fields(arm)
    )


def differences(settings: Settings) -> dict[str, Any]:
    """What decides a result and is not at its default, as section.key: value.

    Named in this way, settings that are added later leave logs valid. Left out are seed and steps,
    which belong to the arm, what data has a fingerprint of its own for, and what changes nothing.
    """
    plain, usual = settings.to_plain(), Settings.from_plain({}).to_plain()
    found = {
        f"{section}.{key}": value
        for section in _GROUND
        for key, value in plain[section].items()
        if f"{section}.{key}" not in _NO_GROUND and value != usual[section][key]
    }
    return {**found, "run.precision": plain["run"]["precision"]}


def fingerprint(told: Any) -> str:
    """A short hash of plain values."""
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]


def fits(name: str, pattern: str) -> bool:
    """Whether a pattern (`*` stands for anything) fits a name, or what stands behind its slash."""
    return any(fnmatch.fnmatchcase(n, pattern) for n in (name, name.rpartition("/")[2]))


def split_patterns(patterns: str) -> list[str]:
    """What stands between the commas; those in parentheses belong to a codec."""
    return [part.strip() for part in _COMMA.split(patterns) if part.strip()]


def merged(base: Values, changes: Values) -> Values:
    """Plain settings with some keys changed; the base stays as it is."""
    values = {section: dict(keys) for section, keys in base.items()}
    for section, keys in changes.items():
        values.setdefault(section, {}).update(keys)
    return values


def check_arms(arms: Sequence[TrainingArm], base: Values, overrides: Sequence[str]) -> None:
    """Refuse an arm that cannot work, or that overrides what was set, before any one trains."""
    for arm in arms:
        refuse_overridden(arm.changes(), base, overrides, arm.label)
        arm.settings(base)


def refuse_overridden(changes: Values, base: Values, overrides: Sequence[str], arm: str) -> None:
    """Refuse a `section.key=value` that an arm would override without a word."""
    for override in overrides:
        place = override.partition("=")[0].strip()
        section, _, key = place.partition(".")
        chosen = changes.get(section, {})
        if key in chosen and chosen[key] != base[section][key]:
            option = f": use {_OPTIONS[place]}" if place in _OPTIONS else ""
            raise ConfigError(
                f"--set {override}: the experiment chooses {place} itself{option} "
                f"({chosen[key]!r} for {arm})"
            )


def mean(values: Iterable[float]) -> float:
    """The mean of at least one number."""
    numbers = list(values)
    return sum(numbers) / len(numbers)


def gap_to_dense(rows: Sequence[Row], dense: Sequence[Row]) -> float:
    """The loss above dense, relative to it: dense of the same seed, or its mean for other seeds."""
    by_seed = {row["seed"]: row["loss"] for row in dense}
    usual = mean(by_seed.values())
    return mean(row["loss"] / by_seed.get(row["seed"], usual) - 1 for row in rows)


def noise_of(dense: Sequence[Row]) -> float | None:
    """What the seeds of dense differ by, relative to their mean; None with one seed."""
    losses = [row["loss"] for row in dense]
    return (max(losses) - min(losses)) / mean(losses) if len(losses) > 1 else None


class _Process:
    """An arm under way. What it prints goes to a file: a pipe that nobody reads would fill up."""

    def __init__(self, arm: Arm, ground: Ground):
        self.arm = arm
        self._ground = ground
        self._fields = dataclasses.asdict(arm)
        order = json.dumps({"arm": self._fields, "shared": ground.shared})
        self._output: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed with us
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "thinwire.lab.arms", ground.module, order],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def output(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def ending(self) -> str:
        """How it ended, unless as it should."""
        status = self._process.returncode
        if not status:
            return ""
        return f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"

    def row(self) -> Row | None:
        """The arm with the figures that it printed; None without them.

        Who has printed them has trained: what a driver does to a process that is on its way out,
        and what that process says of it, takes no training back.
        """
        lines = [line for line in self.output().splitlines() if line.startswith(_FIGURES)]
        try:
            figures = json.loads(lines[-1].removeprefix(_FIGURES))
        except (IndexError, json.JSONDecodeError):  # none, or cut short
            return None
        return {**self._fields, **self._ground.names, **figures}

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.wait()


def _result(row: Row) -> str:
    loss, accuracy = row["loss"], row.get("accuracy")
    shown = f"loss {loss:.4f}" if accuracy is None else f"accuracy {accuracy:.2%}"
    return f"{shown}  {row['seconds']:.0f} s"


def main() -> None:
    """Entry point of an arm's process: train it, print its figures in a line of their own."""
    parser = argparse.ArgumentParser(description="Train one arm (started by thinwire lab).")
    parser.add_argument("module")
    parser.add_argument("order")
    options = parser.parse_args()
    order = json.loads(options.order)
    train = importlib.import_module(options.module).train
    figures = train(order["arm"], order["shared"])
    print(f"\n{_FIGURES}{json.dumps(figures)}", flush=True)


if __name__ == "__main__":
    main()
