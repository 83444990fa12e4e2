"""A stream of messages between the coordinator and a peer.

It rides on a pipe of its own: over TLS connections that may be lost and come back, or a pair of
sockets on this machine. It carries little, which is metered, and no step waits for it.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from thinwire.errors import ThinwireError, WireError
from thinwire.run.protocol import MOST_SAID, OF_NO_STAGE, Envelope, Kinds, pack, unpack
from thinwire.wire import Frame, FrameKind, Link, Meter, Pipe
from thinwire.wire.frame import BytesLike
from thinwire.wire.pipe import CLOSE_GRACE_S
from thinwire.wire.sockets import hang_up

_LONGEST = 2 * MOST_SAID


class SocketPipe(Pipe):
    """Messages over a pair of sockets, each after its length: between processes of one machine."""

    def __init__(self, end: socket.socket):
        self._end, self._messages = end, Connection(os.dup(end.fileno()))
        self._writing = threading.Lock()

    def write(self, message: BytesLike) -> None:
        try:
            with self._writing:
                self._messages.send_bytes(message)
        except OSError as error:
            raise WireError(f"the process at the other end is gone: {error}") from None

    def read(self) -> bytes | None:
        try:
            return self._messages.recv_bytes(_LONGEST)
        except (EOFError, OSError):  # closed here meanwhile, or reset
            return None

    def close(self, grace: float | None = CLOSE_GRACE_S) -> None:
        hang_up(self._end)  # what was written can still be read
        self._end.close()
        self._messages.close()


class Channel:
    """One end of a stream of messages, which go to a callback in order. One that is malformed, or
    not for this end (`kinds`), breaks it: the other end's fault. `on_over` is told why it broke, or
    None of a goodbye.
    """

    def __init__(
        self,
        pipe: Pipe,
        name: str,
        kinds: Kinds,
        on_message: Callable[[Envelope], None],
        on_over: Callable[[ThinwireError | None], None],
        meter: Meter | None = None,
    ):
        self._kinds, self._on_message = kinds, on_message
        self._link = Link(pipe, meter or Meter(), name, MOST_SAID)
        self._link.start(self._on_frame, on_over, lambda: on_over(None))

    def send(
        self, message: Any, stage: int = OF_NO_STAGE, generation: int = 0, again: int = 0
    ) -> None:
        """Queue a message about the peer itself or one of its stages; never blocks. WireError if it
        is too large; on a stream that is lost, which shows by itself, it goes nowhere.
        """
        payload = pack(Envelope(message, stage, generation, again))
        with contextlib.suppress(WireError):
            self._link.send(Frame(kind=FrameKind.CONTROL, payload=payload))

    @property
    def unsent(self) -> int:
        """How many messages still wait to be sent."""
        return self._link.unsent

    def close(self) -> None:
        """Send what is queued, then say goodbye."""
        self._link.close()

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind is not FrameKind.CONTROL:
            raise WireError(f"a {frame.kind.name} frame came on a stream of messages")
        self._on_message(unpack(bytes(frame.payload), self._kinds))
