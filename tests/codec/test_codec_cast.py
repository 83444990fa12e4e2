"""Casts: what arrives is what was sent, rounded to the format and no further."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.codec import Cast, Codec, Leg, Place, Surroundings, TensorSpec, parse_codec, spec_of
from thinwire.errors import ConfigError

PLACE = Place(Leg.FORWARD, step=3, microbatch=1)
CPU = torch.device("cpu")
NAMES = ("fp64", "fp32", "bf16", "fp16")
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

names = st.sampled_from(NAMES)
# 0-dim, empty in any dimension, one element, and up to the four dimensions a frame can carry
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def round_trip(codec: Codec, tensor: Tensor) -> Tensor:
    spec = spec_of(tensor)
    return codec.unpack(bytes(codec.pack(tensor, PLACE)), spec, PLACE)


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def allowed_error(sent: Tensor, format: torch.dtype) -> Tensor:
    """Half a unit in the last place of each element: what rounding to nearest may change.

    Below the smallest normal number the places stop shrinking. Torch casts float64 to the
    half formats by way of float32, which may add half a place of float32.
    """
    info = torch.finfo(format)
    magnitude = sent.double().abs()
    half_place = 0.5 * info.eps * magnitude.clamp(min=info.smallest_normal)
    if info.bits < 32 and sent.dtype == torch.float64:
        half_place = half_place + 2.0**-24 * magnitude
    return half_place


@settings(deadline=None)
@given(names, shapes, st.integers(0, 2**32))
def test_representable_values_arrive_exactly(name: str, shape: tuple[int, ...], seed: int) -> None:
    sent = normal(shape, seed, DTYPES[name]).to(torch.float64)
    got = round_trip(Cast(name), sent)
    assert got.shape == sent.shape and got.dtype == sent.dtype
    assert torch.equal(got, sent)


@settings(deadline=None)
@given(
    names,
    st.lists(st.floats(-60000, 60000), max_size=20),
    st.sampled_from((torch.float64, torch.float32)),
)
def test_other_values_move_by_half_a_place_at_most(
    name: str, values: list[float], dtype: torch.dtype
) -> None:
    sent = torch.tensor(values, dtype=dtype)
    error = (round_trip(Cast(name), sent).double() - sent.double()).abs()
    assert (error <= allowed_error(sent, DTYPES[name])).all()


@settings(deadline=None)
@given(names, st.integers(0, 2**32))
def test_a_cast_rounds_once_only(name: str, seed: int) -> None:
    once = round_trip(Cast(name), normal((3, 5), seed))
    assert torch.equal(round_trip(Cast(name), once), once)


@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_travel(name: str) -> None:
    sent = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1.0])
    got = round_trip(Cast(name), sent)
    assert got.isnan().tolist() == [True, False, False, False, False]
    assert torch.equal(got[1:], sent[1:])
    assert torch.signbit(got[3])


def test_fp16_overflows_to_infinity_and_bf16_does_not() -> None:
    sent = torch.tensor([65504.0, 65520.0, -1e6, 3e38])
    assert round_trip(Cast("fp16"), sent).tolist() == [65504.0, math.inf, -math.inf, math.inf]
    assert round_trip(Cast("bf16"), sent).isfinite().all()


def test_a_device_without_float64_is_refused_for_fp64_alone() -> None:
    spec = TensorSpec((2,), torch.float32, torch.device("mps"))
    for name in NAMES:
        for codec in (Cast(name), parse_codec(f"{name}+ef+zstd")):
            if name == "fp64":
                with pytest.raises(ConfigError, match="MPS has none: choose fp32"):
                    codec.prepare(spec, Surroundings(0, 0))
            else:
                codec.prepare(spec, Surroundings(0, 0))


def test_the_bytes_are_little_endian_ieee() -> None:
    """The wire format is a contract between machines: fix it by value."""
    one = torch.tensor([1.0, -2.0])
    assert bytes(Cast("fp64").pack(one, PLACE)).hex() == "000000000000f03f00000000000000c0"
    assert bytes(Cast("fp32").pack(one, PLACE)).hex() == "0000803f000000c0"
    assert bytes(Cast("bf16").pack(one, PLACE)).hex() == "803f00c0"
    assert bytes(Cast("fp16").pack(one, PLACE)).hex() == "003c00c0"


def test_tags_name_the_codec_for_ever() -> None:
    tags = {name: Cast(name).tag for name in NAMES}
    assert len(set(tags.values())) == len(NAMES)
    assert all(0 < tag < 2**32 for tag in tags.values())
    # Written out: a release that changes one can no longer talk to the last.
    assert tags == {
        "fp64": 0xC3507A53,
        "fp32": 0x57442B23,
        "bf16": 0xF5D6C52D,
        "fp16": 0x621F8DB8,
    }
