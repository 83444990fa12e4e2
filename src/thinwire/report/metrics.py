"""The numbers of a run on disk: one JSON object per line, and TensorBoard event files.

metrics.jsonl is the record that plots and summaries are made from; TensorBoard is a
convenience on top and may be missing.
"""

import dataclasses
import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from thinwire.errors import ThinwireError
from thinwire.report.records import EvaluationRecord, LinkRecord, StageRecord, StepRecord

FILE_NAME = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

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
    path = Path(folder) / FILE_NAME
    for number, (_, values) in enumerate(_complete_lines(path), start=1):
        try:
            if values["kind"] == "step":
                steps[values["step"]] = _step_record(values)
            elif values["kind"] == "evaluation":
                evaluations[values["step"]] = _revived(EvaluationRecord, values)
        except (KeyError, TypeError) as error:
            raise _damaged(path, number, f"a field is missing or wrong ({error})") from None
    return [steps[k] for k in sorted(steps)], [evaluations[k] for k in sorted(evaluations)]


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


def _complete_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Each line with its object. Only the last may be unreadable: a crash cuts it off there."""
    if not path.exists():
        return []
    lines = [line for line in path.read_bytes().split(b"\n") if line]
    complete = []
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
        except ValueError:
            if number < len(lines):
                raise _damaged(path, number, "it is not JSON") from None
            break
        if not isinstance(values, dict) or not isinstance(values.get("step"), int):
            raise _damaged(path, number, "it is not the record of a step")
        complete.append((line, values))
    return complete


def _drop_after(path: Path, last_step: int | None) -> None:
    """Rewrite the file without lines after `last_step` and without a cut-off line.

    The new content replaces the old in one move, so a crash in between loses nothing.
    """
    kept = [
        line + b"\n"
        for line, values in _complete_lines(path)
        if last_step is None or values["step"] <= last_step
    ]
    content = b"".join(kept)
    if not path.exists() or path.read_bytes() == content:
        return
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _damaged(path: Path, line: int, why: str) -> ThinwireError:
    return ThinwireError(
        f"line {line} of {path} cannot be read: {why}. "
        "Delete that line, or move the file away to begin a new record."
    )
