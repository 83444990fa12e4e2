"""Two TCP connections joined into one: bytes, ends and errors of each pass on to the other."""

import asyncio
import contextlib
import socket
import struct
import sys
from collections.abc import Callable

from thinwire.wire.loop import ended

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
    loop = asyncio.get_running_loop()
    last = loop.time()

    async def pump(source: socket.socket, target: socket.socket) -> None:
        nonlocal last
        space = memoryview(bytearray(CHUNK))
        while size := await loop.sock_recv_into(source, space):
            last = loop.time()
            count(size)
            if allowance is not None and (delay := allowance.book(size, last)) > 0:
                await asyncio.sleep(delay)
            await loop.sock_sendall(target, space[:size])
            last = loop.time()
        target.shutdown(socket.SHUT_WR)

    pumps = [loop.create_task(pump(one, other)), loop.create_task(pump(other, one))]
    is_whole = False
    try:
        while True:
            done, pending = await asyncio.wait(pumps, timeout=idle, return_when="FIRST_EXCEPTION")
            if any(task.exception() for task in done) or not pending:
                is_whole = not any(task.exception() for task in done)
                return
            if loop.time() - last >= idle:
                return
    finally:
        await ended(*pumps)
        if not is_whole:
            for connection in (one, other):
                with contextlib.suppress(OSError):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
