"""The ends of a connection that passes a door: a tunnel of who dials, a standby of who accepts.

Both are local TCP ends. What is above them, gRPC under mutual TLS, sees loopback addresses only
and does not know by which way its bytes travel.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from thinwire.errors import AdmissionError, WireError
from thinwire.wire.kernel import address_text
from thinwire.wire.loop import LoopThread, callers
from thinwire.wire.preamble import HERE, call, check_name, connect, hear, noted
from thinwire.wire.splice import prepare, splice
from thinwire.wire.tls import Prover

ROUTE_S = 4.0  # for one route to answer: a firewall may swallow a dial, and another route is next
_MOST_CONNECTIONS = 64  # of one tunnel
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0

Kind = Literal["direct", "relayed"]


@dataclass(frozen=True)
class Route:
    """A way to a name: the address of a door, whose bytes pass another's machine or do not."""

    address: str
    kind: Kind = "direct"
    token: str = field(default="", repr=False)  # WHO.SECRET, or the pass of a relay


@dataclass(frozen=True)
class Seen:
    """What a door answered to a ping: how it sees the caller, and how far off clocks are."""

    address: str  # the caller's, as the door sees it
    ahead_s: float  # by which the door's clock is ahead of ours
    round_trip_s: float


def ping(route: Route, name: str, timeout: float = ROUTE_S) -> Seen:
    """Ask a door what it sees of us; a WireError says why there is no answer.

    The name is one of a run that the door admits; its service need not exist.
    """

    async def ask() -> Seen:
        begin = time.time()
        connection, said = await call(route.address, route.token, "ping", name, timeout)
        end = time.time()
        with connection:
            address, _, clock = said.partition(" ")
            try:
                # Four trips of equal length: connect, greeting, request, answer.
                ahead = float(clock) - (begin + (end - begin) * 3 / 4)
            except ValueError:
                raise WireError(f"{route.address}: the answer to a ping is not one") from None
            return Seen(address, ahead, (end - begin) / 2)

    loop = LoopThread("thinwire ping")
    try:
        return loop.wait_for(ask())
    finally:
        loop.close()


class Tunnel:
    """The dialer's end: a local `address` behind which a name at some door is found.

    Each connection takes the first of the routes, in their order, that works at that moment; so
    after a break the best is tried again. `timeout` is what a route has to answer.
    """

    def __init__(self, name: str, routes: Sequence[Route], timeout: float = ROUTE_S) -> None:
        self.name = check_name(name)
        self._routes, self._timeout = tuple(routes), timeout
        self._in_use: list[Route] = []
        self._carried: dict[Kind, int] = {"direct": 0, "relayed": 0}
        self._trouble = ""
        self.refusal: AdmissionError | None = None  # of a door that struck off this token
        self._connections: set[asyncio.Task[object]] = set()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.address = address_text(*self._socket.getsockname())
        self._loop = LoopThread("thinwire tunnel")
        self._loop.do(lambda: self._loop.start(self._accept()))

    @property
    def routes(self) -> tuple[Route, ...]:
        """The ways that are tried, in their order."""
        return self._routes

    @property
    def in_use(self) -> Route | None:
        """The route of the latest connection that is open; None while there is none."""
        in_use = self._in_use
        return in_use[-1] if in_use else None

    @property
    def trouble(self) -> str:
        """Why the last attempt found no way, route by route; empty if it found one."""
        return self._trouble

    @property
    def carried(self) -> dict[Kind, int]:
        """Bytes that passed, both ways together, by kind of route."""
        return dict(self._carried)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Within, an error of who dials `address` also says why no route worked.

        To the dialer a tunnel without a way looks like a connection that was closed.
        """
        try:
            yield
        except WireError as error:
            if type(error) is not WireError or not self._trouble:
                raise
            raise WireError(f"{error}; tried: {self._trouble}") from error

    def reroute(self, routes: Sequence[Route], cut: bool = False) -> None:
        """Other routes from now on; with `cut`, also for what is above, which has to dial again."""
        self._routes = tuple(routes)
        if cut:
            self.cut()

    def cut(self) -> None:
        """Cut the connections of the moment: what is above dials again, by the best route then."""
        self._loop.do(lambda: [task.cancel() for task in self._connections])

    def close(self) -> None:
        """Cut all connections and end the thread."""
        self._loop.close()
        self._socket.close()

    def __enter__(self) -> "Tunnel":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _accept(self) -> None:
        async for connection, _ in callers(self._socket):
            if len(self._connections) >= _MOST_CONNECTIONS:
                connection.close()
                continue
            task = self._loop.start(self._carry(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _carry(self, connection: socket.socket) -> None:
        with connection:
            prepare(connection)
            found = await self._find_way()
            if found is None:
                return
            route, far = found

            def count(size: int) -> None:
                self._carried[route.kind] += size

            self._in_use = [*self._in_use, route]
            try:
                with far:
                    await splice(connection, far, count)
            finally:
                left = list(self._in_use)
                left.remove(route)
                self._in_use = left

    async def _find_way(self) -> tuple[Route, socket.socket] | None:
        problems = []
        for route in self._routes:
            try:
                far, _ = await call(route.address, route.token, "reach", self.name, self._timeout)
                self._trouble, self.refusal = "", None
                return route, far
            except WireError as error:
                if isinstance(error, AdmissionError):
                    self.refusal = error
                problems.append(f"{route.kind} by {error}")
        self._trouble = "; ".join(problems) or "no route is known"
        await asyncio.sleep(_FIRST_PAUSE_S)  # what is above tries again at once
        return None


class Standby:
    """The acceptor's end at a door elsewhere: waits there, and joins who calls to `target`.

    `ready` connections wait at a time. While the door is away it comes back by itself, with
    growing pauses. A host that waits for those who want its services needs the prover of its
    authority; the ends of links need none. In `origins` (`Door.origins`) it keeps where calls come
    from, by the local addresses from which the target sees them come.
    """

    def __init__(
        self,
        name: str,
        route: Route,
        target: str,
        ready: int = 2,
        timeout: float = ROUTE_S,
        prover: Prover | None = None,
        origins: dict[str, str] | None = None,
    ) -> None:
        self.name, self.route, self.target = check_name(name), route, target
        self._timeout, self._prover = timeout, prover
        self._waiting = 0
        self._trouble = ""
        self._carried = 0
        self._origins = origins if origins is not None else {}
        self._loop = LoopThread("thinwire standby")
        self._loop.do(lambda: [self._loop.start(self._stand_by()) for _ in range(ready)])

    @property
    def waiting(self) -> int:
        """How many connections wait at the door now."""
        return self._waiting

    @property
    def trouble(self) -> str:
        """Why the last attempt to wait there failed; empty if it did not."""
        return self._trouble

    @property
    def carried(self) -> int:
        """Bytes that passed, both ways together."""
        return self._carried

    def close(self) -> None:
        """Cut all connections and end the thread."""
        self._loop.close()

    def __enter__(self) -> "Standby":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _stand_by(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            try:
                far, _ = await call(
                    self.route.address,
                    self.route.token,
                    "wait",
                    self.name,
                    self._timeout,
                    self._prover,
                )
                self._trouble, begin = "", time.monotonic()
                call_from = await self._called_from(far)
                if call_from is not None:
                    self._loop.start(self._answer(far, call_from))
                if call_from is not None or time.monotonic() - begin > _LONGEST_PAUSE_S:
                    pause = _FIRST_PAUSE_S
                    continue
            except WireError as error:
                self._trouble = str(error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _called_from(self, far: socket.socket) -> str | None:
        """Wait for a call; the host from which it comes, None if the door ended the wait."""
        self._waiting += 1
        word, host = "", ""
        try:
            with contextlib.suppress(OSError, WireError):
                word, _, host = (await hear(far)).partition(" ")
        finally:
            self._waiting -= 1
            if word != "call":
                far.close()
        return host if word == "call" else None

    async def _answer(self, far: socket.socket, home: str) -> None:
        with far, contextlib.suppress(OSError):
            near = await connect(self.target)
            with near, noted(self._origins, near, home):
                await asyncio.get_running_loop().sock_sendall(far, HERE)
                await splice(near, far, self._count)

    def _count(self, size: int) -> None:
        self._carried += size
