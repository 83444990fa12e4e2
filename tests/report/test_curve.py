import math

from hypothesis import given
from hypothesis import strategies as st

from thinwire.report.losses import Curve, sparkline


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
    points = curve.column(-1)
    assert len(points) <= 16
    assert points == sorted(points)
    assert points[0] < 100 < 900 < points[-1]


def test_curve_shows_the_newest_value_before_its_run_is_full():
    curve = Curve(capacity=2)
    for value in (1.0, 3.0, 7.0):
        curve.add(value)
    assert curve.column(-1) == [2.0, 7.0]
