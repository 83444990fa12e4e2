import dataclasses
import io
import sys

import pytest
from rich.console import Console

from thinwire.report import EvaluationRecord
from thinwire.report.display import LiveDisplay


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def panel_lines(display, console):
    """The panel as it would be drawn now, without what moves the cursor."""
    paper = Console(file=io.StringIO(), color_system=None, width=console.width, height=40)
    paper.print(display._panel(), end="")
    return paper.file.getvalue().splitlines()


def make_display(width=80, run="shakespeare"):
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system=None, width=width, height=40
    )
    clock = Clock()
    clock.used = 0.0  # processor seconds
    display = LiveDisplay(console, run, clock=clock, used=lambda: clock.used)
    return display, console, clock


def drawings(console):
    """How often the panel was drawn: its header line holds the ETA exactly once."""
    return console.file.getvalue().count("ETA")


@pytest.mark.parametrize("width", [20, 60, 80, 200])
@pytest.mark.parametrize("stage_count", [1, 2, 9])
def test_loss_is_visible_and_nothing_wraps_at_any_width(width, stage_count, make_record):
    display, console, _ = make_display(width, run="a run whose name is rather long " * 4)
    display.evaluation(EvaluationRecord(0, 10.8, 2.5))
    display.step(make_record(stage_count=stage_count))
    lines = panel_lines(display, console)
    display.close()
    assert any("loss 5.1234" in line for line in lines)
    assert all(len(line) <= width for line in lines)


def test_the_panel_shows_what_matters_at_80_columns(make_record):
    display, console, _ = make_display(80)
    for step in range(1, 41):
        display.step(make_record(step, loss=10 - step / 8))
    display.evaluation(EvaluationRecord(40, 4.9876, 1.4))
    text = "\n".join(panel_lines(display, console))
    display.close()
    expected = [
        "shakespeare",
        "step 40/200",
        "ETA 3m12s",
        "loss 5.0000 █",
        "valid 4.9876 at step 40",
    ]
    expected += ["3,412 tok/s", "1.25 s/step", "163.8k tokens", "lr 3.0e-04", "grad 1.25"]
    expected += ["60 %", "32 %", "4 %", "0..1", "cpu"]
    expected += ["0→1", "1.2 MB", "2.3 MB", "83 %  ████████░░"]
    for part in expected:
        assert part in text


def test_a_link_that_is_not_emulated_has_no_bar(make_record):
    display, console, _ = make_display()
    display.step(make_record())
    line = next(line for line in panel_lines(display, console) if line.startswith("1→2"))
    display.close()
    assert line.split() == ["1→2", "1.2", "MB", "2.3", "MB", "-"]


def test_tables_stand_side_by_side_only_where_there_is_room(make_record):
    for width, together in ((100, False), (140, True)):
        display, console, _ = make_display(width)
        display.step(make_record())
        lines = panel_lines(display, console)
        display.close()
        assert any("stage" in line and "link" in line for line in lines) == together


def test_the_panel_is_drawn_at_most_four_times_a_second(make_record):
    display, console, clock = make_display()
    for step in range(100):
        clock.now = step * 0.01
        display.step(make_record(step + 1))
    assert drawings(console) == 4
    display.close()


def test_costly_drawing_is_done_less_often(make_record):
    display, console, clock = make_display()

    def costly_panel():
        clock.used += 0.04
        return "ETA"

    display._panel = costly_panel
    for _ in range(100):
        clock.now += 0.1
        display.step(make_record())
    assert 5 <= drawings(console) <= 6  # in 10 s at two per cent, 0.04 s each
    display.close()


def test_on_a_busy_machine_the_panel_still_follows_the_steps(make_record):
    """Drawing waits 0.2 s for a core, of which it uses 5 ms."""
    display, console, clock = make_display()

    def delayed_panel():
        clock.now += 0.2
        clock.used += 0.005
        return "ETA"

    display._panel = delayed_panel
    for _ in range(16):
        clock.now += 1.2
        display.step(make_record())
    assert drawings(console) == 16
    display.close()


def test_the_last_step_is_drawn_without_delay(make_record):
    display, console, _ = make_display()
    display.step(make_record(199))
    display.step(make_record(200, loss=1.2345))
    assert "1.2345" in console.file.getvalue()
    display.close()


def test_close_draws_a_step_that_was_held_back_and_is_idempotent(make_record):
    display, console, _ = make_display()
    display.step(make_record(1))
    display.step(make_record(2, loss=4.4444))
    assert "4.4444" not in console.file.getvalue()
    display.close()
    assert "4.4444" in console.file.getvalue()
    length = len(console.file.getvalue())
    display.close()
    assert len(console.file.getvalue()) == length


def test_an_exception_gives_the_terminal_back(make_record):
    display, console, _ = make_display()
    before = sys.stdout, sys.stderr
    with pytest.raises(RuntimeError), display:
        display.step(make_record())
        raise RuntimeError("stage 1 died")
    output = console.file.getvalue()
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")
    assert (sys.stdout, sys.stderr) == before


def test_the_terminal_comes_back_even_if_the_last_drawing_fails(make_record):
    display, console, _ = make_display()
    display.step(make_record())

    def broken_panel():
        raise ValueError("cannot draw")

    display._panel = broken_panel
    with pytest.raises(ValueError, match="cannot draw"):
        display.close()
    assert console.file.getvalue().rindex("\x1b[?25h") > 0


def test_output_that_goes_to_a_file_is_not_drawn_into_the_panel(monkeypatch, make_record):
    redirected = io.StringIO()
    monkeypatch.setattr(sys, "stdout", redirected)
    display, console, _ = make_display()
    with display:
        display.step(make_record())
        print("a result for the pipe")
    assert redirected.getvalue() == "a result for the pipe\n"
    assert "pipe" not in console.file.getvalue()


def test_phases_and_notes_are_printed_as_they_are(make_record):
    display, console, _ = make_display()
    with display:
        display.phase("data", "reading [bold]notes[/bold].txt :smile:")
        display.note("link 0 is slow")
        display.evaluation(EvaluationRecord(3, 4.5, 1.25))
    lines = console.file.getvalue().splitlines()
    assert "[data]  reading [bold]notes[/bold].txt :smile:" in lines
    assert "[note]  link 0 is slow" in lines
    assert "[valid] step 3  loss 4.5000  1.2500 bits/byte" in lines


def test_a_word_longer_than_a_line_stays_whole(make_record):
    """An invite is copied from the screen into a shell."""
    display, console, _ = make_display(width=60)
    with display:
        display.phase("invite", f"thinwire join tw1-{'x' * 150}")
    assert f"[invite] thinwire join tw1-{'x' * 150}" in console.file.getvalue().splitlines()


def test_a_peer_that_knows_nothing_of_other_stages_sees_no_empty_table(make_record):
    display, console, _ = make_display()
    display.step(dataclasses.replace(make_record(step=3), stages=[], links=[]))
    lines = panel_lines(display, console)
    assert any("loss" in line for line in lines) and not any("compute" in line for line in lines)
    display.close()


def test_progress_bar_comes_and_goes():
    display, console, _ = make_display()
    display.progress("data", 4_100_000, 10_200_000, "B")
    (line,) = panel_lines(display, console)
    assert line.startswith("[data]") and "━" in line and line.endswith("4.1 MB / 10.2 MB")
    display.progress("data", 10_200_000, 10_200_000, "B")
    assert panel_lines(display, console) == []
    assert "10.2 MB / 10.2 MB done" in console.file.getvalue()
    display.close()
