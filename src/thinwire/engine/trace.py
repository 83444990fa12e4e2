"""What a stage did with its time in one step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


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
