"""A pipe that outlives its connections: when one is lost, it is opened anew and nothing is missing.

Each message has a number, and an end keeps what it has sent until the other acknowledges it. On a
new connection both ends tell each other how many messages they have, and send the rest again; what
came twice is dropped. So a home router may restart in the middle of a step.
"""

import collections
import os
import struct
import threading
import time
from collections.abc import Callable
from enum import IntEnum

from thinwire.background import on_daemon_thread
from thinwire.errors import AdmissionError, BreachError, WireError
from thinwire.wire.frame import BytesLike
from thinwire.wire.pipe import CLOSE_GRACE_S, Pipe

HEAD = struct.Struct("<BQ")
LASTING_BYTES = HEAD.size
MOST_KEPT = 64 << 20  # bytes that may wait to be acknowledged before another message is taken
SESSION_BYTES = 8  # behind the head of OPEN: who speaks; another process is another speaker
ACKNOWLEDGE_BYTES = 1 << 20  # received, after which the sender is told: few beside MOST_KEPT
LEAST_COUNTED = 1 << 16  # what a message counts for at least
_ATTEMPT_S = 10.0  # for one attempt to open a connection
_PAUSE_S = 0.1  # between two of them

Reopen = Callable[[float], Pipe]  # another connection, within so many seconds; or WireError


class LastingPipe(Pipe):
    """Joins successive connections to one other end into one pipe; both ends must be lasting. It
    begins with `first`; `reopen` makes the next ones, on a thread that also writes. An outage of
    more than `outage` seconds breaks it for good. Acknowledgements, and most losses, are noticed by
    whoever reads: somebody should always do so. `on_down` is told why a connection was lost,
    `on_up` after how many seconds there is another; neither may wait, or raise.
    """

    def __init__(
        self,
        first: Pipe,
        reopen: Reopen,
        outage: float,
        on_down: Callable[[str], None] = lambda reason: None,
        on_up: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._reopen, self._outage = reopen, outage
        self._on_down, self._on_up = on_down, on_up
        self._session, self._other = os.urandom(SESSION_BYTES), b""
        self._reading = threading.Lock()  # one thread at a time, so that order is kept
        self._changed = threading.Condition()  # guards all that follows
        self.outages = 0
        self._connection: Pipe | None = None  # on which both ends have said what they have
        self._down_since, self._reason = time.monotonic(), ""  # of an outage
        # What we have to say and the other end has not acknowledged: in order, with its number.
        self._kept: collections.deque[bytes] = collections.deque()
        self._kept_bytes = 0
        self._first = 0  # the number of the first that is kept
        self._written = 0  # of those kept, on this connection
        self._received = 0
        self._unsaid = 0  # bytes received since we last acknowledged
        self._closed = False  # by us
        self._over = False  # the other end has said that it ends
        self._stopped: WireError | None = None  # why nothing more is moved
        on_daemon_thread("thinwire lasting", lambda: self._carry(first))

    def write(self, message: BytesLike) -> None:
        with self._changed:
            while not (self._closed or self._over or self._stopped):
                # All is on the connection, and not too much of it is kept.
                if self._written == len(self._kept) and self._kept_bytes < MOST_KEPT:
                    self._keep(LastingKind.DATA, message)
                    return
                self._changed.wait()
            if self._closed:
                raise WireError("the pipe is closed")
            raise self._stopped or WireError("the other end is gone")

    def read(self) -> BytesLike | None:
        with self._reading:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._connection or self._stopped)
                    connection = self._connection
                if connection is None or self._stopped:
                    break
                try:
                    raw = connection.read()
                    if raw is None:
                        self._lose(connection, None, has_read=True)
                    elif (message := self._receive(raw)) is not None:
                        return message
                except WireError as error:
                    self._lose(connection, error, has_read=True)
        if self._stopped and not self._over and not self._closed:
            raise self._stopped
        return None

    def close(self, grace: float | None = CLOSE_GRACE_S) -> None:
        with self._changed:
            if not self._closed:
                self._closed = True
                self._keep(LastingKind.END, b"")
                # Somebody must read to the end, and from here on it may be nobody else.
                on_daemon_thread("thinwire close", self.read)
            self._changed.wait_for(lambda: self._stopped, grace)
            self._stop(WireError("the pipe is closed"))
            connection = self._connection
        if connection is not None:
            connection.close(grace)

    def round_trip(self) -> float:
        connection = self._connection
        return connection.round_trip() if connection else 0.0

    def _keep(self, kind: "LastingKind", message: BytesLike) -> None:
        """Give a message its number, and have it written."""
        self._kept.append(HEAD.pack(kind, self._first + len(self._kept)) + message)
        self._kept_bytes += len(self._kept[-1])
        self._changed.notify_all()

    def _forget(self, count: int) -> None:
        """The other end has so many messages: they need not be kept."""
        known = self._first + len(self._kept)
        if count > known:
            raise BreachError(f"{count} messages are acknowledged, but only {known} were sent")
        while self._first < count:
            self._kept_bytes -= len(self._kept.popleft())
            self._first += 1
            self._written = max(0, self._written - 1)

    def _receive(self, raw: BytesLike) -> BytesLike | None:
        """What one message of a connection says; its content if it is new, and wanted."""
        kind, number = head_of(raw)
        with self._changed:
            if kind == LastingKind.HAVE:
                self._forget(number)
            elif kind not in (LastingKind.DATA, LastingKind.END) or number > self._received:
                raise BreachError(f"message {number} arrived, but {self._received} was due")
            elif number == self._received:  # else it came twice
                self._received += 1
                self._over = self._over or kind == LastingKind.END
                self._unsaid += max(len(raw), LEAST_COUNTED)
                if self._over:  # its sender waits to hear that we know
                    self._unsaid = ACKNOWLEDGE_BYTES
                elif not self._closed:
                    self._changed.notify_all()
                    return memoryview(raw)[LASTING_BYTES:]
            self._changed.notify_all()
            return None

    def _carry(self, first: Pipe) -> None:
        """On a thread of its own: write on one connection after the other, until the pipe ends."""
        connection: Pipe | None = first
        try:
            while self._stopped is None and (left := self._time_left()) > 0:
                try:
                    connection = connection or self._reopen(min(_ATTEMPT_S, left))
                    self._agree(connection)
                    while (message := self._next_due(connection)) is not None:
                        connection.write(message)
                except WireError as error:
                    self._lose(connection, error, has_read=False)
                connection = None
                time.sleep(_PAUSE_S)
            why = f"the connection was down for {self._outage:g} s: {self._reason}"
        except Exception as error:  # it must not die with this thread
            why = f"a connection failed: {error!r}"
        with self._changed:
            self._stop(WireError(why))
        if connection is not None:  # its reader may wait
            on_daemon_thread("thinwire close", connection.close)

    def _time_left(self) -> float:
        """Seconds until an outage has lasted too long."""
        # Once the other end has said that it ends, it may not come back, and need not.
        limit = CLOSE_GRACE_S if self._over else self._outage
        return self._down_since + limit - time.monotonic()

    def _agree(self, connection: Pipe) -> None:
        """Both ends say what they have; from there they go on, on this connection."""
        connection.write(HEAD.pack(LastingKind.OPEN, self._received) + self._session)
        raw = connection.read_within(_ATTEMPT_S)
        if raw is None:
            raise WireError("the other end did not say how many messages it has")
        (kind, count), other = head_of(raw), bytes(raw[LASTING_BYTES:])
        if kind != LastingKind.OPEN or len(other) != SESSION_BYTES:
            raise BreachError("the other end did not say first how many messages it has")
        if self._other not in (b"", other):
            raise BreachError("the other end restarted and has lost what was sent to it")
        with self._changed:
            if self._stopped:
                raise self._stopped
            self._other = other
            self._forget(count)
            self._connection, self._written = connection, 0  # all that is kept is written again
            self._changed.notify_all()
            if self.outages:
                self._on_up(time.monotonic() - self._down_since)

    def _next_due(self, connection: Pipe) -> bytes | None:
        """Wait for what is to be written next; None if the connection is lost or the pipe done."""
        with self._changed:
            while not self._has_ended(connection):
                if self._unsaid >= ACKNOWLEDGE_BYTES:
                    self._unsaid = 0
                    return HEAD.pack(LastingKind.HAVE, self._received)
                if self._written < len(self._kept):
                    self._written += 1
                    self._changed.notify_all()
                    return self._kept[self._written - 1]
                if self._closed and not self._kept:  # the other end has our last word
                    self._stop(WireError("the pipe is closed"))
                else:
                    self._changed.wait()
            return None

    def _has_ended(self, connection: Pipe | None) -> bool:
        """Whether nothing more is moved on this connection."""
        return self._connection is not connection or self._stopped is not None

    def _lose(self, connection: Pipe | None, error: WireError | None, has_read: bool) -> None:
        """A connection is lost, or cannot be had; without an error, the other end closed it."""
        with self._changed:
            if connection is not None and self._over and not has_read:
                # It may hang up while we still write, which only a reader can tell from a loss.
                self._changed.wait_for(lambda: self._has_ended(connection), CLOSE_GRACE_S)
            self._reason = str(error or "the other end closed the connection")
            if isinstance(error, BreachError | AdmissionError):  # either end may not do that
                self._stop(error)
            elif connection is not None and not self._has_ended(connection):
                if (self._closed and not self._kept) or (error is None and self._over):
                    self._stop(WireError("the other end is gone"))
                else:
                    self._connection, self._down_since = None, time.monotonic()
                    self.outages += 1
                    self._on_down(self._reason)
            self._changed.notify_all()
        if connection is not None:
            on_daemon_thread("thinwire close", connection.close)

    def _stop(self, reason: WireError) -> None:
        """Move nothing more, for this reason or an earlier one; whoever closes it hangs up."""
        self._stopped = self._stopped or reason
        self._changed.notify_all()


class LastingKind(IntEnum):
    """What a message on a connection of a lasting pipe is."""

    DATA = 0  # behind the head: what was written
    END = 1  # the last of its direction
    HAVE = 2  # an acknowledgement: how many messages its sender has
    OPEN = 3  # the first on a connection: the same, and who its sender is


def head_of(raw: BytesLike) -> tuple[int, int]:
    """The kind of a message, which may be none of ours, and its number."""
    if len(raw) < LASTING_BYTES:
        raise BreachError(f"a message of {len(raw)} bytes is shorter than a header")
    kind, number = HEAD.unpack_from(raw)
    return kind, number
