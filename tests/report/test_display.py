import io
import math
import os
from types import SimpleNamespace

import pytest
from rich.console import Console

from records import step_record
from thinwire.report import EvaluationRecord, PlainDisplay, open_display
from thinwire.report.display import LiveDisplay


class Terminal(io.TextIOWrapper):
    """A terminal as far as a program can tell, kept in memory."""

    def __init__(self, encoding="utf-8"):
        super().__init__(io.BytesIO(), encoding=encoding)

    def isatty(self):
        return True

    @property
    def shown(self):
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


@pytest.fixture(autouse=True)
def neutral_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("thinwire.report.display.monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def plain(stream, clock):
    return PlainDisplay(stream)


def test_a_whole_run_in_plain_lines(plain, stream, clock):
    plain.phase("data", "tokenising 10.2 MB")
    plain.progress("data", 4_100_000, 10_200_000, "B")
    plain.progress("data", 10_200_000, 10_200_000, "B")
    plain.step(step_record(1, loss=10.8125, eta_seconds=7500))
    clock.now = 2.0
    plain.step(step_record(40))
    plain.evaluation(EvaluationRecord(40, 4.9876, 1.4321))
    plain.note("link 0 is slow\ntry fewer stages")
    plain.step(step_record(200, tokens_per_s=123_456, step_seconds=0.031, eta_seconds=0))
    plain.evaluation(EvaluationRecord(200, 3.5, None))
    plain.close()
    assert stream.getvalue() == (
        "[data]  tokenising 10.2 MB\n"
        "[data]   40 %  4.1 MB / 10.2 MB\n"
        "[data]  100 %  10.2 MB / 10.2 MB\n"
        "[train] step    1/200  loss 10.8125    3,412 tok/s    1.25 s/step  ETA 2h05m\n"
        "[train] step   40/200  loss  5.1234    3,412 tok/s    1.25 s/step  ETA 3m12s\n"
        "[valid] step   40/200  loss  4.9876  1.4321 bits/byte\n"
        "[note]  link 0 is slow\n"
        "        try fewer stages\n"
        "[train] step  200/200  loss  5.1234  123,456 tok/s    0.03 s/step  ETA 0s\n"
        "[valid] step  200/200  loss  3.5000\n"
    )


def test_steps_are_thinned_but_first_and_last_appear(plain, stream, clock):
    for step in range(1, 101):
        clock.now = step * 0.125  # exact in binary: no rounding decides what is due
        plain.step(step_record(step, steps=100))
    shown = [int(line.split()[2].split("/")[0]) for line in stream.getvalue().splitlines()]
    assert shown == [1, 17, 33, 49, 65, 81, 97, 100]
    for done in range(1001):
        plain.progress("data", done, 1000, "files")
    rest = ["[data]    0 %  0 / 1,000 files", "[data]  100 %  1,000 / 1,000 files"]
    assert stream.getvalue().splitlines()[len(shown) :] == rest


def test_a_stopped_run_ends_with_its_last_loss_once_and_in_order(plain, stream):
    plain.step(step_record(1))
    plain.step(step_record(2, loss=4.4444))
    assert "4.4444" not in stream.getvalue()
    plain.close()
    plain.close()
    assert stream.getvalue().count("4.4444") == 1
    plain.step(step_record(3, loss=math.nan, eta_seconds=math.nan))
    plain.phase("end", "left the run")  # what is held back comes before what came later
    held, last = stream.getvalue().splitlines()[-2:]
    assert "loss     NaN" in held and held.endswith("ETA -") and last.startswith("[end]")
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    PlainDisplay(ascii_only).phase("data", "reading café.txt")
    assert ascii_only.buffer.getvalue() == b"[data]  reading caf?.txt\n"


class GoneReader(io.TextIOWrapper):
    """The writing end of a pipe whose reader has left; perhaps a terminal, as far as it says."""

    def __init__(self, tty=False):
        reading, writing = os.pipe()
        os.close(reading)
        super().__init__(os.fdopen(writing, "wb"), encoding="utf-8")
        self.tty = tty

    def isatty(self):
        return self.tty


@pytest.mark.parametrize("tty", [False, True])
def test_a_reader_that_leaves_does_not_end_the_run(tty):
    stream = GoneReader(tty)
    with pytest.raises(BrokenPipeError):  # so it is without a display
        print("text", file=stream, flush=True)
    with open_display(stream) as display:
        assert type(display) is (LiveDisplay if tty else PlainDisplay)
        display.phase("data", "ready")
        display.progress("data", 1, 2, "B")
        display.progress("data", 2, 2, "B")
        display.evaluation(EvaluationRecord(0, 5.0, 1.5))
        for step in range(1, 4):
            display.step(step_record(step, steps=3))
        display.note("slow")
    stream.close()  # what was buffered must not fail later, when the program ends


def test_a_terminal_gets_the_panel_and_its_cursor_back():
    terminal = Terminal()
    with open_display(terminal, "shakespeare") as display:
        assert isinstance(display, LiveDisplay)
        display.step(step_record())
    assert "shakespeare" in terminal.shown
    assert "5.1234" in terminal.shown
    assert terminal.shown.rindex("\x1b[?25h") > terminal.shown.rindex("\x1b[?25l")


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_is_dumb_or_without_unicode_gets_plain_lines(monkeypatch, term):
    monkeypatch.setenv("TERM", term)
    assert type(open_display(Terminal())) is PlainDisplay
    monkeypatch.setenv("TERM", "xterm")
    assert type(open_display(Terminal(encoding="latin-1"))) is PlainDisplay


def panel_lines(display, console):
    """The panel as it would be drawn now, without what moves the cursor."""
    paper = Console(file=io.StringIO(), color_system=None, width=console.width, height=40)
    paper.print(display._panel(), end="")
    return paper.file.getvalue().splitlines()


def make_display(width=80, run="shakespeare"):
    own = {"force_terminal": True, "color_system": None, "width": width, "height": 40}
    console = Console(file=io.StringIO(), **own)
    return LiveDisplay(console, run), console


@pytest.mark.parametrize("width", [20, 60, 80, 200])
def test_loss_is_visible_and_nothing_wraps_at_any_width(width):
    display, console = make_display(width, run="a run whose name is rather long " * 4)
    display.evaluation(EvaluationRecord(40, 4.9876, 1.4))
    display.step(step_record())
    lines = panel_lines(display, console)
    display.close()
    assert any("loss 5.1234" in line for line in lines)
    assert all(len(line) <= width for line in lines)
    all_that_matters = ("a run whose name", "step 40/200", "ETA 3m12s", "valid 4.9876 at step 40",
                        "3,412 tok/s", "1.25 s/step")  # fmt: skip
    assert width < 80 or all(part in "\n".join(lines) for part in all_that_matters)


def test_the_panel_is_drawn_at_most_four_times_a_second(clock):
    display, console = make_display()
    for step in range(100):
        clock.now = step * 0.01
        display.step(step_record(step + 1))
    assert console.file.getvalue().count("ETA") == 4, "it is in the header line once"
    display.close()


def test_long_work_has_a_bar_until_it_is_done():
    display, console = make_display()
    with display:
        display.progress("data", 4_100_000, 10_200_000, "B")
        assert "4.1 MB / 10.2 MB" in "\n".join(panel_lines(display, console))
        display.progress("data", 10_200_000, 10_200_000, "B")
        assert not "".join(panel_lines(display, console)).strip()
    assert "[data]  10.2 MB / 10.2 MB done" in console.file.getvalue()


def test_phases_and_notes_are_printed_as_they_are():
    display, console = make_display()
    with display:
        display.phase("data", "reading [bold]notes[/bold].txt :smile:")
        display.note("link 0 is slow")
        display.evaluation(EvaluationRecord(3, 4.5, 1.25))
    lines = console.file.getvalue().splitlines()
    assert "[data]  reading [bold]notes[/bold].txt :smile:" in lines
    assert "[note]  link 0 is slow" in lines
    assert "[valid] step    3  loss  4.5000  1.2500 bits/byte" in lines
    display, console = make_display(width=60)
    with display:  # an invite is copied from the screen into a shell: it stays whole
        display.phase("invite", f"thinwire join tw1-{'x' * 150}")
    assert f"[invite] thinwire join tw1-{'x' * 150}" in console.file.getvalue().splitlines()
