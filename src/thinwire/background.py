"""Calls on threads of their own that cannot hold up the end of the program."""

import threading
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

T = TypeVar("T")


def on_daemon_thread(name: str, call: Callable[[], T]) -> futures.Future[T]:
    """Begin the call on a new daemon thread. A thread pool's would be joined when Python exits."""
    future: futures.Future[T] = futures.Future()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
