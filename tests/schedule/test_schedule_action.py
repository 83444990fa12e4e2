import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import ScheduleError
from thinwire.schedule import Action, Kind, Schedule, build

numbers = st.integers(0, 40)
actions = st.one_of(
    st.builds(Action, numbers, st.sampled_from([Kind.F, Kind.B]), numbers),
    st.builds(Action, numbers, st.just(Kind.U)),
)
schedules = st.builds(
    Schedule,
    st.from_regex(r"[a-z0-9]+", fullmatch=True),
    numbers,
    numbers,
    numbers,
    st.lists(st.lists(actions, max_size=5).map(tuple), max_size=5).map(tuple),
)


def test_actions_print_in_the_short_notation():
    assert str(Action(2, Kind.F, 0)) == "2F0"
    assert str(Action(0, Kind.B, 3)) == "0B3"
    assert str(Action(1, Kind.U)) == "1U"
    assert Action(12, Kind.B, 34).label == "B34"


@given(actions)
def test_an_action_reads_back_equal(action):
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "1U3", "-1F0", "2f0", "2F0 ", "2F-1", "٢F0"]
)
def test_other_text_is_no_action(text):
    with pytest.raises(ScheduleError, match=r"cannot read .* as an action"):
        Action.parse(text)


@pytest.mark.parametrize(
    "arguments", [(-1, Kind.F, 0), (0, Kind.F), (0, Kind.B, -2), (0, Kind.U, 0)]
)
def test_impossible_actions_cannot_be_made(arguments):
    with pytest.raises(ScheduleError):
        Action(*arguments)


@given(schedules)
def test_any_schedule_reads_back_equal_even_a_broken_one(schedule):
    assert Schedule.parse(str(schedule)) == schedule


def test_the_text_of_a_schedule():
    assert str(build("1f1b", 2, 3)) == (
        "1f1b stages=2 microbatches=3 window=2\n"
        "0F0 0F1 0B0 0F2 0B1 0B2 0U\n"
        "1F0 1B0 1F1 1B1 1F2 1B2 1U"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "first line"),
        ("1f1b stages=2", "first line"),
        ("1f1b stages=2 microbatches=x window=2", "first line"),
        ("x stages=2 microbatches=1 window=1\n0F0 0B0\n1F0 1Q0", "row of stage 1: .*'1Q0'"),
    ],
)
def test_unreadable_schedules_say_where(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.parse(text)


def test_the_grid_has_a_row_per_stage_and_a_column_per_slot():
    assert build("1f1b", 2, 2).grid().splitlines() == [
        "slot     0    1    2    3    4    5    6",
        "stage 0  0F0  0F1  .    0B0  .    0B1  0U",
        "stage 1  .    1F0  1B0  1F1  1B1  .    1U",
    ]


def test_the_grid_marks_cells_and_draws_what_never_runs():
    stuck = Schedule.parse(
        "x stages=2 microbatches=2 window=2\n0F0 0B0 0F1 0B1 0U\n1F0 1F1 1B0 1B1 1U"
    )
    assert stuck.unit_slots() == [[0], [1]]
    assert stuck.grid(marked=[(0, 1)]).splitlines() == [
        "slot     0    1    -    -    -    -",
        "stage 0  0F0  .   >0B0< 0F1  0B1  0U",
        "stage 1  .    1F0  1F1  1B0  1B1  1U",
    ]
