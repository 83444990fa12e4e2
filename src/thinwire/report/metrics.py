"""The numbers of a run on disk: one JSON object per line, and TensorBoard event files.

metrics.jsonl is the record that plots and summaries are made from; TensorBoard and Weights & Biases
are a convenience on top and may be missing.
"""

import contextlib
import dataclasses
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from thinwire.errors import ThinwireError
from thinwire.report.records import EvaluationRecord, StepLoss, StepRecord, revived
from thinwire.report.wandb import WandbLog

FILE_NAME = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

Step = TypeVar("Step", StepRecord, StepLoss)


class MetricsWriter(contextlib.AbstractContextManager["MetricsWriter"]):
    """Appends steps and evaluations to a run's folder, each visible to readers at once.

    `resume_step=k` drops what an interrupted run wrote after step k, so that a curve has
    each step once. `tensorboard` says whether event files are written too; `wandb` gets the same.
    """

    def __init__(
        self,
        folder: str | Path,
        resume_step: int | None = None,
        wandb: WandbLog | None = None,
    ) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _drop_after(folder / FILE_NAME, resume_step)
        self._file = (folder / FILE_NAME).open("a", encoding="utf-8")
        self._scalars = _tensorboard_writer(folder / TENSORBOARD_FOLDER, resume_step)
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
        scalars = {
            "loss/valid": record.loss,
            "loss/valid_bits_per_byte": record.bits_per_byte,
        }
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
        values = {"kind": kind, **dataclasses.asdict(record)}
        self._file.write(json.dumps(without_nan(values), allow_nan=False) + "\n")
        self._file.flush()

    def _plot(self, scalars: Mapping[str, float | None], step: int) -> None:
        # where a number is not finite, a gap reads better than a broken axis
        finite = {n: v for n, v in scalars.items() if v is not None and math.isfinite(v)}
        if self._wandb is not None:
            self._wandb.add(finite, step)
        if self._scalars is not None:
            for name, value in finite.items():
                self._scalars.add_scalar(name, value, step)


def without_nan(value: Any) -> Any:
    """JSON knows neither NaN nor infinity; both become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return value


def read_metrics(folder: str | Path) -> tuple[list[StepRecord], list[EvaluationRecord]]:
    """The steps and evaluations in a run's folder, by step; an incomplete last line is left out."""
    steps: dict[int, StepRecord] = {}
    evaluations: dict[int, EvaluationRecord] = {}
    for record in metrics_of(folder):
        if isinstance(record, StepRecord):
            steps[record.step] = record
        else:
            evaluations[record.step] = record
    return [steps[k] for k in sorted(steps)], [evaluations[k] for k in sorted(evaluations)]


def metrics_of(folder: str | Path) -> Iterator[StepRecord | EvaluationRecord]:
    """The same one by one, as they were written: a long run need not fit into memory."""
    return _records(folder, StepRecord)


def losses_of(folder: str | Path) -> Iterator[StepLoss | EvaluationRecord]:
    """Only the loss of each step, which takes a fraction of the time."""
    return _records(folder, StepLoss)


def _records(folder: str | Path, step: type[Step]) -> Iterator[Step | EvaluationRecord]:
    path = Path(folder) / FILE_NAME
    for number, values in _complete_lines(path):
        try:
            if values["kind"] == "step":
                yield revived(step, values)
            elif values["kind"] == "evaluation":
                yield revived(EvaluationRecord, values)
        except (KeyError, TypeError) as error:
            raise _damaged(path, number, f"a field is missing or wrong ({error})") from None


def _complete_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of each line and the record in it."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                values = _record_in(line, is_last=not file.peek(1))
            except ValueError as error:
                raise _damaged(path, number, str(error)) from None
            if values is not None:
                yield number, values


def _drop_after(path: Path, last_step: int | None) -> None:
    """Cut the file off behind `last_step`, and in any case a line that a crash has cut off.

    It is read from its end, since the rest may be long.
    """
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = _end_of(last_step, content, path)
            if content[end : end + 2] == b"\n":
                return
        file.truncate(end)
        file.seek(end)
        file.write(b"\n" if end else b"")
        file.flush()
        os.fsync(file.fileno())


def _end_of(last_step: int | None, content: mmap.mmap, path: Path) -> int:
    """Where the last line ends whose step is not beyond `last_step`; 0 if there is none."""
    end = len(content)
    while end > 0:
        start = content.rfind(b"\n", 0, end) + 1
        try:
            values = _record_in(content[start:end], is_last=end >= len(content) - 1)
        except ValueError as error:
            raise _damaged(path, content[:start].count(b"\n") + 1, str(error)) from None
        if values is not None and (last_step is None or values["step"] <= last_step):
            return end
        end = start - 1
    return 0


def _record_in(line: bytes, is_last: bool) -> dict[str, Any] | None:
    """The object in a line; None in an empty one, and in a last one that a crash has cut off."""
    if not line.strip():
        return None
    try:
        values = json.loads(line)
    except ValueError:
        if is_last:
            return None
        raise ValueError("it is not JSON") from None
    if not isinstance(values, dict) or not isinstance(values.get("step"), int):
        raise ValueError("it is not the record of a step")
    return values


def _tensorboard_writer(folder: Path, resume_step: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    # TensorBoard hides what earlier event files hold from the purge step on
    purge_step = None if resume_step is None else resume_step + 1
    return SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)


def _damaged(path: Path, line: int, why: str) -> ThinwireError:
    return ThinwireError(
        f"line {line} of {path} cannot be read: {why}. "
        "Delete that line, or move the file away to begin a new record."
    )
