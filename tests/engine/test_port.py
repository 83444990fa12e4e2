"""Received frames are held against the contract; late and repeated ones are dropped."""

import threading

import pytest
import torch

from thinwire.codec import Leg, TensorSpec, parse_codec
from thinwire.engine.cut import CutEnd
from thinwire.engine.mailbox import Mailbox
from thinwire.engine.port import Port, Versions
from thinwire.errors import WireError
from thinwire.wire import Frame, FrameKind, Link, Meter, memory_pair

SHAPE = (2, 4, 8)
MADE_WITH = Versions(weights=7, basis=1)


class Pair:
    """A sending port, a receiving port, and the raw link beneath the sender."""

    def __init__(self, sender_codec: str = "bf16", limit: int = 1 << 16):
        ours, theirs = memory_pair()
        self.mailbox = Mailbox(timeout=5)
        self.raw = Link(ours, Meter(), None, "boundary-0", limit)
        self.sender = self.port(self.raw, Mailbox(), sender_codec, {FrameKind.BACKWARD})
        other = Link(theirs, Meter(), None, "boundary-0", limit)
        self.receiver = self.port(other, self.mailbox, "bf16", {FrameKind.FORWARD})

    @staticmethod
    def port(link: Link, mailbox: Mailbox, codec: str, receives: set[FrameKind]) -> Port:
        codecs = {Leg.FORWARD: parse_codec(codec), Leg.BACKWARD: parse_codec(codec)}
        spec = TensorSpec(SHAPE, torch.float32, torch.device("cpu"))
        return Port(link, 0, CutEnd(codecs, spec), mailbox, receives)


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
