"""The one rule by which the emulator and the simulator let messages pass a link."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.occupancy import Occupancy

MEGABIT = 125_000  # bytes


def test_messages_pass_one_after_the_other() -> None:
    link = Occupancy(mbps=8)
    assert link.seconds(MEGABIT) == 0.125
    assert link.carry(MEGABIT, first=10.0, last=10.0) == (10.0, 10.125)
    assert link.carry(2 * MEGABIT, first=10.0, last=10.0) == (10.125, 10.375)
    assert link.carry(MEGABIT, first=20.0, last=20.0) == (20.0, 20.125), "idling saves nothing up"
    assert link.busy == 0.5


@pytest.mark.parametrize(("mbps", "passed"), [(16, 1.125), (8, 1.125), (4, 1.25)])
def test_bytes_pass_while_others_follow(mbps: float, passed: float) -> None:
    """The first byte comes at 1.0, the last at 1.125."""
    link = Occupancy(mbps)
    assert link.carry(MEGABIT, first=1.0, last=1.125) == (1.0, passed)
    assert link.carry(MEGABIT, first=1.0, last=1.125)[0] == passed, "the next one waits so long"


def test_an_unlimited_link_makes_nothing_wait() -> None:
    link = Occupancy(mbps=0)
    assert link.carry(10**9, first=1.0, last=9.0) == (1.0, 9.0)
    assert link.carry(10**9, first=2.0, last=2.0) == (2.0, 2.0)
    assert link.busy == link.seconds(10**9) == 0.0


@given(st.lists(st.tuples(st.integers(1, 10**7), st.floats(0, 10), st.floats(0, 1)), max_size=20))
def test_no_rate_is_exceeded(messages: list[tuple[int, float, float]]) -> None:
    link = Occupancy(mbps=8)
    free = float("-inf")
    for size, first, spread in sorted(messages, key=lambda message: message[1]):
        start, passed = link.carry(size, first, first + spread)
        assert start >= max(first, free)
        assert passed >= first + spread
        assert passed - start >= link.seconds(size) * (1 - 1e-9) - 1e-9
        free = passed
