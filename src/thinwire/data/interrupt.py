"""Ctrl-C while a library computes: heard at once, not when the library comes back."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 0.5


class Abandoned(Exception):
    """Raised in the input of a computation that nobody waits for any more."""


def interruptible(
    work: Callable[[Iterator[ItemT]], ResultT], items: Iterable[ItemT] = ()
) -> ResultT:
    """What `work` makes of the items, computed in a thread of its own.

    Python hears a signal between two of its own steps in the main thread, which waits here and
    so has them. An interrupted computation is left behind: it gets no further items, and otherwise
    dies with the process.
    """
    result: Future[ResultT] = Future()
    is_abandoned = threading.Event()

    def guarded() -> Iterator[ItemT]:
        for item in items:
            if is_abandoned.is_set():
                raise Abandoned
            yield item

    def compute() -> None:
        try:
            result.set_result(work(guarded()))
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
        is_abandoned.set()
        thread.join(_GRACE_SECONDS)
