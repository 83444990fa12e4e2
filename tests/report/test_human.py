import math

import pytest

from thinwire.report import human

SPOKEN = {
    human.human_bytes: [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"),
                        (10_200_000, "10.2 MB"), (3e9, "3.0 GB"), (5e18, "5000.0 PB"),
                        # would round to the four digits of "1000.0 kB"
                        (999_950, "1.0 MB"), (math.nan, "-")],
    human.human_count: [(0, "0"), (500, "500"), (1e9, "1B")],
    human.duration: [(0.4, "0s"), (45, "45s"), (192, "3m12s"), (3599.7, "1h00m"), (7500, "2h05m"),
                     (59.6, "1m00s"),  # rounded before it is split, never "0m60s"
                     (3 * 86400 + 4 * 3600, "3d04h"), (-3, "0s"), (math.nan, "-"), (math.inf, "-")],
    # three digits
    human.elapsed: [(0, "0.000 s"), (0.4123, "0.412 s"), (0.9996, "1.00 s"), (1.234, "1.23 s"),
                    (9.996, "10.0 s"), (13.84, "13.8 s"), (59.94, "59.9 s"), (59.96, "1m00s"),
                    (192, "3m12s")],
    human.percent: [(0.625, "62 %"), (None, "-"), (math.nan, "-")],
    human.loss_text: [(3.45678, "3.4568"), (math.nan, "NaN"), (math.inf, "infinite"),
                      (-math.inf, "infinite"), (None, "-")],
}  # fmt: skip
CASES = [(function, *case) for function, cases in SPOKEN.items() for case in cases]


@pytest.mark.parametrize(("function", "number", "text"), CASES)
def test_numbers_are_told_briefly_and_what_is_none_is_named(function, number, text):
    assert function(number) == text


def test_decimals_and_amounts():
    assert human.human_count(1_250_000, 2) == "1.25M"
    assert human.amount(4_100_000, 10_200_000, "B") == "4.1 MB / 10.2 MB"
    assert human.amount(1200, 5000, "files") == "1,200 / 5,000 files"
