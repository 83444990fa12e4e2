"""The frame: one message between two stages, a 64-byte header and a payload; and its meter.

docs/wire.md describes the header byte by byte. Nothing here knows what the payload means; codec tag
and shape travel with it so that the receiver can check both before it allocates anything.

Each end of a link has a meter. It counts whole frames from the handshake to the goodbye, header and
payload apart. What TLS and TCP add lies below (docs/wire.md).
"""

import enum
import struct
import threading
import zlib
from dataclasses import dataclass
from typing import Any

from thinwire.errors import WireError

BytesLike = bytes | bytearray | memoryview

MAGIC = b"THWR"
WIRE_VERSION = 1
HEADER_BYTES = 64
MAX_DIMS = 4

# Everything before the checksum; little-endian, no padding. Reserved bytes are read, to be checked.
_HEAD = struct.Struct("<4sBBHQIIIIB3s4IQ")
_CHECKSUM = struct.Struct("<I")
_RESERVED = bytes(3)
assert _HEAD.size + _CHECKSUM.size == HEADER_BYTES


class FrameKind(enum.IntEnum):
    """What a frame is for; the number is the byte on the wire."""

    HELLO = 1
    FORWARD = 2
    BACKWARD = 3
    TALLY = 4
    VERDICT = 5
    CONTROL = 6
    BYE = 7
    EVALUATE = 8  # an activation of a validation: like FORWARD, but no gradient comes back
    BASIS = 9  # a basis that moves
    PROBE = 10  # an activation that scores a move of the basis: 0 just before it, 1 just after
    VALIDATED = 11  # the verdict that ends a validation: apart, for it is no part of a step
    TOKENS = 12  # token ids of a microbatch, for a stage without the corpus; empty: asks for them
    PIECE = 13  # the next bytes of a file
    ROWS = 14  # rows of the embedding: their gradients on the way down, their changes up
    WITNESS = 15  # what the stage that a process follows has sent: its payload, or a digest


@dataclass(frozen=True)
class Frame:
    """One message: which stage sent it, which work it belongs to, and its payload."""

    kind: FrameKind
    sender: int = 0
    step: int = 0
    microbatch: int = 0
    weight_version: int = 0
    basis_version: int = 0
    codec: int = 0
    shape: tuple[int, ...] = ()
    payload: BytesLike = b""


def encode(frame: Frame) -> bytes:
    """The message of a frame; copies the payload once, behind its header."""
    payload, ndim = memoryview(frame.payload), len(frame.shape)
    place = FrameKind(frame.kind), frame.sender, frame.step, frame.microbatch
    made_with = frame.weight_version, frame.basis_version, frame.codec
    dims = (*frame.shape, *(0,) * (MAX_DIMS - ndim))
    rest = ndim, _RESERVED, *dims, payload.nbytes
    head = _HEAD.pack(MAGIC, WIRE_VERSION, *place, *made_with, *rest)
    checksum = zlib.crc32(payload, zlib.crc32(head))
    return b"".join((head, _CHECKSUM.pack(checksum), payload))


def kind_and_step(message: BytesLike) -> tuple[int, int]:
    """What a frame is for, and the step that it belongs to, by its header alone."""
    _, _, kind, _, step, *_ = _head_of(message)
    return kind, step


def _head_of(message: BytesLike) -> tuple[Any, ...]:
    if len(message) < HEADER_BYTES:
        raise _malformed("length", f"{len(message)} bytes, a header alone has {HEADER_BYTES}")
    return _HEAD.unpack_from(message)


def decode(message: BytesLike, max_payload: int) -> Frame:
    """The frame of a message, its payload a view into it; WireError names what is malformed. Cheap
    checks come first, so that a stranger's bytes cost next to nothing, and the checksum last.
    """
    view = memoryview(message).cast("B")
    magic, version, kind, sender, step, number, weights, basis, codec, *others = _head_of(view)
    ndim, reserved, *dims, length = others
    if magic != MAGIC:
        raise _malformed("magic", f"{magic!r} instead of {MAGIC!r}: not a thinwire frame")
    if version != WIRE_VERSION:
        raise _malformed(
            "version",
            f"the other end speaks wire version {version}, this end {WIRE_VERSION}: "
            "install the same release on both",
        )
    if kind not in _KINDS:
        raise _malformed("kind", f"{kind} is not one of {', '.join(map(str, _KINDS))}")
    if ndim > MAX_DIMS:
        raise _malformed("ndim", f"{ndim} dimensions, at most {MAX_DIMS} are allowed")
    if reserved != _RESERVED:
        raise _malformed("reserved", f"bytes 33 to 35 must be zero, got {reserved.hex()}")
    if any(dims[ndim:]):
        raise _malformed("dims", f"unused dimensions must be zero, got {dims} with ndim {ndim}")
    if length > max_payload:
        raise _malformed("payload length", f"{length} bytes, at most {max_payload} are accepted")
    payload = view[HEADER_BYTES:]
    if length != payload.nbytes:
        raise _malformed("payload length", f"{length} bytes are announced, {payload.nbytes} came")
    (announced,) = _CHECKSUM.unpack_from(view, _HEAD.size)
    computed = zlib.crc32(payload, zlib.crc32(view[: _HEAD.size]))
    if announced != computed:
        raise _malformed("checksum", f"announced {announced:08x}, computed {computed:08x}")
    place = sender, step, number, weights, basis, codec
    return Frame(_KINDS[kind], *place, tuple(dims[:ndim]), payload)


_KINDS = {int(kind): kind for kind in FrameKind}


def _malformed(field: str, why: str) -> WireError:
    return WireError(f"malformed frame, {field}: {why}")


class Meter:
    """Thread-safe counts of frames and bytes, by direction and kind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, dict[FrameKind, tuple[int, int]]] = {"sent": {}, "received": {}}

    def count_sent(self, kind: FrameKind, payload_bytes: int) -> None:
        """Bill one frame that goes out."""
        self._count("sent", kind, payload_bytes)

    def count_received(self, kind: FrameKind, payload_bytes: int) -> None:
        """Bill one frame that came in."""
        self._count("received", kind, payload_bytes)

    def sent_bytes(self) -> int:
        """Bytes sent, headers included."""
        return self._bytes("sent")

    def received_bytes(self) -> int:
        """Bytes received, headers included."""
        return self._bytes("received")

    def moved_bytes(self) -> int:
        """Bytes of both directions, headers included."""
        return self.sent_bytes() + self.received_bytes()

    def snapshot(self) -> dict[str, dict[str, dict[str, int]]]:
        """All counts at one moment, ready for JSON: direction -> kind or "total" -> counts."""
        with self._lock:
            return {
                direction: counted({kind.name: counts[kind] for kind in sorted(counts)})
                for direction, counts in self._counts.items()
            }

    def _count(self, direction: str, kind: FrameKind, payload_bytes: int) -> None:
        with self._lock:
            frames, payload = self._counts[direction].get(kind, (0, 0))
            self._counts[direction][kind] = frames + 1, payload + payload_bytes

    def _bytes(self, direction: str) -> int:
        total = self.snapshot()[direction]["total"]
        return total["header_bytes"] + total["payload_bytes"]


class Unmetered(Meter):
    """Of a link inside a process, over which nothing is sent: it counts nothing."""

    def _count(self, direction: str, kind: FrameKind, payload_bytes: int) -> None:
        pass


def counted(counts: dict[str, tuple[int, int]]) -> dict[str, dict[str, int]]:
    """What a meter says of frames, and bytes of their payloads, by kind; and in total."""
    total = tuple(map(sum, zip((0, 0), *counts.values(), strict=True)))
    return {
        name: {"frames": frames, "header_bytes": frames * HEADER_BYTES, "payload_bytes": payload}
        for name, (frames, payload) in [*counts.items(), ("total", total)]
    }
