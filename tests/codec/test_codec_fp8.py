"""Eight-bit floats: a relative error of a sixteenth at most, rows scaled into their range."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.codec import Leg, Place, spec_of
from thinwire.codec.quantize import LARGEST, Float8

CPU = torch.device("cpu")
FORWARD = Place(Leg.FORWARD, step=3, microbatch=1)
BACKWARD = Place(Leg.BACKWARD, step=3, microbatch=1)
CODEC = Float8()

quick = settings(deadline=None, max_examples=60, derandomize=True)
finite = st.floats(-(2.0**119), 2.0**119, width=32)
rows = st.integers(1, 9).flatmap(
    lambda width: st.lists(st.lists(finite, min_size=width, max_size=width), min_size=1, max_size=4)
)


def normal(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def round_trip(tensor: Tensor, place: Place = FORWARD) -> Tensor:
    spec = spec_of(tensor)
    return CODEC.unpack(bytes(CODEC.pack(tensor, place)), spec, place)


@quick
@given(rows)
def test_every_value_arrives_within_the_bound(values: list[list[float]]) -> None:
    """Half a unit in the last of three places, or half of the smallest subnormal's step."""
    sent = torch.tensor(values, dtype=torch.float32)
    scales = CODEC.encode(sent, FORWARD)[0].double()
    error = (round_trip(sent).double() - sent.double()).abs()
    bound = torch.maximum(sent.double().abs() / 16, scales[:, None] * 2.0**-10) * (1 + 2.0**-12)
    assert (error <= bound).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_a_row_with_something_not_finite_is_nan_and_no_other(bad: float) -> None:
    sent = normal((3, 5))
    healthy = round_trip(sent)
    sent[1, 2] = bad
    got = round_trip(sent)
    assert got[1].isnan().all() and torch.equal(got[::2], healthy[::2])


def test_extremes() -> None:
    assert torch.equal(round_trip(torch.zeros(2, 3)), torch.zeros(2, 3))
    assert round_trip(torch.full((4,), LARGEST)).isfinite().all()
    assert round_trip(torch.tensor([1e-45, -1e-45])).abs().max() <= 2.0**-126
    tops = torch.logspace(-30, 30, 301, base=2.0)[:, None]
    assert ((round_trip(tops) / tops - 1).abs() <= 1 / 16).all()


def test_both_ways_round_to_nearest_and_bytes_depend_on_values_alone() -> None:
    sent = normal((4, 6), torch.bfloat16)
    payload = bytes(CODEC.pack(sent, FORWARD))
    assert bytes(CODEC.pack(sent, BACKWARD)) == payload
    for dtype in (torch.float32, torch.float64):
        assert bytes(CODEC.pack(sent.to(dtype), FORWARD)) == payload
    view = sent.float().t().contiguous().t()
    assert not view.is_contiguous() and bytes(CODEC.pack(view, FORWARD)) == payload


def test_the_payload_is_fixed_byte_by_byte() -> None:
    # scale 1.0 in bf16, then 448, 1, -2, 0 in e4m3
    assert bytes(CODEC.pack(torch.tensor([448.0, 1, -2, 0]), FORWARD)).hex() == "803f" + "7e38c000"
