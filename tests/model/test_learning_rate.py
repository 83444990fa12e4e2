"""The learning rate is a pure function of the step, with the landmarks its schedules promise."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.model import OptimConfig, learning_rate, rate_changes

PEAK = 0.5
SCHEDULES = ("cosine", "linear", "wsd", "constant")


def rate(schedule, step, warmup=10, steps=110):
    return learning_rate(OptimConfig(lr=PEAK, warmup=warmup, schedule=schedule), step, steps)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_warmup_climbs_evenly_to_the_peak(schedule):
    climb = [rate(schedule, step) for step in range(10)]
    assert climb == pytest.approx([PEAK * (step + 1) / 10 for step in range(10)])
    assert climb[0] > 0, "the first update is not wasted"
    assert climb[-1] == rate(schedule, 10) == PEAK


@pytest.mark.parametrize(("schedule", "quarter", "half", "end"), [
    # 0.1 + 0.9 (1 + cos(pi/4)) / 2, and so on
    ("cosine", 0.8681980515339464, 0.55, 0.1),
    ("linear", 0.75, 0.5, 0.0),
    ("wsd", 1.0, 1.0, 0.0),
    ("constant", 1.0, 1.0, 1.0),
])  # fmt: skip
def test_landmarks_of_the_decay(schedule, quarter, half, end):
    shares = [rate(schedule, step) / PEAK for step in (35, 60, 110)]
    assert shares == pytest.approx([quarter, half, end], abs=1e-12)


@given(st.sampled_from(SCHEDULES), st.integers(1, 300), st.integers(0, 300), st.floats(1e-6, 10.0))
def test_up_then_down_and_never_past_the_peak(schedule, steps, warmup, peak):
    warmup = min(warmup, steps)
    config = OptimConfig(lr=peak, warmup=warmup, schedule=schedule)
    rates = [learning_rate(config, step, steps) for step in range(steps)]
    assert all(0 < value <= peak * (1 + 1e-15) for value in rates)  # lr * 53 / 53 may round up
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


def test_a_stretched_schedule_is_told_with_both_rates():
    config = OptimConfig(lr=0.0325, warmup=2, floor=0.0)
    (text,) = rate_changes(config, 100, config, 10_000, 99)
    assert "was 3.34e-05 at the checkpoint and continues at 0.0325" in text
    lower = dataclasses.replace(config, lr=0.01, schedule="constant")
    assert "continues at 0.01:" in rate_changes(config, 100, lower, 100, 50)[0]
