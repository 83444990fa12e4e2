"""What a person sees while a run is under way: plain lines, or a live panel on a real terminal.

Plain lines serve log files, pipes and dumb terminals. All methods of a display are called from one
thread. None fails because the reader is gone (the display falls silent then), and none waits for
one who has stopped reading: the run goes on.
"""

import atexit
import contextlib
import math
import os
import sys
import time
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from thinwire.report.human import (
    amount,
    duration,
    human_bytes,
    human_count,
    loss_text,
    meter_bar,
    percent,
    sparkline,
)
from thinwire.report.metrics import Curve
from thinwire.report.records import EvaluationRecord, LinkRecord, StageRecord, StepRecord
from thinwire.report.table import number_columns
from thinwire.safe_stream import safe_stream

_TAG_WIDTH = len("[train]")


class Display(contextlib.AbstractContextManager["Display"]):
    """Shows a run to a person. A context manager, so that errors leave a sane terminal."""

    share: Callable[[str, str], None] = lambda *said: None  # a method here: the display comes first
    """Tells others what this display has found out itself; whoever leads a run sets it."""

    def opened(self, folder: Path) -> None:
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
        self, stream: TextIO, interval: float = 2.0, clock: Callable[[], float] = time.monotonic
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


_SIDE_BY_SIDE_WIDTH = 110  # from here on the two tables fit beside each other
_SPARKLINE_WIDTH = 24
_CURVE_POINTS = 256
_LEAST_INTERVAL = 0.25  # seconds between two drawings of the panel
_COST_SHARE = 0.02  # of a core that drawing may take, whatever the number of stages
_MOST_INTERVAL = 2.0  # but nobody waits longer to see that the run goes on


def open_display(stream: TextIO, run: str = "thinwire") -> Display:
    """The display that suits `stream`: a live panel on a capable terminal, else plain lines.

    A panel needs cursor movement (no TERM=dumb) and Unicode. NO_COLOR keeps the panel
    and takes its colours away. `run` is the name in the panel's header.
    """
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    unicode = (stream.encoding or "").lower().replace("-", "").startswith("utf")
    if not stream.isatty() or dumb or not unicode:
        return PlainDisplay(stream)
    return LiveDisplay(Console(file=stream, highlight=False), run)


class LiveDisplay(Display):
    """Permanent lines for phases and notes, and under them a panel redrawn in place.

    There is no refresh thread: the panel changes only when something is reported, at most
    four times a second, and less often where drawing costs much, so the run keeps its cores. What
    it costs is processor time: on a busy machine a drawing also waits for a core.
    """

    def __init__(
        self,
        console: Console,
        run: str,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
    ) -> None:
        self._stream = safe_stream(cast(TextIO, console.file))
        console.file = cast(IO[str], self._stream)
        self._console = console
        self._run = run
        self._clock, self._used = clock, used
        self._live: Live | None = None
        self._due = -math.inf
        self._bar: RenderableType | None = None
        self._record: StepRecord | None = None
        self._evaluation: EvaluationRecord | None = None
        self._losses = Curve(_CURVE_POINTS)
        # a caller that dies without `with` must not leave a hidden cursor behind
        atexit.register(self.close)

    def phase(self, tag: str, text: str) -> None:
        self._say(tag, text, "cyan")

    def progress(self, tag: str, done: int, total: int, unit: str) -> None:
        """Draw a bar in the panel; when all is done, one permanent line replaces it."""
        if done >= total:
            self._bar = None
            self._draw(at_once=True)
            self._say(tag, f"{amount(done, total, unit)} done", "cyan")
        else:
            bar = ProgressBar(total=total, completed=done)
            self._bar = _row(_tag(tag, "cyan"), bar, Text(amount(done, total, unit)))
            self._draw()

    def step(self, record: StepRecord) -> None:
        self._record = record
        self._bar = None
        self._losses.add(record.loss)
        self._draw(at_once=record.step >= record.steps)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Show the validation loss in the header and keep it as a line in the scrollback."""
        self._evaluation = record
        self._say("valid", f"step {record.step}  loss {record.loss:.4f}{record.facts()}", "green")
        self._draw(at_once=True)

    def note(self, text: str) -> None:
        self._say("note", text, "yellow")

    def close(self) -> None:
        """Leave the last state on the screen, show the cursor, release stdout and stderr."""
        atexit.unregister(self.close)
        try:
            if self._live is not None:
                self._draw(at_once=True)
        finally:
            if self._live is not None:
                self._live.stop()
                self._live = None
            self._stream.finish()

    def _say(self, tag: str, text: str, style: str) -> None:
        # A word longer than a line, as an invite is, must stay whole for whoever copies it.
        is_long = any(len(word) > self._console.width - 2 * len(tag) for word in text.split())
        # Text, not markup: a path such as "[a].txt" must come out as it is
        self._console.print(Text.assemble(_tag(tag, style), " ", text), soft_wrap=is_long)

    def _draw(self, at_once: bool = False) -> None:
        if not at_once and self._clock() < self._due:
            return
        began = self._used()
        if self._live is None:
            # prints to the terminal go above the panel; those to a file or pipe stay there
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()
        self._live.update(self._panel(), refresh=True)
        pause = max(_LEAST_INTERVAL, (self._used() - began) / _COST_SHARE)
        self._due = self._clock() + min(pause, _MOST_INTERVAL)

    def _panel(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._record is not None:
            parts.append(Rule(style="dim"))  # parts the panel from the lines above it
            parts += self._header(self._record)
            if self._record.stages:  # a peer on another machine is told the run's numbers alone
                parts.append(_tables(self._record, self._console.width))
        if self._bar is not None:
            parts.append(self._bar)
        return Group(*parts)

    def _header(self, record: StepRecord) -> list[RenderableType]:
        run = Text(self._run, style="bold cyan")
        run.truncate(self._console.width // 3, overflow="ellipsis")
        top = _row(
            run,
            Text(f"step {record.step:,}/{record.steps:,}"),
            ProgressBar(total=max(1, record.steps), completed=record.step),
            Text(f"ETA {duration(record.eta_seconds)}", style="bold"),
        )
        losses: list[str | tuple[str, str]] = ["loss ", (loss_text(record.loss), "bold"), " "]
        losses.append((sparkline(self._losses.column(-1), _SPARKLINE_WIDTH), "magenta"))
        if self._evaluation is not None:
            losses += ["   valid ", (loss_text(self._evaluation.loss), "bold green")]
            losses.append((f" at step {self._evaluation.step:,}", "dim"))
        facts = (
            f"{record.tokens_per_s:,.0f} tok/s   {record.step_seconds:.2f} s/step"
            f"   {human_count(record.tokens)} tokens   lr {record.lr:.1e}   "
            f"grad {record.grad_norm:.2f}"
        )
        return [
            top,
            Text.assemble(*losses, no_wrap=True, overflow="ellipsis"),
            Text(facts, no_wrap=True, overflow="ellipsis"),
            "",
        ]


def _row(*cells: RenderableType) -> Table:
    """Cells in one line, in which a bar takes all the room that the others leave."""
    row = Table.grid(padding=(0, 1), expand=True)
    for cell in cells:
        is_bar = isinstance(cell, ProgressBar)
        row.add_column(no_wrap=not is_bar, ratio=1 if is_bar else None)
    row.add_row(*cells)
    return row


def _tables(record: StepRecord, width: int) -> RenderableType:
    stages = _stage_table(record.stages, record.step_seconds, text_width=width // 5)
    if not record.links:
        return stages
    links = _link_table(record.links)
    if width < _SIDE_BY_SIDE_WIDTH:
        return Group(stages, "", links)
    both = Table.grid(padding=(0, 6))
    both.add_row(stages, links)
    return both


def _stage_table(stages: list[StageRecord], step_seconds: float, text_width: int) -> Table:
    # On a narrow terminal the texts give way, never the numbers.
    narrow: dict[str, Any] = {"no_wrap": True, "overflow": "ellipsis", "max_width": text_width}
    texts = Column("layers", **narrow), Column("device", **narrow)
    table = _bare_table("stage", *texts, *number_columns("compute", "wait", "update"))
    for stage in stages:
        shares = [
            percent(seconds / step_seconds if step_seconds > 0 else None)
            for seconds in (stage.compute_s, stage.wait_s, stage.update_s)
        ]
        table.add_row(str(stage.stage), Text(stage.layers), Text(stage.device), *shares)
    return table


def _link_table(links: list[LinkRecord]) -> Table:
    busy = Column("uplink busy", no_wrap=True)
    table = _bare_table("link", *number_columns("fwd/step", "bwd/step"), busy)
    for link in links:
        table.add_row(
            f"{link.cut}→{link.cut + 1}",
            human_bytes(link.forward_bytes),
            human_bytes(link.backward_bytes),
            Text.assemble(
                f"{percent(link.utilisation):>5}  ", (meter_bar(link.utilisation), "blue")
            ),
        )
    return table


def _bare_table(first: str, *columns: Column) -> Table:
    style: dict[str, Any] = {"header_style": "dim", "padding": (0, 2, 0, 0), "pad_edge": False}
    return Table(Column(first, no_wrap=True), *columns, box=None, **style)


def _tag(tag: str, style: str) -> Text:
    return Text(padded_tag(tag), style=style)
