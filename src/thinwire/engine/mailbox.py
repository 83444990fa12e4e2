"""Where received tensors wait for the compute thread, and the compute thread for them."""

import threading
import time
from collections.abc import Callable
from typing import Any

from thinwire.errors import ThinwireError, WireError

Key = tuple[Any, ...]


class Mailbox:
    """Items by key, put by link threads as they arrive and taken once by the runner.

    A failure of any link is put here too, so that a stage which waits for a frame that can no
    longer come stops at once instead of for ever.
    """

    def __init__(self, timeout: float = 600.0):
        self._items: dict[Key, Any] = {}
        self._changed = threading.Condition()
        self._failure: ThinwireError | None = None
        self._timeout = timeout
        self._done_step = -1
        self.dropped = 0

    def put(self, key: Key, step: int, item: Any) -> None:
        """Keep an item until it is taken; late and repeated ones are dropped and counted."""
        with self._changed:
            if step <= self._done_step or key in self._items:
                self.dropped += 1
                return
            self._items[key] = item
            self._changed.notify_all()

    def take(self, key: Key, waiting: Callable[[], None] | None = None) -> Any:
        """The item of this key, waiting for it if need be.

        `waiting` is called now and then while nothing comes, and may raise.
        """
        deadline = time.monotonic() + self._timeout
        with self._changed:
            while key not in self._items:
                if self._failure is not None:
                    raise self._failure
                if time.monotonic() > deadline:
                    raise WireError(f"no {key} arrived within {self._timeout:.0f} s")
                self._changed.wait(1.0)
                if waiting is not None:
                    waiting()
            return self._items.pop(key)

    def close_step(self, step: int) -> None:
        """Frames of this step and of earlier ones are late from now on."""
        with self._changed:
            self._done_step = step

    def fail(self, error: ThinwireError) -> None:
        """Wake everyone who waits with this error; the first one stays the reason."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
