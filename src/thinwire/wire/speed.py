"""The rate and the round trip of the way between a peer and a host, by bursts of random bytes.

The host serves this behind its door as `RUN/speed`. Each connection asks for one burst:

    caller   down SECONDS    or: up SECONDS
    host     here            at once: the round trip
    host     go              once nobody else measures; then down: it sends for so long, and ends;
                             up: the caller sends for so long, and the host says how fast it came

Whoever receives takes the time, so buffers on the way do not flatter. Seconds, bytes and callers
are bounded, and a run's door admits only its own peers.
"""

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from thinwire.errors import WireError
from thinwire.wire.door import ROUTE_S, Route, call, first_that_works, hear, say

SERVICE = "speed"
MOST_SECONDS = 3.0  # of one burst
MOST_BYTES = 64 << 20  # of one burst: fast links are known well enough by then
_CALLERS = 16
_TURN_S = 30.0  # for those before us to be done
_CHUNK = 1 << 16
_GRACE_S = 2.0  # beyond a burst, for what is still on its way
_RAMP = 0.3  # of a burst, in which a connection still finds its rate
_LEAST_CALLS = 20  # as long as so many calls take, for its rate doubles with each round trip


@dataclass(frozen=True)
class LinkRates:
    """What a way carries: 10^6 bits per second each way, and the round trip in seconds."""

    mbps_up: float
    mbps_down: float
    round_trip_s: float


class SpeedService:
    """The host's end: `take` serves a connection, for a door."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(_CALLERS)
        self._turn = threading.Lock()

    def take(self, caller: socket.socket, comes_from: str) -> None:
        """Serve one connection to its end."""
        with caller, suppress(OSError, WireError, ValueError), ExitStack() as held:
            if not self._places.acquire(blocking=False):
                return
            held.callback(self._places.release)
            wish, _, text = hear(caller, time.monotonic() + 2 * _GRACE_S).partition(" ")
            seconds = float(text)
            if wish in ("down", "up") and 0 < seconds <= MOST_SECONDS:
                say(caller, "here")
                if self._turn.acquire(timeout=_TURN_S):
                    held.callback(self._turn.release)
                    _burst(caller, wish, seconds)


def _burst(caller: socket.socket, wish: str, seconds: float) -> None:
    say(caller, "go")
    if wish == "down":
        _send(caller, seconds)
    else:
        rate = _receive(caller, seconds)
        caller.settimeout(_GRACE_S)
        say(caller, f"{rate:.3f}")
    _receive(caller, _GRACE_S)  # what is on the way must not be lost to our end


def _send(connection: socket.socket, seconds: float) -> None:
    """Random bytes, which nothing on the way can compress, for so long; then the end."""
    chunk, sent, end = os.urandom(_CHUNK), 0, time.monotonic() + seconds
    with suppress(TimeoutError):
        while sent < MOST_BYTES and (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            sent += connection.send(chunk)
    connection.shutdown(socket.SHUT_WR)


def _receive(connection: socket.socket, seconds: float) -> float:
    """The steady rate of what arrives within so long of its first byte; 0 if it cannot be told."""
    arrived: list[tuple[float, int]] = []  # when, and how many bytes by then
    space, total, end = bytearray(_CHUNK), 0, time.monotonic() + _GRACE_S + seconds
    with suppress(TimeoutError):
        while (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            size = connection.recv_into(space)
            if not size:
                break
            total += size
            arrived.append((time.monotonic(), total))
            end = arrived[0][0] + seconds
    if len(arrived) < 2:
        return 0.0
    first, (last, total) = arrived[0], arrived[-1]
    ramp_end = first[0] + _RAMP * (last - first[0])
    then, before = next((point for point in arrived if ramp_end <= point[0] < last), first)
    return (total - before) * 8 / (last - then) / 1e6 if last > then else 0.0


def measure_link(routes: Sequence[Route], run: str, seconds: float = 1.0) -> LinkRates:
    """Rates and round trip between here and the host of a run, by the first route that works. It
    takes twice `seconds`, longer where the way is long, once nobody else measures, and at most
    MOST_BYTES each way. A WireError says why nothing could be measured.
    """

    def measure(route: Route) -> LinkRates:
        down, trip = _measured(route, run, "down", seconds)
        up, other_trip = _measured(route, run, "up", seconds)
        if not (up and down):
            raise WireError(f"{route.address}: too few bytes arrived")
        return LinkRates(up, down, min(trip, other_trip))

    try:
        return first_that_works(routes, measure)[1]
    except WireError as error:
        raise WireError(f"the link could not be measured: {error}") from None


def _measured(route: Route, run: str, wish: str, seconds: float) -> tuple[float, float]:
    """The rate of one direction, and the round trip."""
    begin = time.monotonic()
    connection, _ = call(route, "reach", f"{run}/{SERVICE}", ROUTE_S)
    seconds = min(MOST_SECONDS, max(seconds, _LEAST_CALLS * (time.monotonic() - begin)))
    with connection:
        begin = time.monotonic()
        try:
            say(connection, f"{wish} {seconds:g}")
            hear(connection, begin + _TURN_S)  # here
            trip = time.monotonic() - begin
            hear(connection, begin + _TURN_S)  # go
            if wish == "down":
                return _receive(connection, seconds), trip
            _send(connection, seconds)
            return float(hear(connection, time.monotonic() + MOST_SECONDS + _GRACE_S)), trip
        except (OSError, WireError, ValueError):
            raise WireError(
                f"{route.address}: the host ended the measurement; try again later"
            ) from None
