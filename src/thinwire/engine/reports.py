"""What a stage notes of its work, and reports to whoever leads the run.

Annotations say all that is checked when a report arrives from another process.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypedDict, cast

import msgspec
from torch import Tensor

from thinwire.engine.checkpoint import Shard, Versions, is_finite
from thinwire.typed import Finite
from thinwire.wire import Link

Cost = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # seconds: the simulator plays with them
Span = tuple[str, str, Finite, Finite]  # lane, label, start, end by this machine's clock
Agreements = dict[str, dict[str, str]]  # fingerprints of what codecs remember, by cut and leg
Amount = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]  # more than any link counts

# Where values that are not finite may be seen.
INPUT = "input"  # the activations that the stage below sent
FORWARD = "forward"  # this stage's own forward pass
GRADIENT = "gradient"  # what the stage above sent back
BACKWARD = "backward"  # this stage's own backward pass
NORMS = "norms"  # the tally that the stage above sent
PLACES = (INPUT, FORWARD, GRADIENT, BACKWARD, NORMS)  # each leads to the next


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
    """How what a stage sent stands against what the process that follows it computes, up to this
    step. With a `tensor` it is the first that differs by more than rounding; a difference of 0 is
    then not known.
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
    """One step of one stage; the loss is known on the last stage alone. `not_finite` is the first
    of PLACES where it saw such values.
    """

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
    measures: dict[str, float]
    meters: Meters
    dropped: int
    not_finite: str = ""


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


class Progress:
    """What one stage is doing, so that no wait is silent; read by the thread that sends pulses."""

    def __init__(self) -> None:
        self.begun = 0
        self.doing = "starts"

    def begin(self, doing: str) -> None:
        """The stage begins another piece of work, or another wait."""
        self.doing = doing
        self.begun += 1


@dataclass
class StepTrace:
    """Spans of one step as (lane, label, start, end), in this machine's monotonic seconds."""

    spans: list[tuple[str, str, float, float]] = field(default_factory=list)
    on_begin: Callable[[str, str], None] = lambda lane, label: None

    @contextmanager
    def span(self, lane: str, label: str) -> Iterator[None]:
        """Record how long the body takes."""
        self.on_begin(lane, label)
        start = time.monotonic()
        try:
            yield
        finally:
            self.spans.append((lane, label, start, time.monotonic()))

    def seconds(self, lane: str, prefix: str = "") -> float:
        """Total time in a lane, of the labels that start with `prefix`."""
        return sum(
            end - start
            for where, label, start, end in self.spans
            if where == lane and label.startswith(prefix)
        )


class Sightings:
    """Where a stage has seen values that are not finite: step by step, so that the first is named.
    Within a step microbatches do not depend on each other: the place decides which came first.
    """

    def __init__(self) -> None:
        self._places: dict[int, set[str]] = {}

    def note(self, step: int, place: str) -> None:
        """Values that are not finite were seen here."""
        self._places.setdefault(step, set()).add(place)

    def look(self, step: int, place: str, tensor: Tensor) -> None:
        """Note the place if this tensor is not finite."""
        if not is_finite(tensor):
            self.note(step, place)

    def take_first(self, step: int) -> str:
        """The first place of a step that is over, or nothing; it is forgotten."""
        return min(self._places.pop(step, set()), key=PLACES.index, default="")
