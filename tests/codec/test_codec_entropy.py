"""Entropy coding: fewer bytes, the same tensor, and no way in for a payload that lies."""

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import CPU, normal

from thinwire.codec import Cast, Leg, Place, TensorSpec, cross, parse_codec, spec_of
from thinwire.codec.wrappers import Zstd
from thinwire.errors import WireError

FORWARD = Place(Leg.FORWARD, step=3, microbatch=1)
BACKWARD = Place(Leg.BACKWARD, step=3, microbatch=1)
INNER = ("fp32", "bf16", "int2", "int4", "int5(group=4)", "int8(tensor)", "step(3)", "topk(0.1)",
         "randk(0.3)")  # fmt: skip

quick = settings(deadline=None, max_examples=40, derandomize=True)


@quick
@given(st.sampled_from(INNER), st.lists(st.integers(0, 6), max_size=4).map(tuple),
       st.sampled_from((FORWARD, BACKWARD)), st.integers(1, 5))  # fmt: skip
def test_what_arrives_is_what_the_inner_codec_delivers(name, shape, place, level):
    sent = normal(shape, 0)
    plain = parse_codec(name)
    wanted = plain.unpack(bytes(plain.pack(sent, place)), spec_of(sent), place)
    sender, receiver = Zstd(parse_codec(name), level), Zstd(parse_codec(name), level)
    payload = bytes(sender.pack(sent, place))
    assert len(payload) <= receiver.payload_limit(shape)
    for kind in (bytes, bytearray, memoryview):
        assert torch.equal(receiver.unpack(kind(payload), spec_of(sent), place), wanted)
    assert torch.equal(cross(sender, receiver, sent, place), wanted)


@pytest.mark.parametrize("shape", [(2, 32, 61), (4, 256, 17), (8, 512, 61)])
@pytest.mark.parametrize("bits", [1.5, 2, 3, 4, 5.5, 8])
def test_a_plan_expects_about_what_is_sent(bits, shape):
    codec, sent = parse_codec(f"step({bits})+zstd"), normal(shape, 0)
    expected = codec.expected_bytes(shape)
    assert expected == pytest.approx(len(codec.pack(sent, FORWARD)), rel=0.1)
    assert expected < 0.6 * codec.payload_limit(shape)
    for around in (f"step({bits})+ef+zstd", f"step({bits})+zstd+ef21"):
        assert parse_codec(around).expected_bytes(shape) == expected
    small = (1, 3)  # where a frame's own bytes are most of it
    assert codec.expected_bytes(small) == codec.payload_limit(small)
    unknown = ("step(9)+zstd", f"step({bits})+zstd+aqsgd")
    for name in (f"step({bits})", "int4", "int4+zstd", *unknown):
        plain = parse_codec(name)
        assert plain.expected_bytes(shape) == plain.payload_limit(shape)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 2**17 - 1, 2**17, 2**17 + 1, 3 * 2**17 + 5])
@pytest.mark.parametrize("level", [1, 3, 9, 19])
def test_what_cannot_be_compressed_stays_within_the_limit(size, level):
    noise = torch.randint(-(2**31), 2**31, (size // 4 + 1,), dtype=torch.int32)
    sent = noise.view(torch.float32)[: size // 4]
    codec = Zstd(Cast("fp32"), level)
    assert len(codec.pack(sent, FORWARD)) <= codec.payload_limit(tuple(sent.shape))
    assert codec.payload_limit(tuple(sent.shape)) <= 4 * (size // 4) * 1.0001 + 24


@pytest.mark.parametrize("name", ["int4", "step(3)", "bf16"])
def test_an_altered_payload_never_gives_another_tensor(name):
    codec, sent = Zstd(parse_codec(name)), normal((8, 24), 0)
    payload = bytes(codec.pack(sent, FORWARD))
    right = codec.unpack(payload, spec_of(sent), FORWARD)
    refused = 0
    for place in range(len(payload)):
        for bit in range(8):
            altered = bytearray(payload)
            altered[place] ^= 1 << bit
            try:
                got = codec.unpack(altered, spec_of(sent), FORWARD)
            except WireError:
                refused += 1
            else:
                assert torch.equal(got, right), f"byte {place}, bit {bit}"
    assert refused > 0.99 * 8 * len(payload)  # a few bits of a frame mean nothing


def test_a_bomb_is_refused_by_what_it_says_and_by_what_it_is():
    codec, spec = Zstd(Cast("fp32")), TensorSpec((4,), torch.float32, CPU)
    bomb = zstandard.compress(bytes(2**26))
    assert len(bomb) < 10_000
    with pytest.raises(WireError, match="holds 16 bytes, but one of 67108864 bytes arrived"):
        codec.unpack(bomb, spec, FORWARD)
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(16))
    with pytest.raises(WireError, match="an unknown size"):
        codec.unpack(silent, spec, FORWARD)
    # One that says 16 and holds 64 MiB: the size in the header is the byte behind the descriptor.
    small, large = zstandard.compress(bytes(16)), zstandard.compress(bytes(17))
    liar = small[:5] + small[5:6] + large[6:]
    with pytest.raises(WireError, match="cannot be read"):
        codec.unpack(liar, spec, FORWARD)


@pytest.mark.parametrize("name", ["int4", "fp32"])
def test_a_truncated_or_longer_payload_is_refused(name):
    codec, sent = Zstd(parse_codec(name)), normal((6, 7), 0)
    payload = bytes(codec.pack(sent, FORWARD))
    wrong = [payload[:length] for length in range(len(payload))]
    wrong += [payload + b"\0", payload + payload, payload + zstandard.compress(b"")]
    wrong += [b"\x50\x2a\x4d\x18\x02\x00\x00\x00ab" + payload]  # behind a frame to be skipped
    for bad in wrong:
        with pytest.raises(WireError, match=rf"{name}\+zstd payload"):
            codec.unpack(bad, spec_of(sent), FORWARD)
