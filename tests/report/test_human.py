import math

import pytest

from thinwire.report.human import (
    duration,
    human_bytes,
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
    ("seconds", "text"),
    [(0.4, "0s"), (45, "45s"), (192, "3m12s"), (3599.7, "1h00m"), (7500, "2h05m"),
     (59.6, "1m00s"),  # rounded before it is split, never "0m60s"
     (3 * 86400 + 4 * 3600, "3d04h"), (-3, "0s"), (math.nan, "-"), (math.inf, "-")],
)  # fmt: skip
def test_duration(seconds, text):
    assert duration(seconds) == text
