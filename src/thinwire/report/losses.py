"""The losses of a run as its plot needs them, in memory that does not grow with the run."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from thinwire.report.curve import Curve
from thinwire.report.metrics import losses_of
from thinwire.report.records import EvaluationRecord, StepLoss, StepRecord

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

    def tokens_at_validations(self) -> np.ndarray:
        """Tokens seen before each validation; one before the first step has seen none."""
        return np.interp(self.valid_steps, [0, *self.steps], [0, *self.tokens])
