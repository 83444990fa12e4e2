"""The rate and the round trip of the way between a peer and a host, by bursts of random bytes.

The host serves this behind its door as `RUN/speed`. Each connection asks for one thing:

    caller   echo                then a byte at a time, each of which is sent back
    caller   down SECONDS        the service says go, sends for so long and ends
    caller   up SECONDS          the service says go, the caller sends for so long, and the service
                                 says how fast it came

Whoever receives takes the time, so buffers on the way do not flatter. One burst goes at a time, for
two would measure each other. Seconds, bytes and callers are bounded, and a run's door admits only
its own peers.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.errors import WireError
from thinwire.wire.kernel import address_text
from thinwire.wire.loop import LoopThread, callers
from thinwire.wire.preamble import call, hear, say
from thinwire.wire.splice import prepare
from thinwire.wire.tunnel import ROUTE_S, Route

SERVICE = "speed"
GO = "go"
MOST_SECONDS = 3.0  # of one burst
MOST_BYTES = 64 << 20  # of one burst: fast links are known well enough by then
ECHOES = 5
_CALLERS = 16
_TURN_S = 30.0  # for those before us to be done
_CHUNK = 1 << 16
_GRACE_S = 2.0  # beyond a burst, for what is still on its way
_RAMP = 0.3  # of a burst, in which a connection still finds its rate


@dataclass(frozen=True)
class LinkRates:
    """What a way carries: 10^6 bits per second each way, and the round trip in seconds."""

    mbps_up: float
    mbps_down: float
    round_trip_s: float


class Burst:
    """Counts what arrives, and tells the rate once the connection has found it."""

    def __init__(self) -> None:
        self._arrived: list[tuple[float, int]] = []  # when, and how much by then
        self.total = 0

    def add(self, size: int, now: float) -> None:
        """So many bytes have come."""
        self.total += size
        self._arrived.append((now, self.total))

    @property
    def mbps(self) -> float:
        """The rate behind the first part of the burst; 0 where nothing can be told."""
        if len(self._arrived) < 2:
            return 0.0
        first, last = self._arrived[0][0], self._arrived[-1]
        from_then = first + _RAMP * (last[0] - first)
        begin = next(point for point in self._arrived if point[0] >= from_then)
        if last[0] <= begin[0]:
            begin = self._arrived[0]
        seconds = last[0] - begin[0]
        return (last[1] - begin[1]) * 8 / seconds / 1e6 if seconds > 0 else 0.0


class SpeedService:
    """The host's end, on a local `address` for its door to serve."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.address = address_text(*self._socket.getsockname())
        self._callers = 0
        self._turn = asyncio.Lock()
        self._loop = LoopThread("thinwire speed")
        self._loop.do(lambda: self._loop.start(self._accept()))

    def close(self) -> None:
        """Cut all connections and end the thread."""
        self._loop.close()
        self._socket.close()

    def __enter__(self) -> "SpeedService":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _accept(self) -> None:
        async for caller, _ in callers(self._socket):
            if self._callers >= _CALLERS:
                caller.close()
                continue
            self._callers += 1
            self._loop.start(self._serve(caller))

    async def _serve(self, caller: socket.socket) -> None:
        try:
            with caller, contextlib.suppress(OSError, TimeoutError, WireError):
                prepare(caller)
                async with asyncio.timeout(2 * _GRACE_S):
                    wish, _, text = (await hear(caller)).partition(" ")
                    if wish == "echo":
                        return await _echo(caller)
                seconds = _seconds(text)
                async with asyncio.timeout(_TURN_S):
                    await self._turn.acquire()
                try:
                    async with asyncio.timeout(MOST_SECONDS + 2 * _GRACE_S):
                        await _burst(caller, wish, seconds)
                finally:
                    self._turn.release()
        finally:
            self._callers -= 1


async def _echo(caller: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(ECHOES):
        await loop.sock_sendall(caller, await loop.sock_recv(caller, 1))


async def _burst(caller: socket.socket, wish: str, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    await say(caller, GO)
    if wish == "down":
        await _send(caller, seconds)
        await loop.sock_recv(caller, 1)  # its end: what is on the way must not be lost to ours
    elif wish == "up":
        burst = await _receive(caller, seconds)
        await say(caller, f"{burst.mbps:.3f}")
        while await loop.sock_recv(caller, _CHUNK):  # left unread, it would undo the answer
            pass


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise WireError("the length of a burst is not a number") from None
    if not 0 < seconds <= MOST_SECONDS:
        raise WireError(f"a burst takes at most {MOST_SECONDS:g} s")
    return seconds


async def _send(connection: socket.socket, seconds: float) -> None:
    """Random bytes, which nothing on the way can compress, for so long; then the end."""
    loop = asyncio.get_running_loop()
    chunk, sent = os.urandom(_CHUNK), 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while sent < MOST_BYTES:
                await loop.sock_sendall(connection, chunk)
                sent += len(chunk)
    connection.shutdown(socket.SHUT_WR)


async def _receive(connection: socket.socket, seconds: float) -> Burst:
    """What arrives within the time of a burst from its first byte on, or until its end."""
    loop, burst = asyncio.get_running_loop(), Burst()
    space = bytearray(_CHUNK)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_GRACE_S + seconds) as limit:
            while size := await loop.sock_recv_into(connection, space):
                if not burst.total:
                    limit.reschedule(loop.time() + seconds)
                burst.add(size, loop.time())
    return burst


def measure_link(routes: Sequence[Route], run: str, seconds: float = 1.0) -> LinkRates:
    """Rates and round trip between here and the host of a run, by the first route that works.

    It takes twice `seconds` and little more, once nobody else measures, and at most MOST_BYTES
    each way. A WireError says why nothing could be measured.
    """
    loop = LoopThread("thinwire speed")
    try:
        return loop.wait_for(_measured(routes, f"{run}/{SERVICE}", seconds))
    finally:
        loop.close()


async def _measured(routes: Sequence[Route], name: str, seconds: float) -> LinkRates:
    problems = []
    for route in routes:
        try:
            async with asyncio.timeout(2 * (_TURN_S + MOST_SECONDS + 2 * _GRACE_S)):
                round_trip = await _round_trip(route, name)
                down = await _down(route, name, seconds)
                up = await _up(route, name, seconds)
            if up and down:
                return LinkRates(up, down, round_trip)
            problems.append(f"{route.address}: too few bytes arrived")
        except TimeoutError:
            problems.append(f"{route.address}: the measurement took too long")
        except OSError as error:
            problems.append(f"{route.address}: {error.strerror or error}")
        except WireError as error:
            problems.append(str(error))
    raise WireError(f"the link could not be measured: {'; '.join(problems) or 'no route is known'}")


async def _asked(route: Route, name: str, line: str) -> socket.socket:
    connection, _ = await call(route.address, route.token, "reach", name, ROUTE_S)
    await say(connection, line)
    return connection


async def _at_our_turn(connection: socket.socket) -> None:
    async with asyncio.timeout(_TURN_S):
        if await hear(connection) != GO:
            raise WireError("the host's answer to a measurement is not one")


async def _round_trip(route: Route, name: str) -> float:
    loop = asyncio.get_running_loop()
    with await _asked(route, name, "echo") as connection:
        trips = []
        for _ in range(ECHOES):
            begin = loop.time()
            await loop.sock_sendall(connection, b"+")
            if not await loop.sock_recv(connection, 1):
                raise WireError(f"{route.address}: the host ended the measurement; try again later")
            trips.append(loop.time() - begin)
        return min(trips)


async def _down(route: Route, name: str, seconds: float) -> float:
    with await _asked(route, name, f"down {seconds:g}") as connection:
        await _at_our_turn(connection)
        return (await _receive(connection, seconds)).mbps


async def _up(route: Route, name: str, seconds: float) -> float:
    with await _asked(route, name, f"up {seconds:g}") as connection:
        await _at_our_turn(connection)
        sending = asyncio.create_task(_send(connection, seconds))
        try:
            text = await hear(connection)
        finally:
            sending.cancel()
            await asyncio.wait([sending])
            if not sending.cancelled():
                sending.exception()
        try:
            return float(text)
        except ValueError:
            raise WireError(f"{route.address}: the answer to a measurement is not a rate") from None
