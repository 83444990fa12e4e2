"""The meter: counts every byte a stage hands to the transport and takes from it.

Each end of a link has its own. It counts whole frames from the handshake to the goodbye, header
and payload apart, so that a published number can be traced to what really crossed the link. What
TLS and TCP add lies below (docs/wire.md).
"""

import threading

from thinwire.wire.frame import HEADER_BYTES, FrameKind

_Counts = dict[FrameKind, tuple[int, int]]  # of each kind: frames, and bytes of their payloads


class Meter:
    """Thread-safe counts of frames and bytes, by direction and kind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: _Counts = {}
        self._received: _Counts = {}

    def count_sent(self, kind: FrameKind, payload_bytes: int) -> None:
        """Bill one frame that goes out."""
        self._count(self._sent, kind, payload_bytes)

    def count_received(self, kind: FrameKind, payload_bytes: int) -> None:
        """Bill one frame that came in."""
        self._count(self._received, kind, payload_bytes)

    def sent_bytes(self, kind: FrameKind | None = None) -> int:
        """Bytes sent, headers included; of one kind, or of all."""
        return self._bytes(self._sent, kind)

    def received_bytes(self, kind: FrameKind | None = None) -> int:
        """Bytes received, headers included; of one kind, or of all."""
        return self._bytes(self._received, kind)

    def snapshot(self) -> dict[str, dict[str, dict[str, int]]]:
        """All counts at one moment, ready for JSON: direction -> kind or "total" -> counts."""
        with self._lock:
            return {"sent": _plain(self._sent), "received": _plain(self._received)}

    def _count(self, counts: _Counts, kind: FrameKind, payload_bytes: int) -> None:
        with self._lock:
            frames, payload = counts.get(kind, (0, 0))
            counts[kind] = frames + 1, payload + payload_bytes

    def _bytes(self, counts: _Counts, kind: FrameKind | None) -> int:
        with self._lock:
            total = _plain({kind: counts.get(kind, (0, 0))} if kind else counts)["total"]
            return total["header_bytes"] + total["payload_bytes"]


class Unmetered(Meter):
    """Of a link inside a process, over which nothing is sent: it counts nothing."""

    def count_sent(self, kind: FrameKind, payload_bytes: int) -> None:
        pass

    def count_received(self, kind: FrameKind, payload_bytes: int) -> None:
        pass


def _plain(counts: _Counts) -> dict[str, dict[str, int]]:
    total = tuple(map(sum, zip((0, 0), *counts.values(), strict=True)))
    named = {kind.name: counts[kind] for kind in sorted(counts)} | {"total": total}
    return {
        name: {"frames": frames, "header_bytes": frames * HEADER_BYTES, "payload_bytes": payload}
        for name, (frames, payload) in named.items()
    }
