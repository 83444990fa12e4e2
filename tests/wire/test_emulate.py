import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.schedule import Costs, Links, build, simulate
from thinwire.wire import Nic

MEGABIT = 125_000  # bytes


def test_the_uplink_carries_one_message_after_the_other_and_saves_nothing_up():
    nic = Nic(mbps_up=8, mbps_down=8, latency_ms=1000)
    first = nic.reserve_up(MEGABIT, now=10.0)
    second = nic.reserve_up(2 * MEGABIT, now=10.0)
    assert (first.start, first.end) == (10.0, pytest.approx(10.125))
    assert (second.start, second.end) == (pytest.approx(10.125), pytest.approx(10.375))
    # Latency delays without occupying.
    assert (first.arrival, second.arrival) == pytest.approx((11.125, 11.375))
    assert nic.reserve_up(MEGABIT, now=15.0).end == pytest.approx(15.125)


@pytest.mark.parametrize(("down", "arrivals", "delivered"), [
    (0, [1.0, 0.25], [1.0, 0.25]),  # unlimited: nobody waits for another sender
    # The first byte comes at 0.0, the last at 0.125; passing the downlink takes 0.5.
    (2, [0.125, 0.25], [0.5, 1.0]),
    (800, [3.0], [3.0]),  # not before the last byte
    (8, [0.15, 0.275, 0.4], [0.15, 0.275, 0.4]),  # equal rates up and down do not count twice
    (8, [0.125, 0.125], [0.125, 0.25]),  # two senders share the downlink of one host
])  # fmt: skip
def test_the_downlink_decides_where_it_is_slower(down, arrivals, delivered):
    receiver = Nic(mbps_up=8, mbps_down=down, latency_ms=0)
    assert [receiver.reserve_down(MEGABIT, at) for at in arrivals] == pytest.approx(delivered)


@given(
    sizes=st.lists(st.integers(64, 10**6), min_size=1, max_size=30),
    jitter_ms=st.floats(0, 500),
    seed=st.integers(),
)
def test_jitter_is_bounded_repeatable_and_never_reorders(sizes, jitter_ms, seed):
    runs = []
    for _ in range(2):
        nic = Nic(80, 80, latency_ms=10, jitter_ms=jitter_ms, seed=seed)
        runs.append([nic.reserve_up(size, now=0.0) for size in sizes])
    assert runs[0] == runs[1]
    firsts = {Nic(80, 80, 10, 100, seed + other).reserve_up(64, 0.0).arrival for other in range(8)}
    assert len(firsts) == 8, "it depends on the seed"
    arrival = [passage.arrival for passage in runs[0]]
    assert arrival == sorted(arrival)
    for passage in runs[0]:
        assert passage.end + 0.01 <= passage.arrival + 1e-9
        assert passage.arrival <= passage.end + 0.01 + jitter_ms / 1e3 + 1e-9


@given(st.lists(st.tuples(st.integers(64, 10**6), st.floats(0, 1)), max_size=30))
def test_the_downlink_never_exceeds_its_rate_and_never_runs_ahead(arrivals):
    nic = Nic(mbps_up=80, mbps_down=20, latency_ms=0)
    free, now = float("-inf"), 0.0
    for size, pause in arrivals:
        now += pause
        done = nic.reserve_down(size, now)
        assert done >= now
        assert done - free >= size * 8e-6 / 20 - 1e-9
        free = done


@pytest.mark.parametrize(("up", "down"), [(8, 8), (8, 2), (4, 80), (0, 8), (8, 0)])
def test_frames_leave_and_arrive_when_the_emulator_says(up, down):
    """The emulator and the simulator are two programs with one model of a link."""
    costs = Costs([0.01, 0.01], [0.02, 0.02], [0.001, 0.001], [MEGABIT], [MEGABIT])
    played = simulate(build("gpipe", 2, 4), costs, Links.alike(2, up, down, 0.025))
    spans = {(s.stage, s.lane, s.label): s for s in played.spans}
    sender, receiver = Nic(up, down, 25), Nic(up, down, 25)
    for number in range(4):
        made = spans[0, "compute", f"F{number}"].end
        passage = sender.reserve_up(MEGABIT, made)
        sent = spans[0, "send", f"F{number}>"]
        assert (sent.start, sent.end) == pytest.approx((passage.start, passage.end))
        delivered = receiver.reserve_down(MEGABIT, passage.arrival)
        taken = spans[1, "compute", f"F{number}"].start
        before = spans[1, "compute", f"F{number - 1}"].end if number else 0.0
        assert taken == pytest.approx(max(delivered, before))
