"""The numbers of a run on disk: one JSON object per line, TensorBoard files, Weights & Biases.

metrics.jsonl is the record that plots and summaries are made from, in memory that does not grow
with the run. The others are a convenience on top and may be missing. Nothing that happens to
Weights & Biases may end a run: what fails is told once, and the run goes on without it.
"""

import contextlib
import dataclasses
import errno
import io
import json
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from thinwire.errors import ThinwireError, printable
from thinwire.lazy import needs
from thinwire.report.human import finite_mean
from thinwire.report.records import EvaluationRecord, StepLoss, StepRecord, revived

ID_FILE = "wandb-id"  # in the folder of a run: one that is resumed continues its curves
INIT_SECONDS = 30
LAST_SECONDS = 60.0  # to upload what is left, at the end of a run


class WandbLog:
    """One run of a project on Weights & Biases, or none once something has failed."""

    def __init__(
        self,
        project: str,
        name: str,
        folder: Path,
        config: dict[str, Any],
        on_lost: Callable[[str], None],
    ):
        self._on_lost = on_lost
        self._run: Any = None
        with self._trying():
            wandb = needs("wandb", "wandb", f'run.wandb = "{project}"')
            # By the environment and wandb's own files. No questions: a run may have no terminal.
            is_online = wandb.setup().settings.mode == "online"
            if is_online and not wandb.login(prompt=False):
                raise ValueError(
                    "you are not logged in: run `wandb login`, or set WANDB_MODE=offline and "
                    "upload with `wandb sync` later"
                )
            kept = folder / ID_FILE
            if not kept.is_file():
                kept.write_text(secrets.token_hex(8) + "\n")
            self._run = wandb.init(
                project=project,
                name=name,
                id=kept.read_text().strip(),
                resume="allow",
                dir=str(folder),
                config=config,
                settings=wandb.Settings(console="off", silent=True, init_timeout=INIT_SECONDS),
            )
            # Not wandb's own counter, which refuses to go back, as a resumed run may.
            self._run.define_metric("*", step_metric="step")

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Log what was measured after so many steps."""
        with self._trying():
            if self._run is not None:
                self._run.log({**scalars, "step": step})

    def close(self) -> None:
        """Upload what is left, within a minute. May be called twice."""
        run, self._run = self._run, None
        if run is None:
            return

        def finish() -> None:
            with self._trying():
                run.finish()

        thread = threading.Thread(target=finish, name="wandb", daemon=True)
        thread.start()
        thread.join(LAST_SECONDS)
        if thread.is_alive():
            self._on_lost(
                f"Weights & Biases did not take the last metrics within {LAST_SECONDS:g} s; "
                "`wandb sync` uploads them later"
            )

    @contextlib.contextmanager
    def _trying(self) -> Any:
        try:
            yield
        except Exception as error:  # the package has many of its own, and they may change
            self._run = None
            self._on_lost(f"nothing is logged to Weights & Biases, the run continues: {error}")


EVENTS_FILE = "events.jsonl"
SECRETS = ("invite", "web")  # tags of lines that let people in: they stay on the terminal
_LONGEST = 2000  # characters of one
_HELD = 100  # before there is a folder
FILE_NAME = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class MetricsWriter(contextlib.AbstractContextManager["MetricsWriter"]):
    """Appends steps and evaluations to a run's folder, each visible to readers at once.

    `resume_step=k` drops what an interrupted run wrote after step k, so that a curve has
    each step once. `tensorboard` says whether event files are written too; `wandb` gets the same.

    A row that a full disk does not take is an OSError and leaves nothing behind. Once there is
    space again, a row of kind "missing" says how many are, and writing goes on.
    """

    def __init__(
        self, folder: str | Path, resume_step: int | None = None, wandb: WandbLog | None = None
    ) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _drop_after(folder / FILE_NAME, resume_step)
        self.missing = 0  # rows that could not be written since the last one that was
        self._file: IO[bytes] = (folder / FILE_NAME).open("ab", buffering=0)
        self._scalars: Any = None
        with contextlib.suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard hides what earlier event files hold from the purge step on.
            purge = None if resume_step is None else resume_step + 1
            events = str(folder / TENSORBOARD_FOLDER)
            self._scalars = SummaryWriter(events, purge_step=purge, flush_secs=10)
        self.tensorboard: bool = self._scalars is not None
        self._wandb = wandb

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

    def close(self) -> None:
        """Close the files. May be called twice."""
        self._file.close()
        if self._scalars is not None:
            self._scalars.close()
        if self._wandb is not None:
            self._wandb.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _append(self, kind: str, record: StepRecord | EvaluationRecord) -> None:
        text = line_of(kind, dataclasses.asdict(record))
        if self.missing:
            row = {"kind": "missing", "step": record.step, "rows": self.missing}
            text = json.dumps(row) + "\n" + text
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(text.encode()) < len(text.encode()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self.missing += 1
            with contextlib.suppress(OSError):
                self._file.truncate(end)  # half a line would spoil the next one
            raise
        self.missing = 0

    def _plot(self, scalars: Mapping[str, float | None], step: int) -> None:
        # where a number is not finite, a gap reads better than a broken axis
        finite = {n: v for n, v in scalars.items() if v is not None and math.isfinite(v)}
        if self._wandb is not None:
            self._wandb.add(finite, step)
        try:
            for name, value in finite.items() if self._scalars is not None else ():
                self._scalars.add_scalar(name, value, step)
        except Exception:  # it has errors of its own, and does not recover from them
            self._scalars = None
            raise


def line_of(kind: str, values: dict[str, Any]) -> str:
    """A row of a record, with the time at which it was written, in seconds since 1970."""
    row = {"kind": kind, **values, "time": round(time.time(), 3)}
    return json.dumps(without_nan(row), allow_nan=False) + "\n"


def without_nan(value: Any) -> Any:
    """JSON knows neither NaN nor infinity; both become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return value


def read_evaluations(folder: str | Path) -> list[EvaluationRecord]:
    """The evaluations alone."""
    found = (record for record in losses_of(folder) if isinstance(record, EvaluationRecord))
    return list({record.step: record for record in sorted(found, key=lambda r: r.step)}.values())


def last_step(folder: str | Path) -> StepRecord | None:
    """The last step that was written; None where there is none that can be read."""
    values: dict[str, Any] = {}
    with contextlib.suppress(ThinwireError, TypeError):
        for _, row, _ in _rows(Path(folder) / FILE_NAME):
            values = row if row.get("kind") == "step" else values
        return revived(StepRecord, values)
    return None


def losses_of(folder: str | Path) -> Iterator[StepLoss | EvaluationRecord]:
    """One by one, as they were written, with only the loss of each step: a long run need not fit
    into memory. Incomplete lines are left out.
    """
    path, kinds = Path(folder) / FILE_NAME, dict[str, type[StepLoss] | type[EvaluationRecord]]()
    kinds |= {"step": StepLoss, "evaluation": EvaluationRecord}
    for number, row, _ in _rows(path):
        try:
            if row["kind"] in kinds:
                yield revived(kinds[row["kind"]], row)
        except (KeyError, TypeError) as error:
            raise _damaged(path, number, f"a field is missing or wrong ({error})") from None


def _drop_after(path: Path, last_step: int | None) -> None:
    """Cut the file off behind `last_step`, and in any case a line that a crash has cut off."""
    ends = (end for _, row, end in _rows(path) if last_step is None or row["step"] <= last_step)
    kept = max(ends, default=0)
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(kept)
            file.seek(max(0, kept - 1))
            if kept and file.read() != b"\n":
                file.write(b"\n")
            file.flush()
            os.fsync(file.fileno())


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any], int]]:
    """The rows of a file: the number of each line, what it holds, and where it ends. A line that
    was cut off on its way is none.
    """
    end = 0
    with path.open("rb") if path.exists() else io.BytesIO() as file:
        for number, line in enumerate(file, start=1):
            end += len(line)
            try:
                row = msgspec.json.decode(line)
            except msgspec.DecodeError:
                continue
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise _damaged(path, number, "it is not the record of a step")
            yield number, row, end


def _damaged(path: Path, line: int, why: str) -> ThinwireError:
    return ThinwireError(
        f"line {line} of {path} cannot be read: {why}. "
        "Delete that line, or move the file away to begin a new record."
    )


class Curve:
    """Points (x, ..., y) of a curve: means over runs of equal length, which doubles when full.

    Of a run the means of the last `means` coordinates are kept, and the others of its last point.
    So neither memory nor the cost of drawing grows with the number of steps. `capacity` is even.
    """

    def __init__(self, capacity: int, means: int = 1) -> None:
        self.run_length = 1
        self._capacity, self._means = capacity, means
        self._points: list[tuple[float, ...]] = []
        self._open: list[tuple[float, ...]] = []

    def add(self, *point: float) -> None:
        """Append the next point."""
        if len(self._points) >= self._capacity and not self._open:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [self._merged(pair) for pair in pairs]
            self.run_length *= 2
        self._open.append(point)
        if len(self._open) == self.run_length:
            self._points.append(self._merged(self._open))
            self._open = []

    def drop_from(self, x: float) -> None:
        """Drop the points from `x` on, and with the first of them all of its run."""
        self._points = [point for point in self._points if point[0] < x]
        self._open = [point for point in self._open if point[0] < x]

    def column(self, index: int) -> list[float]:
        """One coordinate of the points so far, the newest (perhaps incomplete) run last."""
        newest = [self._merged(self._open)] if self._open else []
        return [point[index] for point in self._points + newest]

    def _merged(self, points: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
        columns = list(zip(*points, strict=True))
        means = map(finite_mean, columns[-self._means :])
        return (*points[-1][: -self._means], *means)


MOST_POINTS = 4096  # more than a picture has columns


class Losses:
    """The curve of the training loss and the validations, thinned where there are too many.

    Steps and evaluations are given in the order of the run.
    """

    def __init__(
        self,
        records: Iterable[StepRecord | StepLoss | EvaluationRecord] = (),
        most: int = MOST_POINTS,
    ):
        train, valid = Curve(most), Curve(most)
        for record in records:
            if isinstance(record, EvaluationRecord):
                valid.add(record.step, record.loss)
            else:
                train.add(record.step, record.tokens, record.loss)
        self.steps_per_point = train.run_length
        self.steps, self.tokens, self.train = (train.column(index) for index in range(3))
        self.valid_steps, self.valid = (valid.column(index) for index in range(2))

    @classmethod
    def read(cls, folder: str | Path) -> "Losses":
        """Those that a run has written to its folder."""
        return cls(losses_of(folder))


class Story:
    """Appends what happens in a run, in words and with the time, to events.jsonl in its folder, as
    soon as there is one and on any thread; `kind` is the tag that the terminal shows.

    A full disk costs events, but nothing else.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._held: deque[str] = deque(maxlen=_HELD)
        self._lock = threading.Lock()

    def tell(self, kind: str, text: str) -> None:
        """Add an event."""
        if kind in SECRETS:
            return
        with self._lock:
            self._held.append(line_of(kind, {"text": printable(text, _LONGEST)}))
            if not self._folder.is_dir():
                return
            with contextlib.suppress(OSError), (self._folder / EVENTS_FILE).open("a") as file:
                while self._held:
                    file.write(self._held.popleft())
