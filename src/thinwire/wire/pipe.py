"""A pipe is what a link needs of a transport; the one that stays in memory is here."""

import collections
import threading
import time
from abc import ABC, abstractmethod
from concurrent import futures
from typing import Any

from thinwire.background import on_daemon_thread
from thinwire.errors import WireError
from thinwire.wire.frame import BytesLike

CLOSE_GRACE_S = 5.0


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


class _MemoryPipe(Pipe):
    """One end: a bound keeps a fast writer from filling memory, and closing wakes who waits."""

    def __init__(self, limit: int, changed: threading.Condition) -> None:
        self._limit, self._changed = limit, changed  # which both ends share
        self._unread: collections.deque[BytesLike] = collections.deque()
        self._is_closed = False
        self.other = self

    def write(self, message: BytesLike) -> None:
        unread = self.other._unread
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended() or len(unread) < self._limit)
            if self._has_ended():
                raise WireError("the pipe is closed")
            unread.append(message)
            self._changed.notify_all()

    def read(self) -> BytesLike | None:
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended() or self._unread)
            self._changed.notify_all()
            return self._unread.popleft() if self._unread else None

    def close(self, grace: float | None = CLOSE_GRACE_S) -> None:
        with self._changed:
            self._is_closed = True
            self._unread.clear()
            self._changed.notify_all()

    def _has_ended(self) -> bool:
        return self._is_closed or self.other._is_closed


def memory_pair(limit: int = 1024) -> tuple[Pipe, Pipe]:
    """Two ends joined inside this process, each holding at most `limit` unread messages."""
    changed = threading.Condition()
    here, there = _MemoryPipe(limit, changed), _MemoryPipe(limit, changed)
    here.other, there.other = there, here
    return here, there
