"""A pipe is what a link needs of a transport. Here are one that stays in memory, and one that is as
slow as an emulated network, so that one machine can behave like many hosts on slow links.

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
from abc import ABC, abstractmethod
from concurrent import futures
from typing import Any, Generic, NamedTuple, TypeVar

from thinwire.background import on_daemon_thread
from thinwire.errors import WireError
from thinwire.occupancy import Occupancy
from thinwire.wire.frame import BytesLike

T = TypeVar("T")

CLOSE_GRACE_S = 5.0
STAMP_BYTES = 8  # below the frame, so the meter does not see them
_STAMP = struct.Struct("<d")
_LONGEST_SLEEP_S = 60.0
_MOST_OVERDUE = 8  # messages that wait in an emulated link although they are due


class Pipe(ABC):
    """Moves whole byte messages, none of them empty, both ways, in order, between two ends. Reading
    and writing may happen on different threads at once. Closing is idempotent.
    """

    comes_from: str = ""  # the host of who dialed, where a listener accepted it
    state: Any = None  # a LinkState, where another process may take the place of the other end

    @abstractmethod
    def write(self, message: BytesLike) -> None:
        """Hand a message over; may block while the transport is full. WireError if it broke."""

    def send(self, message: BytesLike) -> tuple[float, float] | None:
        """Write a frame of a link; when it has an uplink to itself, from when to when. None if the
        other end has it, so that it is not written.
        """
        start = time.monotonic()
        self.write(message)
        return start, time.monotonic()

    @abstractmethod
    def read(self) -> BytesLike | None:
        """Wait for the next message; None once either end closed in good order."""

    def read_within(self, seconds: float | None) -> BytesLike | None:
        """The same with an end. After a WireError because of that, close it: a thread reads on."""
        try:
            return on_daemon_thread("thinwire reading", self.read).result(seconds)
        except futures.TimeoutError:
            raise WireError(f"the other end said nothing for {seconds:g} s") from None

    @abstractmethod
    def close(self, grace: float | None = CLOSE_GRACE_S) -> None:
        """End both directions; messages already written still reach the other end, which has
        `grace` seconds to read them; None waits for as long as the connection lives.
        """

    def round_trip(self) -> float:
        """Seconds to the other end of its connection and back, at the moment; 0: not known."""
        return 0.0


class _Line(Generic[T]):
    """Items in the order they came, each to be taken not before its time. Whoever puts waits while
    so many stand behind one that is due: what nobody takes must not pile up here.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._waiting: collections.deque[tuple[float, T]] = collections.deque()
        self._changed = threading.Condition()  # guards what waits
        self._is_closed = False

    def put(self, item: T, due: float = 0.0) -> None:
        """To be taken at the time `due`, or right after its predecessor if that is later."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    len(self._waiting) < self.most or self._seconds_left() > 0 or self._is_closed
                )
            )
            if self._is_closed:
                raise WireError("the pipe is closed")
            self._waiting.append((due, item))
            self._changed.notify_all()

    def take(self) -> T | None:
        """Wait for the first in line, and for its time; None if none comes any more."""
        with self._changed:
            while not self._is_closed and (left := self._seconds_left()) > 0:
                self._changed.wait(min(left, _LONGEST_SLEEP_S))
            self._changed.notify_all()
            return self._waiting.popleft()[1] if self._waiting else None

    def close(self, until: float) -> None:
        """Take nothing more in, and forget what is due later than that."""
        with self._changed:
            self._is_closed = True
            self._waiting = collections.deque(one for one in self._waiting if one[0] <= until)
            self._changed.notify_all()

    def _seconds_left(self) -> float:
        """Until the first in line is due."""
        return self._waiting[0][0] - time.monotonic() if self._waiting else math.inf


class _MemoryPipe(Pipe):
    """One end: a bound keeps a fast writer from filling memory, and closing wakes who waits."""

    def __init__(self, coming: _Line[BytesLike], going: _Line[BytesLike]) -> None:
        self._coming, self._going = coming, going

    def write(self, message: BytesLike) -> None:
        self._going.put(message)

    def read(self) -> BytesLike | None:
        return self._coming.take()

    def close(self, grace: float | None = CLOSE_GRACE_S) -> None:
        self._coming.close(-math.inf)
        self._going.close(math.inf)


def memory_pair(limit: int = 1024) -> tuple[Pipe, Pipe]:
    """Two ends joined inside this process, each holding at most `limit` unread messages."""
    there, back = _Line[BytesLike](limit), _Line[BytesLike](limit)
    return _MemoryPipe(back, there), _MemoryPipe(there, back)


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


class _EmulatedPipe(Pipe):
    """A pipe over a link of two such network cards; at its other end is another of these."""

    def __init__(self, pipe: Pipe, nic: Nic) -> None:
        self._pipe, self._nic = pipe, nic
        self._leaving = _Line[bytes](_MOST_OVERDUE)
        self._arriving = _Line[BytesLike | WireError | None](_MOST_OVERDUE)
        self._has_left = on_daemon_thread("thinwire uplink", self._write)
        on_daemon_thread("thinwire downlink", self._read)

    def write(self, message: BytesLike) -> None:
        start, _ = self.send(message)
        futures.wait([self._has_left], max(0.0, start - time.monotonic()))

    def send(self, message: BytesLike) -> tuple[float, float]:
        """Have it written as soon as the uplink is free."""
        passage = self._nic.reserve_up(len(message), time.monotonic())
        self._leaving.put(_STAMP.pack(passage.arrival) + message, passage.start)
        return passage.start, passage.end

    def read(self) -> BytesLike | None:
        arrived = self._arriving.take()
        if isinstance(arrived, WireError):
            raise arrived
        return arrived

    def close(self, grace: float | None = CLOSE_GRACE_S) -> None:
        self._leaving.close(time.monotonic())
        self._arriving.close(-math.inf)
        futures.wait([self._has_left], grace)
        self._pipe.close(grace)

    def round_trip(self) -> float:
        return self._pipe.round_trip()

    def _write(self) -> None:
        try:
            while (message := self._leaving.take()) is not None:
                self._pipe.write(message)
        finally:  # whoever reads hears of a loss, and its reason
            self._leaving.close(-math.inf)

    def _read(self) -> None:
        end = None
        try:
            while (message := self._pipe.read()) is not None:
                (arrival,), frame = _STAMP.unpack_from(message), memoryview(message)[STAMP_BYTES:]
                self._arriving.put(frame, self._nic.reserve_down(len(frame), arrival))
        except WireError as error:
            end = error
        self._arriving.put(end)


def emulated(pipe: Pipe, nic: Nic | None) -> Pipe:
    """The pipe with the delays of a network card, if there is one."""
    return _EmulatedPipe(pipe, nic) if nic else pipe
