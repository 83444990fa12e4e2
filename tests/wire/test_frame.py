import dataclasses
import re
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import WireError
from thinwire.wire import HEADER_BYTES, Frame, FrameKind, decode, encode
from thinwire.wire.lasting import Kind

U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
FRAMES = st.builds(
    Frame,
    kind=st.sampled_from(FrameKind),
    sender=U16,
    step=U64,
    microbatch=U32,
    weight_version=U32,
    basis_version=U32,
    codec=U32,
    shape=st.lists(U32, max_size=4).map(tuple),
    payload=st.binary(max_size=200),
)
EXAMPLE = Frame(
    kind=FrameKind.BACKWARD,
    sender=3,
    step=1_000_000_007,
    microbatch=11,
    weight_version=12,
    basis_version=13,
    codec=0xC0DEC,
    shape=(2, 5),
    payload=b"thin wires carry far",
)


def resealed(message: bytes, offset: int, replacement: bytes) -> bytes:
    """The message with some header bytes replaced and a checksum that fits again."""
    changed = message[:offset] + replacement + message[offset + len(replacement) :]
    checksum = zlib.crc32(changed[:60] + changed[64:])
    return changed[:60] + struct.pack("<I", checksum) + changed[64:]


def test_header_is_laid_out_as_documented():
    message = encode(EXAMPLE)
    assert message[0:4] == b"THWR"
    assert message[4] == 1
    assert message[5] == 3
    assert int.from_bytes(message[6:8], "little") == 3
    assert int.from_bytes(message[8:16], "little") == 1_000_000_007
    assert int.from_bytes(message[16:20], "little") == 11
    assert int.from_bytes(message[20:24], "little") == 12
    assert int.from_bytes(message[24:28], "little") == 13
    assert int.from_bytes(message[28:32], "little") == 0xC0DEC
    assert message[32] == 2
    assert message[33:36] == bytes(3)
    assert struct.unpack("<4I", message[36:52]) == (2, 5, 0, 0)
    assert int.from_bytes(message[52:60], "little") == len(EXAMPLE.payload)
    assert int.from_bytes(message[60:64], "little") == zlib.crc32(message[:60] + EXAMPLE.payload)
    assert message[64:] == EXAMPLE.payload


@given(FRAMES)
def test_decode_inverts_encode(frame: Frame):
    message = encode(frame)
    assert len(message) == HEADER_BYTES + len(frame.payload)
    assert decode(message, max_payload=200) == frame


def test_payload_is_a_view_not_a_copy():
    message = bytearray(encode(EXAMPLE))
    payload = decode(message, 100).payload
    message[-1] ^= 0xFF
    assert payload[-1] == message[-1]


def test_payload_may_be_any_contiguous_buffer():
    wide = memoryview(struct.pack("<3d", 1, 2, 3)).cast("d")
    assert decode(encode(dataclasses.replace(EXAMPLE, payload=wide)), 24).payload == bytes(wide)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(message: bytes):
    with pytest.raises(WireError):
        decode(message, 1000)


@given(st.binary(min_size=58, max_size=300))
def test_random_bytes_behind_the_right_magic_are_refused(rest: bytes):
    with pytest.raises(WireError):
        decode(b"THWR\x01\x02" + rest, 1000)


def test_every_single_bit_flip_is_refused():
    message = encode(EXAMPLE)
    for bit in range(8 * len(message)):
        flipped = bytearray(message)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            decode(flipped, 1000)


def test_every_truncation_and_an_extension_are_refused():
    message = encode(EXAMPLE)
    for length in range(len(message)):
        with pytest.raises(WireError, match="length"):
            decode(message[:length], 1000)
    with pytest.raises(WireError, match="payload length"):
        decode(message + b"\0", 1000)


@pytest.mark.parametrize(
    ("offset", "replacement", "field"),
    [
        (0, b"THWS", "magic"),
        (4, b"\x02", "version"),
        (5, b"\x00", "kind"),
        (5, b"\xff", "kind"),
        (32, b"\x05", "ndim"),
        (33, b"\x01", "reserved"),
        (35, b"\x80", "reserved"),
        (44, b"\x01", "dims"),
        (51, b"\x01", "dims"),
        (52, b"\x13", "payload length"),
        (59, b"\x01", "payload length"),
    ],
)
def test_each_malformed_field_is_named_although_the_checksum_fits(offset, replacement, field):
    with pytest.raises(WireError, match=f"malformed frame, {field}:"):
        decode(resealed(encode(EXAMPLE), offset, replacement), 1000)


def test_resealing_an_unchanged_message_leaves_it_valid():
    assert decode(resealed(encode(EXAMPLE), 0, b"THWR"), 1000) == EXAMPLE


def test_a_wrong_checksum_is_named():
    message = encode(EXAMPLE)
    with pytest.raises(WireError, match="checksum"):
        decode(message[:-1] + b"!", 1000)


def test_payload_limit_is_exact():
    message = encode(EXAMPLE)
    assert decode(message, len(EXAMPLE.payload)) == EXAMPLE
    with pytest.raises(WireError, match="at most 19"):
        decode(message, len(EXAMPLE.payload) - 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sender", 1 << 16),
        ("step", 1 << 64),
        ("step", -1),
        ("microbatch", 1 << 32),
        ("weight_version", 1 << 32),
        ("basis_version", -1),
        ("codec", 1 << 32),
        ("shape", (1, 2, 3, 4, 5)),
        ("shape", (1 << 32,)),
        ("shape", (-1,)),
    ],
)
def test_values_that_do_not_fit_the_header_are_refused(field, value):
    with pytest.raises(WireError, match=field):
        encode(dataclasses.replace(EXAMPLE, **{field: value}))


def test_the_example_of_the_format_page_is_true():
    page = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
    rows = re.findall(r"^[0-9a-f]0  ((?:[0-9a-f]{2} ?)+)$", page, re.MULTILINE)
    example = Frame(
        kind=FrameKind.FORWARD,
        sender=1,
        step=300,
        microbatch=2,
        weight_version=300,
        basis_version=4,
        codec=42,
        shape=(1, 2, 4),
        payload=bytes(range(8)),
    )
    assert bytes.fromhex("".join(rows)) == encode(example)


@pytest.mark.parametrize(
    ("section", "kinds"), [("The frame", FrameKind), ("Links that break and come back", Kind)]
)
def test_the_format_page_lists_every_kind(section, kinds):
    page = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
    (text,) = re.findall(rf"^## {section}$(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    listed = dict(re.findall(r"^\| (\d+) \| ([A-Z]+) \|", text, re.MULTILINE))
    assert listed == {str(int(kind)): kind.name for kind in kinds}
