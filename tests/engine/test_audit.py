"""Audits: what a stage sent against what the process that follows it computes."""

import dataclasses

import pytest
import torch

from thinwire.codec import Leg, TensorSpec, build_codecs
from thinwire.engine import audit as module
from thinwire.engine.audit import DRIFTED, MOST_ROUNDING, Audit
from thinwire.engine.cut import CutEnd
from thinwire.engine.reports import Audited
from thinwire.wire import Frame, FrameKind, decode, encode
from thinwire.wire import logged as wire

SPEC = TensorSpec((2, 8, 16), torch.float32, torch.device("cpu"))
MICROBATCHES, STEPS = 4, 20


def honest(tensor, step):
    return tensor


def rounding(tensor, step):
    """As on another CPU, a little further away with each step."""
    return tensor * (1 + 1e-6 * (1 + step / 10) * torch.randn(tensor.shape))


def scaled(tensor, step):
    return 1.05 * tensor


def noise(tensor, step):
    drawn = torch.randn(tensor.shape)
    return drawn * tensor.norm() / drawn.norm()


def skipped_update(tensor, step):
    return tensor + 5e-3 * noise(tensor, step)


class Audition:
    """A follower of a stage that sends gradients by this codec."""

    def __init__(self, codec="bf16", is_exact=True):
        self.end = CutEnd(build_codecs(codec, codec), SPEC)
        self.told: list[Audited] = []
        self.audit = Audit((self.end, None), is_exact, self.told.append)

    def frame(self, tensor, step, microbatch):
        place = self.end.place(Leg.BACKWARD, step, microbatch, training=False)
        payload = self.end.codecs[Leg.BACKWARD].pack(tensor, place)
        kind = FrameKind.BACKWARD
        return Frame(kind, 1, step, microbatch, shape=SPEC.shape, payload=payload)

    def play(self, follower, stage, steps=range(STEPS)):
        """Both compute the same tensors, each in its own way; now this comes first, now that."""
        for step in steps:
            for microbatch in range(MICROBATCHES):
                tensor = torch.randn(SPEC.shape)
                mine = self.frame(follower(tensor, step), step, microbatch)
                theirs = self.frame(stage(tensor, step), step, microbatch)
                halves = [(self.audit.hear, mine), (self.witness, theirs)]
                for half, frame in halves if microbatch % 2 else halves[::-1]:
                    half(frame)

    def witness(self, frame):
        """What a neighbour says that the stage has sent."""
        witness = wire.witness_of(encode(frame))
        assert witness is not None
        self.audit.hear(decode(witness, 1 << 20))


@pytest.mark.parametrize("codec", ["bf16", "int4(group=64)", "topk(0.1)+ef21"])
def test_equal_bits_are_no_news_and_all_tensors_count(codec):
    one = Audition(codec)
    one.play(honest, honest)
    assert not one.told
    assert one.audit.standing() == Audited(STEPS - 1, STEPS * MICROBATCHES, 0.0, 0.0)


@pytest.mark.parametrize(
    "lie, codec",
    [*((lie, codec) for lie in (scaled, noise) for codec in ("fp32", "topk(0.1)+ef21")),
     (skipped_update, "bf16"), (rounding, "fp32")],
)  # fmt: skip
def test_one_other_bit_is_told_at_once_and_once_where_machines_are_alike(lie, codec):
    one = Audition(codec)
    one.play(honest, honest)
    one.play(honest, lie, range(STEPS, 2 * STEPS))
    (told,) = one.told
    assert (told.step, told.microbatch, told.tensor) == (STEPS, 0, "gradient")
    assert told.tolerance == 0


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_another_kind_of_machine_rounds_and_that_is_no_news(codec):
    one = Audition(codec, is_exact=False)
    one.play(rounding, honest, range(200))
    assert not one.told
    found = one.audit.standing()
    assert 0 < found.difference < DRIFTED and found.difference < found.tolerance <= MOST_ROUNDING


@pytest.mark.parametrize("lie", [scaled, noise, skipped_update])
def test_what_is_far_from_all_before_is_found_there_too(lie):
    one = Audition("fp32", is_exact=False)
    one.play(rounding, honest)
    one.play(rounding, lambda tensor, step: lie(tensor, step), range(STEPS, 5 * STEPS))
    (told,) = one.told
    assert told.step < STEPS + 40, "one tensor in eight is sent whole, and it takes three"
    assert told.difference > told.tolerance


def test_a_lie_from_the_first_step_on_is_found_if_it_is_no_rounding():
    one = Audition("fp32", is_exact=False)
    one.play(rounding, scaled, range(100))
    (told,) = one.told
    assert told.difference == pytest.approx(0.05, abs=1e-3) and told.tolerance == MOST_ROUNDING


def test_payloads_that_cannot_be_compared_say_nothing_to_those_who_round():
    one = Audition("topk(0.1)+aqsgd", is_exact=False)
    for step in range(STEPS):
        frame = Frame(FrameKind.BACKWARD, 1, step, 0, shape=SPEC.shape, payload=b"short")
        one.audit.hear(frame)
        other = dataclasses.replace(frame, kind=FrameKind.WITNESS, sender=3, payload=b"other")
        one.audit.hear(other)
    assert not one.told and one.audit.standing().compared == 0


def test_what_waits_for_its_counterpart_is_bounded(monkeypatch):
    one = Audition("fp32")
    size = len(one.frame(torch.zeros(SPEC.shape), 0, 0).payload)
    monkeypatch.setattr(module, "MOST_WAITING", 10 * (size + 64))
    tensor = torch.ones(SPEC.shape)
    for step in range(100):
        one.audit.hear(one.frame(tensor, step, 0))
    for step in range(100):
        one.witness(one.frame(2 * tensor, step, 0))
    (told,) = one.told
    assert told.step == 90, "the oldest were dropped"


def test_nobody_can_foresee_which_tensors_are_sent_whole():
    one = Audition()
    message = encode(one.frame(torch.ones(SPEC.shape), 0, 0))
    shapes = [decode(wire.witness_of(message) or b"", 1 << 20).shape for _ in range(400)]
    assert 10 < sum(bool(shape) for shape in shapes) < 120
