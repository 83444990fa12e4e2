"""The losses of a run in memory that does not grow with it: for its plot, or as one line."""

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.report.metrics import losses_of
from thinwire.report.records import EvaluationRecord, StepLoss, StepRecord

if TYPE_CHECKING:
    import numpy as np

_BLOCKS = "▁▂▃▄▅▆▇█"


def finite_mean(values: Sequence[float]) -> float:
    """The mean of the finite values, NaN when there is none."""
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


class Curve:
    """Points (x, ..., y) of a curve: means over runs of equal length, which doubles when full.

    Of a run the mean of y is kept, and the other coordinates of its last point. So neither memory
    nor the cost of drawing grows with the number of steps. `capacity` is even.
    """

    def __init__(self, capacity: int) -> None:
        self.run_length = 1
        self._capacity = capacity
        self._points: list[tuple[float, ...]] = []
        self._open: list[tuple[float, ...]] = []

    def add(self, *point: float) -> None:
        """Append the next point."""
        self._open.append(point)
        if len(self._open) < self.run_length:
            return
        self._points.append(_merged(self._open))
        self._open = []
        if len(self._points) >= self._capacity:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_merged(pair) for pair in pairs]
            self.run_length *= 2

    def column(self, index: int) -> list[float]:
        """One coordinate of the points so far, the newest (perhaps incomplete) run last."""
        newest = [_merged(self._open)] if self._open else []
        return [point[index] for point in self._points + newest]


def _merged(points: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return (*points[-1][:-1], finite_mean([point[-1] for point in points]))


def sparkline(values: Sequence[float], width: int) -> str:
    """The curve of `values` in at most `width` characters; a gap where nothing is finite.

    More values than characters are averaged in equal runs, so the whole curve stays in view.
    """
    cells = min(width, len(values))
    edges = [index * len(values) // cells for index in range(cells + 1)] if cells else []
    means = [finite_mean(values[a:b]) for a, b in itertools.pairwise(edges)]
    known = [mean for mean in means if math.isfinite(mean)]
    if not known:
        return " " * cells
    # halves, because the distance between two huge values would overflow
    low, span = min(known) / 2, max(known) / 2 - min(known) / 2
    top = len(_BLOCKS) - 1

    def block(mean: float) -> str:
        if not math.isfinite(mean):
            return " "
        return _BLOCKS[round((mean / 2 - low) / span * top)] if span > 0 else _BLOCKS[top // 2]

    return "".join(map(block, means))


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

    def tokens_at_validations(self) -> "np.ndarray":
        """Tokens seen before each validation; one before the first step has seen none."""
        import numpy as np  # slow to import, and only plots need it

        return np.interp(self.valid_steps, [0, *self.steps], [0, *self.tokens])
