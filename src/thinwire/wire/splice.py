"""Two TCP connections joined into one: bytes, ends and errors of each pass on to the other."""

import asyncio
import contextlib
import socket
import struct
import sys
from collections.abc import Callable

CHUNK = 1 << 16  # bytes that a direction holds at most, between reading and writing
IDLE_S = 120.0  # our links ping every few seconds: who says nothing for so long is gone
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 15, 5, 3
_AT_ONCE = struct.pack("ii", 1, 0)


class Allowance:
    """Spreads bytes over time so that they stay below a rate; 0 Mbit/s is no bound.

    Time is told by the caller, so the bound can be checked by counting.
    """

    def __init__(self, mbps: float, burst_s: float = 0.25) -> None:
        self.mbps = mbps
        self._burst_s = burst_s
        self._paid_until = 0.0

    def book(self, count: int, now: float) -> float:
        """Account for bytes that are to be passed on; the seconds to wait before that."""
        if self.mbps <= 0:
            return 0.0
        self._paid_until = max(self._paid_until, now - self._burst_s)
        self._paid_until += count * 8 / (self.mbps * 1e6)
        return max(0.0, self._paid_until - now)


def prepare(connection: socket.socket) -> None:
    """Small messages at once, and silence noticed: what every connection of ours is set to."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"
    for name, value in (
        (idle, _KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", _KEEPALIVE_PROBES),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def keep_pace(connection: socket.socket) -> None:
    """Let a connection to another machine go on after a pause at the rate it had before, if it may.

    A stage sends in bursts. After a quiet quarter of a second the usual congestion control of TCP
    starts again from 14 kB for each round trip. BBR does not, where the system offers it.
    """
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it, and may not allow it
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")


async def splice(
    one: socket.socket,
    other: socket.socket,
    count: Callable[[int], None],
    allowance: Allowance | None = None,
    idle: float = IDLE_S,
) -> None:
    """Pass bytes both ways until both directions have ended, then return; nothing is raised.

    An end of one direction is passed on while the other goes on. After an error, or `idle` seconds
    without a byte, both connections are set to be reset when they are closed, by the caller.
    `count` is told the number of bytes before they are passed on.
    """
    directions = [
        _Direction(one, other, count, allowance),
        _Direction(other, one, count, allowance),
    ]
    ends = [direction.ended for direction in directions]
    is_whole = False
    try:
        while True:
            passed = sum(direction.passed for direction in directions)
            done, pending = await asyncio.wait(ends, timeout=idle, return_when="FIRST_EXCEPTION")
            failed = any(end.exception() for end in done)
            is_whole = not failed and not pending
            is_idle = passed == sum(direction.passed for direction in directions)
            if failed or not pending or is_idle:
                return
    finally:
        for direction in directions:
            direction.stop()
        if not is_whole:
            for connection in (one, other):
                with contextlib.suppress(OSError):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)


class _Direction:
    """Passes bytes one way, by callbacks of the loop: a task for each read would cost far more."""

    def __init__(
        self,
        source: socket.socket,
        target: socket.socket,
        count: Callable[[int], None],
        allowance: Allowance | None,
    ) -> None:
        self.passed = 0
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._source, self._target = source, target
        self._count, self._allowance = count, allowance
        self._space = memoryview(bytearray(CHUNK))
        self._left = self._space[:0]  # read, and not yet written
        self._is_held_up = False
        self._delayed: asyncio.TimerHandle | None = None
        self._loop.add_reader(source, self._read)

    def stop(self) -> None:
        """Pass nothing more."""
        if self._delayed is not None:
            self._delayed.cancel()
        self._loop.remove_reader(self._source)
        self._loop.remove_writer(self._target)
        if self.ended.done():
            self.ended.exception()  # else it is reported as forgotten
        else:
            self.ended.cancel()

    def _read(self) -> None:
        try:
            size = self._source.recv_into(self._space)
            if not size:
                self._loop.remove_reader(self._source)
                self._target.shutdown(socket.SHUT_WR)
                self.ended.set_result(None)
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(error)
            return
        self._count(size)
        self._left = self._space[:size]
        delay = self._allowance.book(size, self._loop.time()) if self._allowance else 0.0
        if delay > 0:
            self._hold_up()
            self._delayed = self._loop.call_later(delay, self._write)
        else:
            self._write()

    def _write(self) -> None:
        try:
            sent = self._target.send(self._left)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._fail(error)
            return
        self.passed += sent
        self._left = self._left[sent:]
        if self._left:
            self._hold_up()
            self._loop.add_writer(self._target, self._write)
        elif self._is_held_up:
            self._is_held_up = False
            self._loop.remove_writer(self._target)
            self._loop.add_reader(self._source, self._read)

    def _hold_up(self) -> None:
        """Read nothing until what was read is written."""
        if not self._is_held_up:
            self._is_held_up = True
            self._loop.remove_reader(self._source)

    def _fail(self, error: OSError) -> None:
        self._loop.remove_reader(self._source)
        self._loop.remove_writer(self._target)
        self.ended.set_exception(error)
