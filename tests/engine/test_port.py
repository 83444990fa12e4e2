"""Received frames are held against the contract; late and repeated ones are dropped."""

import threading

import pytest
import torch

from thinwire.codec import Leg, Place, TensorSpec, parse_codec
from thinwire.engine.cut import CutEnd
from thinwire.engine.mailbox import Mailbox
from thinwire.engine.port import Port, Versions
from thinwire.errors import WireError
from thinwire.wire import Frame, FrameKind, Link, Meter, memory_pair

SHAPE = (2, 4, 8)
MICROBATCHES = 3
MADE_WITH = Versions(weights=7, basis=1)


class Pair:
    """A sending port, a receiving port, and the raw link beneath the sender."""

    def __init__(
        self, sender_codec: str = "bf16", receiver_codec: str = "bf16", limit: int = 1 << 16
    ):
        ours, theirs = memory_pair()
        self.mailbox = Mailbox(timeout=5)
        self.raw = Link(ours, Meter(), None, "boundary-0", limit)
        self.sender = self.port(self.raw, Mailbox(), sender_codec, {FrameKind.BACKWARD})
        other = Link(theirs, Meter(), None, "boundary-0", limit)
        receives = {FrameKind.FORWARD, FrameKind.EVALUATE}
        self.receiver = self.port(other, self.mailbox, receiver_codec, receives)

    @staticmethod
    def port(link: Link, mailbox: Mailbox, codec: str, receives: set[FrameKind]) -> Port:
        codecs = {Leg.FORWARD: parse_codec(codec), Leg.BACKWARD: parse_codec(codec)}
        spec = TensorSpec(SHAPE, torch.float32, torch.device("cpu"))
        return Port(link, 0, CutEnd(codecs, spec, microbatches=MICROBATCHES), mailbox, receives)


def test_a_tensor_crosses() -> None:
    pair = Pair()
    tensor = torch.randn(SHAPE)
    pair.sender.send_tensor(FrameKind.FORWARD, tensor, 3, 1, MADE_WITH)
    received = pair.receiver.take_tensor(FrameKind.FORWARD, 3, 1, MADE_WITH)
    assert torch.equal(received, tensor.bfloat16().float())


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (Frame(FrameKind.FORWARD, shape=(2, 4, 9), codec=1), "not packed by bf16"),
        (Frame(FrameKind.BACKWARD), "unexpected BACKWARD"),
        (Frame(FrameKind.HELLO), "unexpected HELLO"),
    ],
)
def test_frames_outside_the_contract_break_the_link(frame: Frame, words: str) -> None:
    pair = Pair()
    pair.raw.send(frame)
    with pytest.raises(WireError, match=words):
        pair.mailbox.take(("never",))


def test_shape_and_size_are_checked_before_unpacking() -> None:
    tag = parse_codec("bf16").tag
    for frame, words in [
        (Frame(FrameKind.FORWARD, shape=(2, 4, 9), codec=tag, payload=bytes(144)), "has shape"),
        (Frame(FrameKind.FORWARD, shape=SHAPE, codec=tag, payload=bytes(130)), "at most 128"),
        (Frame(FrameKind.FORWARD, shape=SHAPE, codec=tag, payload=bytes(126)), "126 arrived"),
    ]:
        pair = Pair()
        pair.raw.send(frame)
        with pytest.raises(WireError, match=words):
            pair.mailbox.take(("never",))


def test_ends_with_other_codecs_notice() -> None:
    pair = Pair(sender_codec="fp32")
    pair.sender.send_tensor(FrameKind.FORWARD, torch.randn(SHAPE), 0, 0, MADE_WITH)
    with pytest.raises(WireError, match="codecs differ"):
        pair.receiver.take_tensor(FrameKind.FORWARD, 0, 0, MADE_WITH)


def test_a_neighbour_that_leaves_wakes_who_waits() -> None:
    pair = Pair()
    pair.sender.send_tensor(FrameKind.FORWARD, torch.randn(SHAPE), 0, 0, MADE_WITH)
    pair.sender.link.close()
    pair.receiver.take_tensor(
        FrameKind.FORWARD, 0, 0, MADE_WITH
    )  # what was sent before still counts
    with pytest.raises(WireError, match="left the run"):
        pair.receiver.take_tensor(FrameKind.FORWARD, 0, 1, MADE_WITH)


# --- codecs that remember ---

MEMORY = "int4+ef21"


class Remembering(Pair):
    """Both ends remember; frames are made by hand, so that they can be wrong."""

    def __init__(self) -> None:
        super().__init__(MEMORY, MEMORY)
        self.codec = parse_codec(MEMORY)

    def frame(self, step: int, microbatch: int, kind: FrameKind = FrameKind.FORWARD) -> Frame:
        place = Place(Leg.FORWARD, step, microbatch, training=kind is FrameKind.FORWARD)
        payload = bytes(self.codec.pack(torch.randn(SHAPE), place))
        tag = self.codec.tag
        return Frame(
            kind, step=step, microbatch=microbatch, codec=tag, shape=SHAPE, payload=payload
        )

    def send(self, frame: Frame) -> None:
        """Send a frame, and let everything before it arrive."""
        self.raw.send(frame)
        self.raw.send(self.frame(10**9, 0, FrameKind.EVALUATE))
        self.mailbox.take((FrameKind.EVALUATE, 10**9, 0))

    def arrived(self, step: int, microbatch: int) -> bool:
        return (FrameKind.FORWARD, step, microbatch) in self.mailbox._items

    def remembered(self) -> str:
        return self.receiver._end.codecs[Leg.FORWARD].agreement()


def test_a_step_waits_until_it_is_opened_and_the_one_after_it_goes_on_waiting() -> None:
    pair = Remembering()
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
def test_a_tensor_is_remembered_once(is_held: bool) -> None:
    """The mailbox would drop it, but the codec would have moved on by then."""
    pair = Remembering()
    frame = pair.frame(4, 0)
    if not is_held:
        pair.receiver.open_step(4)
    pair.send(frame)
    before = pair.remembered()
    pair.raw.send(frame)
    with pytest.raises(WireError, match="FORWARD of step 4, microbatch 0 has come before"):
        pair.mailbox.take(("never",))
    assert pair.remembered() == before


@pytest.mark.parametrize("step", [3, 6])
def test_a_step_that_is_not_due_is_refused(step: int) -> None:
    pair = Remembering()
    pair.receiver.open_step(4)
    pair.send(pair.frame(4, 0))
    before = pair.remembered()
    pair.raw.send(pair.frame(step, 1))
    with pytest.raises(WireError, match=f"step {step}, microbatch 1 is neither of the step"):
        pair.mailbox.take(("never",))
    assert pair.remembered() == before


def test_a_step_that_is_over_is_refused_also_where_it_was_held() -> None:
    pair = Remembering()
    pair.send(pair.frame(3, 0))
    with pytest.raises(WireError, match="step 3, microbatch 0 is neither"):
        pair.receiver.open_step(4)
    assert pair.remembered() == ""


def test_no_more_is_held_than_a_step_has() -> None:
    pair = Remembering()
    for step in range(MICROBATCHES):
        pair.send(pair.frame(step, 0))
    pair.raw.send(pair.frame(MICROBATCHES, 0))
    with pytest.raises(WireError, match="nor of the next"):
        pair.mailbox.take(("never",))
    assert len(pair.receiver._held) == MICROBATCHES


@pytest.mark.parametrize("codec", ["bf16", MEMORY])
def test_a_microbatch_that_does_not_exist_is_refused(codec: str) -> None:
    pair = Pair(codec, codec)
    pair.receiver.open_step(0)
    pair.sender.send_tensor(FrameKind.EVALUATE, torch.randn(SHAPE), 0, 9, MADE_WITH)
    pair.receiver.take_tensor(FrameKind.EVALUATE, 0, 9, MADE_WITH)
    pair.sender.send_tensor(FrameKind.FORWARD, torch.randn(SHAPE), 0, MICROBATCHES, MADE_WITH)
    with pytest.raises(WireError, match="microbatch 3 does not exist: a step has 3 of them"):
        pair.mailbox.take(("never",))


def test_only_the_step_at_hand_and_the_next_are_kept_in_mind() -> None:
    pair = Remembering()
    for step in range(20):
        pair.receiver.open_step(step)
        for microbatch in range(MICROBATCHES):
            pair.send(pair.frame(step, microbatch))
    assert len(pair.receiver._seen) == MICROBATCHES
    assert pair.remembered() == pair.codec.agreement()


def test_late_and_repeated_frames_are_dropped() -> None:
    mailbox = Mailbox()
    mailbox.put(("F", 0, 0), 0, "first")
    mailbox.put(("F", 0, 0), 0, "again")
    assert mailbox.take(("F", 0, 0)) == "first"
    mailbox.close_step(0)
    mailbox.put(("F", 0, 0), 0, "late")
    assert mailbox.dropped == 2
    mailbox.put(("F", 1, 0), 1, "next")
    assert mailbox.take(("F", 1, 0)) == "next"


def test_waiting_ends_with_the_item_or_a_timeout() -> None:
    mailbox = Mailbox(timeout=0.05)
    with pytest.raises(WireError, match="arrived within"):
        mailbox.take(("F", 0, 0))
    mailbox = Mailbox()
    threading.Timer(0.05, mailbox.fail, (WireError("the link broke"),)).start()
    with pytest.raises(WireError, match="the link broke"):
        mailbox.take(("F", 0, 0))
    mailbox = Mailbox()
    threading.Timer(0.05, mailbox.put, (("F", 0, 0), 0, "item")).start()
    assert mailbox.take(("F", 0, 0)) == "item"
