"""Pipes: what a link needs of a transport, and the one that stays in memory."""

import collections
import threading
from abc import ABC, abstractmethod
from typing import Any

from thinwire.errors import WireError
from thinwire.wire.frame import BytesLike

CLOSE_GRACE_S = 5.0


class Pipe(ABC):
    """Moves whole byte messages, none of them empty, both ways, in order, between two ends.

    Reading and writing may happen on different threads at once. Closing is idempotent.
    `comes_from` is the host of who dialed, where a listener accepted it.
    """

    comes_from: str = ""
    state: Any = None  # a LinkState, where another process may take the place of the other end

    @abstractmethod
    def write(self, message: BytesLike) -> None:
        """Hand a message over; may block while the transport is full. WireError if it broke."""

    def keep(self, message: BytesLike) -> bool:
        """Called with each frame before it is written; False if it need not be."""
        return True

    @abstractmethod
    def read(self) -> BytesLike | None:
        """Wait for the next message; None once either end closed in good order."""

    @abstractmethod
    def close(self, grace: float | None = CLOSE_GRACE_S) -> None:
        """End both directions; messages already written still reach the other end.

        It has `grace` seconds to read them; None waits for as long as the connection lives.
        """


class Handover:
    """A bounded queue from one writing to one reading thread that either side can end.

    The bound keeps a fast writer from filling memory; ending wakes both sides, so that no
    thread ever waits for a partner that is gone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: collections.deque[BytesLike] = collections.deque()
        self._ended = False
        self._changed = threading.Condition()

    def put(self, message: BytesLike) -> bool:
        """Add a message, waiting for room; False if the queue was ended instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._waiting) < self._limit)
            if self._ended:
                return False
            self._waiting.append(message)
            self._changed.notify_all()
            return True

    def end(self, drop: bool = False) -> None:
        """Accept nothing more; with `drop`, also forget what the reader has not taken."""
        with self._changed:
            self._ended = True
            if drop:
                self._waiting.clear()
            self._changed.notify_all()

    def __iter__(self) -> "Handover":
        return self

    def __next__(self) -> BytesLike:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or bool(self._waiting))
            if not self._waiting:
                raise StopIteration
            message = self._waiting.popleft()
            self._changed.notify_all()
            return message


class _MemoryPipe(Pipe):
    def __init__(self, outgoing: Handover, incoming: Handover) -> None:
        self._outgoing = outgoing
        self._incoming = incoming

    def write(self, message: BytesLike) -> None:
        if not self._outgoing.put(message):
            raise WireError("the pipe is closed")

    def read(self) -> BytesLike | None:
        return next(self._incoming, None)

    def close(self, grace: float | None = CLOSE_GRACE_S) -> None:
        self._outgoing.end()
        self._incoming.end(drop=True)


def memory_pair(limit: int = 1024) -> tuple[Pipe, Pipe]:
    """Two ends joined inside this process, each holding at most `limit` unread messages."""
    there, back = Handover(limit), Handover(limit)
    return _MemoryPipe(there, back), _MemoryPipe(back, there)
