"""One gRPC stream as a pipe; the listening and the dialing side use it alike.

gRPC runs its own threads and takes messages as fast as the network does, so a pipe only
has to hold a few of them.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from thinwire.errors import WireError, printable
from thinwire.wire.background import on_daemon_thread
from thinwire.wire.pipe import CLOSE_GRACE_S, Handover, Pipe

_LAST = b""
_MESSAGES_HELD = 4


@dataclass(frozen=True)
class Keepalive:
    """How soon a silent peer is noticed: a ping every so often, and the wait for its answer."""

    every_s: float = 5.0
    timeout_s: float = 5.0


DEFAULT_KEEPALIVE = Keepalive()


class Outbox(Handover):
    """Where gRPC takes messages from: a few at most, so that a slow network holds writers back.

    An empty message is the last of each direction. Without it the end of a stream would not
    tell a closed pipe from a lost connection: gRPC's server side ends both alike.
    """

    def __init__(self) -> None:
        super().__init__(_MESSAGES_HELD)

    def to_the_last(self) -> Iterator[bytes]:
        """What to give to gRPC."""
        yield from self
        yield _LAST


class StreamPipe(Pipe):
    """One end of a stream: what it sends goes into `outgoing`, what comes is `incoming`.

    `let_go` releases whatever gRPC holds for the stream.
    """

    def __init__(
        self, outgoing: Outbox, incoming: Iterator[bytes], let_go: Callable[[], object]
    ) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._let_go = let_go
        self._reading = threading.Lock()
        self._over = threading.Event()
        self._closed = False

    def stream_is_over(self) -> None:
        """Called by gRPC when the stream has ended, for whatever reason."""
        self._over.set()
        self._outgoing.end(drop=True)

    def write(self, message: bytes) -> None:
        if message == _LAST:
            raise WireError("an empty message cannot be sent")
        if not self._outgoing.put(message):
            raise WireError("the stream is closed" if self._closed else "the other end is gone")

    def read(self) -> bytes | None:
        reason = "the connection was lost"
        with self._reading:
            try:
                message = next(self._incoming, None)
            except Exception as error:  # which class it is depends on the side and the moment
                message, reason = None, why_it_ended(error)
        if message == _LAST or (message is None and self._closed):
            # The other end closed and reads no more: finish, so that it need not wait for us.
            self._outgoing.end()
            return None
        if message is None:
            raise WireError(f"the other end is gone ({reason})")
        return message

    def close(self, grace: float | None = CLOSE_GRACE_S) -> None:
        self._closed = True
        self._outgoing.end()
        # Letting go at once would cut off what is still on its way out. The stream is over
        # once both ends have read it to its end, and here nobody may be reading any more.
        on_daemon_thread("thinwire close", self._discard_rest)
        self._over.wait(grace)
        self._let_go()

    def cut(self) -> None:
        """Break it at once: both ends see a lost connection."""
        self._let_go()

    def _discard_rest(self) -> None:
        while self.read() is not None:
            pass


def common_options(max_message: int, keepalive: Keepalive) -> list[tuple[str, int]]:
    """The gRPC options that both sides need."""
    return [
        ("grpc.max_receive_message_length", max_message),
        ("grpc.max_send_message_length", max_message),
        ("grpc.keepalive_time_ms", round(keepalive.every_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(keepalive.timeout_s * 1000)),
        # Recent releases wait this long for the answer, whatever the option above says, and
        # a minute unless told otherwise.
        ("grpc.http2.ping_timeout_ms", round(keepalive.timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def why_it_ended(error: Any) -> str:
    """What gRPC says of a call or an exception that ended."""
    try:
        return printable(f"{error.code().name}: {error.details()}")
    except AttributeError:  # the server side of gRPC says no more than that it ended
        return "the connection was lost"
