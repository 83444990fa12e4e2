"""Float formats and quantizers: what arrives is within the stated bound, on every path, and never
a wrong number."""

import math

import pytest
import torch
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensors import CPU, normal, round_trip

from thinwire.codec import Cast, Leg, Place, cross, parse_codec, spec_of
from thinwire.codec.quantize import (
    FORMATS,
    LARGEST,
    Integer,
    StepCodec,
    TensorInteger,
    pack_bits,
    packed_bytes,
    random_words,
    rotate,
    unpack_bits,
)

FORWARD = Place(Leg.FORWARD, step=3, microbatch=1)
BACKWARD = Place(Leg.BACKWARD, step=3, microbatch=1)
BITS = range(2, 9)
STEP_BITS = (1.25, 2, 3.5, 6, 12)
FORMS = ("", "(group=4)", "(hadamard)", "(group=4,hadamard)", "(tensor)")
INTEGERS = [f"int{bits}{form}" for bits in BITS for form in FORMS]
STEPS = [f"step({bits})" for bits in STEP_BITS]
NAMES = [*INTEGERS, *STEPS]
INF, NAN = math.inf, math.nan

quick = settings(deadline=None, max_examples=150, derandomize=True)
names = st.sampled_from(NAMES)
places = st.sampled_from((FORWARD, BACKWARD))
formats = st.sampled_from(sorted(FORMATS))
# 0-dim, empty in any dimension, one element, and up to the four dimensions a frame can carry
finite = st.floats(-(2.0**100), 2.0**100, width=32)
rows = st.integers(1, 13).flatmap(
    lambda width: st.lists(st.lists(finite, min_size=width, max_size=width), max_size=4)
)


# Casts


@settings(deadline=None)
@given(
    formats,
    st.lists(st.floats(-60000, 60000), max_size=20),
    st.sampled_from((torch.float64, torch.float32)),
)
def test_other_values_are_rounded_as_torch_rounds_them(name, values, dtype):
    sent = torch.tensor(values, dtype=dtype)
    assert torch.equal(round_trip(Cast(name), sent), sent.to(FORMATS[name]).to(dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_nan_and_infinity_travel(name):
    sent = torch.tensor([NAN, INF, -INF, -0.0, 1.0])
    got = round_trip(Cast(name), sent)
    assert got.isnan().tolist() == [True, False, False, False, False]
    assert torch.equal(got[1:], sent[1:]) and torch.signbit(got[3])
    assert round_trip(Cast(name), torch.tensor([65520.0, -1e6, 3e38])).isfinite().all()


def test_tags_name_the_codec_for_ever():
    """Written out: a release that changes one can no longer talk to the last."""
    tags = {name: Cast(name).tag for name in FORMATS}
    assert tags == {"fp64": 0xC3507A53, "fp32": 0x57442B23, "bf16": 0xF5D6C52D}


# All quantizers


def steps_of(codec, tensor, place):
    """The distance of neighbouring levels for every element, read off the payload."""
    first = codec.encode(tensor, place)[0].double()
    if isinstance(codec, TensorInteger | StepCodec):
        return first[-1:].expand(tensor.numel()).view(tensor.shape)
    groups = len(first) * tensor.shape[-1] // tensor.numel()
    width = 4 if "group" in codec.name else tensor.shape[-1]
    per_row = first.view(-1, groups).repeat_interleave(width, dim=1)[:, : tensor.shape[-1]]
    return per_row.reshape(tensor.shape)


def float32_term(codec, sent):
    """What float32's own rounding may add to an error, as the docs have it."""
    x = sent.double()
    if isinstance(codec, StepCodec):
        return 2.0**-20 * x.abs()
    if isinstance(codec, TensorInteger):
        return 2.0**-20 * (x.amax() - x.amin() + x.abs())
    return 2.0**-20 * x.abs().amax(-1, keepdim=True).expand(x.shape)


def is_within_bound(codec, sent, place):
    """Half a step forward, a whole one backward, and float32's own rounding; rotated: by length."""
    error = round_trip(codec, sent, place).double() - sent.double()
    step = steps_of(codec, sent, place)
    bound = step * (0.5 if place.leg is Leg.FORWARD else 1.0) + float32_term(codec, sent)
    if "hadamard" in codec.name:
        error, bound = error.square().sum(-1), bound.square().sum(-1) * (1 + 2.0**-12)
    return bool((error.abs() <= bound).all())


@quick
@given(names, rows, places)
@example("int4(group=4)", [[1.0], [2.0]], FORWARD)  # a group that is nearly all padding
def test_every_value_arrives_within_the_bound(name, values, place):
    sent = torch.tensor(values, dtype=torch.float32)
    if sent.numel():
        assert is_within_bound(parse_codec(name), sent, place)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", [FORWARD, BACKWARD])
def test_zeros_and_extremes(name, place):
    codec = parse_codec(name)
    assert torch.equal(round_trip(codec, torch.zeros(3, 5), place), torch.zeros(3, 5))
    tiny = torch.tensor([[1e-45, -1e-45, 0.0], [1e-38, 0.0, -1e-40]])
    least = 2.0**-100 if name in STEPS else 2.0**-126
    assert (round_trip(codec, tiny, place) - tiny).abs().max() <= least
    assert is_within_bound(codec, tiny, place)
    largest = torch.full((2, 16), LARGEST / (16 if "hadamard" in name else 1))
    assert round_trip(codec, largest, place).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", [FORWARD, BACKWARD])
@pytest.mark.parametrize("bad", [NAN, INF, -INF, 3e38, -(2.0**125)])
def test_a_group_with_something_not_finite_is_nan_and_no_other(name, place, bad):
    sent = normal((3, 11), 0)
    healthy = round_trip(parse_codec(name), sent, place)
    sent[1, 6] = bad
    got = round_trip(parse_codec(name), sent, place)
    ill = torch.zeros(3, 11, dtype=torch.bool)
    if "tensor" in name or name in STEPS:
        ill[:] = True
    elif "group" in name:
        ill[1, 4:8] = True
    else:
        ill[1] = True
    assert torch.equal(got.isnan(), ill)
    assert torch.equal(got[~ill], healthy[~ill])


BIASED = ["int2", "int3", "int4(group=4)", "int8", "int4(tensor)", "step(2)"]


@pytest.mark.parametrize("name", BIASED)
def test_gradients_are_rounded_without_bias(name):
    """The same row many times over: each copy meets other random numbers."""
    codec, copies = parse_codec(name), 20_000
    sent = normal((1, 10), 0).expand(copies, 10)
    limit = 5 * 0.5 * steps_of(codec, sent, BACKWARD)[0] / math.sqrt(copies)
    got = cross(codec, codec, sent, BACKWARD).double()
    assert ((got.mean(0) - sent[0]).abs() <= limit).all()
    nearest = cross(codec, codec, sent, FORWARD).double()
    assert ((nearest.mean(0) - sent[0]).abs() > limit).any(), "rounding to nearest is biased"


@pytest.mark.parametrize("name", NAMES)
def test_rounding_depends_on_the_place_and_values_alone(name):
    codec, sent = parse_codec(name), normal((6, 20), 0, torch.bfloat16)
    torch.manual_seed(1)
    first, forward = (bytes(codec.pack(sent, place)) for place in (BACKWARD, FORWARD))
    torch.manual_seed(2)
    for same in (sent, sent.float(), sent.double()):
        assert bytes(parse_codec(name).pack(same, BACKWARD)) == first
        assert bytes(parse_codec(name).pack(same, FORWARD)) == forward
    assert bytes(codec.pack(sent, Place(Leg.FORWARD, 9, 9))) == forward
    others = [Place(Leg.BACKWARD, *where) for where in ((3, 2), (4, 1), (3, 1, 1), (3, 1, 0, 1))]
    drawn = {bytes(codec.pack(sent, place)) for place in others} | {first, forward}
    assert len(drawn) == 6


@pytest.mark.parametrize(("name", "sent", "payload"), [
    ("fp64", [1.0, -2.0], "000000000000f03f00000000000000c0"),
    ("fp32", [1.0, -2.0], "0000803f000000c0"),
    ("bf16", [1.0, -2.0], "803f00c0"),
    # scales 1.0 and 0.5 in bf16, then codes 14 0 8 7 5 | 7 7 8 14 7, low nibbles first
    ("int4", [[7.0, -7, 1, 0, -2], [0, 0, 0.5, 3.5, 0]], "803f003f" + "0e7875877e"),
    # offset -7 and step 14/3 in fp32, then codes of two bits: 3 0 2 2 1
    ("int2(tensor)", [7.0, -7, 1, 0.4, -2], "0000e0c0" + "55559540" + "a301"),
])  # fmt: skip
def test_the_payload_is_fixed_byte_by_byte(name, sent, payload):
    """The wire format is a contract between machines: little-endian, fixed by value."""
    assert bytes(parse_codec(name).pack(torch.tensor(sent), FORWARD)).hex() == payload


# Whole numbers


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_the_nearest_by_a_plain_loop(bits):
    sent = normal((5, 9), 0)
    scales, packed = Integer(bits).encode(sent, FORWARD)
    codes = unpack_bits(packed, 45, bits).view(5, 9).tolist()
    center = 1.5 if bits == 2 else 2 ** (bits - 1) - 1
    for row, scale, got in zip(sent.tolist(), scales.tolist(), codes, strict=True):
        levels = [(code - center) * scale for code in range(2**bits)]
        nearest = [min(range(2**bits), key=lambda c, x=x: abs(levels[c] - x)) for x in row]
        assert got == nearest


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 7, 8, 9, 16, 17, 1001])
def test_bits_are_one_little_endian_number(bits, count):
    codes = normal((count,), count).mul(1e6).long().remainder(2**bits)
    number = sum(code << (bits * place) for place, code in enumerate(codes.tolist()))
    packed = pack_bits(codes.to(torch.uint8), bits)
    assert bytes(packed.numpy()) == number.to_bytes(packed_bytes(count, bits), "little")
    assert torch.equal(unpack_bits(packed, count, bits).long(), codes)


def test_random_words_are_the_same_everywhere():
    """Written out: both ends of a link draw them."""
    known = {0: [-1476896137, 292778451, -1956552925], 1: [-623957823, 1025656885, -1270649016],
             2**63 - 1: [113183879, -287671110, -648740913]}  # fmt: skip
    assert {key: random_words(3, key, CPU).tolist() for key in known} == known


def test_turning_codes_back_is_exact():
    """So that both ends of a link agree to the bit, whatever adds up their sums."""
    codes = normal((50, 340), 0).mul(60).round().clamp(-127, 127)
    back = rotate(codes, 340, back=True)
    matrix = rotate(torch.eye(340), 340)  # row i: where element i goes
    exact = codes.double() @ matrix.double().T
    assert torch.equal(back.double(), exact)


# Multiples of one step for a whole tensor


def step_of(codec, tensor):
    return float(codec.encode(tensor, FORWARD)[0])


def entropy(symbols):
    """Bits per symbol that an ideal coder would need, knowing how often each occurs."""
    share = symbols.unique(return_counts=True)[1].double() / symbols.numel()
    return float(-(share * share.log2()).sum())


def symbols_of(codec, tensor):
    """As they arrive: 2**15 is zero."""
    parts = codec.encode(tensor, FORWARD)
    return (codec.decode(parts, spec_of(tensor), FORWARD) / parts[0]).round().int() + 2**15


@pytest.mark.parametrize("bits", [2, 3, 4.5, 6, 8])
def test_a_gaussian_tensor_costs_as_many_bits_as_the_name_says(bits):
    sent = normal((256, 256), 0) * 1e-6
    rms = sent.square().mean().sqrt()
    wanted = float(rms) * math.sqrt(2 * math.pi * math.e) * 2**-bits
    assert step_of(StepCodec(bits), sent) == pytest.approx(wanted, rel=1e-5)
    assert entropy(symbols_of(StepCodec(bits), sent)) == pytest.approx(bits, abs=0.08)


def test_nothing_is_clipped_however_far_it_lies_out():
    sent = normal((300, 400), 0)
    sent[7, 7] = -1e6
    codec = StepCodec(12)
    assert step_of(codec, sent) == pytest.approx(1e6 / 32_000)
    assert abs(float(round_trip(codec, sent)[7, 7]) + 1e6) <= 1e6 / 64_000
    assert symbols_of(codec, sent).max() < 2**16


def test_symbols_are_sent_in_two_planes_of_bytes_about_what_rows_have_in_common():
    sent = torch.tensor([[1000.0, 3.0], [-200.0, -7.0], [2000.0, 0.0]])
    payload = bytes(StepCodec(10).pack(sent, FORWARD))
    step = torch.frombuffer(bytearray(payload[:4]), dtype=torch.float32).item()
    symbols = [[round(x / step) for x in row] for row in sent.tolist()]
    means = [(sum(column) + 1) // 3 for column in zip(*symbols, strict=True)]
    rests = [s - mean + 136 for row in symbols for s, mean in zip(row, means, strict=True)]
    planes = bytes(r % 256 for r in rests) + bytes(r // 256 % 256 for r in rests)
    common = b"".join(m.to_bytes(2, "little", signed=True) for m in means)
    assert payload[4:] == common + b"\0" + planes


def test_small_symbols_are_sent_two_to_a_byte():
    """Where four bits hold nearly all: lower halves, then upper halves, then a last odd byte."""
    sent = torch.tensor([[float(n % 15 - 7)] for n in range(201)])
    sent[11] = 50
    step, means, paired, lower, upper = StepCodec(2.5).encode(sent, FORWARD)
    symbols = [round(float(x / step)) - int(means) + 136 for x in sent[:, 0]]
    pairs = list(zip(symbols[:-1:2], symbols[1::2], strict=True))
    halves = [[a % 16 + b % 16 * 16 for a, b in pairs], [a // 16 + b // 16 * 16 for a, b in pairs]]
    assert bool(paired) and max(symbols) >= 144 and not upper.any()
    assert lower.tolist() == [*halves[0], *halves[1], symbols[-1]]
    sent[5:9] = 50
    assert not StepCodec(2.5).encode(sent, FORWARD)[2], "more than one in a hundred lies outside"


@pytest.mark.parametrize("bits", [1.5, 2, 3, 4, 5])
def test_zstd_comes_close_to_the_entropy(bits):
    """A byte for each symbol would cost half a bit more with two bits."""
    sent = normal((4096, 61), 0)
    symbols = (round_trip(StepCodec(bits), sent) / step_of(StepCodec(bits), sent)).round()
    packed = 8 * len(parse_codec(f"step({bits})+zstd").pack(sent, FORWARD)) / sent.numel()
    assert packed < entropy(symbols) + 0.1
    single = zstandard.compress((symbols + 128).byte().numpy().tobytes(), 1)
    assert bits > 2 or 8 * len(single) / sent.numel() > entropy(symbols) + 0.3


def test_the_receiver_takes_the_random_numbers_off_again():
    """Half of the error's variance; rows without a gradient stay without one."""
    sent = normal((4096, 61), 0)
    sent[100] = 0
    step = step_of(StepCodec(2), sent)
    error = cross(StepCodec(2), StepCodec(2), sent, BACKWARD) - sent
    assert float(error.square().mean()) == pytest.approx(step**2 / 12, rel=0.02)
    assert float(error.abs().max()) <= step / 2 * 1.0001
    assert not error[100].any()
    kept = StepCodec(2).decode(StepCodec(2).encode(sent, BACKWARD), spec_of(sent), FORWARD) - sent
    assert float(kept.square().mean()) == pytest.approx(step**2 / 6, rel=0.02)


def test_what_all_rows_have_in_common_is_sent_once():
    """Sent with every row it would take as many bits as it is large, as with gradients."""
    sent = normal((4096, 64), 0) + 5 * normal((64,), 1)
    codec = parse_codec("step(6)+zstd")
    step, means, *_ = StepCodec(6).encode(sent, FORWARD)
    symbols = (round_trip(codec, sent) / step).round()
    assert torch.equal(means, symbols.double().mean(0).add(0.5).floor().short())
    bits, back = (8 * len(codec.pack(sent, p)) / sent.numel() for p in (FORWARD, BACKWARD))
    assert abs(bits - entropy(symbols - means)) < 0.2
    assert min(back, entropy(symbols)) > bits + 1
    assert not StepCodec(6).encode(sent, BACKWARD)[1].any()


@quick
@given(st.lists(finite, max_size=30).filter(lambda numbers: any(abs(x) > 1e-20 for x in numbers)))
def test_with_the_fewest_bits_something_always_arrives(numbers):
    """Also the error's length is below the tensor's, as feedback asks for."""
    sent = torch.tensor(numbers, dtype=torch.float32)
    got = round_trip(StepCodec(1.25), sent)
    assert got.any()
    assert (got.double() - sent.double()).norm() <= 0.87 * sent.double().norm()


def test_feedback_delivers_what_has_one_size_only():
    """Below 1.05 bits it would arrive as zeros for ever: the step grows with what is owed."""
    sent, rounds = normal((4, 64), 0).sign(), 50
    sender, receiver = parse_codec("step(1.25)+ef"), parse_codec("step(1.25)+ef")
    places = [Place(Leg.FORWARD, step, 0) for step in range(rounds)]
    total = sum(cross(sender, receiver, sent, place) for place in places)
    assert ((total / rounds - sent).abs() < 0.1).all()
