"""The emulator and the simulator are two programs with one model of a link."""

import pytest

from thinwire.schedule import Costs, Network, build, simulate
from thinwire.wire import Nic

SIZE = 100_000


@pytest.mark.parametrize(("up", "down"), [(8, 8), (8, 2), (4, 80), (0, 8), (8, 0)])
def test_frames_leave_and_arrive_when_the_emulator_says(up: float, down: float) -> None:
    costs = Costs([0.01, 0.01], [0.02, 0.02], [0.001, 0.001], [SIZE], [SIZE])
    played = simulate(build("gpipe", 2, 4), costs, Network(up, down, 0.025))
    spans = {(s.stage, s.lane, s.label): s for s in played.spans}
    sender, receiver = Nic(up, down, 25), Nic(up, down, 25)
    for number in range(4):
        made = spans[0, "compute", f"F{number}"].end
        passage = sender.reserve_up(SIZE, made)
        sent = spans[0, "send", f"F{number}>"]
        assert (sent.start, sent.end) == pytest.approx((passage.start, passage.end))
        delivered = receiver.reserve_down(SIZE, passage.arrival)
        taken = spans[1, "compute", f"F{number}"].start
        before = spans[1, "compute", f"F{number - 1}"].end if number else 0.0
        assert taken == pytest.approx(max(delivered, before))
