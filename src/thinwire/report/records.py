"""What the coordinator tells this room about a run, as plain frozen data.

Byte counts are what left the sender in one step, frame headers included; seconds are
those of one step unless a name says otherwise.
"""

import dataclasses
import json
import math
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from thinwire.errors import ThinwireError

T = TypeVar("T")


@dataclass(frozen=True)
class StageRecord:
    """How one stage spent one step."""

    stage: int
    layers: str  # "embed+0..1"
    compute_s: float
    wait_s: float
    update_s: float
    device: str


@dataclass(frozen=True)
class LinkRecord:
    """What crossed a cut, which lies between the stage of its number and the next, in one step."""

    cut: int
    forward_bytes: int
    backward_bytes: int
    utilisation: float  # of the busier uplink of its two ends, 0..1; NaN where no rate is known


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. `step` counts from 1, so the last one has step == steps."""

    step: int
    steps: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int  # seen since the beginning of the run
    tokens_per_s: float
    step_seconds: float
    eta_seconds: float
    stages: list[StageRecord]
    links: list[LinkRecord]
    measures: dict[str, float] = field(default_factory=dict)  # of the method: drift, energy, ...


@dataclass(frozen=True)
class EvaluationRecord:
    """The validation loss after a step; bits per byte where the tokenizer's ratio is known."""

    step: int
    loss: float
    bits_per_byte: float | None = None

    def facts(self) -> str:
        """What there is beside the loss, each behind two blanks."""
        return "" if self.bits_per_byte is None else f"  {self.bits_per_byte:.4f} bits/byte"


@dataclass(frozen=True)
class TraceSpan:
    """One bar of a step's timeline, in seconds since the step began."""

    stage: int
    lane: str  # "compute", "send" or "wait"
    label: str  # "F0", "B3", "U" on compute; "F0>", "<B0" on send
    start: float
    end: float


def revived(cls: type[T], values: dict[str, Any]) -> T:
    """The record `cls` from a JSON object: null is NaN again where a number is required.

    TypeError if a field is missing that has no default.
    """
    parts = [part for part in dataclasses.fields(cls) if part.name in values]  # type: ignore[arg-type]
    return cls(**{part.name: _revived_value(part.type, values[part.name]) for part in parts})


def _revived_value(kind: Any, value: Any) -> Any:
    if isinstance(value, list):
        (record,) = typing.get_args(kind)
        return [revived(record, inner) for inner in value]
    return math.nan if value is None and kind is float else value


@dataclass(frozen=True)
class Timeline:
    """The spans of one step, in seconds since it began on the first stage."""

    run: str
    step: int  # counts from 1
    seconds: float  # of the step, as the first stage sees it
    stages: list[StageRecord]
    spans: list[TraceSpan]

    def title(self) -> str:
        """What a chart of it is called."""
        return f"{self.run}: step {self.step}, {self.seconds:.3g} s"


def write_timeline(timeline: Timeline, path: Path) -> None:
    """Write it as one JSON object."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(timeline), allow_nan=False) + "\n")


def read_timeline(path: Path) -> Timeline:
    """What `write_timeline` wrote; ThinwireError when it cannot be read."""
    try:
        return revived(Timeline, json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ThinwireError(
            f"{path} is not the timeline of a step: {error}. `thinwire train` writes one "
            "when a run ends"
        ) from error
