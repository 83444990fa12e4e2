"""An emulated network card, so that one machine can behave like many hosts on slow links.

docs/wire.md has the model. A message enters the real transport as soon as it gets the uplink,
stamped with the time at which its last byte would arrive, and the other end holds it until then. So
the real transport's own time passes within the modelled one and is not added to it. The stamp is a
time of the machine's clock: both ends must be on one machine.
"""

import collections
import math
import struct
import threading
import time
import zlib
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from thinwire.errors import ConfigError
from thinwire.occupancy import Occupancy
from thinwire.wire.frame import BytesLike

T = TypeVar("T")

LONGEST_DELAY_MS = 3_600_000.0  # an hour: nothing that is called a link is slower
STAMP_BYTES = 8  # below the frame, so the meter does not see them
_STAMP = struct.Struct("<d")
_LONGEST_SLEEP_S = 60.0


class Passage(NamedTuple):
    """When one message occupies the uplink, and when its last byte reaches the other host."""

    start: float
    end: float
    arrival: float


class Nic:
    """The network card of one host; share one instance among all links of a process. Rates are in
    megabits (10^6) per second, 0 meaning unlimited; times are those of time.monotonic, passed in.
    """

    def __init__(
        self,
        mbps_up: float,
        mbps_down: float,
        latency_ms: float,
        jitter_ms: float = 0.0,
        seed: int = 0,
    ) -> None:
        if latency_ms + jitter_ms > LONGEST_DELAY_MS:
            raise ConfigError(
                f"link.latency_ms + link.jitter_ms = {latency_ms + jitter_ms:g} is more than an "
                f"hour ({LONGEST_DELAY_MS:g} ms)"
            )
        self._up, self._down = Occupancy(mbps_up), Occupancy(mbps_down)
        self._latency_s, self._jitter_s = latency_ms / 1e3, jitter_ms / 1e3
        self._seed = seed % 2**64
        self._sent = 0
        self._last_arrival = -math.inf
        self._lock = threading.Lock()

    def reserve_up(self, size: int, now: float) -> Passage:
        """Queue a message of `size` bytes for the uplink at time `now`."""
        with self._lock:
            start, end = self._up.carry(size, now, now)
            # A hash of (seed, counter): the n-th message is delayed alike in every run.
            self._sent += 1
            drawn = zlib.crc32(struct.pack("<QQ", self._seed, self._sent)) / 2**32
            arrival = end + self._latency_s + self._jitter_s * drawn
            # Jitter delays, it never reorders: TCP would not let it be seen either.
            self._last_arrival = max(arrival, self._last_arrival)
            return Passage(start, end, self._last_arrival)

    def reserve_down(self, size: int, arrived: float) -> float:
        """When a message whose last byte came at `arrived` has passed the downlink. Its first byte
        came earlier by its time on the sender's uplink, for whose rate this host's own stands in.
        """
        with self._lock:
            return self._down.carry(size, arrived - self._up.seconds(size), arrived)[1]


def stamp(message: bytes, arrival: float) -> bytes:
    """A message as it travels on an emulated link: when it arrives, then the message."""
    return b"".join((_STAMP.pack(arrival), message))


def unstamp(stamped: BytesLike) -> tuple[float, memoryview]:
    """When a message arrives, and the message: both ends are this user's own processes."""
    return _STAMP.unpack_from(stamped)[0], memoryview(stamped)[STAMP_BYTES:]


class DelayLine(Generic[T]):
    """Delivers items in the order they came, each not before its time, on its own thread: many
    messages can be under way at once. Whoever puts waits while `most` items stand behind one that
    is due and not taken: what the receiver does not want now must not pile up here.
    """

    def __init__(self, deliver: Callable[[T], None], name: str, most: float = math.inf) -> None:
        self._deliver, self._most = deliver, most
        self._waiting: collections.deque[tuple[float, T]] = collections.deque()
        self._changed = threading.Condition()  # guards what waits
        self._is_stopped = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, due: float, item: T) -> None:
        """Deliver `item` at time `due`, or right after its predecessor if that is later."""
        with self._changed:
            while len(self._waiting) >= self._most and self._seconds_left() <= 0:
                self._changed.wait()
            self._waiting.append((due, item))
            if len(self._waiting) == 1:  # else the thread waits for the first, or delivers one
                self._changed.notify_all()

    def stop(self) -> None:
        """Forget what is still waiting and end the thread."""
        with self._changed:
            self._is_stopped = True
            self._waiting.clear()
            self._changed.notify_all()

    def _seconds_left(self) -> float:
        """Until the first in line is due."""
        return self._waiting[0][0] - time.monotonic() if self._waiting else _LONGEST_SLEEP_S

    def _run(self) -> None:
        while True:
            with self._changed:
                while (wait := self._seconds_left()) > 0 and not self._is_stopped:
                    self._changed.wait(min(wait, _LONGEST_SLEEP_S))
                if self._is_stopped:
                    return
                _, item = self._waiting.popleft()
                self._changed.notify_all()
            self._deliver(item)
