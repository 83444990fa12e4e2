"""Where received tensors wait for the compute thread, and the compute thread for them."""

import threading
from typing import Any

from thinwire.errors import ThinwireError, WireError

Key = tuple[Any, ...]


class Mailbox:
    """Items by key, put by link threads as they arrive and taken once by the runner.

    A failure of any link is put here too, so that a stage which waits for a frame that can no
    longer come stops at once instead of for ever. A link may be as slow as it likes: unless a
    `timeout` is given, waiting ends with the item or with a failure only.
    """

    def __init__(self, timeout: float | None = None):
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

    def take(self, key: Key) -> Any:
        """The item of this key, waiting for it if need be."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._items or self._failure, self._timeout)
            if key in self._items:
                return self._items.pop(key)
            raise self._failure or WireError(f"no {key} arrived within {self._timeout} s")

    def close_step(self, step: int) -> None:
        """Frames of this step and of earlier ones are late from now on."""
        with self._changed:
            self._done_step = step

    def fail(self, error: ThinwireError) -> None:
        """Wake everyone who waits with this error; the first one stays the reason."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
