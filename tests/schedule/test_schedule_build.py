import math

import pytest

from thinwire.errors import ConfigError
from thinwire.schedule import (
    Action,
    Kind,
    PipelineConfig,
    build,
    forward_only,
    in_flight,
    split_layers,
    stage_window,
    validate,
)
from thinwire.typed import from_plain


def labels(row, *kinds):
    return [action.label for action in row if action.kind in kinds]


def test_gpipe_runs_all_forwards_first():
    schedule = build("gpipe", 3, 4)
    for stage, row in enumerate(schedule.rows):
        assert [a.label for a in row] == ["F0", "F1", "F2", "F3", "B0", "B1", "B2", "B3", "U"]
        assert {a.stage for a in row} == {stage}
    assert schedule.window == 4
    assert in_flight(schedule) == [4, 4, 4]


def test_the_default_window_is_classic_1f1b():
    schedule = build("1f1b", 4, 8)
    assert in_flight(schedule) == [4, 3, 2, 1]
    last = [a.label for a in schedule.rows[-1]]
    assert last == [f"{k}{m}" for m in range(8) for k in "FB"] + ["U"]


def test_every_window_is_free_of_deadlock_and_holds_what_the_formula_says():
    for stages in range(1, 9):
        for microbatches in range(stages, 17):
            for window in range(1, microbatches + 1):
                schedule = build("1f1b", stages, microbatches, window)
                validate(schedule)
                slope = (window - 1) / (stages - 1) if stages > 1 else 0
                expected = [
                    min(microbatches, 1 + math.ceil(round((stages - 1 - s) * slope, 9)))
                    for s in range(stages)
                ]
                assert in_flight(schedule) == expected
                assert [
                    stage_window(s, stages, microbatches, window) for s in range(stages)
                ] == expected


def test_the_window_never_changes_the_order_of_the_backwards():
    in_order = [f"B{m}" for m in range(8)]
    candidates = [build("1f1b", 4, 8, window) for window in range(9)] + [build("gpipe", 4, 8)]
    for schedule in candidates:
        assert all(labels(row, Kind.B) == in_order for row in schedule.rows)
    assert len({schedule.rows for schedule in candidates}) > 4  # yet they do differ


def test_a_window_beyond_use_is_lowered():
    assert build("1f1b", 4, 8, 100) == build("1f1b", 4, 8, 8)
    assert build("1f1b", 4, 8, 100).window == 8
    assert build("gpipe", 4, 8, 100) == build("gpipe", 4, 8)
    assert build("1f1b", 1, 8, 5) == build("1f1b", 1, 8)


def test_an_open_window_is_twice_the_stages_by_the_settings_alone():
    assert build("1f1b", 4, 20, -1) == build("1f1b", 4, 20, 8)
    assert build("1f1b", 4, 6, -1) == build("1f1b", 4, 6, 6)
    assert build("1f1b", 1, 6, -1) == build("1f1b", 1, 6)
    assert build("gpipe", 4, 20, -1) == build("gpipe", 4, 20)
    assert PipelineConfig().window == -1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpipe", 0, 8), "pipeline.stages = 0"),
        (("1f1b", 4, 0), "pipeline.microbatches = 0"),
        (("1f1b", 4, 8, -2), "pipeline.window = -2"),
        (("gpipe", 4, 8, 3), 'pipeline.window = 3 .* pipeline.schedule = "1f1b"'),
        (("1f1b", 4, 3), "raise pipeline.microbatches to 4 or lower pipeline.stages to 3.*gpipe"),
        (("1flb", 4, 8), 'did you mean "1f1b"'),
    ],
)
def test_impossible_settings_are_refused_with_a_way_out(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build(*arguments)


def test_gpipe_takes_fewer_microbatches_than_stages():
    assert in_flight(build("gpipe", 4, 2)) == [2, 2, 2, 2]


def test_forward_only_holds_nothing_and_passes():
    schedule = forward_only(3, 2)
    assert schedule.rows[2] == (Action(2, Kind.F, 0), Action(2, Kind.F, 1))
    assert in_flight(schedule) == [1, 1, 1]
    with pytest.raises(ConfigError):
        forward_only(3, 0)


def test_the_config_builds_its_default_schedule_and_refuses_unknown_names():
    config = PipelineConfig()
    schedule = build(config.schedule, config.stages, config.microbatches, config.window)
    assert (schedule.name, schedule.window) == ("1f1b", 8)
    assert from_plain(PipelineConfig, {"split": [1, 2]}).split == [1, 2]
    with pytest.raises(ConfigError, match="gpipe"):
        from_plain(PipelineConfig, {"schedule": "gpip"}, "pipeline")


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        (8, 4, [2, 2, 2, 2]),
        (9, 4, [2, 3, 2, 2]),
        (10, 4, [2, 3, 3, 2]),
        (11, 4, [3, 3, 3, 2]),
        (5, 2, [3, 2]),
        (7, 1, [7]),
        (3, 3, [1, 1, 1]),
    ],
)
def test_an_even_split_spares_the_ends(layers, stages, counts):
    blocks = split_layers(layers, [], stages)
    assert [len(block) for block in blocks] == counts
    assert [layer for block in blocks for layer in block] == list(range(layers))


def test_a_given_split_is_used_as_it_is():
    assert split_layers(6, [1, 4, 1], 3) == [range(1), range(1, 5), range(5, 6)]


@pytest.mark.parametrize(
    ("layers", "split", "stages", "message"),
    [
        (3, [], 4, "pipeline.stages = 4 but the model has 3 layers"),
        (8, [4, 4], 3, r"\[4, 4\] names 2 stages but pipeline.stages = 3"),
        (8, [4, 3], 2, "adds up to 7 but the model has 8"),
        (8, [8, 0], 2, r"\[8, 0\]: every stage needs at least one"),
        (8, [9, -1], 2, "at least one layer"),
        (8, [], 0, "pipeline.stages = 0"),
    ],
)
def test_impossible_splits_show_the_numbers(layers, split, stages, message):
    with pytest.raises(ConfigError, match=message):
        split_layers(layers, split, stages)
