"""An event loop on a thread of its own: many connections, one thread, and an end to all of it."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent import futures
from typing import Any, TypeVar

from thinwire.errors import WireError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines on one daemon thread; `close` cancels them all and ends the thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_open = True
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        """Begin a coroutine, from within the loop. It deals with its own errors."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)  # the loop itself holds only weak references
        task.add_done_callback(self._is_done)
        return task

    def do(self, action: Callable[[], T]) -> T:
        """Call a function within the loop, from another thread, and wait for its result."""

        async def call() -> T:
            return action()

        return self.wait_for(call())

    def wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine within the loop, from another thread, and wait for its result."""
        with self._lock:
            if not self._is_open:
                coroutine.close()
                raise WireError("it is closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except futures.CancelledError:
            raise WireError("it was closed") from None

    def close(self) -> None:
        """Cancel what runs, wait for its end, and end the thread; a second call does nothing."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _is_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._loop.call_exception_handler(
                {"message": "a connection's task failed", "exception": error, "task": task}
            )

    async def _cancel_all(self) -> None:
        ours = asyncio.current_task()
        while tasks := asyncio.all_tasks() - {ours}:
            await ended(*tasks)


async def ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks and wait for their end; their errors are of no interest any more."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # else it is reported as forgotten


async def callers(listening: socket.socket) -> AsyncIterator[tuple[socket.socket, Any]]:
    """Connections as they come, with the addresses that they come from."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, place = await loop.sock_accept(listening)
        except OSError:  # too many open files, or a caller that has gone already
            await asyncio.sleep(0.1)
            continue
        yield connection, place
