"""Feedback: what is left out comes later, both ends know the same, evaluation leaves no trace."""

import math
import zlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.codec import (
    Cast,
    Codec,
    Leg,
    Payload,
    Place,
    Surroundings,
    TensorSpec,
    Wrapper,
    cross,
    spec_of,
)
from thinwire.codec.aqsgd import AQSGD
from thinwire.codec.base import Parts, Shape
from thinwire.codec.feedback import EF21, ErrorFeedback, Feedback, MixedErrorFeedback
from thinwire.codec.lowrank import LowRank
from thinwire.codec.quantize import Integer
from thinwire.codec.sparse import RandK, TopK
from thinwire.errors import ConfigError, WireError

SHAPE = (3, 6, 8)
BUDGETED: dict[str, Callable[[], Codec]] = {
    "topk": lambda: TopK(0.2),
    "randk": lambda: RandK(0.2),
    "lowrank": lambda: LowRank(2),
}
INNERS: dict[str, Callable[[], Codec]] = {
    **BUDGETED,
    "int": lambda: Integer(4),
    "fp16": lambda: Cast("fp16"),
}
SENDERS = (ErrorFeedback, MixedErrorFeedback)
WRAPPERS = (*SENDERS, EF21)
PAIRS = [
    (wrapper, inner)
    for wrapper in WRAPPERS
    for inner in (BUDGETED if wrapper is MixedErrorFeedback else INNERS)
]

pairs = st.sampled_from(PAIRS)
seeds = st.integers(0, 2**32)
dtypes = st.sampled_from((torch.float32, torch.float64, torch.bfloat16))
# What happens to a microbatch: trained on, evaluated, or spoilt by a value that is not finite
events = st.lists(st.sampled_from(("train", "evaluate", "spoilt")), max_size=12)
few = settings(deadline=None, max_examples=40)


def normal(seed: int, dtype: torch.dtype = torch.float32, shape: Shape = SHAPE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


class Ends:
    """The sending and the receiving end of one direction."""

    def __init__(self, make: Callable[[], Codec]):
        self.sender, self.receiver = make(), make()

    def send(self, tensor: Tensor, place: Place) -> Tensor:
        payload = bytes(self.sender.pack(tensor, place))
        shape = tuple(tensor.shape)
        assert len(payload) == sum(part.bytes for part in self.sender.layout(shape, place))
        assert len(payload) <= self.receiver.payload_limit(shape)
        return self.receiver.unpack(payload, spec_of(tensor), place)


def ends_of(pair: tuple[type[Feedback], str]) -> Ends:
    wrapper, inner = pair
    return Ends(lambda: wrapper(INNERS[inner]()))


def traffic(events: list[str], seed: int, dtype: torch.dtype) -> list[tuple[str, Tensor, Place]]:
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
def test_what_arrived_is_what_was_meant_but_for_the_last_error(
    pair: tuple[type[Feedback], str], events: list[str], seed: int, dtype: torch.dtype
) -> None:
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


@few
@given(st.sampled_from(sorted(INNERS)), events, seeds, dtypes)
def test_the_buffers_of_ef21_are_equal_on_both_ends(
    inner: str, events: list[str], seed: int, dtype: torch.dtype
) -> None:
    ends = ends_of((EF21, inner))
    assert ends.sender.agreement() == ends.receiver.agreement() == ""
    for event, tensor, place in traffic(events, seed, dtype):
        before = ends.sender.agreement()
        got = ends.send(tensor, place)
        assert ends.sender.agreement() == ends.receiver.agreement()
        if event == "evaluate":
            assert ends.sender.agreement() == before
            continue
        mine = ends.sender.state_tensors()["buffer"]
        theirs = ends.receiver.state_tensors()["buffer"]
        assert torch.equal(mine, theirs)
        assert mine.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        if event == "train":
            assert torch.equal(got, theirs.to(dtype))
        elif before:
            assert ends.sender.agreement() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")])
@pytest.mark.parametrize("inner", sorted(INNERS))
def test_ef21_agrees_between_unlike_devices(inner: str, devices: tuple[str, str]) -> None:
    ends = ends_of((EF21, inner))
    here, there = map(torch.device, devices)
    for number in range(6):
        tensor, place = normal(number).to(here), Place(Leg.BACKWARD, number, 0)
        payload = bytes(ends.sender.pack(tensor, place))
        ends.receiver.unpack(payload, replace(spec_of(tensor), device=there), place)
        assert ends.sender.agreement() == ends.receiver.agreement()


def test_an_ef21_that_missed_a_tensor_is_found_out() -> None:
    ends = ends_of((EF21, "topk"))
    for number in range(3):
        payload = ends.sender.pack(normal(number), Place(Leg.FORWARD, 0, number))
        if number != 1:
            spec = spec_of(normal(number))
            ends.receiver.unpack(bytes(payload), spec, Place(Leg.FORWARD, 0, number))
    assert ends.sender.agreement() != ends.receiver.agreement()


@pytest.mark.parametrize(("wrapper", "inner"), PAIRS)
def test_feedback_delivers_a_constant_tensor_in_the_end(
    wrapper: type[Feedback], inner: str
) -> None:
    """Without feedback these codecs never would: what they leave out, they leave out for ever."""
    sent, ends, plain = normal(0), ends_of((wrapper, inner)), INNERS[inner]()
    arrived = torch.zeros(SHAPE)
    rounds = 60
    for number in range(rounds):
        place = Place(Leg.FORWARD, number, 0)
        got = ends.send(sent, place)
        arrived += got
    mean = got if wrapper is EF21 else arrived / rounds
    alone = cross(plain, INNERS[inner](), sent, place)
    assert (mean - sent).norm() < 0.35 * (alone - sent).norm() + 1e-6


@few
@given(pairs, seeds, dtypes)
def test_in_evaluation_a_wrapper_is_its_inner_codec(
    pair: tuple[type[Feedback], str], seed: int, dtype: torch.dtype
) -> None:
    ends, inner = ends_of(pair), INNERS[pair[1]]
    for number in range(2):
        ends.send(normal(seed + number, dtype), Place(Leg.FORWARD, 0, number))
    tensor, place = normal(seed, dtype), Place(Leg.FORWARD, 1, 0, training=False)
    states = [
        {name: tensor.clone() for name, tensor in end.state_tensors().items()}
        for end in (ends.sender, ends.receiver)
    ]
    assert bytes(ends.sender.pack(tensor, place)) == bytes(inner().pack(tensor, place))
    assert torch.equal(ends.send(tensor, place), cross(inner(), inner(), tensor, place))
    for state, end in zip(states, (ends.sender, ends.receiver), strict=True):
        assert state.keys() == end.state_tensors().keys()
        assert all(torch.equal(state[name], t) for name, t in end.state_tensors().items())


@few
@given(pairs, seeds, st.sampled_from((math.nan, math.inf, -math.inf)), st.sampled_from((0, 2)))
def test_what_is_not_finite_passes_and_leaves_no_trace(
    pair: tuple[type[Feedback], str], seed: int, value: float, when: int
) -> None:
    ends, without = ends_of(pair), ends_of(pair)
    spoilt = normal(seed)
    spoilt.view(-1)[seed % spoilt.numel()] = value
    for number in range(when):
        for each in (ends, without):
            each.send(normal(number), Place(Leg.FORWARD, number, 0))
    assert not ends.send(spoilt, Place(Leg.FORWARD, when, 0)).isfinite().all()
    buffers = [each.sender.state_tensors().get("buffer") for each in (ends, without)]
    assert torch.equal(buffers[0], torch.zeros(SHAPE) if when == 0 else buffers[1])
    if pair == (MixedErrorFeedback, "lowrank"):
        return  # the half on the error was finite, and may have turned its subspace
    for number in range(when, when + 2):
        place = Place(Leg.FORWARD, number, 1)
        assert torch.equal(ends.send(normal(number), place), without.send(normal(number), place))


@few
@given(pairs, st.integers(0, 4), seeds, dtypes)
def test_a_saved_state_continues_alike(
    pair: tuple[type[Feedback], str], cut: int, seed: int, dtype: torch.dtype
) -> None:
    ends, resumed = ends_of(pair), ends_of(pair)
    for number in range(cut):
        ends.send(normal(seed + number, dtype), Place(Leg.FORWARD, number, 0))
    for old, new in ((ends.sender, resumed.sender), (ends.receiver, resumed.receiver)):
        new.load_state_tensors({name: t.clone() for name, t in old.state_tensors().items()})
    for number in range(cut, cut + 3):
        tensor, place = normal(seed + number, dtype), Place(Leg.FORWARD, number, 0)
        assert torch.equal(ends.send(tensor, place), resumed.send(tensor, place))
        assert resumed.sender.agreement() == resumed.receiver.agreement()
    mine, theirs = ends.sender.state_tensors(), resumed.sender.state_tensors()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_state_handed_out_does_not_change_afterwards() -> None:
    ends = ends_of((EF21, "topk"))
    ends.send(normal(0), Place(Leg.FORWARD, 0, 0))
    state = ends.sender.state_tensors()["buffer"]
    before = state.clone()
    ends.send(normal(1), Place(Leg.FORWARD, 1, 0))
    assert torch.equal(state, before)


def test_what_arrived_from_ef21_may_be_changed_by_its_owner() -> None:
    ends = ends_of((EF21, "topk"))
    ends.send(normal(0), Place(Leg.FORWARD, 0, 0)).zero_()
    assert ends.sender.agreement() == ends.receiver.agreement()


def test_the_wrong_state_is_refused() -> None:
    for wrapper in WRAPPERS:
        codec = wrapper(TopK(0.2))
        with pytest.raises(ValueError, match="momentum"):
            codec.load_state_tensors({"momentum": torch.zeros(1)})
    for codec in (EF21(TopK(0.2)), Deflated(TopK(0.2)), TopK(0.2)):
        with pytest.raises(ValueError, match=r"inner\.q"):
            codec.load_state_tensors({"inner.q": torch.zeros(1)})


def test_the_warm_starts_inside_are_saved_as_well() -> None:
    place = Place(Leg.FORWARD, 0, 0)
    single, mixed = ErrorFeedback(LowRank(2)), MixedErrorFeedback(LowRank(4))
    for codec in (single, mixed, mixed):  # at the first tensor there is no error yet
        codec.pack(normal(0), place)
    assert single.state_tensors().keys() == {"buffer", "inner.q"}
    assert mixed.state_tensors().keys() == {"buffer", "tensor.q", "error.q"}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_another_shape_or_type_is_refused(wrapper: type[Feedback]) -> None:
    codec, place = wrapper(TopK(0.2)), Place(Leg.FORWARD, 0, 0)
    codec.pack(normal(0), place)
    for other in (normal(0, shape=(2, 6, 8)), normal(0, torch.float64)):
        with pytest.raises(ConfigError, match=r"buffer of torch.float32 and shape \(3, 6, 8\)"):
            codec.pack(other, place)
    codec.pack(normal(0, shape=(2, 6, 8)), replace(place, training=False))
    codec.pack(normal(0, torch.bfloat16), place)


@pytest.mark.parametrize(("wrapper", "inner"), PAIRS)
@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (3, 5), (1, 1, 1)])
def test_empty_small_and_odd_tensors_travel(
    wrapper: type[Feedback], inner: str, shape: Shape
) -> None:
    ends = ends_of((wrapper, inner))
    for number in range(3):
        got = ends.send(normal(number, shape=shape), Place(Leg.FORWARD, 0, number))
        assert got.shape == shape and got.isfinite().all()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_views_are_read_in_row_order(wrapper: type[Feedback]) -> None:
    view, place = normal(0).transpose(0, 2), Place(Leg.FORWARD, 0, 0)
    one, other = wrapper(TopK(0.2)), wrapper(TopK(0.2))
    for _ in range(2):
        assert bytes(one.pack(view, place)) == bytes(other.pack(view.contiguous(), place))


def test_a_refused_payload_changes_nothing() -> None:
    ends = ends_of((EF21, "topk"))
    ends.send(normal(0), Place(Leg.FORWARD, 0, 0))
    place = Place(Leg.FORWARD, 1, 0)
    payload = bytearray(ends.sender.pack(normal(1), place))
    before = ends.receiver.agreement()
    payload[0] ^= 1
    for wrong in (payload, payload[:-1], payload + b"\0"):
        with pytest.raises(WireError):
            ends.receiver.unpack(wrong, spec_of(normal(1)), place)
    assert ends.receiver.agreement() == before
    payload[0] ^= 1
    ends.receiver.unpack(payload, spec_of(normal(1)), place)
    assert ends.receiver.agreement() == ends.sender.agreement()


def test_mixed_feedback_spends_half_on_the_error() -> None:
    codec, place = MixedErrorFeedback(TopK(0.25)), Place(Leg.FORWARD, 0, 0)
    half = TopK(0.125).payload_limit(SHAPE)
    assert len(codec.pack(normal(0), place)) == 2 * half
    one_shape = (4, 1)
    assert codec.payload_limit(one_shape) == 2 * TopK(0.125).payload_limit(one_shape)
    drawn = MixedErrorFeedback(RandK(0.25))
    buffer = torch.ones(1000)
    drawn.load_state_tensors({"buffer": buffer})
    arrived = drawn.decode(drawn.encode(torch.ones(1000), place), spec_of(buffer), place)
    assert arrived.sum() == 250
    # The halves draw apart: both fall on one element in an eighth of an eighth of all cases.
    assert 0 < (arrived == 2).sum() < 50
    # And the second half does not draw what a run of the next seed draws.
    second = cross(RandK(0.125), RandK(0.125), buffer, replace(place, seed=1))
    assert not torch.equal(arrived - cross(RandK(0.125), RandK(0.125), buffer, place), second)


@pytest.mark.parametrize("inner", [Cast("bf16"), Integer(4)])
def test_mixed_feedback_needs_a_budget_to_halve(inner: Codec) -> None:
    with pytest.raises(ConfigError, match=f"{inner.name} has no budget to halve; topk, randk"):
        MixedErrorFeedback(inner)


@pytest.mark.parametrize("outer", [*WRAPPERS, AQSGD])
@pytest.mark.parametrize("wrapper", [*WRAPPERS, AQSGD])
def test_feedback_around_feedback_is_refused(
    outer: type[Feedback], wrapper: type[Feedback]
) -> None:
    with pytest.raises(ConfigError, match=r"topk\(0.2\)\+.*only one kind of feedback"):
        outer(wrapper(TopK(0.2)))
    with pytest.raises(ConfigError, match="only one kind of feedback"):
        outer(Deflated(wrapper(TopK(0.2))))


class ByExample(Cast):
    """A codec of an outsider that remembers examples, and has a budget to halve."""

    remembers_examples = True

    def __init__(self, format: str = "fp32"):
        super().__init__(format)

    def halved(self) -> Codec:
        return ByExample("bf16")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_remembers_examples_if_what_it_wraps_does(wrapper: type[Feedback]) -> None:
    assert wrapper(ByExample()).remembers_examples
    assert not wrapper(TopK(0.2)).remembers_examples


def test_mixed_feedback_takes_any_codec_that_can_be_halved() -> None:
    codec, place = MixedErrorFeedback(ByExample()), Place(Leg.FORWARD, 0, 0)
    sent = normal(0)
    assert len(codec.pack(sent, place)) == 2 * 2 * sent.numel()
    error = codec.state_tensors()["buffer"]
    assert torch.equal(error, sent - sent.bfloat16().float()) and error.any()


def test_names() -> None:
    assert ErrorFeedback(TopK(0.1)).name == "topk(0.1)+ef"
    assert MixedErrorFeedback(RandK(0.1)).name == "randk(0.1)+ef-mixed"
    assert EF21(LowRank(8)).name == "lowrank(8)+ef21"
    assert AQSGD(Cast("fp16")).name == "fp16+aqsgd"


class Deflated(Wrapper):
    """A codec that changes bytes and not parts, as an entropy coder does."""

    content_decides_size = True

    @property
    def name(self) -> str:
        return f"{self.inner.name}+deflate"

    def to_bytes(self, parts: Parts) -> Payload:
        return zlib.compress(self.inner.to_bytes(parts))

    def from_bytes(self, payload: Payload, spec: TensorSpec, place: Place) -> Parts:
        return self.inner.from_bytes(zlib.decompress(payload), spec, place)

    def payload_limit(self, shape: Shape) -> int:
        return 2 * self.inner.payload_limit(shape) + 64


@pytest.mark.parametrize("wrapper", [ErrorFeedback, EF21])
def test_the_bytes_are_the_affair_of_the_inner_codec(wrapper: type[Feedback]) -> None:
    tensor, place = torch.ones(SHAPE), Place(Leg.FORWARD, 0, 0)
    plain, small = wrapper(TopK(1)), wrapper(Deflated(TopK(1)))
    payload = bytes(small.pack(tensor, place))
    assert len(payload) < len(plain.pack(tensor, place))
    assert small.payload_limit(SHAPE) == Deflated(TopK(1)).payload_limit(SHAPE)
    assert small.size_varies and not plain.size_varies
    got = wrapper(Deflated(TopK(1))).unpack(payload, spec_of(tensor), place)
    assert torch.equal(got, tensor)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_buffer_of_another_shape_is_refused_when_it_is_loaded(wrapper: type[Feedback]) -> None:
    saved = {"buffer": torch.zeros(2, 6, 8)}
    codec = wrapper(TopK(0.2))
    codec.prepare(spec_of(normal(0)), Surroundings(examples=0, limit_bytes=0))
    with pytest.raises(ValueError, match="size of microbatches cannot change"):
        codec.load_state_tensors(saved)
    codec.load_state_tensors({"buffer": torch.zeros(SHAPE)})
