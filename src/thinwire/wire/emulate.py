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
from concurrent import futures
from typing import Generic, NamedTuple, TypeVar

from thinwire.background import on_daemon_thread
from thinwire.errors import ConfigError, WireError
from thinwire.occupancy import Occupancy
from thinwire.wire.frame import BytesLike
from thinwire.wire.pipe import CLOSE_GRACE_S, Pipe

T = TypeVar("T")

LONGEST_DELAY_MS = 3_600_000.0  # an hour: nothing that is called a link is slower
STAMP_BYTES = 8  # below the frame, so the meter does not see them
_STAMP = struct.Struct("<d")
_LONGEST_SLEEP_S = 60.0
_MOST_UNTAKEN = 8  # messages that wait although they are due


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


class _DelayLine(Generic[T]):
    """Items in the order they came, each to be taken not before its time. Whoever puts waits while
    many stand behind one that is due and not taken: what the receiver does not want now must not
    pile up here.
    """

    def __init__(self) -> None:
        self._waiting: collections.deque[tuple[float, T]] = collections.deque()
        self._changed = threading.Condition()  # guards what waits
        self._is_closed = False

    def put(self, due: float, item: T) -> None:
        """To be taken at the time `due`, or right after its predecessor if that is later."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    len(self._waiting) < _MOST_UNTAKEN
                    or self._seconds_left() > 0
                    or self._is_closed
                )
            )
            if not self._is_closed:
                self._waiting.append((due, item))
                self._changed.notify_all()

    def take(self) -> T | None:
        """Wait for the first in line, and for its time; None if there is none any more."""
        with self._changed:
            while not self._is_closed and (left := self._seconds_left()) > 0:
                self._changed.wait(min(left, _LONGEST_SLEEP_S))
            self._changed.notify_all()
            return self._waiting.popleft()[1] if self._waiting else None

    def close(self) -> None:
        """Take nothing more in, and forget what is not due yet."""
        with self._changed:
            self._is_closed, now = True, time.monotonic()
            self._waiting = collections.deque(one for one in self._waiting if one[0] <= now)
            self._changed.notify_all()

    def _seconds_left(self) -> float:
        """Until the first in line is due."""
        return self._waiting[0][0] - time.monotonic() if self._waiting else math.inf


class _EmulatedPipe(Pipe):
    """A pipe over a link of two such network cards; at its other end is another of these."""

    def __init__(self, pipe: Pipe, nic: Nic) -> None:
        self._pipe, self._nic = pipe, nic
        self._leaving = _DelayLine[bytes]()
        self._arriving = _DelayLine[BytesLike | WireError | None]()
        self._has_left = on_daemon_thread("thinwire uplink", self._write)
        on_daemon_thread("thinwire downlink", self._read)

    def write(self, message: BytesLike) -> None:
        start, _ = self.send(message)
        futures.wait([self._has_left], max(0.0, start - time.monotonic()))

    def send(self, message: BytesLike) -> tuple[float, float]:
        """Have it written as soon as the uplink is free."""
        if self._has_left.done():
            raise WireError("the pipe is closed")
        passage = self._nic.reserve_up(len(message), time.monotonic())
        self._leaving.put(passage.start, stamp(message, passage.arrival))
        return passage.start, passage.end

    def read(self) -> BytesLike | None:
        arrived = self._arriving.take()
        if isinstance(arrived, WireError):
            raise arrived
        return arrived

    def close(self, grace: float | None = CLOSE_GRACE_S) -> None:
        self._leaving.close()
        self._arriving.close()
        futures.wait([self._has_left], grace)
        self._pipe.close(grace)

    def round_trip(self) -> float:
        return self._pipe.round_trip()

    def _write(self) -> None:
        while (message := self._leaving.take()) is not None:
            self._pipe.write(message)  # whoever reads hears of a loss, and its reason

    def _read(self) -> None:
        end = None
        try:
            while (message := self._pipe.read()) is not None:
                (arrival,), frame = _STAMP.unpack_from(message), memoryview(message)[STAMP_BYTES:]
                self._arriving.put(self._nic.reserve_down(len(frame), arrival), frame)
        except WireError as error:
            end = error
        self._arriving.put(time.monotonic(), end)


def stamp(message: BytesLike, arrival: float) -> bytes:
    """A message as it travels on an emulated link: when it arrives, then the message."""
    return _STAMP.pack(arrival) + message


def emulated(pipe: Pipe, nic: Nic | None) -> Pipe:
    """The pipe with the delays of a network card, if there is one."""
    return _EmulatedPipe(pipe, nic) if nic else pipe
