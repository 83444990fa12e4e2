"""The control channel between the coordinator and one peer: small messages in frames.

It rides on the same transport and the same encryption as the data, but on a stream of its own
that is not emulated: it carries well under a kilobyte per stage and step, which is metered, and
nothing waits for it.
"""

import queue
from collections.abc import Callable
from types import UnionType
from typing import Any, TypeVar

from thinwire.errors import ThinwireError, WireError
from thinwire.run.messages import CONTROL
from thinwire.run.vocabulary import MOST_SAID, Vocabulary
from thinwire.wire import Frame, FrameKind, Keepalive, LastingPipe, Link, Meter, Pipe
from thinwire.wire.lasting import Reopen

CONTROL_KEEPALIVE = Keepalive(every_s=60.0, timeout_s=7 * 86_400.0)
"""A coordinator may be suspended for days (Ctrl-Z) and go on. On one machine a death shows without
pings, and a stage that is stuck shows in its pulses."""

MessageT = TypeVar("MessageT")


def lasting_control(
    first: Pipe,
    reopen: Reopen,
    outage: float,
    on_down: Callable[[str], None] = lambda reason: None,
    on_up: Callable[[float], None] = lambda seconds: None,
) -> Pipe:
    """What a control stream between two machines goes over: connections may be lost and come back.

    Nothing is lost with them, and no message comes twice. An outage of more than `outage` seconds
    breaks it; without any, it is the first connection alone.
    """
    return LastingPipe(first, reopen, outage, on_down, on_up) if outage else first


class Channel:
    """One end of a control stream. Received messages go to a callback, or wait to be received.

    A message that is malformed, or not for this end, breaks the channel: the other end's fault.
    """

    def __init__(
        self,
        pipe: Pipe,
        name: str,
        takes: UnionType,
        on_message: Callable[[Any], None] | None = None,
        on_lost: Callable[[ThinwireError], None] | None = None,
        words: Vocabulary = CONTROL,
        on_end: Callable[[], None] = lambda: None,
    ):
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._words = words
        self._takes = takes
        self._on_message = on_message or self._inbox.put
        self.meter = Meter()
        self._link = Link(pipe, self.meter, None, name, MOST_SAID)
        self._link.start(self._on_frame, on_lost or self._inbox.put, on_end)

    def send(self, message: Any) -> None:
        """Queue a message; never blocks."""
        self._link.send(Frame(kind=FrameKind.CONTROL, payload=self._words.pack(message)))

    @property
    def unsent(self) -> int:
        """How many messages still wait to be sent."""
        return self._link.unsent

    def receive(self, wanted: type[MessageT]) -> MessageT:
        """The next message, which must be of the wanted type; waits while the channel holds."""
        message = self._inbox.get()
        if isinstance(message, ThinwireError):
            raise message
        if not isinstance(message, wanted):
            due, came = self._words.name_of(wanted), self._words.name_of(message)
            raise WireError(f"expected {due!r} from the coordinator, got {came!r}")
        return message

    def close(self) -> None:
        """Send what is queued, then say goodbye."""
        self._link.close()

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind is not FrameKind.CONTROL:
            raise WireError(f"a {frame.kind.name} frame came on a control stream")
        message = self._words.unpack(bytes(frame.payload))
        if not isinstance(message, self._takes):
            raise WireError(
                f"a {self._words.name_of(message)!r} message arrived at the end that sends it"
            )
        self._on_message(message)
