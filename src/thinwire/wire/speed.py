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

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass

from thinwire.errors import WireError
from thinwire.wire.background import on_daemon_thread
from thinwire.wire.routes import ROUTE_S, Route, call, hear, say
from thinwire.wire.sockets import hang_up, why

SERVICE = "speed"
MOST_SECONDS = 3.0  # of one burst
MOST_BYTES = 64 << 20  # of one burst: fast links are known well enough by then
ECHOES = 5
_GO = "go"
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
    """The host's end: `take` serves a connection, for a door."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(_CALLERS)
        self._turn = threading.Lock()

    def take(self, caller: socket.socket, comes_from: str) -> futures.Future[None]:
        """Serve one connection; the result is there when it is over."""
        return on_daemon_thread("thinwire speed", lambda: self._serve(caller))

    def _serve(self, caller: socket.socket) -> None:
        with caller, contextlib.suppress(OSError, WireError):
            if not self._places.acquire(blocking=False):
                return
            try:
                wish, _, text = hear(caller, time.monotonic() + 2 * _GRACE_S).partition(" ")
                if wish == "echo":
                    caller.settimeout(2 * _GRACE_S)
                    for _ in range(ECHOES):
                        caller.sendall(caller.recv(1))
                    return
                seconds = _seconds(text)
                if self._turn.acquire(timeout=_TURN_S):
                    try:
                        _burst(caller, wish, seconds)
                    finally:
                        self._turn.release()
            finally:
                self._places.release()


def _burst(caller: socket.socket, wish: str, seconds: float) -> None:
    over = threading.Timer(MOST_SECONDS + 2 * _GRACE_S, hang_up, [caller])
    over.daemon = True
    over.start()
    try:
        say(caller, _GO)
        if wish == "down":
            _send(caller, seconds)
            caller.settimeout(_GRACE_S)
            caller.recv(1)  # its end: what is on the way must not be lost to ours
        elif wish == "up":
            burst = _receive(caller, seconds)
            say(caller, f"{burst.mbps:.3f}")
            caller.settimeout(_GRACE_S)
            while caller.recv(_CHUNK):  # left unread, it would undo the answer
                pass
    finally:
        over.cancel()


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise WireError("the length of a burst is not a number") from None
    if not 0 < seconds <= MOST_SECONDS:
        raise WireError(f"a burst takes at most {MOST_SECONDS:g} s")
    return seconds


def _send(connection: socket.socket, seconds: float) -> None:
    """Random bytes, which nothing on the way can compress, for so long; then the end."""
    chunk, sent, end = os.urandom(_CHUNK), 0, time.monotonic() + seconds
    with contextlib.suppress(TimeoutError):
        while sent < MOST_BYTES and (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            sent += connection.send(chunk)
    connection.shutdown(socket.SHUT_WR)


def _receive(connection: socket.socket, seconds: float) -> Burst:
    """What arrives within the time of a burst from its first byte on, or until its end."""
    burst, space, end = Burst(), bytearray(_CHUNK), time.monotonic() + _GRACE_S + seconds
    with contextlib.suppress(TimeoutError):
        while (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            size = connection.recv_into(space)
            if not size:
                break
            if not burst.total:
                end = time.monotonic() + seconds
            burst.add(size, time.monotonic())
    return burst


def measure_link(routes: Sequence[Route], run: str, seconds: float = 1.0) -> LinkRates:
    """Rates and round trip between here and the host of a run, by the first route that works.

    It takes twice `seconds` and little more, once nobody else measures, and at most MOST_BYTES
    each way. A WireError says why nothing could be measured.
    """
    problems = []
    for route in routes:
        try:
            round_trip = _round_trip(route, run)
            down, up = _down(route, run, seconds), _up(route, run, seconds)
            if up and down:
                return LinkRates(up, down, round_trip)
            problems.append(f"{route.address}: too few bytes arrived")
        except TimeoutError:
            problems.append(f"{route.address}: the measurement took too long")
        except OSError as error:
            problems.append(f"{route.address}: {why(error)}")
        except WireError as error:
            problems.append(str(error))
    raise WireError(f"the link could not be measured: {'; '.join(problems) or 'no route is known'}")


def _asked(route: Route, run: str, line: str) -> socket.socket:
    connection, _ = call(route, "reach", f"{run}/{SERVICE}", ROUTE_S)
    say(connection, line)
    return connection


def _at_our_turn(connection: socket.socket) -> None:
    if hear(connection, time.monotonic() + _TURN_S) != _GO:
        raise WireError("the host's answer to a measurement is not one")


def _round_trip(route: Route, run: str) -> float:
    with _asked(route, run, "echo") as connection:
        trips = []
        connection.settimeout(_TURN_S)
        for _ in range(ECHOES):
            begin = time.monotonic()
            connection.sendall(b"+")
            if not connection.recv(1):
                raise WireError(f"{route.address}: the host ended the measurement; try again later")
            trips.append(time.monotonic() - begin)
        return min(trips)


def _down(route: Route, run: str, seconds: float) -> float:
    with _asked(route, run, f"down {seconds:g}") as connection:
        _at_our_turn(connection)
        return _receive(connection, seconds).mbps


def _up(route: Route, run: str, seconds: float) -> float:
    with _asked(route, run, f"up {seconds:g}") as connection:
        _at_our_turn(connection)
        _send(connection, seconds)
        try:
            return float(hear(connection, time.monotonic() + MOST_SECONDS + _GRACE_S))
        except ValueError:
            raise WireError(f"{route.address}: the answer to a measurement is not a rate") from None
