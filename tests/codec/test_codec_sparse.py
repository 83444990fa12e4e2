"""Sparse codecs: which elements travel, in how many bytes, and what is refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import CPU, PLACE, normal, round_trip, sent

from thinwire.codec import Leg, Place
from thinwire.codec.base import spec_of
from thinwire.codec.sparse import PositionCode, RandK, SharedMask, TopK, drawn
from thinwire.codec.wrappers import EF21, ErrorFeedback
from thinwire.errors import WireError

BACK = Place(Leg.BACKWARD, step=3, microbatch=1, seed=5)
SHARES = (0.004, 0.03, 0.1, 0.25, 0.5, 1.0)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
shares = st.sampled_from(SHARES)
seeds = st.integers(0, 2**32)
few = settings(deadline=None, max_examples=60)


def samples(shape):
    return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))


def kept_count(n, share):
    return min(n, max(1, round(share * n)))


def by_hand(tensor, share):
    """What topk must deliver, element by element: larger first, then the earlier."""
    B, n = samples(tuple(tensor.shape))
    got = torch.zeros(B, n, dtype=tensor.dtype)
    for row, sample in enumerate(tensor.reshape(B, n)):
        order = sorted(range(n), key=lambda i: (-abs(float(sample[i])), i))
        for i in order[: kept_count(n, share)]:
            got[row, i] = sample[i].to(torch.bfloat16)
    return got.reshape(tensor.shape)


@few
@given(shapes, shares, seeds, st.sampled_from(DTYPES), st.integers(0, 3))
def test_topk_delivers_the_largest_of_each_sample(shape, share, seed, dtype, levels):
    sent = normal(shape, seed, dtype)
    sent = sent.mul(levels).round() if levels else sent
    got = round_trip(TopK(share), sent)
    assert got.dtype == dtype and torch.equal(got, by_hand(sent, share))


# Positions as bits


@few
@given(st.integers(1, 4), st.integers(1, 70), st.data())
def test_every_code_reads_back_what_it_wrote(B, n, data):
    k, low = data.draw(st.integers(1, n)), data.draw(st.integers(0, 7))
    code = PositionCode(n, k, low)
    chosen = st.lists(st.integers(0, n - 1), min_size=k, max_size=k, unique=True).map(sorted)
    index_Bk = torch.tensor([data.draw(chosen) for _ in range(B)])
    marks, lows = code.write(index_Bk)
    assert (len(marks), len(lows)) == code.sizes(B)
    assert torch.equal(code.read(marks, lows, B), index_Bk)


def test_the_bytes_of_positions_are_fixed():
    """The wire format is a contract between machines: fix it by value."""
    index_Bk = torch.tensor([[1, 4, 9], [0, 10, 11]])
    marks, lows = PositionCode(12, 3, 0).write(index_Bk)
    # bits from the lowest up: 0100 1000 0100 | 1000 0000 0011
    assert bytes(marks.tolist()).hex() == "1212c0" and len(lows) == 0
    marks, lows = PositionCode(12, 3, 2).write(index_Bk)
    # marks 0+0, 1+1, 2+2 and 0+0, 2+1, 2+2 of five each; low bits 1 0 1 and 0 2 3
    assert bytes(marks.tolist()).hex() == "3503" and bytes(lows.tolist()).hex() == "110e"


@few
@given(st.integers(1, 3), st.integers(1, 50), shares, seeds, st.data())
def test_a_flipped_bit_among_the_positions_is_refused_or_still_positions(B, n, share, seed, data):
    codec, sent = TopK(share), normal((B, n), seed)
    marks, lows, values = (part.bytes for part in codec.layout((B, n), PLACE))
    payload = bytearray(codec.pack(sent, PLACE))
    assert len(payload) == marks + lows + values
    bit = data.draw(st.integers(0, 8 * (marks + lows) - 1))
    payload[bit // 8] ^= 1 << bit % 8
    if bit < 8 * marks:
        with pytest.raises(WireError, match=r"are marked, but .* were agreed"):
            codec.unpack(payload, spec_of(sent), PLACE)
        return
    try:
        got = codec.unpack(payload, spec_of(sent), PLACE)
    except WireError:
        return
    assert got.shape == sent.shape
    assert ((got != 0).sum(1) == kept_count(n, share)).all()


def read(code, marks, lows="", B=1):
    streams = [torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8) for text in (marks, lows)]
    assert tuple(map(len, streams)) == code.sizes(B)
    return code.read(*streams, B).tolist()


@pytest.mark.parametrize(("code", "right", "wrong"), [
    (PositionCode(12, 3, 0), ("0308",), ("0310",)),  # 0, 1, 11; a bit of the padding
    (PositionCode(12, 3, 2), ("15", "24"), ("23", "24")),  # 0, 5, 10; a bit of the padding
    (PositionCode(12, 3, 2), ("15", "24"), ("15", "64")),  # the padding of the low bits
    (PositionCode(12, 3, 2), ("07", "24"), ("07", "09")),  # 0, 1, 2; 1, 2, 0
    (PositionCode(12, 3, 2), ("07", "24"), ("07", "25")),  # 0, 1, 2; 1, 1, 2
    (PositionCode(10, 2, 2), ("09", "04"), ("09", "0c")),  # 0, 9; 0, 11
])  # fmt: skip
def test_positions_that_cannot_be_are_refused(code, right, wrong):
    assert len(read(code, *right)[0]) == code.k
    with pytest.raises(WireError, match="not in order, or not within"):
        read(code, *wrong)


# Random positions


def test_draws_are_fixed_for_ever():
    """Both ends must draw alike, whatever they run on: fix it by value."""
    assert drawn(10, 5, 0, CPU).tolist() == [8, 5, 9, 0, 1]
    assert drawn(1000, 4, 2**63 - 1, CPU).tolist() == [925, 398, 280, 232]


def test_randk_draws_anew_at_every_place_and_alike_on_both_ends():
    sent = torch.ones(1000)
    masks = {
        tuple(round_trip(RandK(0.1), sent, place).tolist())
        for place in (PLACE, BACK, Place(Leg.FORWARD, 4, 1, seed=5),
                      Place(Leg.FORWARD, 3, 2, seed=5), Place(Leg.FORWARD, 3, 1, cut=1, seed=5),
                      Place(Leg.FORWARD, 3, 1, seed=6))
    }  # fmt: skip
    assert len(masks) == 6
    assert torch.equal(round_trip(RandK(0.1), sent), round_trip(RandK(0.1), sent))
    assert round_trip(RandK(0.1), sent).sum() == 100


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [TopK, RandK])
def test_devices_agree_bit_for_bit(kind):
    for share in SHARES:
        for dtype in DTYPES:
            sent = normal((3, 41, 129), 0, dtype)
            payload = bytes(kind(share).pack(sent, PLACE))
            assert bytes(kind(share).pack(sent.cuda(), PLACE)) == payload
            there = kind(share).unpack(payload, spec_of(sent.cuda()), PLACE)
            assert there.is_cuda and torch.equal(there.cpu(), round_trip(kind(share), sent))


# The mask of the way forward on the way back


class Boundary:
    """Both ends of both directions, as two processes would hold them."""

    def __init__(self, forward, backward=SharedMask):
        self.forward = forward(), forward()
        self.backward = backward(), backward()
        for codec, back in zip(self.forward, reversed(self.backward), strict=True):
            [mask] = [inner for _, inner in back.walk() if isinstance(inner, SharedMask)]
            mask.bind(codec)

    def send(self, codecs, tensor, place):
        return sent(*codecs, tensor, place)


FORWARDS = {"topk": lambda: TopK(0.2), "randk": lambda: RandK(0.2),
            "ef": lambda: ErrorFeedback(TopK(0.2)), "ef21": lambda: EF21(TopK(0.2))}  # fmt: skip
BACKWARDS = {
    "plain": SharedMask,
    "ef": lambda: ErrorFeedback(SharedMask()),
    "ef21": lambda: EF21(SharedMask()),
}


@pytest.mark.parametrize("back", BACKWARDS)
@pytest.mark.parametrize("way", FORWARDS)
def test_gradients_come_back_where_activations_went(way, back):
    boundary = Boundary(FORWARDS[way], BACKWARDS[back])
    for step in range(3):
        for microbatch in range(4):
            activation, place = normal((2, 5, 8), microbatch), Place(Leg.FORWARD, step, microbatch)
            boundary.send(boundary.forward, activation, place)
        for microbatch in (1, 0, 3, 2):
            place = Place(Leg.BACKWARD, step, microbatch)
            gradient = normal((2, 5, 8), 9)
            got = boundary.send(boundary.backward, gradient, place)
            assert torch.count_nonzero(got) >= 16
            if back == "plain":
                rounded = gradient.to(torch.bfloat16).float()
                assert torch.count_nonzero(got) == 16
                assert torch.equal(got, torch.where(got != 0, rounded, 0))
        inner = [inner for codec in boundary.forward for _, inner in codec.walk()]
        assert [len(one.masks.waiting) for one in inner if isinstance(one, TopK | RandK)] == [0, 0]


def test_a_gradient_that_is_not_finite_stays_so_where_it_is_left_out():
    boundary = Boundary(FORWARDS["topk"])
    gradient = torch.zeros(40)
    gradient[0] = math.nan
    assert boundary.send(boundary.forward, torch.arange(40.0), PLACE)[0] == 0
    assert not boundary.send(boundary.backward, gradient, BACK).isfinite().all()


def test_a_gradient_without_its_activation_is_an_error():
    boundary, ones = Boundary(FORWARDS["topk"]), torch.ones(40)
    with pytest.raises(WireError, match=r"no mask for step 3, microbatch 1: topk\(0.2\) sent"):
        boundary.backward[0].pack(ones, BACK)
    with pytest.raises(WireError, match="no mask"):
        boundary.backward[1].unpack(bytes(16), spec_of(ones), BACK)
    boundary.send(boundary.forward, ones, Place(Leg.FORWARD, 3, 1, training=False))
    with pytest.raises(WireError, match="no mask"):
        boundary.backward[0].pack(ones, BACK)


def test_masks_that_nobody_asks_for_do_not_pile_up():
    boundary = Boundary(FORWARDS["topk"])
    for step in range(5):
        for microbatch in range(3):
            boundary.send(boundary.forward, torch.ones(40), Place(Leg.FORWARD, step, microbatch))
    assert [len(codec.masks.waiting) for codec in boundary.forward] == [6, 6]
    alone = TopK(0.2)
    alone.pack(torch.ones(40), PLACE)
    assert alone.masks is None
