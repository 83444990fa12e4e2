"""The losses of a run as its plot needs them, in memory that does not grow with the run."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from thinwire.report.human import finite_mean
from thinwire.report.metrics import losses_of
from thinwire.report.records import EvaluationRecord, StepLoss, StepRecord

MOST_POINTS = 4096  # more than a picture has columns; even, for they are merged in pairs


class _Thinned:
    """Points of a curve: means over runs of equal length, which doubles when they are too many."""

    def __init__(self, most: int):
        self.run_length = 1
        self._most = most
        self._points: list[tuple[int, int, float]] = []  # step and tokens at the end of a run
        self._open: list[tuple[int, int, float]] = []

    def add(self, step: int, tokens: int, loss: float) -> None:
        self._open.append((step, tokens, loss))
        if len(self._open) < self.run_length:
            return
        self._points.append(_merged(self._open))
        self._open = []
        if len(self._points) == self._most:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_merged(pair) for pair in pairs]
            self.run_length *= 2

    @property
    def points(self) -> list[tuple[int, int, float]]:
        return self._points + ([_merged(self._open)] if self._open else [])


class Losses:
    """The curve of the training loss and the validations, thinned where there are too many.

    Steps and evaluations are given in the order of the run.
    """

    def __init__(
        self,
        records: Iterable[StepRecord | StepLoss | EvaluationRecord] = (),
        most: int = MOST_POINTS,
    ):
        train, valid = _Thinned(most), _Thinned(most)
        self.unit = "token"
        for record in records:
            if isinstance(record, EvaluationRecord):
                valid.add(record.step, 0, record.loss)
            else:
                train.add(record.step, record.tokens, record.loss)
                self.unit = record.unit
        self.steps_per_point = train.run_length
        self.steps = [step for step, _, _ in train.points]
        self.tokens = [tokens for _, tokens, _ in train.points]
        self.train = [loss for _, _, loss in train.points]
        self.valid_steps = [step for step, _, _ in valid.points]
        self.valid = [loss for _, _, loss in valid.points]

    @classmethod
    def read(cls, folder: str | Path) -> "Losses":
        """Those that a run has written to its folder."""
        return cls(losses_of(folder))

    def tokens_at_validations(self) -> np.ndarray:
        """Tokens seen before each validation; one before the first step has seen none."""
        return np.interp(self.valid_steps, [0, *self.steps], [0, *self.tokens])


def _merged(points: Sequence[tuple[int, int, float]]) -> tuple[int, int, float]:
    step, tokens, _ = points[-1]
    return step, tokens, finite_mean([loss for _, _, loss in points])
