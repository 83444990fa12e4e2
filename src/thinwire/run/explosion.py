"""Whether the loss of a run has exploded: finite, and far above its own past.

The training loss is noisy, so the median of the last steps counts, against what all but the worst
losses of the calmest stretch so far stayed below. Validations always score the same data, so one
counts against the best; but where the training loss stays below that, the run only overfits.
"""

import math
import statistics
from collections import deque
from pathlib import Path

from thinwire.engine.checkpoint import Checkpoint
from thinwire.engine.reports import Evaluation, Step
from thinwire.run.checkpoints import begin_proof
from thinwire.run.events import Exploded, Recovered
from thinwire.settings import Settings

STRETCH = 64  # steps whose losses a later one is held against
LATEST = 16  # steps whose median is held against them
WORST_SHARE = 20  # of the losses of a stretch, one in so many is not looked at
LEAST_RISE, RISE_SHARE = 1.0, 0.5  # in nats, and of the loss before: no run recovers that by chance


class LossWatch:
    """Hears the reports of a run's stages in order, and says when its loss explodes."""

    def __init__(self, stops: bool = False, best: float = math.inf):
        self.stops = stops  # whether the run is to end then
        self._best = best  # validation so far
        self._validation = -math.inf  # the last one
        self._stretch: deque[float] = deque(maxlen=STRETCH)
        self._latest: deque[float] = deque(maxlen=LATEST)
        self._calmest = math.inf  # what the losses of the calmest stretch stayed below
        self._is_exploded = False

    def hear(self, report: Step | Evaluation) -> list[Exploded | Recovered]:
        """What a report changes; most change nothing, and so does a loss that is not finite."""
        if report.loss is None or not math.isfinite(report.loss):
            return []
        if isinstance(report, Evaluation):
            self._validation = report.loss
            self._best = min(self._best, report.loss)
        else:
            if len(self._latest) == LATEST:
                self._stretch.append(self._latest[0])
            self._latest.append(report.loss)
            if len(self._stretch) == STRETCH:
                high = sorted(self._stretch)[-1 - STRETCH // WORST_SHARE]
                self._calmest = min(self._calmest, high)
        trouble = self._trouble()
        if bool(trouble) == self._is_exploded:
            return []
        self._is_exploded = bool(trouble)
        done = report.step + isinstance(report, Step)
        if trouble:
            return [Exploded(f"the loss has exploded by step {done}: {trouble}")]
        return [Recovered(f"the loss is back to where it was, at step {done}")]

    def _trouble(self) -> str:
        if not self._latest:
            return ""  # a validation alone may be of a run that has overfitted before
        now = statistics.median(self._latest)
        if now > self._limit(self._calmest):
            return f"that of training is {now:.4g}, where it had stayed below {self._calmest:.4g}"
        if self._validation > self._limit(self._best) and now > self._best:
            return f"that of validation is {self._validation:.4g}, and was {self._best:.4g}"
        return ""

    def _limit(self, loss: float) -> float:
        """The highest loss that may follow on this one; lower for a run that has exploded."""
        rise = max(LEAST_RISE, RISE_SHARE * loss)
        return loss + (rise / 2 if self._is_exploded else rise)


def watch_losses(settings: Settings, folder: Path, resumed: Checkpoint | None) -> LossWatch:
    """The watch of a run that begins, or goes on from a checkpoint."""
    best = begin_proof(folder, resumed).best_loss
    return LossWatch(settings.run.on_explosion == "stop", best)
