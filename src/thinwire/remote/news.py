"""What a host shows on its own screen and, in a few numbers, on those of all its peers."""

import threading
import time
from collections.abc import Callable

from thinwire.remote.messages import FromHost, News, ScoreNews, StepNews
from thinwire.remote.standing import Standing
from thinwire.report import Display, EvaluationRecord, StepRecord

STEP_NEWS_SECONDS = 1.0  # between two steps that peers are told of: their downlinks have other work


class SharedDisplay(Display):
    """A display whose steps, scores and news reach everybody. Unlike others it may be called from
    several threads.
    """

    def __init__(self, shown: Display, tell_all: Callable[[FromHost], None], standing: Standing):
        self._shown, self._tell_all = shown, tell_all
        self.standing = standing
        self._lock = threading.RLock()
        self._told_at = -STEP_NEWS_SECONDS

    def phase(self, tag: str, text: str) -> None:
        with self._lock:
            self._shown.phase(tag, text)

    def progress(self, tag: str, done: int, total: int, unit: str) -> None:
        with self._lock:
            self._shown.progress(tag, done, total, unit)

    def step(self, record: StepRecord) -> None:
        with self._lock:
            self._shown.step(record)
        self.standing.stepped(record)
        for link in record.links:
            seconds = record.step_seconds
            self.standing.crossed(link.cut, link.forward_bytes, link.backward_bytes, seconds)
        now = time.monotonic()
        if now - self._told_at < STEP_NEWS_SECONDS and record.step < record.steps:
            return
        self._told_at = now
        numbers = {name: getattr(record, name) for name in StepNews.__annotations__}
        self._tell_all(StepNews(**numbers))

    def evaluation(self, record: EvaluationRecord) -> None:
        with self._lock:
            self._shown.evaluation(record)
        self._tell_all(ScoreNews(**vars(record)))

    def note(self, text: str) -> None:
        with self._lock:
            self._shown.note(text)
        self._tell_all(News(text))

    def announce(self, tag: str, text: str) -> None:
        """A phase that everybody sees."""
        self.phase(tag, text)
        self._tell_all(News(text))

    def close(self) -> None:
        with self._lock:
            self._shown.close()
