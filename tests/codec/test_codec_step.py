"""One step for a whole tensor: the same error everywhere, and bits where the signal is."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.codec import Codec, Leg, Place, cross, noise, parse_codec, spec_of
from thinwire.codec.quantize import LARGEST, Integer, StepCodec
from thinwire.errors import ConfigError

CPU = torch.device("cpu")
FORWARD = Place(Leg.FORWARD, step=3, microbatch=1)
BACKWARD = Place(Leg.BACKWARD, step=3, microbatch=1)
ALL_BITS = (1.25, 2, 3.5, 6, 12)

quick = settings(deadline=None, max_examples=60, derandomize=True)
places = st.sampled_from((FORWARD, BACKWARD))
values = st.lists(st.floats(-(2.0**119), 2.0**119, width=32), max_size=30)


def normal(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def round_trip(codec: Codec, tensor: Tensor, place: Place = FORWARD) -> Tensor:
    spec = spec_of(tensor)
    return codec.unpack(bytes(codec.pack(tensor, place)), spec, place)


def step_of(codec: Codec, tensor: Tensor) -> float:
    return float(codec.encode(tensor, FORWARD)[0])


def entropy(symbols: Tensor) -> float:
    """Bits per symbol that an ideal coder would need, knowing how often each occurs."""
    share = symbols.unique(return_counts=True)[1].double() / symbols.numel()
    return float(-(share * share.log2()).sum())


def symbols_of(codec: Codec, tensor: Tensor) -> Tensor:
    _, lower, upper = codec.encode(tensor, FORWARD)
    return lower.int() + 256 * upper.int()


@quick
@given(st.sampled_from(ALL_BITS), values, places)
def test_every_value_arrives_within_the_bound(
    bits: float, numbers: list[float], place: Place
) -> None:
    sent, codec = torch.tensor(numbers, dtype=torch.float32), StepCodec(bits)
    if not numbers:
        return
    allowed = (0.5 if place.leg is Leg.FORWARD else 1.0) * step_of(codec, sent)
    error = (round_trip(codec, sent, place).double() - sent.double()).abs()
    assert (error <= allowed + 2.0**-20 * sent.double().abs()).all()


@pytest.mark.parametrize("bits", [2, 3, 4.5, 6, 8])
def test_a_gaussian_tensor_costs_as_many_bits_as_the_name_says(bits: float) -> None:
    sent = normal((256, 256)) * 1e-6
    rms = sent.square().mean().sqrt()
    wanted = float(rms) * math.sqrt(2 * math.pi * math.e) * 2**-bits
    assert step_of(StepCodec(bits), sent) == pytest.approx(wanted, rel=1e-5)
    assert entropy(symbols_of(StepCodec(bits), sent)) == pytest.approx(bits, abs=0.08)


def test_unequal_tokens_cost_fewer_bits_than_with_a_scale_each() -> None:
    """What the codec is for: at the error of int4, fewer bits than its codes hold."""
    sent = normal((200, 128)) * torch.logspace(-1, 1, 200)[:, None]
    error = (round_trip(Integer(4), sent) - sent).square().mean()
    bits = next(b / 8 for b in range(10, 60) if _error(b / 8, sent) <= error)
    assert entropy(symbols_of(StepCodec(bits), sent)) < 3.2


def _error(bits: float, sent: Tensor) -> Tensor:
    return (round_trip(StepCodec(bits), sent) - sent).square().mean()


def test_nothing_is_clipped_however_far_it_lies_out() -> None:
    sent = normal((300, 400))
    sent[7, 7] = -1e6
    codec = StepCodec(12)
    assert step_of(codec, sent) == pytest.approx(1e6 / 32_000)
    assert abs(float(round_trip(codec, sent)[7, 7]) + 1e6) <= 1e6 / 64_000
    assert symbols_of(codec, sent).max() < 2**16


def test_zeros_extremes_and_the_tiniest_numbers() -> None:
    for bits in ALL_BITS:
        assert torch.equal(round_trip(StepCodec(bits), torch.zeros(2, 3)), torch.zeros(2, 3))
        assert round_trip(StepCodec(bits), torch.full((5,), LARGEST)).isfinite().all()
        tiny = torch.tensor([1e-45, -1e-40, 1e-33])
        assert (round_trip(StepCodec(bits), tiny) - tiny).abs().max() <= 2.0**-100


def test_gradients_are_rounded_without_bias() -> None:
    copies, codec = 20_000, StepCodec(2)
    sent = normal((1, 10)).expand(copies, 10)
    limit = 5 * 0.5 * step_of(codec, sent) / math.sqrt(copies)
    got = cross(codec, codec, sent, BACKWARD).double().mean(0)
    assert ((got - sent[0]).abs() <= limit).all()
    nearest = cross(codec, codec, sent, FORWARD).double().mean(0)
    assert ((nearest - sent[0]).abs() > limit).any(), "rounding to nearest is biased"


@pytest.mark.parametrize("place", [FORWARD, BACKWARD])
def test_bytes_depend_on_place_and_values_alone(place: Place) -> None:
    codec, sent = StepCodec(3), normal((6, 8), dtype=torch.bfloat16)
    payload = bytes(codec.pack(sent, place))
    for same in (sent.float(), sent.double(), sent.float().t().contiguous().t()):
        assert bytes(StepCodec(3).pack(same, place)) == payload
    other = bytes(codec.pack(sent, Place(place.leg, 9, 9)))
    assert (other == payload) is (place.leg is Leg.FORWARD)


def test_the_payload_is_fixed_byte_by_byte() -> None:
    sent = torch.tensor([1000.0, -1000.0, 3.0, -200.0])
    payload = bytes(StepCodec(10).pack(sent, FORWARD))
    step = torch.frombuffer(bytearray(payload[:4]), dtype=torch.float32).item()
    symbols = [round(x / step) + 128 for x in sent.tolist()]
    assert payload[4:] == bytes(s % 256 for s in symbols) + bytes(s // 256 % 256 for s in symbols)


@pytest.mark.parametrize("bits", [0, 0.5, 1.2, 12.5, 12.0000001, -1, math.nan])
def test_bits_out_of_range_are_refused(bits: float) -> None:
    with pytest.raises(ConfigError, match=rf"^step\({bits}\): .* between 1\.25 and 12"):
        StepCodec(bits)


@quick
@given(values.filter(lambda numbers: any(abs(x) > 1e-20 for x in numbers)))
def test_with_the_fewest_bits_something_always_arrives(numbers: list[float]) -> None:
    """Also the error's length is below the tensor's, as feedback asks for."""
    sent = torch.tensor(numbers, dtype=torch.float32)
    got = round_trip(StepCodec(1.25), sent)
    assert got.any()
    assert (got.double() - sent.double()).norm() <= 0.87 * sent.double().norm()


def test_feedback_delivers_what_has_one_size_only() -> None:
    """Below 1.05 bits it would arrive as zeros for ever: the step grows with what is owed."""
    sent, rounds = normal((4, 64)).sign(), 50
    sender, receiver = parse_codec("step(1.25)+ef"), parse_codec("step(1.25)+ef")
    places = [Place(Leg.FORWARD, step, 0) for step in range(rounds)]
    total = sum(cross(sender, receiver, sent, place) for place in places)
    assert ((total / rounds - sent).abs() < 0.1).all()


def test_the_mean_of_a_gradient_is_kept_as_well_as_the_docs_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of the 2**15 dithers once, for as many copies of a row."""
    dithers = torch.arange(-(2**15) + 1, 2**15, 2, dtype=torch.int16).repeat_interleave(8)
    words = dithers.view(torch.int32)
    monkeypatch.setattr(noise, "random_words", lambda count, key, device: words.clone())
    sent = (normal((1, 8)) * torch.logspace(-3, 1, 8)).expand(2**15, 8)
    for bits in (3, 12):
        mean = cross(StepCodec(bits), StepCodec(bits), sent, BACKWARD).double().mean(0)
        bound = 2.0**-16 * step_of(StepCodec(bits), sent) + 2.0**-20 * sent[0].abs()
        assert ((mean - sent[0]).abs() <= bound).all()
