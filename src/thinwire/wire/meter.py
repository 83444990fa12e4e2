"""The meter: counts every byte a stage hands to the transport and takes from it.

Each end of a link has its own. It counts whole frames from the handshake to the goodbye, header
and payload apart, so that a published number can be traced to what really crossed the link. What
TLS and TCP add lies below (docs/wire.md).
"""

import collections
import threading
from collections.abc import Collection

from thinwire.wire.frame import HEADER_BYTES, FrameKind


class Meter:
    """Thread-safe counts of frames and bytes, by direction and kind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent = _OneWay()
        self._received = _OneWay()

    def count_sent(self, kind: FrameKind, payload_bytes: int) -> None:
        """Bill one frame that goes out."""
        with self._lock:
            self._sent.add(kind, payload_bytes)

    def count_received(self, kind: FrameKind, payload_bytes: int) -> None:
        """Bill one frame that came in."""
        with self._lock:
            self._received.add(kind, payload_bytes)

    def sent_bytes(self, kind: FrameKind | None = None) -> int:
        """Bytes sent, headers included; of one kind, or of all."""
        with self._lock:
            return self._sent.bytes_of(kind)

    def received_bytes(self, kind: FrameKind | None = None) -> int:
        """Bytes received, headers included; of one kind, or of all."""
        with self._lock:
            return self._received.bytes_of(kind)

    def snapshot(self) -> dict[str, dict[str, dict[str, int]]]:
        """All counts at one moment, ready for JSON: direction -> kind or "total" -> counts."""
        with self._lock:
            return {"sent": self._sent.plain(), "received": self._received.plain()}


class _OneWay:
    """The counts of one direction."""

    def __init__(self) -> None:
        self._frames: collections.Counter[FrameKind] = collections.Counter()
        self._payload: collections.Counter[FrameKind] = collections.Counter()

    def add(self, kind: FrameKind, payload_bytes: int) -> None:
        self._frames[kind] += 1
        self._payload[kind] += payload_bytes

    def bytes_of(self, kind: FrameKind | None) -> int:
        counts = self._counts(self._frames if kind is None else [kind])
        return counts["header_bytes"] + counts["payload_bytes"]

    def plain(self) -> dict[str, dict[str, int]]:
        by_kind = {kind.name: self._counts([kind]) for kind in sorted(self._frames)}
        return by_kind | {"total": self._counts(self._frames)}

    def _counts(self, kinds: Collection[FrameKind]) -> dict[str, int]:
        frames = sum(self._frames[kind] for kind in kinds)
        payload = sum(self._payload[kind] for kind in kinds)
        return {
            "frames": frames,
            "header_bytes": frames * HEADER_BYTES,
            "payload_bytes": payload,
        }
