"""What a stage notes of its own work: what it does, how long it takes, where values go bad."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

# Where values that are not finite may be seen.
INPUT = "input"  # the activations that the stage below sent
FORWARD = "forward"  # this stage's own forward pass
GRADIENT = "gradient"  # what the stage above sent back
BACKWARD = "backward"  # this stage's own backward pass
NORMS = "norms"  # the tally that the stage above sent
PLACES = (INPUT, FORWARD, GRADIENT, BACKWARD, NORMS)  # each leads to the next
_DOING = {"wait": "waits for", "compute": "computes"}  # in the lanes of a trace


class Progress:
    """What one stage is doing, so that no wait is silent; read by the thread that sends pulses."""

    def __init__(self) -> None:
        self.begun = 0
        self.doing = "starts"

    def begin(self, doing: str) -> None:
        """The stage begins another piece of work, or another wait."""
        self.doing = doing
        self.begun += 1


class StepTrace:
    """Spans of one step as (lane, label, start, end), in this machine's monotonic seconds."""

    def __init__(self, step: int = 0, progress: Progress | None = None):
        """`progress` is told of each span as it begins."""
        self.spans: list[tuple[str, str, float, float]] = []
        self._step, self._progress = step, progress or Progress()

    @contextmanager
    def span(self, lane: str, label: str) -> Iterator[None]:
        """Record how long the body takes."""
        self._progress.begin(f"{_DOING[lane]} {label} of step {self._step + 1}")
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


def is_finite(tensor: Tensor) -> bool:
    """Whether all entries are finite: a sum reads a tensor once, and only it may overflow too."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def not_finite(tensors: Mapping[str, Tensor]) -> str:
    """The first of these whose entries are not all finite, if any: as `is_finite`, all at once."""
    named = {name: tensor for name, tensor in tensors.items() if tensor.ndim}
    sums = torch.stack([tensor.sum() for tensor in named.values()]).tolist() if named else []
    suspects = (name for name, total in zip(named, sums, strict=True) if not math.isfinite(total))
    return next((name for name in suspects if not is_finite(named[name])), "")


class Sightings:
    """Where a stage has seen values that are not finite, by step: the first place is named."""

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
