import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.report.human import (
    Curve,
    amount,
    duration,
    elapsed,
    human_bytes,
    human_count,
    loss_text,
    meter_bar,
    percent,
    sparkline,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),  # would round to the four digits of "1000.0 kB"
        (10_200_000, "10.2 MB"),
        (3e9, "3.0 GB"),
        (5e18, "5000.0 PB"),  # the largest suffix keeps growing
        (math.nan, "-"),
    ],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "decimals", "text"),
    [(0, 1, "0"), (500, 1, "500"), (1_250_000, 2, "1.25M"), (1e9, 1, "1B"), (math.inf, 1, "-")],
)
def test_human_count(count, decimals, text):
    assert human_count(count, decimals) == text


def test_human_count_without_decimals_keeps_its_zeros():
    assert human_count(500_000, 0) == "500k"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0s"),
        (45, "45s"),
        (59.6, "1m00s"),  # rounded before it is split, never "0m60s"
        (192, "3m12s"),
        (3599.7, "1h00m"),
        (7500, "2h05m"),
        (3 * 86400 + 4 * 3600, "3d04h"),
        (-3, "0s"),
        (math.nan, "-"),
        (math.inf, "-"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.000 s"),
        (0.4123, "0.412 s"),
        (0.9996, "1.00 s"),
        (1.234, "1.23 s"),
        (9.996, "10.0 s"),
        (13.84, "13.8 s"),
        (59.94, "59.9 s"),
        (59.96, "1m00s"),
        (192, "3m12s"),
        (None, "-"),
        (math.nan, "-"),
    ],
)
def test_elapsed_has_three_digits(seconds, text):
    assert elapsed(seconds) == text


def test_a_loss_that_is_not_finite_is_named():
    losses = (3.45678, math.nan, math.inf, -math.inf, None)
    assert [loss_text(loss) for loss in losses] == ["3.4568", "NaN", "infinite", "infinite", "-"]


def test_percent_and_amount():
    assert percent(0.625) == "62 %"
    assert percent(None) == percent(math.nan) == "-"
    assert amount(4_100_000, 10_200_000, "B") == "4.1 MB / 10.2 MB"
    assert amount(1200, 5000, "files") == "1,200 / 5,000 files"


def test_meter_bar_is_clamped_and_empty_when_unknown():
    assert meter_bar(0.5, 4) == "██░░"
    assert meter_bar(1.7, 4) == "████"
    assert meter_bar(-1, 4) == "░░░░"
    assert meter_bar(math.nan) == ""


def test_sparkline_spans_all_levels():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([7, 0], 8) == "█▁"


def test_sparkline_averages_what_does_not_fit():
    assert sparkline([0, 0, 3, 5, 14, 14], 3) == "▁▃█"


def test_sparkline_of_nothing_flat_and_gaps():
    assert sparkline([], 8) == ""
    assert sparkline([3.0, 3.0], 8) == "▄▄"
    assert sparkline([math.nan, math.inf], 8) == "  "
    assert sparkline([0.0, math.nan, 1.0], 8) == "▁ █"


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True)), st.integers(0, 50))
def test_sparkline_never_exceeds_its_width(values, width):
    assert len(sparkline(values, width)) == min(width, len(values))


def test_curve_keeps_the_shape_in_bounded_memory():
    curve = Curve(capacity=16)
    for value in range(1000):
        curve.add(float(value))
    points = curve.points
    assert len(points) <= 16
    assert points == sorted(points)
    assert points[0] < 100 < 900 < points[-1]


def test_curve_shows_the_newest_value_before_its_run_is_full():
    curve = Curve(capacity=2)
    for value in (1.0, 3.0, 7.0):
        curve.add(value)
    assert curve.points == [2.0, 7.0]
