"""Handing a tensor over within a process is the same as sending it: what arrives, and what both
ends remember.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.codec import Codec, Leg, Place, Surroundings, build_codecs, cross, spec_of

SHAPE = (4, 6, 8)
EXAMPLES = 6
PAIRS = [
    ("bf16", "fp8"),
    ("int4(group=8,hadamard)", "int8(tensor)"),
    ("step(4)+zstd", "lowrank(2)"),
    ("topk(0.2)", "topk(0.1)"),
    ("topk(0.9)", "randk(0.3)"),
    ("topk(0.2)+ef", "topk(0.2)+ef-mixed"),
    ("topk(0.2)+ef21", "int4+ef21"),
    ("topk(0.2)+aqsgd", "topk(shared)"),
    ("int4+aqsgd", "lowrank(2)+ef"),
    ("topk(0.3)+ef-mixed", "topk(shared)"),
    ("topk(0.3)+ef", "topk(shared)+ef21"),
    ("randk(0.3)+ef-mixed", "lowrank(4)+ef-mixed"),
    ("topk(0.3)+zstd+ef21", "randk(0.3)+ef"),
]
Ends = tuple[dict[Leg, Codec], dict[Leg, Codec]]


def tensor_of(seed: int, kind: str, dtype: torch.dtype) -> Tensor:
    """Many numbers are equal, as after rounding and rectifying; or one is not finite."""
    drawn = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if kind == "tied":
        drawn = (2 * drawn).round().relu()
    if kind == "spoilt":
        drawn[1, 2, 3] = float("nan")
    return drawn.to(dtype)


def ends_of(pair: tuple[str, str], dtype: torch.dtype) -> Ends:
    below, above = build_codecs(*pair), build_codecs(*pair)
    for codec in (*below.values(), *above.values()):
        codec.prepare(spec_of(tensor_of(0, "plain", dtype)), Surroundings(EXAMPLES, 1 << 20))
    return below, above


def by_bytes(sender: Codec, receiver: Codec, tensor: Tensor, place: Place) -> Tensor:
    return receiver.unpack(bytes(sender.pack(tensor, place)), spec_of(tensor), place)


def bits(tensor: Tensor) -> Tensor:
    """All of them, but one NaN is as good as another: processors write them differently."""
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    return tensor.contiguous().view(torch.uint8)


def travel(
    ends: Ends, way: Callable, kinds: list[str], training: list[bool], seed: int, dtype: torch.dtype
) -> list[Tensor]:
    """Tensors go up and gradients come back; each microbatch names the examples that it is."""
    below, above = ends
    arrived = []
    for step, (kind, trains) in enumerate(zip(kinds, training, strict=True)):
        examples = tuple((seed + step * row) % EXAMPLES for row in range(SHAPE[0]))
        up = Place(Leg.FORWARD, step, 0, training=trains, examples=examples)
        down = Place(Leg.BACKWARD, step, 0, training=trains, examples=examples)
        sent = tensor_of(seed + step, kind, dtype)
        arrived.append(way(below[Leg.FORWARD], above[Leg.FORWARD], sent, up))
        if trains:
            gradient = tensor_of(seed - step, kind, dtype)
            arrived.append(way(above[Leg.BACKWARD], below[Leg.BACKWARD], gradient, down))
    return arrived


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
@settings(deadline=None, max_examples=25)
@given(
    kinds=st.lists(st.sampled_from(("plain", "tied", "spoilt")), min_size=1, max_size=6),
    trains=st.integers(0, 63),
    seed=st.integers(100, 2**20),
    dtype=st.sampled_from((torch.float32, torch.float64, torch.bfloat16)),
)
def test_it_is_as_if_the_tensor_had_travelled(
    pair: tuple[str, str], kinds: list[str], trains: int, seed: int, dtype: torch.dtype
) -> None:
    training = [bool(trains >> step & 1) for step in range(len(kinds))]
    sent, handed = ends_of(pair, dtype), ends_of(pair, dtype)
    wanted = travel(sent, by_bytes, kinds, training, seed, dtype)
    got = travel(handed, cross, kinds, training, seed, dtype)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(wanted, got, strict=True))
    for by_sending, by_handing in zip(sent, handed, strict=True):
        for leg in Leg:
            left, right = (ends[leg].state_tensors() for ends in (by_sending, by_handing))
            assert left.keys() == right.keys()
            assert all(torch.equal(bits(left[name]), bits(right[name])) for name in left)
            assert by_sending[leg].agreement() == by_handing[leg].agreement()


NAMES = sorted({name for pair in PAIRS for name in pair if "shared" not in name})
NAMES += ["int4", "int4+zstd+ef21", "int4+zstd+aqsgd", "int4+aqsgd+zstd", "int4+ef+zstd"]


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_as_a_codec_declares_them(name: str) -> None:
    """What the layout says where content does not decide; the limit where nothing varies."""
    sender, _ = ends_of((name, "bf16"), torch.float32)
    codec, sizes = sender[Leg.FORWARD], []
    for step, kind in enumerate(("plain", "zeros", "tied", "plain")):
        sent = tensor_of(step, kind, torch.float32) * (kind != "zeros")
        place = Place(Leg.FORWARD, step, 0, training=step < 3, examples=(0, 1, 2, 3))
        said = sum(part.bytes for part in codec.layout(SHAPE, place))
        sizes.append(len(codec.pack(sent, place)))
        assert codec.content_decides_size or sizes[-1] == said
    limit = codec.payload_limit(SHAPE)
    assert max(sizes) <= limit and (codec.size_varies or set(sizes) == {limit})
    assert codec.content_decides_size is ("zstd" in name)
    assert codec.size_varies is any(word in name for word in ("zstd", "aqsgd", "ef-mixed"))
