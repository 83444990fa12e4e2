"""The control channel between the coordinator and one peer: small messages in frames.

It rides on the same transport and the same encryption as the data, but on a stream of its own
that is not emulated: it carries well under a kilobyte per stage and step, which is metered, and
nothing waits for it.
"""

import queue
from collections.abc import Callable

from thinwire.errors import ThinwireError, WireError
from thinwire.run.messages import MAX_MESSAGE, Message, pack, unpack
from thinwire.wire import Frame, FrameKind, Keepalive, Link, Meter, Pipe

__all__ = ["CONTROL_KEEPALIVE", "MAX_MESSAGE", "Channel", "Message"]

CONTROL_KEEPALIVE = Keepalive(every_s=60.0, timeout_s=7 * 86_400.0)
"""A coordinator may be suspended for days (Ctrl-Z) and go on. On one machine a death shows without
pings, and a stage that is stuck shows in its pulses."""


class Channel:
    """One end of a control stream. Received messages go to a callback, or wait to be received.

    A message that is malformed, or that `check` refuses, breaks the channel: the other end's fault.
    """

    def __init__(
        self,
        pipe: Pipe,
        name: str,
        on_message: Callable[[Message], None] | None = None,
        on_lost: Callable[[ThinwireError], None] | None = None,
        check: Callable[[Message], None] = lambda message: None,
    ):
        self._inbox: queue.SimpleQueue[Message | ThinwireError] = queue.SimpleQueue()
        self._on_message = on_message or self._inbox.put
        self._on_lost = on_lost or self._inbox.put
        self._check = check
        self.meter = Meter()
        self._link = Link(pipe, self.meter, None, name, MAX_MESSAGE)
        self._link.start(self._on_frame, self._on_lost)

    def send(self, message: Message) -> None:
        """Queue a message; never blocks."""
        self._link.send(Frame(kind=FrameKind.CONTROL, payload=pack(message)))

    def receive(self, wanted: str) -> Message:
        """The next message, which must be of the wanted type; waits while the channel holds."""
        message = self._inbox.get()
        if isinstance(message, ThinwireError):
            raise message
        if message.get("type") != wanted:
            raise WireError(f"expected {wanted!r} from the coordinator, got {message['type']!r}")
        return message

    def close(self) -> None:
        """Send what is queued, then say goodbye."""
        self._link.close()

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind is not FrameKind.CONTROL:
            raise WireError(f"a {frame.kind.name} frame came on a control stream")
        message = unpack(bytes(frame.payload))
        self._check(message)
        self._on_message(message)
