"""What a stage reports of its work, to whoever leads the run.

Annotations say all that is checked when a report arrives from another process.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, TypedDict, cast

import msgspec

from thinwire.engine.checkpoint import Shard, Versions
from thinwire.typed import Finite
from thinwire.wire import Link

Cost = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # seconds: the simulator plays with them
Label = Annotated[str, msgspec.Meta(max_length=24)]
Span = tuple[str, Label, Finite, Finite]  # lane, label, start, end by this machine's clock
Agreements = dict[str, dict[str, str]]  # fingerprints of what codecs remember, by cut and leg
Amount = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]  # more than any link counts


class Counts(TypedDict):
    """Frames of one kind that a link has moved."""

    frames: Amount
    header_bytes: Amount
    payload_bytes: Amount


class Moved(TypedDict):
    """What a link has moved, by kind of frame and in `total`, as its meter has it."""

    sent: dict[str, Counts]
    received: dict[str, Counts]


Named = Literal["", "activation", "gradient", "tally", "basis", "rows"]  # what is audited
Meters = dict[str, Moved]  # of each link of a stage, by its name


def meters_of(links: Iterable[Link]) -> Meters:
    """What these links have moved until now."""
    return cast(Meters, {link.name: link.meter.snapshot() for link in links})


@dataclass(frozen=True)
class Audited:
    """How what a stage sent stands against what the process that follows it computes. With a
    `tensor` it is the first that differs by more than rounding; a difference of 0 is then not
    known.
    """

    step: int
    compared: int
    difference: Finite  # the largest so far, relative to the tensor's norm; or that of `tensor`
    tolerance: Finite
    tensor: Named = ""
    microbatch: int = 0


@dataclass(frozen=True)
class StageCosts:
    """Mean seconds of a microbatch's forward and backward, and those of the update."""

    forward: Cost
    backward: Cost
    update: Cost


@dataclass(frozen=True)
class Step:
    """One step of one stage; the loss is known on the last stage alone."""

    step: int
    loss: float | None
    lr: float
    grad_norm: float
    committed: bool
    start: Finite
    end: Finite
    wait: Finite
    costs: StageCosts
    spans: list[Span]
    measures: Annotated[dict[str, float], msgspec.Meta(max_length=32)]
    meters: Meters
    dropped: int
    not_finite: str = ""  # the first of PLACES where it saw such values


@dataclass(frozen=True)
class Evaluation:
    """A validation, scored by the last stage, its seconds there, the tokens behind the loss."""

    step: int
    loss: float
    seconds: Finite
    count: int = 0


@dataclass(frozen=True)
class ShardWritten:
    """A stage's part of a checkpoint is on disk."""

    step: int
    versions: Versions
    shard: Shard
    agreements: Agreements


@dataclass(frozen=True)
class ShardFailed:
    """A stage could not write its part of a checkpoint."""

    step: int
    error: str


Report = Step | Evaluation | ShardWritten | ShardFailed
