"""The control channel between the coordinator and one peer: small JSON messages in frames.

It rides on the same transport and the same encryption as the data, but on a stream of its own
that is not emulated: it carries a few kilobytes per step and nothing waits for it.
"""

import json
import queue
from collections.abc import Callable
from typing import Any

from thinwire.errors import ThinwireError, WireError
from thinwire.wire import Frame, FrameKind, Link, Meter, Pipe

Message = dict[str, Any]
MAX_MESSAGE = 64 << 20


class Channel:
    """One end of a control stream. Received messages go to a callback, or wait to be received."""

    def __init__(
        self,
        pipe: Pipe,
        name: str,
        on_message: Callable[[Message], None] | None = None,
        on_lost: Callable[[ThinwireError], None] | None = None,
    ):
        self._inbox: queue.SimpleQueue[Message | ThinwireError] = queue.SimpleQueue()
        self._on_message = on_message or self._inbox.put
        self._on_lost = on_lost or self._inbox.put
        self._link = Link(pipe, Meter(), None, name, MAX_MESSAGE)
        self._link.start(self._on_frame, self._on_lost)

    def send(self, message: Message) -> None:
        """Queue a message; never blocks."""
        payload = json.dumps(message).encode()
        self._link.send(Frame(kind=FrameKind.CONTROL, payload=payload))

    def receive(self, wanted: str) -> Message:
        """The next message, which must be of the wanted type; waits while the channel holds."""
        message = self._inbox.get()
        if isinstance(message, ThinwireError):
            raise message
        if message.get("type") != wanted:
            raise WireError(
                f"expected {wanted!r} from the coordinator, got {message.get('type')!r}"
            )
        return message

    def close(self) -> None:
        """Send what is queued, then say goodbye."""
        self._link.close()

    def _on_frame(self, frame: Frame) -> None:
        try:
            message = json.loads(bytes(frame.payload))
        except ValueError as error:
            raise WireError(f"a control message is not JSON: {error}") from error
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            raise WireError("a control message must be an object with a type")
        self._on_message(message)
