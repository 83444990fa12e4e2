"""What a person sees while a run is under way: the interface, and the plain-text form of it.

Plain lines serve log files, pipes and dumb terminals; `live.py` holds the panel that a real
terminal gets. All methods are called from one thread. None fails because the reader is gone (the
display falls silent then), and none waits for one who has stopped reading: the run goes on.
"""

import abc
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from thinwire.report.human import SHORT, amount, duration, loss_text, percent
from thinwire.report.records import EvaluationRecord, StepRecord
from thinwire.report.stream import safe_stream

_TAG_WIDTH = 8  # "[train] ": texts of the usual tags start in the same column


class Display(abc.ABC):
    """Shows a run to a person. A context manager, so that errors leave a sane terminal."""

    @abc.abstractmethod
    def phase(self, tag: str, text: str) -> None:
        """Say what begins or has happened, e.g. phase("data", "tokenising 10.2 MB")."""

    @abc.abstractmethod
    def progress(self, tag: str, done: int, total: int, unit: str) -> None:
        """Show how far a long piece of work is; unit "B" is shown as kB, MB and so on."""

    @abc.abstractmethod
    def step(self, record: StepRecord) -> None:
        """Show a finished training step."""

    @abc.abstractmethod
    def evaluation(self, record: EvaluationRecord) -> None:
        """Show a validation."""

    @abc.abstractmethod
    def note(self, text: str) -> None:
        """Show a warning that does not stop the run."""

    @abc.abstractmethod
    def close(self) -> None:
        """Show what is still due and give the terminal back. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class PlainDisplay(Display):
    """One line per event, never rewritten: right for logs, pipes and dumb terminals.

    Steps are thinned to one line per `interval` seconds, but the first and the last step
    always appear, and so does every evaluation.
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
        self._step_due = -float("inf")
        self._progress_due = -float("inf")
        self._latest: StepRecord | None = None
        self._unshown: StepRecord | None = None

    def phase(self, tag: str, text: str) -> None:
        """Print the text, its further lines indented to the column of the first."""
        first, *others = text.splitlines() or [""]
        lines = [f"[{tag}]".ljust(_TAG_WIDTH - 1) + " " + first]
        lines += [" " * _TAG_WIDTH + other for other in others]
        self._write("".join(line.rstrip() + "\n" for line in lines))

    def progress(self, tag: str, done: int, total: int, unit: str) -> None:
        """Print a line now and then, and always one at the end."""
        if done < total and self._clock() < self._progress_due:
            return
        self._progress_due = self._clock() + self._interval
        share = percent(done / total if total else 1.0)
        self.phase(tag, f"{share:>5}  {amount(done, total, unit)}")

    def step(self, record: StepRecord) -> None:
        """Print the step's line if one is due; keep it for `close` otherwise."""
        self._latest = self._unshown = record
        if record.step >= record.steps or self._clock() >= self._step_due:
            self._print_step(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Print the validation loss in the columns of the training loss."""
        count = _step_count(record.step, self._latest)
        self.phase("valid", f"{count}  loss {loss_text(record.loss):>7}{record.facts()}")

    def note(self, text: str) -> None:
        """Print the warning."""
        self.phase("note", text)

    def close(self) -> None:
        """Print the last step if it was thinned out, so a stopped run still ends with a loss."""
        if self._unshown is not None:
            self._print_step(self._unshown)
        self._stream.finish()

    def _print_step(self, record: StepRecord) -> None:
        self._step_due = self._clock() + self._interval
        self._unshown = None
        self.phase("train", step_line(record))

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def step_line(record: StepRecord) -> str:
    """A training step in one line with fixed columns, the loss first."""
    return (
        f"{_step_count(record.step, record)}  loss {loss_text(record.loss):>7}"
        f"  {record.tokens_per_s:>7,.0f} {SHORT[record.unit]}/s  {record.step_seconds:>6.2f} s/step"
        f"  ETA {duration(record.eta_seconds)}"
    )


def _step_count(step: int, latest: StepRecord | None) -> str:
    if latest is None:
        return f"step {step:>4}"
    return f"step {step:>{max(4, len(str(latest.steps)))}}/{latest.steps}"
