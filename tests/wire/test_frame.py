import json
import re
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import WireError
from thinwire.wire import HEADER_BYTES, Frame, FrameKind, Meter, decode, encode
from thinwire.wire.lasting import LastingKind

PAGE = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
FRAMES = st.builds(
    Frame, kind=st.sampled_from(FrameKind), sender=U16, step=U64, microbatch=U32,
    weight_version=U32, basis_version=U32, codec=U32, shape=st.lists(U32, max_size=4).map(tuple),
    payload=st.binary(max_size=200),
)  # fmt: skip
EXAMPLE = Frame(
    kind=FrameKind.BACKWARD, sender=3, step=1_000_000_007, microbatch=11, weight_version=12,
    basis_version=13, codec=0xC0DEC, shape=(2, 5), payload=b"thin wires carry far",
)  # fmt: skip


def resealed(message, offset, replacement):
    """The message with some header bytes replaced and a checksum that fits again."""
    changed = message[:offset] + replacement + message[offset + len(replacement) :]
    checksum = zlib.crc32(changed[:60] + changed[64:])
    return changed[:60] + struct.pack("<I", checksum) + changed[64:]


def test_header_is_laid_out_as_documented():
    message = encode(EXAMPLE)
    numbers = (b"THWR", 1, 3, 3, 1_000_000_007, 11, 12, 13, 0xC0DEC, 2, bytes(3), 2, 5, 0, 0, 20)
    assert struct.unpack("<4sBBHQIIIIB3s4IQ", message[:60]) == numbers
    assert int.from_bytes(message[60:64], "little") == zlib.crc32(message[:60] + EXAMPLE.payload)
    assert message[64:] == EXAMPLE.payload


@given(FRAMES)
def test_decode_inverts_encode(frame):
    message = encode(frame)
    assert len(message) == HEADER_BYTES + len(frame.payload)
    assert decode(message, max_payload=200) == frame


@given(st.sampled_from([b"", b"THWR\x01\x02"]), st.binary(max_size=300))
def test_random_bytes_are_refused_with_and_without_the_right_magic(magic, rest):
    with pytest.raises(WireError):
        decode(magic + rest, 1000)


def test_every_single_bit_flip_is_refused():
    message = encode(EXAMPLE)
    with pytest.raises(WireError, match="checksum"):
        decode(message[:-1] + b"!", 1000)
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


@pytest.mark.parametrize(("offset", "replacement", "field"), [
    (0, b"THWS", "magic"), (4, b"\x02", "version"), (5, b"\x00", "kind"), (5, b"\xff", "kind"),
    (32, b"\x05", "ndim"), (33, b"\x01", "reserved"), (35, b"\x80", "reserved"),
    (44, b"\x01", "dims"), (51, b"\x01", "dims"), (52, b"\x13", "payload length"),
    (59, b"\x01", "payload length"),
])  # fmt: skip
def test_each_malformed_field_is_named_although_the_checksum_fits(offset, replacement, field):
    assert decode(resealed(encode(EXAMPLE), 0, b"THWR"), 1000) == EXAMPLE
    with pytest.raises(WireError, match=f"malformed frame, {field}:"):
        decode(resealed(encode(EXAMPLE), offset, replacement), 1000)


def test_the_example_of_the_format_page_is_true():
    rows = re.findall(r"^[0-9a-f]0  ((?:[0-9a-f]{2} ?)+)$", PAGE, re.MULTILINE)
    example = Frame(
        kind=FrameKind.FORWARD, sender=1, step=300, microbatch=2, weight_version=300,
        basis_version=4, codec=42, shape=(1, 2, 4), payload=bytes(range(8)),
    )  # fmt: skip
    assert bytes.fromhex("".join(rows)) == encode(example)


@pytest.mark.parametrize(("section", "kinds"), [
    ("The frame", FrameKind), ("Links that break and come back", LastingKind),
])  # fmt: skip
def test_the_format_page_lists_every_kind(section, kinds):
    (text,) = re.findall(rf"^## {section}$(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    listed = dict(re.findall(r"^\| (\d+) \| ([A-Z]+) \|", text, re.MULTILINE))
    assert listed == {str(int(kind)): kind.name for kind in kinds}


def test_the_meter_counts_by_direction_and_kind_and_loses_nothing_between_threads():
    meter = Meter()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2000):
            pool.submit(meter.count_sent, FrameKind.FORWARD, 1)
    meter.count_sent(FrameKind.TALLY, 5)
    meter.count_received(FrameKind.BACKWARD, 7)
    assert meter.sent_bytes() == 2000 * 65 + 69 and meter.received_bytes() == 7 + 64
    snapshot = meter.snapshot()
    meter.count_sent(FrameKind.TALLY, 5)  # it does not follow later counts

    def counts(frames, payload):
        return {"frames": frames, "header_bytes": 64 * frames, "payload_bytes": payload}

    assert json.loads(json.dumps(snapshot)) == {
        "sent": {"FORWARD": counts(2000, 2000), "TALLY": counts(1, 5), "total": counts(2001, 2005)},
        "received": {"BACKWARD": counts(1, 7), "total": counts(1, 7)},
    }
