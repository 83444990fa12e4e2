import math

import pytest

from thinwire.report.human import (
    amount,
    duration,
    elapsed,
    human_bytes,
    human_count,
    loss_text,
    percent,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (10_200_000, "10.2 MB"),
     (999_950, "1.0 MB"),  # would round to the four digits of "1000.0 kB"
     (3e9, "3.0 GB"), (5e18, "5000.0 PB"), (math.nan, "-")],
)  # fmt: skip
def test_human_bytes(count, text):
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "decimals", "text"),
    [(0, 1, "0"), (500, 1, "500"), (1_250_000, 2, "1.25M"), (1e9, 1, "1B"), (math.inf, 1, "-")],
)
def test_human_count(count, decimals, text):
    assert human_count(count, decimals) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (45, "45s"), (192, "3m12s"), (3599.7, "1h00m"), (7500, "2h05m"),
     (59.6, "1m00s"),  # rounded before it is split, never "0m60s"
     (3 * 86400 + 4 * 3600, "3d04h"), (-3, "0s"), (math.nan, "-"), (math.inf, "-")],
)  # fmt: skip
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.000 s"), (0.4123, "0.412 s"), (0.9996, "1.00 s"), (1.234, "1.23 s"), (9.996, "10.0 s"),
     (13.84, "13.8 s"), (59.94, "59.9 s"), (59.96, "1m00s"), (192, "3m12s"), (None, "-"),
     (math.nan, "-")],
)  # fmt: skip
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
