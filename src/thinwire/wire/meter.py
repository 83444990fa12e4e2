"""The meter: counts every byte a stage hands to the transport and takes from it.

Each end of a link has its own. It counts whole frames from the handshake to the goodbye, header
and payload apart, so that a published number can be traced to what really crossed the link. What
TLS, HTTP/2 and TCP add lies below; thinwire.wire.kernel measures that part.
"""

import dataclasses
import threading
from dataclasses import dataclass

from thinwire.wire.frame import HEADER_BYTES, FrameKind


@dataclass
class Count:
    """Frames of one kind in one direction."""

    frames: int = 0
    header_bytes: int = 0
    payload_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Header and payload together."""
        return self.header_bytes + self.payload_bytes


class Meter:
    """Thread-safe counts of frames and bytes, by direction and kind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[FrameKind, Count] = {}
        self._received: dict[FrameKind, Count] = {}

    def count_sent(self, kind: FrameKind, payload_bytes: int) -> None:
        """Bill one frame that goes out."""
        self._add(self._sent, kind, payload_bytes)

    def count_received(self, kind: FrameKind, payload_bytes: int) -> None:
        """Bill one frame that came in."""
        self._add(self._received, kind, payload_bytes)

    def sent_bytes(self, kind: FrameKind | None = None) -> int:
        """Bytes sent, headers included; of one kind, or of all."""
        return self._total(self._sent, kind)

    def received_bytes(self, kind: FrameKind | None = None) -> int:
        """Bytes received, headers included; of one kind, or of all."""
        return self._total(self._received, kind)

    def snapshot(self) -> dict[str, dict[str, dict[str, int]]]:
        """All counts at one moment, ready for JSON: direction -> kind or "total" -> counts."""
        with self._lock:
            return {"sent": _plain(self._sent), "received": _plain(self._received)}

    def _add(self, counts: dict[FrameKind, Count], kind: FrameKind, payload_bytes: int) -> None:
        with self._lock:
            count = counts.setdefault(kind, Count())
            count.frames += 1
            count.header_bytes += HEADER_BYTES
            count.payload_bytes += payload_bytes

    def _total(self, counts: dict[FrameKind, Count], kind: FrameKind | None) -> int:
        with self._lock:
            return sum(c.bytes for k, c in counts.items() if kind is None or k == kind)


def _plain(counts: dict[FrameKind, Count]) -> dict[str, dict[str, int]]:
    total = Count()
    for count in counts.values():
        total.frames += count.frames
        total.header_bytes += count.header_bytes
        total.payload_bytes += count.payload_bytes
    plain = {kind.name: dataclasses.asdict(counts[kind]) for kind in sorted(counts)}
    plain["total"] = dataclasses.asdict(total)
    return plain
