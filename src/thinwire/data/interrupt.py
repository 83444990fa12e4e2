"""Ctrl-C while a library computes: heard at once, not when the library comes back."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 0.5


class Abandoned(Exception):
    """Told to what feeds a computation that nobody waits for any more."""


class Fuse:
    """Ends the input of a computation once it is abandoned."""

    def __init__(self) -> None:
        self._blown = threading.Event()

    def blow(self) -> None:
        """Let no further item pass."""
        self._blown.set()

    def guarded(self, items: Iterable[T]) -> Iterator[T]:
        """Pass items on until the fuse is blown."""
        for item in items:
            if self._blown.is_set():
                raise Abandoned
            yield item


def interruptible(work: Callable[[], T], fuse: Fuse | None = None) -> T:
    """What `work` returns, computed in a thread of its own.

    Python hears a signal between two of its own steps in the main thread, which waits here and
    so has them. An interrupted computation is left behind: the fuse ends what it still reads,
    and otherwise it dies with the process.
    """
    result: Future[T] = Future()

    def compute() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        while not result.done():
            # A signal may reach another thread: only a wait that ends shows it to this one.
            wait([result], _POLL_SECONDS)
        return result.result()
    finally:
        if fuse is not None:
            fuse.blow()
        thread.join(_GRACE_SECONDS)
