"""What stages run in which order, and what cannot run."""

import itertools
import math
from collections import Counter

import pytest

from thinwire.errors import ConfigError, ScheduleError
from thinwire.schedule import PipelineConfig, Schedule, build, grid
from thinwire.schedule.build import Action, Kind, split_layers, stage_window
from thinwire.schedule.simulator import cells


def test_gpipe_runs_all_forwards_first_and_the_default_window_is_classic_1f1b():
    schedule = build("gpipe", 3, 4)
    for stage in range(3):
        labels = [a.label for a in schedule.row(stage)]
        assert labels == ["F0", "F1", "F2", "F3", "B0", "B1", "B2", "B3", "U"]
    assert schedule.window == 4
    assert schedule.held == (4, 4, 4)
    schedule = build("1f1b", 4, 8)
    assert schedule.held == (4, 3, 2, 1)
    last = [a.label for a in schedule.row(3)]
    assert last == [f"{k}{m}" for m in range(8) for k in "FB"] + ["U"]


def test_every_window_is_free_of_deadlock_and_holds_what_the_formula_says():
    for stages in range(1, 7):
        for microbatches in range(stages, 13):
            for window in range(1, microbatches + 1):
                schedule = build("1f1b", stages, microbatches, window)
                assert all(len({*row}) > 2 * microbatches for row in cells(schedule))
                slope = (window - 1) / (stages - 1) if stages > 1 else 0
                steps = [round((stages - 1 - s) * slope, 9) for s in range(stages)]
                expected = [min(microbatches, 1 + math.ceil(step)) for step in steps]
                assert [*schedule.held] == expected
                count = stages, microbatches, window
                assert [stage_window(s, *count) for s in range(stages)] == expected


def test_an_open_window_is_twice_the_stages_by_the_settings_alone():
    assert build("1f1b", 4, 20, -1) == build("1f1b", 4, 20, 8)
    assert build("1f1b", 4, 6, -1) == build("1f1b", 4, 6, 6)
    assert build("1f1b", 1, 6, -1) == build("1f1b", 1, 6)
    assert build("gpipe", 4, 20, -1) == build("gpipe", 4, 20)
    assert PipelineConfig().window == -1


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (build, ("1f1b", 4, 8, -2), "window = -2: .* of -1 or more"),
        (build, ("gpipe", 0, 8), "pipeline.stages = 0, .* one or more"),
        (build, ("1flb", 4, 8), 'did you mean "1f1b"'),
        (build, ("gpipe", 4, 8, 3), 'pipeline.window = 3 .* pipeline.schedule = "1f1b"'),
        (build, ("1f1b", 4, 3),
         "raise pipeline.microbatches to 4 or lower pipeline.stages to 3.*gpipe"),
        (split_layers, (3, [], 4), "pipeline.stages = 4 but the model has 3 layers"),
        *(
            (split_layers, (8, split, stages), rf"{stages} stages .* add up to the 8 of the model")
            for split, stages in (([4, 4], 3), ([4, 3], 2), ([8, 0], 2))
        ),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused_with_their_numbers_or_a_way_out(
    function, arguments, message
):
    with pytest.raises(ConfigError, match=message):
        function(*arguments)


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(8, 4, [2, 2, 2, 2]), (10, 4, [2, 3, 3, 2]), (11, 4, [3, 3, 3, 2]), (3, 3, [1, 1, 1])],
)
def test_an_even_split_spares_the_ends(layers, stages, counts):
    blocks = split_layers(layers, [], stages)
    assert [len(block) for block in blocks] == counts
    assert [layer for block in blocks for layer in block] == list(range(layers))


def test_a_schedule_prints_as_a_line_per_stage_and_as_a_grid_with_a_column_per_slot():
    assert str(build("1f1b", 2, 3)).splitlines() == [
        "1f1b stages=2 microbatches=3 window=2",
        "0F0 0F1 0B0 0F2 0B1 0B2 0U",
        "1F0 1B0 1F1 1B1 1F2 1B2 1U",
    ]
    assert grid(build("1f1b", 2, 2)).splitlines() == [
        "slot     0    1    2    3    4    5    6",
        "stage 0  0F0  0F1  .    0B0  .    0B1  0U",
        "stage 1  .    1F0  1B0  1F1  1B1  .    1U",
    ]


@pytest.mark.parametrize("held", [(4, 4, 4), (4, 2, 1), (2, 2, 1), (1, 1, 1), (3,)])
def test_whatever_stages_hold_a_row_has_every_action_once_in_an_order_that_can_run(held):
    """Gradients are summed in the order of microbatches, and a backward needs its own forward."""
    schedule = Schedule("hand", 4, held)
    both = [Action(kind, m) for kind in (Kind.F, Kind.B) for m in range(4)]
    for stage, most in enumerate(held):
        *passes, update = schedule.row(stage)
        assert update == Action(Kind.U) and Counter(passes) == Counter(both)
        for kind in (Kind.F, Kind.B):
            assert [a.microbatch for a in passes if a.kind is kind] == [0, 1, 2, 3]
        in_flight = [*itertools.accumulate(1 if a.kind is Kind.F else -1 for a in passes)]
        assert max(in_flight) == most and min(in_flight) >= 0
    slots = [{cell: at for at, cell in enumerate(row)} for row in cells(schedule)]
    for stage, m in itertools.product(range(len(held) - 1), range(4)):
        assert slots[stage][f"{stage}F{m}"] < slots[stage + 1][f"{stage + 1}F{m}"]
        assert slots[stage][f"{stage}B{m}"] > slots[stage + 1][f"{stage + 1}B{m}"]


def _runs_to_its_end(rows):
    """A plain player: whoever has what its next action needs runs it, until nobody can."""
    done, at = set(), [0] * len(rows)
    while True:
        ready = [
            stage for stage, row in enumerate(rows) if at[stage] < len(row)
            and ((beside := stage + (-1 if row[at[stage]].kind is Kind.F else 1)) == len(rows)
                 or beside < 0 or (beside, row[at[stage]]) in done)
        ]  # fmt: skip
        if not ready:
            return all(place == len(row) for place, row in zip(at, rows, strict=True))
        for stage in ready:
            done.add((stage, rows[stage][at[stage]]))
            at[stage] += 1


@pytest.mark.parametrize("held", [*itertools.product(range(1, 5), repeat=3)])
def test_a_schedule_is_refused_if_and_only_if_it_deadlocks(held):
    rows = [Schedule("alone", 4, (count,)).row(0)[:-1] for count in held]
    if _runs_to_its_end(rows):
        assert [Schedule("hand", 4, held).row(stage)[:-1] for stage in range(3)] == rows
    else:
        with pytest.raises(ScheduleError, match=r"hand cannot run: .* hold .* of 4 .* deadlock"):
            Schedule("hand", 4, held)


@pytest.mark.parametrize("held", [(2, 0), (5, 1)])
def test_a_stage_that_holds_nothing_or_more_than_there_is_is_refused(held):
    with pytest.raises(ScheduleError, match="Each needs one"):
        Schedule("hand", 4, held)


@pytest.mark.parametrize(("delay", "expected"), [(1, [
        "5F0 5F1 5B0 5F2 5B1 6F0 5B2 5U 6F1 6B0 6F2 6B1 7F0 6B2 6U 7F1 7B0 7F2 7B1 7B2 7U",
        "5F0 5B0 5F1 5B1 5F2 5B2 6F0 6B0 5U 6F1 6B1 6F2 6B2 7F0 7B0 6U 7F1 7B1 7F2 7B2 7U",
    ]), (3, [
        "5F0 5F1 5B0 5F2 5B1 6F0 5B2 6F1 6B0 6F2 6B1 5U 7F0 6B2 7F1 7B0 7F2 7B1 7B2 6U 7U",
        "5F0 5B0 5F1 5B1 5F2 5B2 6F0 6B0 6F1 6B1 6F2 6B2 5U 7F0 7B0 7F1 7B1 7F2 7B2 6U 7U",
    ])])  # fmt: skip
def test_with_delay_steps_follow_on_each_other_and_updates_come_behind_what_is_delayed(
    delay, expected
):
    schedule = build("1f1b", 2, 3, 2, delay)
    rows = [
        " ".join(f"{step}{action.label}" for step, action in schedule.stream(stage, 5, 8))
        for stage in range(2)
    ]
    assert rows == expected
    drained = build("1f1b", 2, 3, 2)
    assert [*drained.stream(0, 5, 7)] == [(s, a) for s in (5, 6) for a in drained.row(0)]


def test_a_stream_of_steps_has_every_action_once_and_holds_no_more_than_a_step_alone():
    for stages, microbatches in ((1, 1), (1, 3), (3, 3), (3, 5)):
        sizes = range(1, microbatches + 1)
        for window, delay in itertools.product(sizes, sizes):
            schedule = build("1f1b", stages, microbatches, window, delay)
            for stage, most in enumerate(schedule.held):
                stream = [*schedule.stream(stage, 0, 4)]
                every = Counter((s, a) for s in range(4) for a in schedule.row(stage))
                assert Counter(stream) == every
                held, updated = 0, -1
                for step, action in stream:
                    held += {Kind.F: 1, Kind.B: -1, Kind.U: 0}[action.kind]
                    assert held <= most
                    updated = step if action.kind is Kind.U else updated
                    behind = 2 if action.microbatch < delay else 1
                    assert action.kind is not Kind.F or updated == max(-1, step - behind)
