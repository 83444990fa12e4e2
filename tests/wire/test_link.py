import itertools
import threading
import time

import pytest
from wiring import MAX_PAYLOAD, Passed, Recorder

from thinwire.errors import BreachError, WireError
from thinwire.wire import Frame, FrameKind, Link, Meter, Nic, Pipe, emulated, encode, memory_pair
from thinwire.wire.pipe import STAMP_BYTES
from waiting import PATIENCE

NICS = {"direct": lambda: None, "emulated": lambda: Nic(800, 800, latency_ms=2, jitter_ms=1)}


class CountingPipe(Passed):
    """Counts what passes, apart from the meter, and can be made to fail or to stand still.

    `stamp` is what the emulation adds to each message for itself.
    """

    def __init__(self, inner, stamp):
        super().__init__(inner)
        self._stamp = stamp
        self.written = self.read_in = 0
        self.open_gate = threading.Event()
        self.open_gate.set()

    def write(self, message):
        assert self.open_gate.wait(PATIENCE)
        super().write(message)
        self.written += len(message) - self._stamp

    def read(self):
        message = super().read()
        self.read_in += len(message) - self._stamp if message else 0
        return message


class End:
    """A started link with its meter, its counting pipe and what it reported."""

    def __init__(self, name, pipe, nic):
        self.pipe = CountingPipe(pipe, STAMP_BYTES if nic else 0)
        self.meter = Meter()
        self.heard = Recorder()
        self.link = Link(emulated(self.pipe, nic), self.meter, name, MAX_PAYLOAD)
        self.link.start(self.heard.on_frame, self.heard.on_broken, self.heard.on_end)


@pytest.fixture(params=NICS)
def ends(request, pipes):
    both = End("0-1", pipes[0], NICS[request.param]()), End("1-0", pipes[1], NICS[request.param]())
    yield both
    for end in both:
        end.link.close()


@pytest.fixture
def direct_ends():
    here, there = memory_pair()
    both = End("0-1", here, None), End("1-0", there, None)
    yield both
    for end in both:
        end.pipe.open_gate.set()
        end.link.close()


def forward(number, size=1000):
    return Frame(FrameKind.FORWARD, step=number, payload=bytes([number % 256]) * size)


def test_frames_arrive_in_order_and_counted_to_the_byte_and_goodbye_is_no_fault(ends):
    """The meter's totals are the bytes handed to the transport, both ways."""
    here, there = ends
    for number in range(50):
        here.link.send(forward(number, size=number * 777))
        frame = Frame(FrameKind.TALLY, step=number, payload=bytes(number))
        there.link.send(lambda frame=frame: frame)
    here.link.wait_for_room(1)
    there.link.wait_for_room(1)
    there.heard.wait(lambda: len(there.heard.frames) == 50)
    here.heard.wait(lambda: len(here.heard.frames) == 50)
    assert there.heard.frames == [forward(number, number * 777) for number in range(50)]
    assert [frame.step for frame in here.heard.frames] == list(range(50))
    assert here.meter.sent_bytes() == here.pipe.written == 50 * 64 + 1225 * 777
    assert here.meter.received_bytes() == here.pipe.read_in == 50 * 64 + 1225
    assert there.meter.sent_bytes() == there.pipe.written == here.pipe.read_in
    assert there.meter.received_bytes() == there.pipe.read_in == here.pipe.written
    here.link.close()
    there.heard.wait(lambda: there.heard.ends)
    assert here.meter.sent_bytes() == here.pipe.written
    assert here.meter.snapshot()["sent"]["BYE"]["frames"] == 1
    there.link.close()
    assert here.heard.errors == there.heard.errors == []
    assert here.heard.ends == 0


def slow_pair(mbps, latency_ms=0):
    here, there = memory_pair()
    nics = [Nic(mbps, 0, latency_ms) for _ in range(2)]
    return End("0-1", here, nics[0]), End("1-0", there, nics[1])


@pytest.mark.parametrize(("timeout", "mbps"), [(None, 1), (0.05, 0.1)])
def test_closing_without_a_limit_drops_nothing_on_a_slow_link(timeout, mbps):
    here, there = slow_pair(mbps)
    for number in range(5):
        here.link.send(forward(number, 10_000))  # 0.08 s each, or 0.8 s
    here.link.close(timeout)
    there.heard.wait(lambda: there.heard.ends or there.heard.errors)
    assert (len(there.heard.frames) == 5 and there.heard.ends == 1) is (timeout is None)
    there.link.close()


def test_send_does_not_wait_for_a_transport_that_stands_still(direct_ends):
    here, there = direct_ends
    here.pipe.open_gate.clear()
    for number in range(5000):  # far more than any buffer below
        here.link.send(forward(number, size=10))
    assert here.pipe.written == 0 and here.link.unsent == 5000
    here.pipe.open_gate.set()
    here.link.wait_for_room(1)
    there.heard.wait(lambda: len(there.heard.frames) == 5000)


def test_packing_runs_on_the_link_s_thread_in_queue_order(direct_ends):
    here, there = direct_ends
    packed: list[tuple[int, int]] = []

    def pack(number):
        packed.append((number, threading.get_ident()))
        return forward(number)

    here.link.send(forward(0))
    here.link.send(lambda: pack(1))
    here.link.send(forward(2))
    here.link.send(lambda: pack(3))
    there.heard.wait(lambda: len(there.heard.frames) == 4)
    assert [frame.step for frame in there.heard.frames] == [0, 1, 2, 3]
    assert [number for number, _ in packed] == [1, 3]
    assert threading.get_ident() not in {thread for _, thread in packed}


def test_a_failure_in_packing_breaks_both_ends_once(ends):
    here, there = ends

    def fail():
        raise ZeroDivisionError("no such scale")

    here.link.send(fail)
    here.link.send(forward(1))
    here.heard.wait(lambda: here.heard.errors)
    there.heard.wait(lambda: there.heard.errors)
    assert "link 0-1 is broken: packing a frame failed" in str(here.heard.errors[0])
    assert "no such scale" in str(here.heard.errors[0])
    assert isinstance(here.heard.errors[0].__cause__, ZeroDivisionError)
    gone = "link 1-0 is broken: the other end closed it without a goodbye"
    assert gone in str(there.heard.errors[0])
    assert (here.link.other_end_lost, there.link.other_end_lost) == (False, True)
    here.link.close()
    there.link.close()
    assert len(here.heard.errors) == len(there.heard.errors) == 1
    assert there.heard.frames == [] and there.heard.ends == 0


@pytest.mark.parametrize(("message", "reason"), [
    (b"GET / HTTP/1.1\r\n" * 5, "magic"),
    (b"short", "length"),
    (encode(forward(1, MAX_PAYLOAD + 1)), f"at most {MAX_PAYLOAD} are accepted"),
])  # fmt: skip
def test_a_malformed_message_breaks_the_link(message, reason):
    here, there = memory_pair()
    end = End("1-0", there, NICS["direct"]())
    here.write(message)
    end.heard.wait(lambda: end.heard.errors)
    assert reason in str(end.heard.errors[0]) and end.link.other_end_at_fault
    assert here.read() is None  # the pipe was closed, so the sender learns of it
    assert end.meter.received_bytes() == 0


def test_a_link_that_ended_takes_no_more_frames_and_those_queued_before_are_no_fault(direct_ends):
    here, there = direct_ends
    there.pipe.open_gate.clear()
    for number in range(5):
        there.link.send(forward(number))
    here.link.close()
    with pytest.raises(WireError, match="it was closed here"):
        here.link.send(forward(1))
    there.heard.wait(lambda: there.heard.ends)
    with pytest.raises(WireError, match="the other end said goodbye"):
        there.link.send(forward(1))
    there.link.wait_for_room(1)  # nobody needs them any more
    there.pipe.open_gate.set()
    there.link.close()
    assert there.heard.errors == []


def test_a_goodbye_that_is_read_only_after_a_failed_write_still_counts():
    class LatePipe(Pipe):
        """The write fails because the other end left; its goodbye is still to be read."""

        def __init__(self):
            self.failed = threading.Event()
            self.rest = [encode(Frame(FrameKind.BYE)), None]

        def write(self, message):
            self.failed.set()
            raise WireError("the other end is gone")

        def read(self):
            assert self.failed.wait(PATIENCE)
            time.sleep(0.05)
            return self.rest.pop(0)

        def close(self, grace=None):
            pass

    heard = Recorder()
    link = Link(LatePipe(), Meter(), "0-1", MAX_PAYLOAD)
    link.start(heard.on_frame, heard.on_broken, heard.on_end)
    link.send(forward(1))
    heard.wait(lambda: heard.ends)
    link.close()
    assert heard.errors == []


def test_spans_show_the_emulated_uplink_one_frame_after_the_other_and_none_comes_before():
    here, there = slow_pair(mbps=1, latency_ms=1)
    for number in range(4):
        frame = Frame(FrameKind.FORWARD, step=9, microbatch=number, payload=bytes(5000 - 64))
        here.link.send(frame)
    there.heard.wait(lambda: len(there.heard.frames) == 4)
    arrived = time.monotonic()
    spans = here.link.take_spans()
    assert [span[:3] for span in spans] == [("FORWARD", 9, number) for number in range(4)]
    for *_, start, finish in spans:
        assert finish - start == pytest.approx(0.04)
    for before, after in itertools.pairwise(spans):
        assert after[3] >= before[4]
    assert arrived >= spans[-1][4], "it has passed the uplink"
    assert here.link.take_spans() == []
    here.link.close()
    there.link.close()


def test_the_transport_s_own_time_passes_within_the_modelled_one():
    """A frame of 200 ms on the uplink whose transport takes 150 ms came after 350 ms."""
    here, there = memory_pair()
    sender = End("0-1", here, Nic(1e-3, 0, latency_ms=0))
    sender.link.send(forward(1, 25_000 - 64))
    assert there.read() is not None, "the transport has it at once"
    (_, _, _, start, end), *_ = sender.link.take_spans()
    assert end - start == pytest.approx(200)
    assert time.monotonic() < end
    there.close()
    sender.link.close()


@pytest.mark.parametrize("frames", [1, 3])
def test_room_is_waited_for_until_frames_have_left_the_uplink(frames):
    here, there = slow_pair(mbps=1)
    for number in range(4):
        here.link.send(forward(number, 5000 - 64))  # 40 ms each
    here.link.wait_for_room(frames)
    now = time.monotonic()
    spans = here.link.take_spans()
    assert len(spans) == 4
    assert sum(end > now for *_, end in spans) < frames
    there.pipe.close()
    here.link.wait_for_room(1)  # ends with the link, too
    here.link.close()


@pytest.mark.parametrize(("error", "reason", "is_breach"), [
    (KeyError("microbatch 7"), "handling a frame failed: KeyError('microbatch 7')", False),
    (WireError("no such microbatch"), "no such microbatch", True),
])  # fmt: skip
def test_a_frame_that_its_receiver_refuses_is_the_sender_s_fault(error, reason, is_breach):
    near, far = memory_pair()
    heard = Recorder()

    def refuse(frame):
        raise error

    link = Link(far, Meter(), "1-0", MAX_PAYLOAD)
    link.start(refuse, heard.on_broken)
    near.write(encode(forward(1)))
    heard.wait(lambda: heard.errors)
    assert isinstance(heard.errors[0], BreachError) is is_breach
    assert str(heard.errors[0]) == f"link 1-0 is broken: {reason}"
    assert link.other_end_at_fault is is_breach and not link.other_end_lost
