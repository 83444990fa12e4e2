"""What a person sees while a run is under way: plain lines, and on a real terminal a live panel.

All methods of a display are called from one thread. None fails because the reader is gone, and
none waits for one who has stopped reading: the run goes on.
"""

import contextlib
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import IO, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from thinwire.report.human import amount, duration, loss_text, percent
from thinwire.report.records import EvaluationRecord, StepRecord
from thinwire.safe_stream import SafeStream

_TAG_WIDTH = len("[train]")
_LINE_INTERVAL, _PANEL_INTERVAL = 2.0, 0.25  # seconds between two lines or drawings of one thing
_STYLES = {"note": "yellow", "valid": "green"}  # of tags; all others are cyan


class Display(ABC):
    """Shows a run to a person."""

    share: Callable[[str, str], None] = lambda *said: None  # a method here: the display comes first
    """Tells others what this display has found out itself; whoever leads a run sets it."""

    def opened(self, folder: Path) -> None:  # noqa: B027
        """Hear that this folder is the run's from now on; most displays need none."""

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

    def note(self, text: str) -> None:
        """Show a warning that does not stop the run."""
        self.phase("note", text)


class PlainDisplay(Display, contextlib.AbstractContextManager["PlainDisplay"]):
    """One line per event, never rewritten: right for logs, pipes and dumb terminals. A context
    manager, so that errors leave a sane terminal.

    Steps, and the progress of long work, are thinned to one line in a few seconds, but the first
    and the last always appear. A step that was held back comes before a phase or a note.
    """

    def __init__(self, stream: TextIO | SafeStream) -> None:
        # One object for each stream keeps its order.
        self._stream = stream if isinstance(stream, SafeStream) else SafeStream(stream)
        self._stream.never_wait()
        self._step_due = self._progress_due = -math.inf
        self._latest: StepRecord | None = None
        self._unshown: StepRecord | None = None

    def phase(self, tag: str, text: str) -> None:
        self._show_step()
        self._line(tag, text)

    def _line(self, tag: str, text: str) -> None:
        indented = ("\n" + " " * (_TAG_WIDTH + 1)).join(text.splitlines())
        self._stream.write(f"{padded_tag(tag)} {indented}".rstrip() + "\n")

    def progress(self, tag: str, done: int, total: int, unit: str) -> None:
        if done < total and monotonic() < self._progress_due:
            return
        self._progress_due = monotonic() + _LINE_INTERVAL
        share = percent(done / total if total else 1.0)
        self._line(tag, f"{share:>5}  {amount(done, total, unit)}")

    def step(self, record: StepRecord) -> None:
        self._latest = self._unshown = record
        if record.step >= record.steps or monotonic() >= self._step_due:
            self._show_step()

    def evaluation(self, record: EvaluationRecord) -> None:
        count, bits = _step_count(record.step, self._latest), record.bits_per_byte
        facts = "" if bits is None else f"  {bits:.4f} bits/byte"
        self._line("valid", f"{count}  loss {loss_text(record.loss):>7}{facts}")

    def close(self) -> None:
        """Show what is still due and give the terminal back. May be called twice."""
        self._show_step()  # if it was thinned out: a stopped run still ends with a loss
        self._stream.finish()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _show_step(self) -> None:
        record, self._unshown = self._unshown, None
        if record is not None:
            self._step_due = monotonic() + _LINE_INTERVAL
            count, left = _step_count(record.step, record), duration(record.eta_seconds)
            speed = f"{record.tokens_per_s:>7,.0f} tok/s  {record.step_seconds:>6.2f} s/step"
            self._line("train", f"{count}  loss {loss_text(record.loss):>7}  {speed}  ETA {left}")


def padded_tag(tag: str) -> str:
    """A tag as every display shows it, so that texts of the usual ones start in one column."""
    return f"[{tag}]".ljust(_TAG_WIDTH)


def _step_count(step: int, latest: StepRecord | None) -> str:
    if latest is None:
        return f"step {step:>4}"
    return f"step {step:>{max(4, len(str(latest.steps)))}}/{latest.steps}"


def open_display(stream: TextIO, run: str = "thinwire") -> PlainDisplay:
    """The display that suits `stream`: a live panel, headed by the name of the run, on a terminal
    that can move its cursor and has Unicode, else plain lines.
    """
    console = Console(file=stream, highlight=False)
    if not stream.isatty() or console.is_dumb_terminal or not console.encoding.startswith("utf"):
        return PlainDisplay(stream)
    return LiveDisplay(console, run)


class LiveDisplay(PlainDisplay):
    """The same lines, but instead of those of steps and of long work a panel that stands below. It
    changes when something is reported, at most four times a second: there is no refresh thread.
    """

    def __init__(self, console: Console, run: str) -> None:
        super().__init__(cast(TextIO, console.file))
        console.file = cast(IO[str], self._stream)
        self._console, self._run = console, run
        self._work: RenderableType | None = None
        self._due, self._valid = -math.inf, ""
        # prints to the terminal go above the panel; those to a file or pipe stay there
        self._live = Live(
            console=console,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
            get_renderable=self._panel,
        )

    def progress(self, tag: str, done: int, total: int, unit: str) -> None:
        """Draw a bar in the panel; when all is done, one permanent line replaces it."""
        is_done, share = done >= total, amount(done, total, unit)
        bar = ProgressBar(total=total, completed=done)
        self._work = None if is_done else _row(_tag(tag), bar, share)
        self._draw(at_once=is_done)
        if is_done:
            self._line(tag, f"{share} done")

    def step(self, record: StepRecord) -> None:
        self._latest, self._work = record, None
        self._draw(at_once=record.step >= record.steps)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Show the validation loss in the panel and keep it as a line in the scrollback."""
        super().evaluation(record)
        self._valid = f"   valid {loss_text(record.loss)} at step {record.step:,}"
        self._draw(at_once=True)

    def close(self) -> None:
        """Leave the last state on the screen, show the cursor, release stdout and stderr."""
        self._live.stop()
        super().close()

    def _line(self, tag: str, text: str) -> None:
        # A word longer than a line, as an invite is, must stay whole for whoever copies it.
        is_long = any(len(word) > self._console.width - 2 * len(tag) for word in text.split())
        # Text, not markup: a path such as "[a].txt" must come out as it is
        self._console.print(Text.assemble(_tag(tag), " ", text), soft_wrap=is_long)

    def _draw(self, at_once: bool = False) -> None:
        if not at_once and monotonic() < self._due:
            return
        self._due = monotonic() + _PANEL_INTERVAL
        self._live.start()
        self._live.refresh()

    def _panel(self) -> RenderableType:
        parts: list[RenderableType] = []
        if (record := self._latest) is not None:
            run = Text(self._run, style="bold cyan")
            run.truncate(self._console.width // 3, overflow="ellipsis")
            bar = ProgressBar(total=max(1, record.steps), completed=record.step)
            left = Text(f"ETA {duration(record.eta_seconds)}", style="bold")
            speed = f"{record.tokens_per_s:,.0f} tok/s   {record.step_seconds:.2f} s/step"
            facts = f"loss {loss_text(record.loss)}{self._valid}   {speed}"
            parts.append(Rule(style="dim"))  # parts the panel from the lines above it
            parts.append(_row(run, f"step {record.step:,}/{record.steps:,}", bar, left))
            parts.append(Text(facts, no_wrap=True, overflow="ellipsis"))
        return Group(*parts, *([self._work] if self._work is not None else []))


def _row(*cells: RenderableType) -> Table:
    """Cells in one line, in which a bar takes all the room that the others leave."""
    row = Table.grid(padding=(0, 1), expand=True)
    for cell in cells:
        is_bar = isinstance(cell, ProgressBar)
        row.add_column(no_wrap=not is_bar, ratio=1 if is_bar else None)
    row.add_row(*cells)
    return row


def _tag(tag: str) -> Text:
    return Text(padded_tag(tag), style=_STYLES.get(tag, "cyan"))
