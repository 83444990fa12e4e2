"""Where received tensors wait for the compute thread, and the compute thread for them."""

import threading
from typing import Any

from thinwire.errors import ThinwireError, WireError

Key = tuple[Any, ...]


class Mailbox:
    """Items by key, put by link threads as they arrive and taken once by the runner.

    What may be put is bounded by ports, which know what is due; a flow that has no such bound is
    held back by `wait_for_room`.

    A failure of any link is put here too, so that a stage which waits for a frame that can no
    longer come stops at once instead of waiting forever. A link may be as slow as it likes:
    unless a `timeout` is given, waiting ends with the item or with a failure only.
    """

    def __init__(self, timeout: float | None = None):
        self._items: dict[Key, tuple[int, Any]] = {}  # with their steps
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
            self._items[key] = step, item
            self._changed.notify_all()

    def wait_for_room(self, kind: Any, most: int) -> None:
        """On a link thread: wait until fewer than `most` items wait whose key begins with `kind`.

        Meanwhile the link reads nothing, so that its sender is held back too. A failure ends it.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or sum(key[0] == kind for key in self._items) < most
            )

    def take(self, key: Key) -> Any:
        """The item of this key, waiting for it if need be."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._items or self._failure, self._timeout)
            if key in self._items:
                _, item = self._items.pop(key)
                self._changed.notify_all()
                return item
            raise self._failure or WireError(f"no {key} arrived within {self._timeout} s")

    def wait_for_either(self, key: Key, other: Key) -> Key:
        """Wait until one of the two is there, without taking it; `key` if both are."""
        with self._changed:
            self._changed.wait_for(
                lambda: key in self._items or other in self._items or self._failure, self._timeout
            )
            return other if other in self._items and key not in self._items else key

    def close_step(self, step: int) -> None:
        """Frames of this step and of earlier ones are late from now on.

        What nobody took is dropped: nobody will, and it would pile up step by step.
        """
        with self._changed:
            self._done_step = step
            kept = {key: item for key, item in self._items.items() if item[0] > step}
            self.dropped += len(self._items) - len(kept)
            self._items = kept

    def fail(self, error: ThinwireError) -> None:
        """Wake everyone who waits with this error; the first one stays the reason."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
