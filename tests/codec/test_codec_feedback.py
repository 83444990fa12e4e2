"""Feedback: what is left out comes later, both ends know the same, evaluation leaves no trace."""

import math
from dataclasses import replace

import pytest
import tensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codec import Cast, Leg, Place, Surroundings, cross, spec_of
from thinwire.codec.quantize import Integer
from thinwire.codec.sparse import RandK, TopK
from thinwire.codec.wrappers import EF21, ErrorFeedback, MixedErrorFeedback

SHAPE = (3, 6, 8)
SPARSE = {"topk": lambda: TopK(0.2), "randk": lambda: RandK(0.2)}
INNERS = {**SPARSE, "int": lambda: Integer(4), "bf16": lambda: Cast("bf16")}
SENDERS = (ErrorFeedback, MixedErrorFeedback)
WRAPPERS = (*SENDERS, EF21)
PAIRS = [
    (wrapper, inner)
    for wrapper in WRAPPERS
    for inner in (SPARSE if wrapper is MixedErrorFeedback else INNERS)
]

seeds = st.integers(0, 2**32)
dtypes = st.sampled_from((torch.float32, torch.float64, torch.bfloat16))
# What happens to a microbatch: trained on, evaluated, or spoilt by a value that is not finite
events = st.lists(st.sampled_from(("train", "evaluate", "spoilt")), max_size=12)
few = settings(deadline=None, max_examples=40)


def normal(seed, dtype=torch.float32, shape=SHAPE):
    return tensors.normal(shape, seed, dtype)


def ends_of(pair):
    wrapper, inner = pair
    return tensors.Ends(lambda: wrapper(INNERS[inner]()))


def traffic(events, seed, dtype):
    found = []
    for number, event in enumerate(events):
        tensor = normal(seed + number, dtype)
        if event == "spoilt":
            tensor.view(-1)[seed % tensor.numel()] = (math.nan, math.inf)[number % 2]
        place = Place(Leg.BACKWARD, number // 3, number % 3, training=event != "evaluate")
        found.append((event, tensor, place))
    return found


@few
@given(st.sampled_from([pair for pair in PAIRS if pair[0] in SENDERS]), events, seeds, dtypes)
def test_what_arrived_is_what_was_meant_but_for_the_last_error(pair, events, seed, dtype):
    """EF's telescoping sum: c_1 + ... + c_T = x_1 + ... + x_T - e_T."""
    ends = ends_of(pair)
    meant, arrived = (torch.zeros(SHAPE, dtype=torch.float64) for _ in range(2))
    for event, tensor, place in traffic(events, seed, dtype):
        got = ends.send(tensor, place)
        if event == "train":
            meant += tensor.double()
            arrived += got.double()
    error = ends.sender.state_tensors().get("buffer", torch.zeros(SHAPE)).double()
    allowed = 1e-12 if dtype == torch.float64 else 1e-4
    assert (meant - error - arrived).abs().max() < allowed
    assert "buffer" not in ends.receiver.state_tensors()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")])
@pytest.mark.parametrize("inner", sorted(INNERS))
def test_ef21_agrees_between_unlike_devices(inner, devices):
    ends = ends_of((EF21, inner))
    here, there = map(torch.device, devices)
    for number in range(6):
        tensor, place = normal(number).to(here), Place(Leg.BACKWARD, number, 0)
        payload = bytes(ends.sender.pack(tensor, place))
        ends.receiver.unpack(payload, replace(spec_of(tensor), device=there), place)
        assert ends.sender.agreement() == ends.receiver.agreement()


@pytest.mark.parametrize(("wrapper", "inner"), PAIRS)
def test_feedback_delivers_a_constant_tensor_in_the_end(wrapper, inner):
    """Without feedback these codecs never would: what they leave out, they leave out for ever."""
    sent, ends, plain = normal(0), ends_of((wrapper, inner)), INNERS[inner]()
    arrived, rounds = torch.zeros(SHAPE), 60
    for number in range(rounds):
        place = Place(Leg.FORWARD, number, 0)
        got = ends.send(sent, place)
        arrived += got
    mean = got if wrapper is EF21 else arrived / rounds
    alone = cross(plain, INNERS[inner](), sent, place)
    assert (mean - sent).norm() < 0.35 * (alone - sent).norm() + 1e-6


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_another_shape_or_type_is_refused(wrapper):
    codec, place = wrapper(TopK(0.2)), Place(Leg.FORWARD, 0, 0)
    codec.pack(normal(0), place)
    for other in (normal(0, shape=(2, 6, 8)), normal(0, torch.float64)):
        with pytest.raises(ValueError, match=r"has one of \(\(3, 6, 8\), torch.float32\)"):
            codec.pack(other, place)
    codec.pack(normal(0, shape=(2, 6, 8)), replace(place, training=False))
    codec.pack(normal(0, torch.bfloat16), place)
    loaded = wrapper(TopK(0.2))
    loaded.prepare(spec_of(normal(0)), Surroundings(examples=0, limit_bytes=0))
    with pytest.raises(ValueError, match="neither the size of microbatches"):
        loaded.load_state_tensors({"buffer": torch.zeros(2, 6, 8)})
    loaded.load_state_tensors({"buffer": torch.zeros(SHAPE)})


def test_mixed_feedback_spends_half_on_the_error():
    codec, place = MixedErrorFeedback(TopK(0.25)), Place(Leg.FORWARD, 0, 0)
    half, one_shape = TopK(0.125), (4, 1)
    assert len(codec.pack(normal(0), place)) == 2 * half.payload_limit(SHAPE)
    assert codec.payload_limit(one_shape) == 2 * half.payload_limit(one_shape)
    drawn, buffer = MixedErrorFeedback(RandK(0.25)), torch.ones(1000)
    drawn.load_state_tensors({"buffer": buffer})
    arrived = drawn.decode(drawn.encode(torch.ones(1000), place), spec_of(buffer), place)
    assert arrived.sum() == 250
    # The halves draw apart: both fall on one element in an eighth of an eighth of all cases.
    assert 0 < (arrived == 2).sum() < 50
    # And the second half does not draw what a run of the next seed draws.
    second = cross(RandK(0.125), RandK(0.125), buffer, replace(place, seed=1))
    assert not torch.equal(arrived - cross(RandK(0.125), RandK(0.125), buffer, place), second)
