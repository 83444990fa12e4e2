"""Received frames are held against the contract and bounded; repeated ones are dropped."""

import math
import struct
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from thinwire.codec import Leg, Place, TensorSpec, build_codecs, parse_codec
from thinwire.engine.checkpoint import Versions
from thinwire.engine.cut import CutEnd
from thinwire.engine.port import EVALUATION_WINDOW, Due, Mailbox, Port, decision_number
from thinwire.engine.shared import FROM_ABOVE, FROM_BELOW, row_number
from thinwire.engine.step_end import Verdict, pack_tally
from thinwire.engine.trace import Sightings
from thinwire.errors import BreachError, WireError
from thinwire.schedule import build
from thinwire.wire import Frame, FrameKind, Link, Meter, Nic, emulated, encode, memory_pair
from thinwire.wire.logged import FrameLog, LinkState, LoggedPipe
from waiting import PATIENCE, wait_until

SHAPE = (2, 4, 8)
MICROBATCHES = 3
VALIDATION_BATCHES = 40
BASIS_BYTES = 24
ROW_BYTES = 40
MADE_WITH = Versions(weight_version=7, basis_version=1)
FREE = build("gpipe", 2, MICROBATCHES)  # nothing waits for an answer


class Pair:
    """A sending port, a receiving port, and the raw link beneath the sender."""

    def __init__(self, codecs=("bf16", "bf16"), first_step=0, nic=lambda: None, schedule=FREE):
        self.transport, theirs = memory_pair()
        self.mailbox = Mailbox()
        self.raw = Link(emulated(self.transport, nic()), Meter(), "cut-0", 1 << 16)
        from_above = Due(0, False, first_step, FREE, 0, BASIS_BYTES, (3, ROW_BYTES))
        self.sender = self.port(0, self.raw, Mailbox(), codecs[0], from_above)
        self.other = Link(emulated(theirs, nic()), Meter(), "cut-0", 1 << 16)
        rest = VALIDATION_BATCHES, BASIS_BYTES, (3, ROW_BYTES)
        from_below = Due(1, True, first_step, schedule, *rest)
        self.receiver = self.port(1, self.other, self.mailbox, codecs[1], from_below)

    @staticmethod
    def port(stage, link, mailbox, codec, due):
        codecs = {Leg.FORWARD: parse_codec(codec), Leg.BACKWARD: parse_codec(codec)}
        spec = TensorSpec(SHAPE, torch.float32, torch.device("cpu"))
        end = CutEnd(codecs, spec, is_lower=stage == 0)
        return Port(link, end, mailbox, due, Sightings())

    def forward(self, step, microbatch):
        tensor = torch.randn(SHAPE)
        self.sender.send_tensor(FrameKind.FORWARD, tensor, step, microbatch, MADE_WITH)

    def take(self, step, microbatch):
        return self.receiver.take_tensor(FrameKind.FORWARD, step, microbatch, MADE_WITH)

    def answer(self, microbatch):
        tensor = torch.randn(SHAPE)
        self.receiver.send_tensor(FrameKind.BACKWARD, tensor, 0, microbatch, MADE_WITH)
        self.other.wait_for_room(1)

    def refuses(self, words, error=BreachError):
        """What came was refused, with these words."""
        with pytest.raises(error, match=words):
            self.mailbox.take(("never",))

    def send_validation(self, sent):
        """Sends all batches of a validation from a thread of its own."""

        def send_all():
            for number in range(VALIDATION_BATCHES):
                tensor = torch.randn(SHAPE)
                self.sender.send_tensor(FrameKind.EVALUATE, tensor, 0, number, MADE_WITH)
                sent(number)

        thread = threading.Thread(target=send_all, daemon=True)
        thread.start()
        return thread

    def take_validation(self):
        """Takes all batches; how many wait after each."""
        for number in range(VALIDATION_BATCHES):
            self.receiver.take_tensor(FrameKind.EVALUATE, 0, number, MADE_WITH)
            yield len(self.mailbox._items)


def test_a_tensor_crosses():
    pair = Pair(first_step=3)
    tensor = torch.randn(SHAPE)
    pair.sender.send_tensor(FrameKind.FORWARD, tensor, 3, 1, MADE_WITH)
    assert torch.equal(pair.take(3, 1), tensor.bfloat16().float())


PACKED = {"kind": FrameKind.FORWARD, "codec": parse_codec("bf16").tag}


@pytest.mark.parametrize(("frame", "words"), [
    (Frame(FrameKind.FORWARD, shape=(2, 4, 9), codec=1), "not packed by bf16"),
    (Frame(FrameKind.BACKWARD), "unexpected BACKWARD"),
    (Frame(FrameKind.BASIS), "unexpected BASIS"),  # it comes from above alone
    (Frame(FrameKind.HELLO), "unexpected HELLO"),
    (Frame(**PACKED, shape=(2, 4, 9), payload=bytes(144)), "has shape"),
    (Frame(**PACKED, shape=SHAPE, payload=bytes(130)), "at most 128"),
    (Frame(**PACKED, shape=SHAPE, payload=bytes(126)), "126 arrived"),
])  # fmt: skip
def test_frames_outside_the_contract_break_the_link(frame, words):
    pair = Pair()
    pair.raw.send(frame)
    pair.refuses(words, WireError)


def test_ends_with_other_codecs_notice():
    pair = Pair(("fp32", "bf16"))
    pair.forward(0, 0)
    with pytest.raises(WireError, match="codecs differ"):
        pair.take(0, 0)


def test_a_neighbour_that_leaves_wakes_who_waits():
    pair = Pair()
    pair.forward(0, 0)
    pair.sender.link.close()
    pair.take(0, 0)  # what was sent before still counts
    with pytest.raises(WireError, match="left the run"):
        pair.take(0, 1)


def test_a_repeated_stage_unpacks_no_answer_before_what_it_answers_is_packed():
    """Its neighbour's answers are in a log, and may be here first."""
    spec = TensorSpec(SHAPE, torch.float32, torch.device("cpu"))
    mailbox, sent, arrives, packs = Mailbox(), [], threading.Event(), threading.Event()

    def end(is_lower):
        codecs = build_codecs("randk(0.5)", "topk(shared)")
        return CutEnd(codecs, spec, is_lower)

    ours, theirs = memory_pair()
    ours.state = SimpleNamespace(sent_again=5)  # as in the log of whoever was at the other end
    lower, upper = end(True), end(False)
    lower.pack = lambda *frame: (packs.wait(PATIENCE), CutEnd.pack(lower, *frame))[1]
    link = Link(ours, Meter(), "cut-0", 1 << 16)
    port = Port(link, lower, mailbox, Due(0, False, 0, FREE), Sightings())
    port._too_early = lambda frame: (arrives.set(), Port._too_early(port, frame))[1]
    port.open_step(0)
    other = Link(theirs, Meter(), "cut-0", 1 << 16)
    other.start(sent.append, mailbox.fail)
    port.send_tensor(FrameKind.FORWARD, torch.ones(SHAPE), 0, 0, MADE_WITH)
    upper.unpack(end(True).pack(FrameKind.FORWARD, torch.ones(SHAPE), 0, 0, MADE_WITH))
    other.send(upper.pack(FrameKind.BACKWARD, torch.ones(SHAPE), 0, 0, MADE_WITH))
    assert arrives.wait(PATIENCE)
    packs.set()
    answer = port.take_tensor(FrameKind.BACKWARD, 0, 0, MADE_WITH)
    wait_until(lambda: sent)
    assert torch.equal(answer, upper.unpack(sent[0])), "the same elements went both ways"


@pytest.mark.parametrize("kind", [FrameKind.VERDICT, FrameKind.VALIDATED])
def test_a_decision_is_known_as_soon_as_it_counts_as_received(kind, tmp_path):
    """Whoever replaces its sender hears that it was received, and does not send it again."""
    state = LinkState(FrameLog(tmp_path, 1 << 20))
    ours, theirs = memory_pair()
    link = Link(LoggedPipe(ours, state), Meter(), "cut-0", 1 << 16)
    Pair.port(1, link, Mailbox(), "bf16", Due(1, True, 5, FREE))
    theirs.write(encode(verdict_frame(5, kind, stop=True)))
    wait_until(lambda: state.position().received)
    assert state.position().decided == decision_number(kind, 5) and state.stops


MEMORY = "int4+ef21"


class Remembering(Pair):
    """Both ends remember; frames are made by hand, so that they can be wrong."""

    def __init__(self, first_step=0):
        super().__init__((MEMORY, MEMORY), first_step)
        self.codec = parse_codec(MEMORY)
        self.last_sent = (-1, 0)

    def frame(self, step, microbatch, kind=FrameKind.FORWARD):
        place = Place(Leg.FORWARD, step, microbatch, training=kind is FrameKind.FORWARD)
        return packed(self.codec, kind, place)

    def send(self, frame):
        """Send a frame, and let everything before it arrive."""
        self.raw.send(frame)
        step, (before, number) = self.receiver._open_step + 1, self.last_sent
        number = number + 1 if step == before else 0
        self.last_sent = step, number
        self.raw.send(self.frame(step, number, FrameKind.EVALUATE))
        self.mailbox.take((FrameKind.EVALUATE, step, number))

    def arrived(self, step, microbatch):
        return (FrameKind.FORWARD, step, microbatch) in self.mailbox._items

    def remembered(self):
        return self.receiver._end.codecs[Leg.FORWARD].agreement()


def test_a_step_waits_until_it_is_opened_and_the_one_after_it_goes_on_waiting():
    pair = Remembering(first_step=4)
    pair.send(pair.frame(4, 0))
    assert not pair.arrived(4, 0) and pair.remembered() == ""
    pair.receiver.open_step(4)
    assert pair.arrived(4, 0) and pair.remembered() == pair.codec.agreement()
    pair.send(pair.frame(4, 2))
    before = pair.remembered()
    pair.send(pair.frame(5, 1))
    pair.receiver.open_step(4)
    assert pair.arrived(4, 2) and not pair.arrived(5, 1) and pair.remembered() == before
    pair.receiver.open_step(5)
    assert pair.arrived(5, 1) and pair.remembered() == pair.codec.agreement()


@pytest.mark.parametrize("is_held", [True, False])
def test_a_tensor_is_remembered_once(is_held):
    """Else the codec would move on twice."""
    pair = Remembering(first_step=4)
    frame = pair.frame(4, 0)
    if not is_held:
        pair.receiver.open_step(4)
    pair.send(frame)
    before = pair.remembered()
    pair.raw.send(frame)
    pair.refuses("FORWARD of step 4, microbatch 0: it arrived twice", WireError)
    assert pair.remembered() == before


@pytest.mark.parametrize("step", [3, 6])
def test_a_step_that_is_not_due_is_refused(step):
    pair = Remembering(first_step=4)
    pair.receiver.open_step(4)
    pair.send(pair.frame(4, 0))
    before = pair.remembered()
    pair.raw.send(pair.frame(step, 1))
    words = f"step {step}, microbatch 1: it belongs neither to the current step"
    pair.refuses(words, WireError)
    assert pair.remembered() == before


def packed(codec, kind, place):
    payload = bytes(codec.pack(torch.randn(SHAPE), place))
    own = {"step": place.step, "microbatch": place.microbatch, "codec": codec.tag}
    return Frame(kind, shape=SHAPE, payload=payload, **own)


def tensor_frame(kind, step, microbatch=0):
    return packed(parse_codec("bf16"), kind, Place(Leg.FORWARD, step, microbatch))


def verdict_frame(step, kind=FrameKind.VERDICT, stop=False, **own):
    payload = Verdict(1.0, True, False, stop).to_bytes()
    return Frame(kind, step=step, payload=payload, **own)


def rows_frame(step, number):
    return Frame(FrameKind.ROWS, step=step, microbatch=number, payload=bytes(8))


@pytest.mark.parametrize(
    "frame",
    [tensor_frame(FrameKind.FORWARD, 4), tensor_frame(FrameKind.FORWARD, 7),
     tensor_frame(FrameKind.EVALUATE, 5), tensor_frame(FrameKind.EVALUATE, 6, 1),
     tensor_frame(FrameKind.PROBE, 4), tensor_frame(FrameKind.PROBE, 5, 2),
     verdict_frame(4), verdict_frame(5, microbatch=1), verdict_frame(5, FrameKind.VALIDATED),
     verdict_frame(5, sender=2), rows_frame(7, FROM_BELOW), rows_frame(5, FROM_ABOVE),
     rows_frame(5, row_number(3, FROM_BELOW))],
    ids=lambda frame: f"{frame.kind.name} {frame.step} {frame.microbatch}",
)  # fmt: skip
def test_a_frame_that_is_not_due_convicts_its_sender(frame):
    pair = Pair(first_step=5)
    pair.receiver.open_step(5)
    pair.raw.send(frame)
    pair.refuses(f"{frame.kind.name} of step {frame.step}")
    assert pair.other.other_end_at_fault and not pair.other.other_end_lost
    assert pair.mailbox._items == {}


@pytest.mark.parametrize(
    "frame",
    [tensor_frame(FrameKind.FORWARD, 5, 1), tensor_frame(FrameKind.PROBE, 5), verdict_frame(5),
     Frame(FrameKind.ROWS, step=5, microbatch=1, payload=bytes(ROW_BYTES))],
    ids=lambda frame: frame.kind.name,
)  # fmt: skip
def test_nothing_comes_twice(frame):
    """Taken once, it was taken in again, and nobody would ever take the second."""
    pair = Pair(first_step=5)
    pair.receiver.open_step(5)
    pair.raw.send(frame)
    pair.mailbox.take((frame.kind, 5, frame.microbatch))
    pair.raw.send(frame)
    pair.refuses(f"{frame.kind.name} of step 5, .* arrived twice")
    assert pair.mailbox._items == {}


def test_what_nobody_takes_is_dropped_with_its_step():
    """A neighbour could leave something in every step: probes of a basis that does not move."""
    pair = Pair()
    for step in range(50):
        pair.receiver.open_step(step)
        for number in (0, 1):
            pair.raw.send(tensor_frame(FrameKind.PROBE, step, number))
        pair.raw.send(verdict_frame(step))
        pair.receiver.take_message(FrameKind.VERDICT, step)
        assert len(pair.mailbox._items) == 2
        pair.mailbox.close_step(step)
        assert pair.mailbox._items == {}
    assert pair.mailbox.dropped == 100


def test_a_neighbour_that_does_not_keep_the_window_is_refused():
    """By its schedule it waits for a gradient before it sends the next activation."""
    pair = Pair(schedule=build("1f1b", 2, MICROBATCHES, window=1))
    pair.receiver.open_step(0)
    pair.sender.open_step(0)
    for microbatch in range(MICROBATCHES):
        pair.forward(0, microbatch)
        pair.take(0, microbatch)
        if microbatch < MICROBATCHES - 1:
            pair.answer(microbatch)
            pair.sender.take_tensor(FrameKind.BACKWARD, 0, microbatch, MADE_WITH)
    pair.raw.send(tensor_frame(FrameKind.FORWARD, 1, 0))  # a step ahead: not beyond the window
    pair.mailbox.take((FrameKind.FORWARD, 1, 0))
    pair.raw.send(tensor_frame(FrameKind.FORWARD, 1, 1))
    pair.refuses("beyond the window: it is due after 1 gradients, and 0")


def test_with_delay_the_window_reaches_into_the_next_step_and_no_further():
    pair = Pair(schedule=build("1f1b", 2, MICROBATCHES, window=2, delay=1))
    for port in (pair.receiver, pair.sender):
        port.open_step(0)

    for step, microbatch, answered in ((0, 0, None), (0, 1, 0), (0, 2, 1), (1, 0, None)):
        pair.forward(step, microbatch)
        pair.take(step, microbatch)
        if answered is not None:
            pair.answer(answered)
    pair.receiver.open_step(1)  # while the last gradient of step 0 is still to come
    pair.raw.send(verdict_frame(0))
    pair.receiver.take_message(FrameKind.VERDICT, 0)
    pair.raw.send(tensor_frame(FrameKind.FORWARD, 1, 1))
    pair.refuses("beyond the window")


def test_the_stage_above_cannot_be_a_step_ahead():
    pair = Pair()
    pair.sender.open_step(0)
    pair.other.send(Frame(FrameKind.TALLY, sender=1, step=1, payload=bytes(8)))
    with pytest.raises(BreachError, match="TALLY of step 1"):
        pair.sender.take_message(FrameKind.TALLY, 1)


@pytest.mark.parametrize(("kind", "payload", "words"), [
    (FrameKind.TALLY, bytes(13), "a tally has 8 bytes for each parameter, but 13 arrived"),
    (FrameKind.TALLY, pack_tally([1.0, -1.0]), "below zero"),
    (FrameKind.BASIS, bytes(BASIS_BYTES + 4), "has 28 bytes, but at most 24 were agreed"),
    (FrameKind.ROWS, bytes(ROW_BYTES + 500), "has 540 bytes, but at most .* were agreed"),
])  # fmt: skip
def test_a_malformed_message_from_above_convicts_its_sender(kind, payload, words):
    """It was a struct.error, or a StageError, of the stage that received it."""
    pair = Pair()
    pair.sender.open_step(0)
    pair.other.send(Frame(kind, sender=1, payload=payload))
    with pytest.raises(BreachError, match=words):
        pair.sender.take_message(kind, 0)
    assert pair.raw.other_end_at_fault


@pytest.mark.parametrize(
    "payload",
    [bytes(10), bytes(12), bytes(8) + bytes([2, 0, 0]), struct.pack("<dBBB", math.inf, 1, 0, 0),
     struct.pack("<dBBB", -1.0, 0, 0, 0)],
)  # fmt: skip
@pytest.mark.parametrize("kind", [FrameKind.VERDICT, FrameKind.VALIDATED])
def test_a_malformed_verdict_convicts_its_sender(payload, kind):
    pair = Pair()
    pair.receiver.open_step(0)
    step = 1 if kind is FrameKind.VALIDATED else 0  # a validation comes before its step
    pair.raw.send(Frame(kind, step=step, payload=payload))
    with pytest.raises(BreachError, match=r"(?i)verdict|validated"):
        pair.receiver.take_message(kind, step)


def test_validation_frames_wait_for_a_slow_uplink_and_for_a_slow_stage():
    """Neither end piles them up: the sender waits, and goes on as soon as there is room."""
    pair = Pair(nic=lambda: Nic(mbps_up=0.1, mbps_down=0, latency_ms=0))  # 15 ms a frame
    handed_over: list[float] = []
    thread = pair.send_validation(lambda _: handed_over.append(time.monotonic()))
    most_waiting = max(pair.take_validation())
    thread.join(PATIENCE)
    assert len(handed_over) == VALIDATION_BATCHES
    # Seen from the uplink, whatever the receiver's thread was doing: before a frame is handed
    # over, the one a window before it has left.
    left = [end for *_, end in pair.raw.take_spans()]
    assert len(left) == VALIDATION_BATCHES
    later = handed_over[EVALUATION_WINDOW:]
    assert all(at >= end for at, end in zip(later, left, strict=False))
    assert most_waiting <= EVALUATION_WINDOW


@pytest.mark.parametrize(
    "nic", [lambda: None, lambda: Nic(0, 0, latency_ms=1)], ids=["direct", "emulated"]
)
def test_a_stage_that_does_not_take_validation_frames_holds_their_sender_back(nic):
    pair = Pair(nic=nic)
    pair.transport._going.most = 2  # as little as a transport holds
    sent: list[int] = []
    thread = pair.send_validation(sent.append)
    wait_until(lambda: len(pair.mailbox._items) >= EVALUATION_WINDOW)
    thread.join(0.5)  # unhindered, the others would have come in this time
    assert len(pair.mailbox._items) == EVALUATION_WINDOW
    assert len(sent) < VALIDATION_BATCHES - 5
    assert len([*pair.take_validation()]) == VALIDATION_BATCHES
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_waiting_ends_with_the_item_or_a_failure():
    mailbox = Mailbox()
    threading.Timer(0.05, mailbox.fail, (WireError("the link broke"),)).start()
    with pytest.raises(WireError, match="the link broke"):
        mailbox.take(("F", 0, 0))
    mailbox = Mailbox()
    threading.Timer(0.05, mailbox.put, (("F", 0, 0), "item")).start()
    assert mailbox.take(("F", 0, 0)) == "item"
