"""The numbers of a run on disk: one JSON object per line, and TensorBoard event files.

metrics.jsonl is the record that plots and summaries are made from; TensorBoard is a
convenience on top and may be missing.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar

from thinwire.errors import ThinwireError
from thinwire.report.records import (
    EvaluationRecord,
    LinkRecord,
    StageRecord,
    StepLoss,
    StepRecord,
)

FILE_NAME = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
_BLOCK = 1 << 16  # bytes read at a time from the end of a file
_NO_RECORD = "it is not the record of a step"

T = TypeVar("T")


class MetricsWriter:
    """Appends steps and evaluations to a run's folder, each visible to readers at once.

    `resume_step=k` drops what an interrupted run wrote after step k, so that a curve has
    each step once. `tensorboard` says whether event files are written too.
    """

    def __init__(self, folder: str | Path, resume_step: int | None = None) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _drop_after(folder / FILE_NAME, resume_step)
        self._file = (folder / FILE_NAME).open("a", encoding="utf-8")
        self._scalars = _tensorboard_writer(folder / TENSORBOARD_FOLDER, resume_step)
        self.tensorboard: bool = self._scalars is not None

    def step(self, record: StepRecord) -> None:
        """Append a training step."""
        self._append("step", record)
        scalars = {
            "loss/train": record.loss,
            f"speed/{record.unit}s_per_s": record.tokens_per_s,
            "speed/step_seconds": record.step_seconds,
            "optim/lr": record.lr,
            "optim/grad_norm": record.grad_norm,
        }
        for stage in record.stages:
            for name in ("compute_s", "wait_s", "update_s"):
                scalars[f"stage/{stage.stage}/{name}"] = getattr(stage, name)
        for link in record.links:
            for name in ("forward_bytes", "backward_bytes", "utilisation"):
                scalars[f"link/{link.boundary}/{name}"] = getattr(link, name)
        for name, value in record.measures.items():
            scalars[f"space/{name}"] = value
        self._plot(scalars, record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Append a validation."""
        self._append("evaluation", record)
        scalars = {
            "loss/valid": record.loss,
            "loss/valid_bits_per_byte": record.bits_per_byte,
            "accuracy/valid": record.accuracy,
        }
        known = {name: value for name, value in scalars.items() if value is not None}
        self._plot(known, record.step)

    def close(self) -> None:
        """Close the files. May be called twice."""
        self._file.close()
        if self._scalars is not None:
            self._scalars.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _append(self, kind: str, record: StepRecord | EvaluationRecord) -> None:
        values = {"kind": kind, **dataclasses.asdict(record)}
        self._file.write(json.dumps(without_nan(values), allow_nan=False) + "\n")
        self._file.flush()

    def _plot(self, scalars: dict[str, float], step: int) -> None:
        if self._scalars is None:
            return
        for name, value in scalars.items():
            if math.isfinite(value):  # a gap reads better than a broken axis
                self._scalars.add_scalar(name, value, step)


def read_metrics(folder: str | Path) -> tuple[list[StepRecord], list[EvaluationRecord]]:
    """The steps and evaluations in a run's folder, by step; a cut-off last line is left out."""
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
    return _records(folder, _step_record)


def losses_of(folder: str | Path) -> Iterator[StepLoss | EvaluationRecord]:
    """Of each step its loss alone, which takes a fraction of the time."""
    return _records(folder, _step_loss)


def _records(
    folder: str | Path, revive_step: Callable[[dict[str, Any]], T]
) -> Iterator[T | EvaluationRecord]:
    path = Path(folder) / FILE_NAME
    for number, values in _complete_lines(path):
        try:
            if values["kind"] == "step":
                yield revive_step(values)
            elif values["kind"] == "evaluation":
                yield _revived(EvaluationRecord, values)
        except (KeyError, TypeError) as error:
            raise _damaged(path, number, f"a field is missing or wrong ({error})") from None


def _step_loss(values: dict[str, Any]) -> StepLoss:
    loss = math.nan if values["loss"] is None else values["loss"]
    return StepLoss(values["step"], values["tokens"], loss, values.get("unit", "token"))


def _tensorboard_writer(folder: Path, resume_step: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    # TensorBoard hides what earlier event files hold from the purge step on
    purge_step = None if resume_step is None else resume_step + 1
    return SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)


def without_nan(value: Any) -> Any:
    """JSON knows neither nan nor infinity; both become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return value


def _step_record(values: dict[str, Any]) -> StepRecord:
    stages = [_revived(StageRecord, stage) for stage in values["stages"]]
    links = [_revived(LinkRecord, link) for link in values["links"]]
    return _revived(StepRecord, {**values, "stages": stages, "links": links})


def _revived(cls: type[T], values: dict[str, Any]) -> T:
    """The record `cls` from a JSON object: null is nan again where a number is required.

    A field that has a default may be missing: earlier versions did not write it.
    """
    arguments = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name not in values and _has_default(field):
            continue
        value = values[field.name]
        arguments[field.name] = math.nan if value is None and field.type is float else value
    return cls(**arguments)


def _has_default(field: "dataclasses.Field[Any]") -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


def _complete_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each line's number and object. Only the last may be unreadable: a crash cuts it off there."""
    if not path.exists():
        return
    unreadable = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if unreadable:
                raise _damaged(path, unreadable, "it is not JSON")
            try:
                values = json.loads(line)
            except ValueError:
                unreadable = number
                continue
            if not _is_record(values):
                raise _damaged(path, number, _NO_RECORD)
            yield number, values


def _is_record(values: Any) -> bool:
    return isinstance(values, dict) and isinstance(values.get("step"), int)


def _drop_after(path: Path, last_step: int | None) -> None:
    """Cut the file off behind `last_step`, and in any case a line that a crash has cut off.

    It is read from its end, where what is dropped stands: the rest may be long.
    """
    if not path.exists():
        return
    with path.open("r+b") as file:
        end, is_last = 0, True
        for start, line in _lines_from_end(file):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except ValueError:
                if not is_last:
                    raise _damaged(path, _line_number(file, start), "it is not JSON") from None
                is_last = False
                continue
            is_last = False
            if not _is_record(values):
                raise _damaged(path, _line_number(file, start), _NO_RECORD)
            if last_step is None or values["step"] <= last_step:
                end = start + len(line)
                break
        _end_at(file, end)


def _end_at(file: BinaryIO, end: int) -> None:
    """Let the file end with the line that ends there, or be empty."""
    file.seek(end)
    if file.read(2) == b"\n" or (end == 0 and not file.seek(0, os.SEEK_END)):
        return
    file.truncate(end)
    if end:
        file.seek(end)
        file.write(b"\n")
    file.flush()
    os.fsync(file.fileno())


def _lines_from_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, the last one first, each with where it starts."""
    position, rest = file.seek(0, os.SEEK_END), b""
    while position > 0:
        size = min(_BLOCK, position)
        position -= size
        file.seek(position)
        first, *others = (file.read(size) + rest).split(b"\n")
        start, lines = position + len(first) + 1, []
        for line in others:
            lines.append((start, line))
            start += len(line) + 1
        yield from reversed(lines)
        rest = first  # it may begin before this block
    yield 0, rest


def _line_number(file: BinaryIO, start: int) -> int:
    """The number of the line that starts there."""
    file.seek(0)
    number, left = 1, start
    while left > 0 and (block := file.read(min(_BLOCK, left))):
        number += block.count(b"\n")
        left -= len(block)
    return number


def _damaged(path: Path, line: int, why: str) -> ThinwireError:
    return ThinwireError(
        f"line {line} of {path} cannot be read: {why}. "
        "Delete that line, or move the file away to begin a new record."
    )
