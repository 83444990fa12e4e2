"""What a person sees while a run is under way: the interface, and the plain-text form of it.

Plain lines serve log files, pipes and dumb terminals; `live.py` holds the panel that a real
terminal gets. All methods are called from one thread. None fails because the reader is gone (the
display falls silent then), and none waits for one who has stopped reading: the run goes on.
"""

import contextlib
import math
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import TextIO

from thinwire.report.human import amount, duration, loss_text, percent
from thinwire.report.records import EvaluationRecord, StepRecord
from thinwire.report.stream import safe_stream

_TAG_WIDTH = len("[train]")


class Display(contextlib.AbstractContextManager["Display"]):
    """Shows a run to a person. A context manager, so that errors leave a sane terminal."""

    @abstractmethod
    def phase(self, tag: str, text: str) -> None:
        """Say what begins or has happened, e.g. phase("data", "tokenising 10.2 MB")."""

    @abstractmethod
    def progress(self, tag: str, done: int, total: int, unit: str) -> None:
        """Show how far a long piece of work is; unit "B" is shown as kB, MB and so on."""

    @abstractmethod
    def step(self, record: StepRecord) -> None:
        """Show a finished training step."""

    @abstractmethod
    def evaluation(self, record: EvaluationRecord) -> None:
        """Show a validation."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Show a warning that does not stop the run."""

    @abstractmethod
    def close(self) -> None:
        """Show what is still due and give the terminal back. May be called twice."""

    def __exit__(self, *error: object) -> None:
        self.close()


class PlainDisplay(Display):
    """One line per event, never rewritten: right for logs, pipes and dumb terminals.

    Steps, and the progress of long work, are thinned to one line per `interval` seconds, but the
    first and the last always appear, and so does every evaluation. Lines stand in the order of
    what happened: a step that was held back comes before a phase or a note.
    """

    def __init__(
        self,
        stream: TextIO,
        interval: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = safe_stream(stream)
        self._interval = interval
        self._clock = clock
        self._step_due = self._progress_due = -math.inf
        self._latest: StepRecord | None = None
        self._unshown: StepRecord | None = None

    def phase(self, tag: str, text: str) -> None:
        self._show_step()
        self._line(tag, text)

    def _line(self, tag: str, text: str) -> None:
        # further lines are indented to the column of the first
        first, *others = text.splitlines() or [""]
        lines = [padded_tag(tag) + " " + first, *(" " * (_TAG_WIDTH + 1) + text for text in others)]
        self._stream.write("".join(line.rstrip() + "\n" for line in lines))
        self._stream.flush()

    def progress(self, tag: str, done: int, total: int, unit: str) -> None:
        if done < total and self._clock() < self._progress_due:
            return
        self._progress_due = self._clock() + self._interval
        share = percent(done / total if total else 1.0)
        self._line(tag, f"{share:>5}  {amount(done, total, unit)}")

    def step(self, record: StepRecord) -> None:
        self._latest = self._unshown = record
        if record.step >= record.steps or self._clock() >= self._step_due:
            self._show_step()

    def evaluation(self, record: EvaluationRecord) -> None:
        count = _step_count(record.step, self._latest)
        self._line("valid", f"{count}  loss {loss_text(record.loss):>7}{record.facts()}")

    def note(self, text: str) -> None:
        self.phase("note", text)

    def close(self) -> None:
        self._show_step()  # if it was thinned out: a stopped run still ends with a loss
        self._stream.finish()

    def _show_step(self) -> None:
        record, self._unshown = self._unshown, None
        if record is not None:
            self._step_due = self._clock() + self._interval
            self._line(
                "train",
                f"{_step_count(record.step, record)}  loss {loss_text(record.loss):>7}"
                f"  {record.tokens_per_s:>7,.0f} tok/s"
                f"  {record.step_seconds:>6.2f} s/step  ETA {duration(record.eta_seconds)}",
            )


def padded_tag(tag: str) -> str:
    """A tag as every display shows it, so that texts of the usual ones start in one column."""
    return f"[{tag}]".ljust(_TAG_WIDTH)


def _step_count(step: int, latest: StepRecord | None) -> str:
    if latest is None:
        return f"step {step:>4}"
    return f"step {step:>{max(4, len(str(latest.steps)))}}/{latest.steps}"
