import io
import math
import os

import pytest

from thinwire.report import EvaluationRecord, PlainDisplay, open_display
from thinwire.report.display import LiveDisplay


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class CountingStream(io.StringIO):
    flushes = 0

    def flush(self):
        self.flushes += 1
        super().flush()


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
def clock():
    return Clock()


@pytest.fixture
def stream():
    return CountingStream()


@pytest.fixture
def plain(stream, clock):
    return PlainDisplay(stream, clock=clock)


def test_a_whole_run_in_plain_lines(plain, stream, clock, make_record):
    plain.phase("data", "tokenising 10.2 MB")
    plain.progress("data", 4_100_000, 10_200_000, "B")
    plain.progress("data", 10_200_000, 10_200_000, "B")
    plain.step(make_record(1, loss=10.8125, eta_seconds=7500))
    clock.now = 2.0
    plain.step(make_record(40))
    plain.evaluation(EvaluationRecord(40, 4.9876, 1.4321))
    plain.note("link 0 is slow\ntry fewer stages")
    plain.step(make_record(200, tokens_per_s=123_456, step_seconds=0.031, eta_seconds=0))
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


def test_each_line_is_flushed(plain, stream, make_record):
    plain.step(make_record(1))
    plain.phase("data", "ready")
    assert stream.flushes >= 2


def test_steps_are_thinned_but_first_and_last_appear(plain, stream, clock, make_record):
    for step in range(1, 101):
        clock.now = step * 0.125  # exact in binary: no rounding decides what is due
        plain.step(make_record(step, steps=100))
    shown = [int(line.split()[2].split("/")[0]) for line in stream.getvalue().splitlines()]
    assert shown == [1, 17, 33, 49, 65, 81, 97, 100]


def test_a_stopped_run_ends_with_its_last_loss_once(plain, stream, make_record):
    plain.step(make_record(1))
    plain.step(make_record(2, loss=4.4444))
    assert "4.4444" not in stream.getvalue()
    plain.close()
    plain.close()
    assert stream.getvalue().count("4.4444") == 1


def test_what_is_held_back_is_shown_before_what_came_later(plain, stream, make_record):
    plain.step(make_record(1))
    plain.step(make_record(2, loss=4.4444))
    plain.phase("end", "left the run")
    plain.close()
    assert [line.split()[0] for line in stream.getvalue().splitlines()] == [
        "[train]", "[train]", "[end]"
    ]  # fmt: skip


def test_progress_is_thinned_but_the_end_appears(plain, stream):
    for done in range(1001):
        plain.progress("data", done, 1000, "files")
    assert stream.getvalue().splitlines() == [
        "[data]    0 %  0 / 1,000 files",
        "[data]  100 %  1,000 / 1,000 files",
    ]


def test_progress_of_nothing_is_complete(plain, stream):
    plain.progress("data", 0, 0, "files")
    assert "100 %" in stream.getvalue()


def test_numbers_that_are_not_finite_are_shown(plain, stream, make_record):
    plain.step(make_record(1, loss=math.nan, eta_seconds=math.nan))
    assert "loss     NaN" in stream.getvalue()
    assert stream.getvalue().endswith("ETA -\n")


def test_long_runs_stay_aligned(plain, stream, clock, make_record):
    plain.step(make_record(1, steps=1_000_000))
    clock.now = 5
    plain.step(make_record(999_999, steps=1_000_000))
    first, second = stream.getvalue().splitlines()
    assert first.index("loss") == second.index("loss")


def test_an_ascii_stream_gets_replacements_not_errors():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    PlainDisplay(stream).phase("data", "reading café.txt")
    assert stream.buffer.getvalue() == b"[data]  reading caf?.txt\n"


class GoneReader(io.TextIOWrapper):
    """The writing end of a pipe whose reader has left; perhaps a terminal, as far as it says."""

    def __init__(self, tty=False):
        reading, writing = os.pipe()
        os.close(reading)
        super().__init__(os.fdopen(writing, "wb"), encoding="utf-8")
        self.tty = tty

    def isatty(self):
        return self.tty


def run_of(display, make_record):
    display.phase("data", "ready")
    display.progress("data", 1, 2, "B")
    display.progress("data", 2, 2, "B")
    display.evaluation(EvaluationRecord(0, 5.0, 1.5))
    for step in range(1, 4):
        display.step(make_record(step, steps=3))
    display.note("slow")


@pytest.mark.parametrize("tty", [False, True])
def test_a_reader_that_leaves_does_not_end_the_run(tty, make_record):
    stream = GoneReader(tty)
    with pytest.raises(BrokenPipeError):  # so it is without a display
        print("text", file=stream, flush=True)
    with open_display(stream) as display:
        assert isinstance(display, LiveDisplay if tty else PlainDisplay)
        run_of(display, make_record)
    stream.close()  # what was buffered must not fail later, when the program ends


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_stream_that_is_closed_does_not_end_the_run(kind, make_record):
    stream = kind()
    with open_display(stream) as display:
        display.phase("data", "ready")
        stream.close()
        run_of(display, make_record)


def test_a_display_stays_silent_once_its_stream_has_failed(make_record):
    class FullDisk(io.StringIO):
        full = False

        def write(self, text):
            if self.full:
                raise OSError(28, "No space left on device")
            return super().write(text)

    stream = FullDisk()
    display = PlainDisplay(stream)
    display.phase("data", "first")
    stream.full = True
    display.phase("data", "second")
    stream.full = False
    display.phase("data", "third")
    assert stream.getvalue() == "[data]  first\n", "half a log would mislead"


def test_errors_that_are_not_the_streams_are_not_hidden(make_record):
    with pytest.raises(ValueError, match="format code"):
        PlainDisplay(io.StringIO()).step(make_record(step_seconds="no number"))


def test_files_and_pipes_get_plain_lines():
    assert isinstance(open_display(io.StringIO()), PlainDisplay)


def test_a_terminal_gets_the_panel_and_its_cursor_back(make_record):
    terminal = Terminal()
    with open_display(terminal, "shakespeare") as display:
        assert isinstance(display, LiveDisplay)
        display.step(make_record())
    assert "shakespeare" in terminal.shown
    assert "5.1234" in terminal.shown
    assert terminal.shown.rindex("\x1b[?25h") > terminal.shown.rindex("\x1b[?25l")


def test_no_color_keeps_the_panel_without_colours(monkeypatch, make_record):
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    with open_display(terminal) as display:
        assert isinstance(display, LiveDisplay)
        display.phase("data", "ready")
        display.step(make_record())
    assert "\x1b[3" not in terminal.shown  # foreground colours are 30 to 38


def test_with_colour_there_is_colour():
    terminal = Terminal()
    with open_display(terminal) as display:
        display.phase("data", "ready")
    assert "\x1b[36m[data]" in terminal.shown


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_dumb_terminal_gets_plain_lines(monkeypatch, term):
    monkeypatch.setenv("TERM", term)
    assert isinstance(open_display(Terminal()), PlainDisplay)


def test_a_terminal_without_unicode_gets_plain_lines():
    assert isinstance(open_display(Terminal(encoding="latin-1")), PlainDisplay)


def test_a_real_pseudo_terminal_is_recognised():
    leader, follower = os.openpty()
    try:
        with os.fdopen(follower, "w", encoding="utf-8") as stream:
            assert isinstance(open_display(stream), LiveDisplay)
    finally:
        os.close(leader)
