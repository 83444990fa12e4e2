"""Accepts the streams of an epoch by their names, each from the one peer that may open it."""

import contextlib
import threading
import time
from collections.abc import Callable

from thinwire.errors import ThinwireError, WireError
from thinwire.wire import Listener, Pipe

_LOOK_SECONDS = 0.5  # between two looks whether the epoch is over


class Reception:
    """The streams of one epoch at the host's listener; what waits for one ends with `close`."""

    def __init__(self, listener: Listener):
        self._listener = listener
        self._is_over = threading.Event()

    def accept(self, name: str, peer: str, timeout: float | None) -> Pipe:
        """Wait for a peer to dial by this name; whoever else does is refused."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._is_over.is_set():
            left = _LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise WireError(f"{peer} did not dial as {name!r} within {timeout:.0f} s")
            with contextlib.suppress(WireError):  # nobody came: look whether to go on
                return self._listener.accept(name, min(left, _LOOK_SECONDS), peer, True)
            time.sleep(0.01)  # the listener may be closed, and then says so at once
        raise WireError(f"nobody waits for {name!r} any more")

    def serve(self, name: str, peer: str, handle: Callable[[Pipe], None]) -> None:
        """Handle one stream of this name after the other, on a thread of its own."""

        def run() -> None:
            while not self._is_over.is_set():
                with contextlib.suppress(ThinwireError):  # the peer dials again
                    handle(self.accept(name, peer, None))

        threading.Thread(target=run, name=f"thinwire {name}", daemon=True).start()

    def close(self) -> None:
        """Accept nothing more."""
        self._is_over.set()
