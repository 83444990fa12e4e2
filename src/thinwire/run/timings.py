"""Where the time of steps went, put together from what all stages report of them.

All times are those of one clock: the stages of a local run are processes of one machine.
"""

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from thinwire.engine.reports import Step
from thinwire.report import TraceSpan

WAITS = ("neighbour", "link", "basis", "verdict")
"""What a stage waits for: the neighbour still computes what is needed; it is done, and the tensor
is packed, queued, sent or on its way; a basis, or rows of a shared embedding; the verdict that
ends the step.
"""
_WARMUP_STEPS = 2  # first steps pay for allocations and caches
_LAST_TRACES = 16  # steps of which one is drawn


class Timings:
    """What steps add up to: of each only its duration is kept, so a run may be of any length.

    Spans are kept of the last few alone.
    """

    def __init__(self, stages: int):
        self.seconds: list[float] = []
        self.sums: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(stages)]
        self.traces: deque[list[Step]] = deque(maxlen=_LAST_TRACES)

    def add(self, reports: list[Step]) -> None:
        """Count one step that all stages have reported."""
        self.seconds.append(step_seconds(reports))
        self.traces.append(reports)
        for stage, (sums, report) in enumerate(zip(self.sums, reports, strict=True)):
            for name, seconds in vars(report.costs).items():
                sums[name] += seconds
            sums["wait"] += report.wait
            for reason, seconds in wait_seconds(reports, stage).items():
                sums[f"wait for {reason}"] += seconds

    @property
    def total(self) -> float:
        """Seconds of all these steps."""
        return sum(self.seconds)

    def mean(self, stage: int, cost: str) -> float:
        """Mean cost per step; 0 when there was none."""
        return self.sums[stage][cost] / len(self.seconds) if self.seconds else 0.0

    def share(self, stage: int, what: str) -> float:
        """Share of the steps' time that went into something."""
        return self.sums[stage][what] / self.total if self.total else math.nan

    def shares(self, stage: int, microbatches: int) -> dict[str, Any]:
        """What a stage did with the steps' time; compute, update, wait and other are all of it."""
        passes = self.share(stage, "forward") + self.share(stage, "backward")
        compute, update = passes * microbatches, self.share(stage, "update")
        wait = self.share(stage, "wait")
        return {
            "stage": stage,
            "compute": compute,
            "update": update,
            "wait": wait,
            "wait_for": {reason: self.share(stage, f"wait for {reason}") for reason in WAITS},
            "other": max(0.0, 1 - compute - update - wait),
        }

    def typical(self) -> list[Step]:
        """Of the last few steps the one nearest to the median duration of all."""
        median = statistics.median(self.seconds)
        return min(self.traces, key=lambda reports: abs(step_seconds(reports) - median))


class StepTimes:
    """All steps of a run, sorted by whether their duration says how fast it trains.

    Two kinds do not: the first steps, and a step behind a validation, which on the first stage
    begins while later stages still validate.
    """

    def __init__(self, stages: int):
        kinds = ("steady", "behind validations", "first")  # the best first
        self._kinds = {kind: Timings(stages) for kind in kinds}
        self._since_start = 0  # steps

    def go_on(self) -> None:
        """Stages were started again: their first steps are first steps too."""
        self._since_start = 0

    def add(self, reports: list[Step], behind_validation: bool) -> None:
        """File a step that all stages have reported."""
        kind = "behind validations" if behind_validation else "steady"
        is_first = self._since_start < _WARMUP_STEPS
        self._since_start += 1
        self._kinds["first" if is_first else kind].add(reports)

    @property
    def which(self) -> str:
        """The kind of steps whose durations count: the best that there are."""
        return next((kind for kind, timings in self._kinds.items() if timings.seconds), "first")

    @property
    def timed(self) -> Timings:
        """The steps whose durations count."""
        return self._kinds[self.which]

    @property
    def steps(self) -> int:
        """How many steps there were."""
        return sum(len(timings.seconds) for timings in self._kinds.values())


def wait_seconds(reports: Sequence[Step], stage: int) -> dict[str, float]:
    """What a stage waited for in a step, by the reasons in WAITS."""
    waits = dict.fromkeys(WAITS, 0.0)
    for lane, label, start, end in reports[stage].spans:
        if lane != "wait":
            continue
        source = {"F": stage - 1, "B": stage + 1}.get(label[:1])
        if source is None:
            waits["verdict" if label == "U" else "basis"] += end - start
            continue
        computed = _computed_at(reports[source], label, start)
        waits["neighbour"] += min(end, max(start, computed)) - start
        waits["link"] += end - min(end, max(start, computed))
    return waits


def _computed_at(report: Step, label: str, unknown: float) -> float:
    ends = (end for lane, name, _, end in report.spans if (lane, name) == ("compute", label))
    return next(ends, unknown)


def step_seconds(reports: Sequence[Step]) -> float:
    """A step as the first stage sees it: from its first forward to the end of its update."""
    return reports[0].end - reports[0].start


def spans_of(reports: Sequence[Step]) -> list[TraceSpan]:
    """The spans of a step for a chart, in seconds since it began on the first stage."""
    origin = reports[0].start
    return [
        TraceSpan(stage, lane, label, start - origin, end - origin)
        for stage, report in enumerate(reports)
        for lane, label, start, end in report.spans
        if label != "norm"
    ]
