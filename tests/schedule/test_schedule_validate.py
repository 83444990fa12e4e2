"""Each way to break a schedule gives its own message and marks the failing cell."""

import re

import pytest

from thinwire.errors import ScheduleError
from thinwire.schedule import Schedule, build, validate

HEADER = "hand stages=2 microbatches=2 window=2"
BELOW = "0F0 0F1 0B0 0B1 0U"
ABOVE = "1F0 1B0 1F1 1B1 1U"


def refusal(*rows: str, header: str = HEADER) -> str:
    with pytest.raises(ScheduleError) as caught:
        validate(Schedule.parse("\n".join([header, *rows])))
    return str(caught.value)


def test_the_rows_these_tests_break_are_sound():
    validate(Schedule.parse("\n".join([HEADER, BELOW, ABOVE])))


@pytest.mark.parametrize(
    ("below", "above", "reason", "cell"),
    [
        (BELOW, "1F0 1B0 1F1 1U", "1B1: missing in the row of stage 1", "1B1"),
        (BELOW, "1F0 1B0 1B1 1U", "1F1: missing in the row of stage 1", "1F1"),
        (BELOW, "1F0 1B0 1F1 1B1", "1U: missing in the row of stage 1", "1U"),
        ("0F0 0B0 0U", ABOVE, "0F1, 0B1: missing", "0F1"),
        (BELOW, "-", "1F0, 1F1, 1B0, 1B1, 1U: missing", "1F0"),
        ("0F0 0F1 0B0 0F1 0B1 0U", ABOVE, "0F1: repeated, .* position 1", "0F1"),
        ("0F0 0F1 0B0 0B1 0U 0U", ABOVE, "0U: repeated", "0U"),
        (BELOW, "1F0 1B0 1B1 1F1 1U", "1B1: backward before its own forward 1F1", "1B1"),
        ("0F0 1F1 0B0 0B1 0U", ABOVE, "an action of stage 1 is in the row of stage 0", "1F1"),
        ("0F0 0F1 0B0 0U 0B1", ABOVE, "0U: update before 0B1 has run", "0U"),
        ("0F0 0F1 0B0 0B2 0U", ABOVE, "0B2: microbatch out of range, .* 0 to 1", "0B2"),
        ("0F0 0F1 0B1 0B0 0U", ABOVE, "0B0: backward after that of microbatch 1", "0B0"),
    ],
)
def test_broken_rows(below, above, reason, cell):
    message = refusal(below, above)
    first, *grid = message.splitlines()
    assert re.search(reason, first)
    assert grid[0].startswith("slot")
    assert len(grid) == 3
    assert "\n".join(grid).count(">") == 1
    assert f">{cell}<" in message


def test_a_window_that_is_passed():
    message = refusal(BELOW, ABOVE, header="hand stages=2 microbatches=2 window=1")
    assert "0F1: stage 0 would hold 2 microbatches, window=1" in message
    assert ">0F1<" in message


def test_the_marked_cell_is_the_second_of_a_repeated_pair():
    grid = refusal("0F0 0F1 0B0 0F1 0B1 0U", ABOVE).splitlines()[-2]
    assert grid.count("0F1") == 2
    assert grid.index(" 0F1 ") < grid.index(">0F1<")


def test_a_deadlock_names_what_each_stage_waits_for():
    message = refusal("0F0 0B0 0F1 0B1 0U", "1F0 1F1 1B0 1B1 1U")
    assert message.splitlines() == [
        "schedule hand cannot run: 0B0: deadlock, it can never start",
        "  stage 0 at 0B0 waits for 1B0, which comes after 1F1",
        "  stage 1 at 1F1 waits for 0F1, which comes after 0B0",
        "slot     0    1    -    -    -    -",
        "stage 0  0F0  .   >0B0< 0F1  0B1  0U",
        "stage 1  .    1F0 >1F1< 1B0  1B1  1U",
    ]


def test_a_deadlock_lists_the_stages_that_wait_for_the_blocked_ones_too():
    message = refusal(
        "0F0 0F1 0B0 0B1 0U",
        "1F0 1B0 1F1 1B1 1U",
        "2F0 2F1 2B0 2B1 2U",
        header="hand stages=3 microbatches=2 window=2",
    )
    assert "stage 0 at 0B0 waits for 1B0\n" in message
    assert "stage 1 at 1B0 waits for 2B0, which comes after 2F1" in message
    assert "stage 2 at 2F1 waits for 1F1, which comes after 1B0" in message


def test_a_window_that_grows_towards_the_last_stage_deadlocks():
    """The reason why in-flight counts must not grow from stage to stage."""
    sound = build("1f1b", 3, 4, 2)
    wide = build("gpipe", 3, 4)
    rows = (sound.rows[0], sound.rows[1], wide.rows[2])
    with pytest.raises(ScheduleError, match="deadlock"):
        validate(Schedule("mixed", 3, 4, 4, rows))
    validate(Schedule("mixed", 3, 4, 4, (wide.rows[0], sound.rows[1], sound.rows[2])))


def test_headers_that_cannot_be():
    assert "has 1 rows" in refusal(BELOW)
    assert "must be 1 or more" in refusal(header="hand stages=0 microbatches=2 window=2")
    assert "must be 1 or more" in refusal("-", header="hand stages=1 microbatches=0 window=2")


def test_a_forward_only_schedule_has_only_forwards():
    header = "forward stages=1 microbatches=2 window=1"
    validate(Schedule.parse(f"{header}\n0F0 0F1"))
    assert "has only F" in refusal("0F0 0F1 0U", header=header)
    assert "0F1: missing" in refusal("0F0", header=header)
