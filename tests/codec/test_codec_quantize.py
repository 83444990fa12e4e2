"""Quantizers: what arrives is within the stated bound, on every path, and never a wrong number."""

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.codec import Codec, Leg, Place, cross, noise, parse_codec, spec_of
from thinwire.codec.bits import pack_bits, packed_bytes, unpack_bits
from thinwire.codec.noise import random_words, round_at
from thinwire.codec.quantize import LARGEST, Integer, TensorInteger, blocks, rotate
from thinwire.errors import ConfigError

CPU = torch.device("cpu")
FORWARD = Place(Leg.FORWARD, step=3, microbatch=1)
BACKWARD = Place(Leg.BACKWARD, step=3, microbatch=1)
BITS = range(2, 9)
FORMS = ("", "(group=4)", "(hadamard)", "(group=4,hadamard)", "(tensor)")
NAMES = [f"int{bits}{form}" for bits in BITS for form in FORMS]
INF, NAN = math.inf, math.nan

quick = settings(deadline=None, max_examples=150, derandomize=True)
names = st.sampled_from(NAMES)
places = st.sampled_from((FORWARD, BACKWARD))
shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
finite = st.floats(-(2.0**100), 2.0**100, width=32)
rows = st.integers(1, 13).flatmap(
    lambda width: st.lists(st.lists(finite, min_size=width, max_size=width), max_size=4)
)


def normal(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def round_trip(codec: Codec, tensor: Tensor, place: Place = FORWARD) -> Tensor:
    spec = spec_of(tensor)
    return codec.unpack(bytes(codec.pack(tensor, place)), spec, place)


def steps_of(codec: Codec, tensor: Tensor, place: Place) -> Tensor:
    """The distance of neighbouring levels for every element, read off the payload."""
    first = codec.encode(tensor, place)[0].double()
    if isinstance(codec, TensorInteger):
        return first[1:].expand(tensor.numel()).view(tensor.shape)
    groups = len(first) * tensor.shape[-1] // tensor.numel()
    width = 4 if "group" in codec.name else tensor.shape[-1]
    per_row = first.view(-1, groups).repeat_interleave(width, dim=1)[:, : tensor.shape[-1]]
    return per_row.reshape(tensor.shape)


def float32_term(codec: Codec, sent: Tensor) -> Tensor:
    """What float32's own rounding may add to an error, as the docs have it."""
    x = sent.double()
    if isinstance(codec, TensorInteger):
        return 2.0**-20 * (x.amax() - x.amin() + x.abs())
    return 2.0**-20 * x.abs().amax(-1, keepdim=True).expand(x.shape)


def is_within_bound(codec: Codec, sent: Tensor, place: Place) -> bool:
    """Half a step forward, a whole one backward, and float32's own rounding; rotated: by length."""
    error = round_trip(codec, sent, place).double() - sent.double()
    step = steps_of(codec, sent, place) * (0.5 if place.leg is Leg.FORWARD else 1.0)
    bound = step + float32_term(codec, sent)
    if "hadamard" in codec.name:
        error, bound = error.square().sum(-1), bound.square().sum(-1) * (1 + 2.0**-12)
    return bool((error.abs() <= bound).all())


@quick
@given(names, rows, places)
@example("int4(group=4)", [[1.0], [2.0]], FORWARD)  # a group that is nearly all padding
def test_every_value_arrives_within_the_bound(
    name: str, values: list[list[float]], place: Place
) -> None:
    sent = torch.tensor(values, dtype=torch.float32)
    if sent.numel():
        assert is_within_bound(parse_codec(name), sent, place)


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_the_nearest_by_a_plain_loop(bits: int) -> None:
    sent = normal((5, 9))
    scales, packed = Integer(bits).encode(sent, FORWARD)
    codes = unpack_bits(packed, 45, bits).view(5, 9).tolist()
    center = 1.5 if bits == 2 else 2 ** (bits - 1) - 1
    for row, scale, got in zip(sent.tolist(), scales.tolist(), codes, strict=True):
        levels = [(code - center) * scale for code in range(2**bits)]
        nearest = [min(range(2**bits), key=lambda c, x=x: abs(levels[c] - x)) for x in row]
        assert got == nearest


@pytest.mark.parametrize("bits", range(3, 9))
@pytest.mark.parametrize("place", [FORWARD, BACKWARD])
@pytest.mark.parametrize("unit", [1.0, 2.0**-40, 3 * 2.0**50])
def test_whole_multiples_of_a_bfloat16_scale_arrive_exactly(
    bits: int, place: Place, unit: float
) -> None:
    top = 2 ** (bits - 1) - 1
    sent = torch.arange(-top, top + 1).float() * unit
    got = round_trip(Integer(bits), sent, FORWARD)
    assert torch.equal(got, sent)
    assert round_trip(Integer(bits), sent, place)[top] == 0


@pytest.mark.parametrize("bits", BITS)
def test_the_scale_is_the_least_bfloat16_that_clips_nothing(bits: int) -> None:
    top = 1.5 if bits == 2 else 2 ** (bits - 1) - 1
    sent = normal((200, 3)).exp() * torch.logspace(-35, 30, 200)[:, None]
    scales = Integer(bits).encode(sent, FORWARD)[0]
    needed = (sent.abs().amax(1) / top).clamp(min=2.0**-126)
    below = torch.nextafter(scales, torch.zeros_like(scales)).float()
    assert (scales.float() >= needed).all() and (below < needed).all()


def test_two_bits_make_four_levels() -> None:
    sent = torch.tensor([3.0, 1.1, 0.2, -0.2, -1.4, -3.0])
    assert round_trip(Integer(2), sent).tolist() == [3.0, 1.0, 1.0, -1.0, -1.0, -3.0]
    assert round_trip(Integer(2), torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", [FORWARD, BACKWARD])
def test_zeros_and_the_tiniest_numbers(name: str, place: Place) -> None:
    codec = parse_codec(name)
    assert torch.equal(round_trip(codec, torch.zeros(3, 5), place), torch.zeros(3, 5))
    tiny = torch.tensor([[1e-45, -1e-45, 0.0], [1e-38, 0.0, -1e-40]])
    got = round_trip(codec, tiny, place)
    assert (got - tiny).abs().max() <= 2.0**-126 and is_within_bound(codec, tiny, place)


@pytest.mark.parametrize("bits", BITS)
def test_the_least_element_of_a_tensor_arrives_exactly(bits: int) -> None:
    sent = normal((7, 11)).relu() + 100
    got = round_trip(TensorInteger(bits), sent)
    assert got.min() == sent.min() and (got == sent.min()).sum() >= (sent == sent.min()).sum()
    constant = torch.full((3,), 1.7)
    assert torch.equal(round_trip(TensorInteger(bits), constant), constant)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", [FORWARD, BACKWARD])
@pytest.mark.parametrize("bad", [NAN, INF, -INF, 3e38, -(2.0**125)])
def test_a_group_with_something_not_finite_is_nan_and_no_other(
    name: str, place: Place, bad: float
) -> None:
    sent = normal((3, 11))
    healthy = round_trip(parse_codec(name), sent, place)
    sent[1, 6] = bad
    got = round_trip(parse_codec(name), sent, place)
    ill = torch.zeros(3, 11, dtype=torch.bool)
    if "tensor" in name:
        ill[:] = True
    elif "group" in name:
        ill[1, 4:8] = True
    else:
        ill[1] = True
    assert torch.equal(got.isnan(), ill)
    assert torch.equal(got[~ill], healthy[~ill])


def test_of_a_rotated_group_the_magnitudes_after_the_rotation_count() -> None:
    codec = Integer(8, hadamard=True)
    signs = rotate(torch.eye(1, 256), 256, back=True).sign()  # all on one element, once turned
    assert round_trip(codec, signs * 2.0**116).isfinite().all()
    assert round_trip(codec, signs * 2.0**121).isnan().all()
    spike = torch.zeros(1, 256)
    spike[0, 7] = 2.0**124
    assert round_trip(codec, spike).isfinite().all()
    assert round_trip(codec, 2 * spike).isnan().all()


def test_the_largest_magnitude_that_counts_as_finite_survives() -> None:
    for name in NAMES:
        sent = torch.full((2, 16), LARGEST / 16)
        assert round_trip(parse_codec(name), sent).isfinite().all(), name


@pytest.mark.parametrize("name", ["int2", "int3", "int4(group=4)", "int8", "int4(tensor)"])
def test_gradients_are_rounded_without_bias(name: str) -> None:
    """The same row many times over: each copy meets other random numbers."""
    codec, copies = parse_codec(name), 20_000
    sent = normal((1, 10)).expand(copies, 10)
    limit = 5 * 0.5 * steps_of(codec, sent, BACKWARD)[0] / math.sqrt(copies)
    got = cross(codec, codec, sent, BACKWARD).double()
    assert ((got.mean(0) - sent[0]).abs() <= limit).all()
    nearest = cross(codec, codec, sent, FORWARD).double()
    assert ((nearest.mean(0) - sent[0]).abs() > limit).any(), "rounding to nearest is biased"


def test_every_place_rounds_anew() -> None:
    codec, sent, places = Integer(4), normal((4, 10)), 400
    limit = 5 * 0.5 * steps_of(codec, sent, BACKWARD) / math.sqrt(places)
    total = torch.zeros(sent.shape, dtype=torch.float64)
    for microbatch in range(places):
        total += cross(codec, codec, sent, Place(Leg.BACKWARD, 0, microbatch))
    assert ((total / places - sent).abs() <= limit).all()


def test_the_chance_of_rounding_up_is_the_fraction() -> None:
    fractions = torch.tensor([0.0, 0.001, 0.25, 0.5, 0.9, 0.999]).repeat(200_000, 1)
    up = round_at(fractions.clone(), BACKWARD).double().mean(0)
    assert (up - fractions[0]).abs().max() < 0.005 and up[0] == 0
    assert round_at(fractions[0].clone(), FORWARD).tolist() == [0, 0, 0, 0, 1, 1]


def test_no_largest_element_passes_the_last_code() -> None:
    """Where the scale is exact, dither and rounding errors together stay below half a level."""
    for numerator in range(129, 256, 2):
        sent = torch.full((20_000,), 127.0 * numerator)
        codes = Integer(8).encode(torch.nextafter(sent, torch.tensor(INF)), BACKWARD)[1]
        assert codes.max() <= 254


def every_dither(count: int, key: int, device: torch.device) -> Tensor:
    """In place of random words: each of the 2**15 dithers once, for as many copies of a row."""
    odd = torch.arange(-(2**15) + 1, 2**15, 2, dtype=torch.int16)
    return odd.repeat_interleave(2 * count // len(odd)).view(torch.int32)


@pytest.mark.parametrize("name", ["int2", "int4", "int8", "int4(tensor)", "int8(tensor)"])
def test_the_mean_of_a_gradient_is_kept_as_well_as_the_docs_say(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise, "random_words", every_dither)
    codec, sent = parse_codec(name), normal((1, 32)).expand(2**15, 32)
    mean = cross(codec, codec, sent, BACKWARD).double().mean(0)
    bound = 2.0**-16 * steps_of(codec, sent, BACKWARD)[0] + float32_term(codec, sent)[0]
    assert ((mean - sent[0]).abs() <= bound).all()


@pytest.mark.parametrize("name", NAMES)
def test_rounding_depends_on_the_place_and_on_nothing_else(name: str) -> None:
    codec, sent = parse_codec(name), normal((6, 20))
    torch.manual_seed(1)
    first = bytes(codec.pack(sent, BACKWARD))
    torch.manual_seed(2)
    assert bytes(parse_codec(name).pack(sent, BACKWARD)) == first
    others = [Place(Leg.BACKWARD, *where) for where in ((3, 2), (4, 1), (3, 1, 1), (3, 1, 0, 1))]
    assert len({bytes(codec.pack(sent, place)) for place in others} | {first}) == 5
    forward = bytes(codec.pack(sent, FORWARD))
    assert bytes(codec.pack(sent, Place(Leg.FORWARD, 9, 9))) == forward != first


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", [FORWARD, BACKWARD])
def test_bytes_depend_on_values_and_not_on_their_type_or_memory(name: str, place: Place) -> None:
    codec, sent = parse_codec(name), normal((4, 6, 8), dtype=torch.bfloat16)
    payload = bytes(codec.pack(sent, place))
    for dtype in (torch.float32, torch.float64):
        assert bytes(codec.pack(sent.to(dtype), place)) == payload
    view = sent.float().transpose(0, 2).contiguous().transpose(0, 2)
    assert not view.is_contiguous() and bytes(codec.pack(view, place)) == payload
    wide = torch.zeros(4, 6, 16)
    wide[..., ::2] = sent
    assert bytes(codec.pack(wide[..., ::2], place)) == payload


def test_the_payload_is_fixed_byte_by_byte() -> None:
    """The wire format is a contract between machines."""
    sent = torch.tensor([[7.0, -7.0, 1.0, 0.0, -2.0], [0.0, 0.0, 0.5, 3.5, 0.0]])
    # scales 1.0 and 0.5 in bf16, then codes 14 0 8 7 5 | 7 7 8 14 7, low nibbles first
    assert bytes(Integer(4).pack(sent, FORWARD)).hex() == "803f003f" + "0e7875877e"
    # offset -7 and step 14/3 in fp32, then codes of two bits: 3 0 2 2 1
    whole = torch.tensor([7.0, -7.0, 1.0, 0.4, -2.0])
    assert bytes(TensorInteger(2).pack(whole, FORWARD)).hex() == "0000e0c0" + "55559540" + "a301"


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 7, 8, 9, 16, 17, 1001])
def test_bits_are_one_little_endian_number(bits: int, count: int) -> None:
    codes = normal((count,), count).mul(1e6).long().remainder(2**bits)
    number = sum(code << (bits * place) for place, code in enumerate(codes.tolist()))
    packed = pack_bits(codes.to(torch.uint8), bits)
    assert bytes(packed.numpy()) == number.to_bytes(packed_bytes(count, bits), "little")
    assert torch.equal(unpack_bits(packed, count, bits).long(), codes)


def plain_words(count: int, key: int) -> list[int]:
    """The hash once more, on Python's own numbers."""

    def mixed(word: int, factor: int) -> int:
        return (word ^ word >> 16) * factor

    key = (key + 0x9E3779B97F4A7C15) % 2**64
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    key = (key ^ key >> 27) * 0x94D049BB133111EB % 2**64
    key ^= key >> 31
    low, high = (key + 2**31) % 2**32, (key // 2**32 + 2**31) % 2**32
    words = [(low + index * 0x9E3779B9) % 2**32 for index in range(count)]
    words = [(high + mixed(word, 0x85EBCA6B)) % 2**32 for word in words]
    words = [mixed(word, 0xC2B2AE35) % 2**32 for word in words]
    return [word - 2**32 if word >= 2**31 else word for word in words]


@quick
@given(st.integers(0, 2**63 - 1))
def test_random_words_are_the_same_everywhere(key: int) -> None:
    assert random_words(50, key, CPU).tolist() == plain_words(50, key)


def test_random_words_are_uniform_and_unrelated() -> None:
    halves = random_words(1 << 20, 12345, CPU).view(torch.int16).long() + 2**15
    for bits in (halves[::2], halves[1::2]):
        counts = torch.bincount(bits, minlength=2**16).double()
        chi = (counts - 16).square().sum() / 16
        assert abs(chi - 65535) < 5 * math.sqrt(2 * 65535)
    noise = (halves.double() - 32767.5) / 65536
    for lag in (1, 2, 3, 8, 64, 512, 1024):
        assert abs((noise[:-lag] * noise[lag:]).mean()) * 12 * math.sqrt(len(noise)) < 5
    for other in (12346, 12345 + 2**32, 12345 + 2**62):
        theirs = random_words(1 << 20, other, CPU).view(torch.int16).double() / 65536
        assert abs((noise * theirs).mean()) * 12 * math.sqrt(len(noise)) < 5


@quick
@given(st.integers(1, 600), st.sampled_from((4, 8, 64, 10_000)), st.integers(0, 2**32))
def test_a_rotation_keeps_lengths_and_can_be_undone(width: int, largest: int, seed: int) -> None:
    sent = normal((3, width), seed)
    turned = rotate(sent, largest)
    assert turned.shape == sent.shape
    torch.testing.assert_close(turned.norm(dim=1), sent.norm(dim=1))
    torch.testing.assert_close(rotate(turned, largest, back=True), sent, atol=1e-5, rtol=0)
    runs = blocks(width, largest)
    assert runs[0][0] == 0 and runs[-1][1] == width
    assert all(left[1] == right[0] for left, right in itertools.pairwise(runs))
    assert all((stop - start) % size == 0 for start, stop, size in runs)


@pytest.mark.parametrize("size", [4, 16, 64, 256])
def test_a_block_is_mixed_evenly(size: int) -> None:
    """One outlier becomes `size` elements of one magnitude; a constant row does not pile up."""
    spike = torch.zeros(1, size)
    spike[0, size // 3] = 1
    assert torch.equal(rotate(spike, size).abs(), torch.full((1, size), size**-0.5))
    if size >= 64:
        assert rotate(torch.ones(1, size), size).abs().max() < 0.6 * size**0.5


def test_turning_codes_back_is_exact() -> None:
    """So that both ends of a link agree to the bit, whatever adds up their sums."""
    codes = normal((50, 340)).mul(60).round().clamp(-127, 127)
    back = rotate(codes, 340, back=True)
    matrix = rotate(torch.eye(340), 340)  # row i: where element i goes
    exact = codes.double() @ matrix.double().T
    assert torch.equal(back.double(), exact)


def test_rotation_pays_where_there_are_outliers() -> None:
    sent = normal((64, 256))
    sent[:, 7] *= 60
    plain = (round_trip(Integer(4), sent) - sent).square().mean()
    rotated = (round_trip(Integer(4, hadamard=True), sent) - sent).square().mean()
    assert rotated < plain / 8


@pytest.mark.parametrize(
    ("bits", "group", "hadamard", "said"),
    [
        (9, None, False, "2 to 8 bits"),
        (1, None, False, "2 to 8 bits"),
        (4, 3, False, "at least 4"),
        (4, 0, False, "at least 4"),
        (4, 48, True, "power of two"),
    ],
)
def test_what_cannot_be_is_refused(bits: int, group: int, hadamard: bool, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Integer(bits, group, hadamard)
