"""A peer's streams to its host, dialed by the best route; the lobby's again and again."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from thinwire.errors import AdmissionError, WireError
from thinwire.remote.messages import LOBBY, Alive, AskAlive, FromHost, lobby_name
from thinwire.run.control import Channel
from thinwire.run.vocabulary import MAX_MESSAGE
from thinwire.wire import Identity, Pipe, Routes, dial
from thinwire.wire.keys import fingerprint_of

DIAL_SECONDS = 20.0  # for one attempt to reach the host
_PAUSE_S = 0.5


@dataclass(frozen=True)
class Connected:
    """The stream to the host is open."""

    channel: Channel


@dataclass(frozen=True)
class Lost:
    """The stream to the host is lost, or could not be opened."""

    channel: Channel | None
    reason: str


class Touch:
    """Keeps one peer in touch with its host.

    `tell` gets what happens: Connected and Lost in turn, messages of the host in between, and the
    AdmissionError with which the host refuses this peer, which is the last. It must not wait.
    """

    def __init__(self, way: Routes, identity: Identity, tell: Callable[[Any], None]):
        self.identity = identity
        self._way, self._tell = way, tell
        self._is_over = False

    def dial(self, name: str) -> Pipe:
        """A stream of this name to the host."""
        whom = fingerprint_of(self.identity.host)
        return dial(self._way, name, self.identity, whom, DIAL_SECONDS, MAX_MESSAGE)

    def keep(self) -> None:
        """Have a stream to the host, again and again, until it refuses or `end` is called."""
        while not self._is_over:
            try:
                pipe = self.dial(lobby_name(self.identity.name))
            except AdmissionError as error:
                self._tell(error)
                return
            except WireError as error:
                self._tell(Lost(None, f"the host cannot be reached: {error}"))
                continue
            self._attend(pipe)
            time.sleep(_PAUSE_S)

    def end(self) -> None:
        """Open no other stream."""
        self._is_over = True

    def _attend(self, pipe: Pipe) -> None:
        """Pass on what the host says until the stream is lost."""
        lost = threading.Event()

        def hear(message: Any) -> None:
            if isinstance(message, AskAlive):  # at once, whatever this peer does at the moment
                channel.send(Alive())
            else:
                self._tell(message)

        channel = Channel(
            pipe,
            "lobby",
            FromHost,
            on_message=hear,
            on_lost=lambda error: lost.set(),
            words=LOBBY,
            on_end=lost.set,
        )
        self._tell(Connected(channel))
        lost.wait()
        self._tell(Lost(channel, "the connection to the host was lost"))
