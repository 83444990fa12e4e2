"""The numbers of a run on disk: one JSON object per line, TensorBoard files, Weights & Biases.

metrics.jsonl is the record that plots and summaries are made from, in memory that does not grow
with the run. The others are a convenience: where Weights & Biases fails, the run goes on without.
"""

import contextlib
import dataclasses
import errno
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from thinwire.background import on_daemon_thread
from thinwire.errors import ConfigError, printable
from thinwire.lazy import needs
from thinwire.report.human import finite_mean
from thinwire.report.records import EvaluationRecord, StepRecord
from thinwire.typed import learn_types

FILE_NAME, EVENTS_FILE = "metrics.jsonl", "events.jsonl"
ID_FILE = "wandb-id"  # in the folder of a run: one that is resumed continues its curves
INIT_SECONDS = 30
LAST_SECONDS = 60.0  # to upload what is left, at the end of a run
_END_BYTES = 1 << 20  # of a file, in which its last step is looked for


class MetricsWriter(contextlib.ExitStack):
    """Appends steps and evaluations to a run's folder, each visible to readers at once, until all
    that is open is closed.

    What an interrupted run wrote after `resume_step` is dropped. TensorBoard gets the same, and a
    service that fails gets no more. A row that a full disk does not take is an OSError and leaves
    nothing behind.
    """

    def __init__(self, folder: Path, resume_step: int = 0) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, path = folder, folder / FILE_NAME
        _drop_after(path, resume_step)
        self._file: IO[bytes] = self.enter_context(path.open("ab", buffering=0))
        self._logs: list[Callable[[dict[str, float], int], None]] = []
        with contextlib.suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard hides what earlier event files hold from the purge step on.
            place, purge = str(folder / "tensorboard"), resume_step + 1
            board = SummaryWriter(place, purge_step=purge, flush_secs=10)
            self.callback(board.close)

            def add(scalars: dict[str, float], step: int) -> None:
                for name, value in scalars.items():
                    board.add_scalar(name, value, step)

            self._logs.append(add)

    def log_to_wandb(self, project: str, name: str, config: dict[str, Any]) -> None:
        """Log to Weights & Biases too, as one run of a project, however often it is resumed."""
        wandb = needs("wandb", "wandb", f'run.wandb = "{project}"')
        # By the environment and wandb's own files. No questions: a run may have no terminal.
        is_online = wandb.setup().settings.mode == "online"
        if is_online and not wandb.login(prompt=False):
            raise ConfigError(
                f'run.wandb = "{project}", but you are not logged in: run `wandb login`, or set '
                "WANDB_MODE=offline and upload with `wandb sync` later"
            )
        kept = self._folder / ID_FILE
        if not kept.is_file():
            kept.write_text(secrets.token_hex(8) + "\n")
        run = wandb.init(
            project=project,
            name=name,
            id=kept.read_text().strip(),
            resume="allow",
            dir=str(self._folder),
            config=config,
            settings=wandb.Settings(console="off", silent=True, init_timeout=INIT_SECONDS),
        )
        # Not wandb's own counter, which refuses to go back, as a resumed run may.
        run.define_metric("*", step_metric="step")
        self._logs.append(lambda scalars, step: run.log({**scalars, "step": step}))
        self.callback(_finish, run)

    def step(self, record: StepRecord) -> None:
        """Append a training step."""
        self._append("step", record)
        scalars = {
            "loss/train": record.loss,
            "speed/tokens_per_s": record.tokens_per_s,
            "speed/step_seconds": record.step_seconds,
            "optim/lr": record.lr,
            "optim/grad_norm": record.grad_norm,
        }
        for stage in record.stages:
            for name in ("compute_s", "wait_s", "update_s"):
                scalars[f"stage/{stage.stage}/{name}"] = getattr(stage, name)
        for link in record.links:
            for name in ("forward_bytes", "backward_bytes", "utilisation"):
                scalars[f"link/{link.cut}/{name}"] = getattr(link, name)
        scalars |= {f"space/{name}": value for name, value in record.measures.items()}
        self._plot(scalars, record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Append a validation."""
        self._append("evaluation", record)
        scalars = {"loss/valid": record.loss, "loss/valid_bits_per_byte": record.bits_per_byte}
        self._plot(scalars, record.step)

    def _append(self, kind: str, record: StepRecord | EvaluationRecord) -> None:
        line = line_of(kind, dataclasses.asdict(record)).encode()
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(end)  # half a line would spoil the next one
            raise

    def _plot(self, scalars: Mapping[str, float | None], step: int) -> None:
        # where a number is not finite, a gap reads better than a broken axis
        finite = {n: v for n, v in scalars.items() if v is not None and math.isfinite(v)}
        for log in [*self._logs]:
            try:
                log(finite, step)
            except Exception:  # these packages have many of their own, and do not recover from them
                self._logs.remove(log)
                raise


def _finish(run: Any) -> None:
    """End a run of Weights & Biases, which uploads what is left."""
    try:
        on_daemon_thread("wandb", run.finish).result(LAST_SECONDS)
    except TimeoutError:
        raise TimeoutError(
            f"Weights & Biases did not take the last metrics within {LAST_SECONDS:g} s; "
            "`wandb sync` uploads them later"
        ) from None


def line_of(kind: str, values: dict[str, Any]) -> str:
    """A row of a record, with the time at which it was written, in seconds since 1970."""
    row = {"kind": kind, **values, "time": round(time.time(), 3)}
    return json.dumps(without_nan(row), allow_nan=False) + "\n"


def without_nan(value: Any) -> Any:
    """JSON knows neither NaN nor infinity; both become null."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=float))  # also numpy's numbers


def last_step(folder: Path) -> "Row | None":
    """The last step that was written, as the end of the file has it; None where there is none."""
    with contextlib.suppress(OSError), (folder / FILE_NAME).open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _END_BYTES))
        rows = map(Row.read, reversed(file.readlines()))
        return next((row for row in rows if row is not None and row.kind == "step"), None)
    return None


def _drop_after(path: Path, last_step: int) -> None:
    """Cut the file off behind `last_step`, and in any case a line that a crash has cut off."""
    kept = end = 0
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        for line in file:
            end, row = end + len(line), Row.read(line) if line.endswith(b"\n") else None
            if row is not None and row.step <= last_step:
                kept = end
        file.truncate(kept)


class Row(msgspec.Struct):
    """What readers need of a line of metrics.jsonl; null stands for a number that is not finite."""

    kind: str
    step: int
    loss: float | None = None
    tokens: int = 0
    steps: int = 0
    tokens_per_s: float | None = None
    step_seconds: float | None = None
    bits_per_byte: float | None = None
    time: float = 0.0

    @classmethod
    def read(cls, line: bytes) -> "Row | None":
        """None for a line that was cut off on its way, or that something else wrote."""
        try:
            return msgspec.json.decode(line, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None


learn_types(Row)  # which threads of a run read


def lines_of(folder: Path) -> Iterator[bytes]:
    """The lines of a run's record, one by one, as far as it can be read."""
    with contextlib.suppress(OSError), (folder / FILE_NAME).open("rb") as file:
        yield from file


MOST_POINTS = 1000  # of a curve: few screens have more columns


class Curves:
    """The curves of a run: of each validation its step and loss, of the steps means over so many
    of them that neither memory nor the cost of drawing grows with the run.
    """

    def __init__(self) -> None:
        self.valid: list[EvaluationRecord] = []
        self._line = b"{}"  # of the newest step
        self.began = 0.0  # when the first step was written
        self._newest = 0, 0.0  # step, and when it was written
        self._size = 1  # steps of a point
        self._points: list[tuple[float, ...]] = []  # step, tokens, time, loss and speed
        self._open: list[tuple[float, ...]] = []  # steps of the next one

    @classmethod
    def read(cls, folder: Path) -> "Curves":
        """Those that a run has written to its folder."""
        curves = cls()
        for line in lines_of(folder):
            curves.add(line)
        return curves

    @property
    def last(self) -> dict[str, Any]:
        """The newest step, with all that it has, also where others wrote it."""
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            return msgspec.json.decode(self._line, type=dict[str, Any])
        return {}

    def add(self, line: bytes) -> None:
        """Add a line of metrics.jsonl; one that cannot be read is left out."""
        if (row := Row.read(line)) is None:
            return
        loss, speed = (math.nan if x is None else x for x in (row.loss, row.tokens_per_s))
        if row.kind == "evaluation":
            self.valid = [one for one in self.valid if one.step < row.step]
            self.valid.append(EvaluationRecord(row.step, loss, row.bits_per_byte))
        elif row.kind == "step":
            step, moment = self._newest
            if row.step <= step:  # a run that went back trains it again
                self._points = [point for point in self._points if point[0] < row.step]
                self._open = [point for point in self._open if point[0] < row.step]
            self._line = line
            # Earlier versions wrote no time: then the steps' own seconds count.
            self._newest = row.step, row.time or moment + (row.step_seconds or 0.0)
            self.began = self.began or self._newest[1]
            if len(self._points) >= MOST_POINTS and not self._open:
                pairs = zip(self._points[::2], self._points[1::2], strict=True)
                self._points, self._size = [_mean(pair) for pair in pairs], 2 * self._size
            self._open.append((row.step, row.tokens, self._newest[1], loss, speed))
            if len(self._open) == self._size:
                self._points.append(_mean(self._open))
                self._open = []

    def points(self) -> dict[str, Any]:
        """What is drawn of the steps, and of how many steps each point is the mean."""
        points = [*self._points, *([_mean(self._open)] if self._open else [])]
        found: Any = map(list, zip(*points, strict=True)) if points else [[]] * 5
        steps, tokens, times, *means = found
        loss, speed = ([round(value, 5) for value in column] for column in means)
        hours = [round((moment - self.began) / 3600, 5) for moment in times]
        columns = {"step": steps, "tokens": tokens, "hours": hours, "loss": loss, "speed": speed}
        return {"size": self._size, **columns}


def _mean(points: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The last of some points, with the mean of their losses and speeds."""
    *_, losses, speeds = zip(*points, strict=True)
    return (*points[-1][:3], finite_mean(losses), finite_mean(speeds))


def tell(folder: Path, kind: str, text: str) -> None:
    """Append what happens in a run, in words and with the time, to events.jsonl in its folder, from
    any thread; `kind` is the tag that the terminal shows. A full disk costs events, nothing else.
    """
    if kind in ("invite", "web"):  # which let people in: they stay on the terminal
        return
    line = line_of(kind, {"text": printable(text, 2000)})
    with contextlib.suppress(OSError), (folder / EVENTS_FILE).open("ab", buffering=0) as file:
        file.write(line.encode())  # whole, so that lines of several threads do not mix
