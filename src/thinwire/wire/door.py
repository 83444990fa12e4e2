"""A door: one public TCP port behind which the services of runs are found, and peers meet.

Who asks to `reach` a name is joined to a local address that is served under it, or to somebody
elsewhere who `wait`s for that name at this door. So every door is also a relay. A door joins bytes
below TLS: it can neither read nor alter what passes, only count it and bound its rate.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from thinwire.errors import WireError
from thinwire.wire.kernel import address_text
from thinwire.wire.loop import LoopThread, callers, ended
from thinwire.wire.preamble import (
    HERE,
    Asked,
    check_name,
    connect,
    greet,
    proof_of,
    refuse,
    say,
    to_sign,
    why,
)
from thinwire.wire.splice import IDLE_S, Allowance, keep_pace, prepare, splice
from thinwire.wire.tls import check_proven

_FULL = b"no there are too many connections at this door: try again later\n"


@dataclass(frozen=True)
class Limits:
    """What a door bears of others. A stranger is who has not yet proven to belong to a run."""

    connections: int = 512
    per_address: int = 128  # several peers may share a home, or a test its machine
    per_run: int = 256
    strangers: int = 128
    strangers_per_address: int = 32
    waiting_per_name: int = 4
    runs: int = 256  # which a relay remembers, if it admits whoever knows its pass
    preamble_s: float = 10.0  # for a stranger to say what it wants
    answer_s: float = 4.0  # for one who waits to answer a call
    idle_s: float = IDLE_S  # for joined connections without a byte


@dataclass(frozen=True)
class Traffic:
    """What a run has at a door at this moment, and the bytes that passed so far."""

    connections: int
    waiting: int
    served_bytes: int  # to and from services of this process
    relayed_bytes: int  # between two others

    @property
    def bytes(self) -> int:
        """All that passed, each byte counted once."""
        return self.served_bytes + self.relayed_bytes


class Door:
    """Listens on one public port; its work is done on a thread of its own."""

    def __init__(self, host: str, port: int, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._served: dict[str, str] = {}
        self._runs: dict[str, _Run] = {}
        self._pass: tuple[str, float] | None = None
        self._callers = Counter[str]()  # connections by address
        self._strangers = Counter[str]()
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.address = address_text(host or "0.0.0.0", self.port)
        self._loop = LoopThread("thinwire door")
        self._loop.do(lambda: self._loop.start(self._accept()))

    def serve(self, name: str, address: str) -> None:
        """Join whoever reaches for the name to this local address, from now on."""
        check_name(name)
        self._loop.do(lambda: self._served.__setitem__(name, address))

    def withdraw(self, name: str) -> None:
        """Serve the name no more; connections that exist go on."""
        self._loop.do(lambda: self._served.pop(name, None))

    def admit(self, run: str, token: str, mbps: float = 0.0) -> None:
        """Let those meet here who prove that they know the run's token.

        `mbps` bounds what passes between others of that run, both directions of all its links
        together; 0 is no bound. Called again, it replaces token and bound.
        """
        check_name(f"{run}/any")
        self._loop.do(lambda: self._run(run).set(token, mbps))

    def admit_any(self, token: str, mbps: float = 0.0) -> None:
        """Let every run meet here whose peers know this pass, each within `mbps`."""
        self._loop.do(lambda: setattr(self, "_pass", (token, mbps)))

    def dismiss(self, run: str) -> None:
        """Admit the run no more, and cut its connections."""

        def dismiss() -> None:
            for task in self._runs.pop(run, _Run()).tasks:
                task.cancel()

        self._loop.do(dismiss)

    def traffic(self) -> dict[str, Traffic]:
        """What each run has here, by run."""
        return self._loop.do(
            lambda: {name: run.traffic() for name, run in self._runs.items()},
        )

    def strangers(self) -> int:
        """Connections that have not yet said what they want."""
        return self._loop.do(self._strangers.total)

    def close(self) -> None:
        """Cut all connections and free the port."""
        self._loop.close()
        self._socket.close()

    def __enter__(self) -> "Door":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, name: str) -> "_Run":
        return self._runs.setdefault(name, _Run())

    async def _accept(self) -> None:
        async for connection, place in callers(self._socket):
            self._loop.start(self._receive(connection, address_text(*place[:2]), _home(place[0])))

    async def _receive(self, caller: socket.socket, address: str, home: str) -> None:
        """One connection, from its first byte to its last."""
        limits = self._limits
        is_full = (
            self._callers.total() >= limits.connections
            or self._callers[home] >= limits.per_address
            or self._strangers.total() >= limits.strangers
            or self._strangers[home] >= limits.strangers_per_address
        )
        with caller, contextlib.suppress(OSError):
            prepare(caller)
            keep_pace(caller)
            if is_full:
                caller.send(_FULL)
                return
            with _counted(self._callers, home):
                try:
                    with _counted(self._strangers, home):
                        asked, run = await self._admit(caller)
                    await self._fulfil(caller, asked, run, address)
                except WireError as error:
                    await _turn_away(caller, str(error))

    async def _admit(self, caller: socket.socket) -> tuple[Asked, "_Run"]:
        """Hear what a caller wants, and whether it may; a WireError says why not."""
        try:
            async with asyncio.timeout(self._limits.preamble_s):
                nonce, asked = await greet(caller)
        except TimeoutError:
            raise WireError(f"no request within {self._limits.preamble_s:g} s") from None
        run = self._runs.get(asked.run)
        if run is not None and run.token is not None:
            token, mbps = run.token, run.allowance.mbps
        elif self._pass is not None:
            token, mbps = self._pass
        else:
            raise WireError(f"run {asked.run} is not known at this door")
        if not hmac.compare_digest(
            proof_of(token, nonce, asked.wish, asked.name).encode(), asked.proof.encode()
        ):
            raise WireError(f"the token shown for run {asked.run} is not the right one")
        if asked.is_for_host:
            _check_host(asked, nonce)
        if run is None:
            self._forget_idle_runs()
            run = self._run(asked.run)
            run.allowance = Allowance(mbps)
        if len(run.tasks) >= self._limits.per_run:
            raise WireError(f"run {asked.run} has {len(run.tasks)} connections here, the most")
        return asked, run

    async def _fulfil(self, caller: socket.socket, asked: Asked, run: "_Run", address: str) -> None:
        with run.has(asyncio.current_task()):
            if asked.wish == "ping":
                await say(caller, f"ok {address} {time.time():.3f}")
            elif asked.wish == "wait":
                await self._keep_waiting(caller, asked.name, run)
            elif asked.name in self._served:
                await self._join_local(caller, asked.name, run)
            else:
                await self._join_waiting(caller, asked.name, run)

    async def _join_local(self, caller: socket.socket, name: str, run: "_Run") -> None:
        try:
            service = await connect(self._served[name])
        except OSError as error:
            raise WireError(f"{name} does not answer: {why(error)}") from None
        with service:
            await say(caller, "ok")
            await splice(caller, service, run.count_served, None, self._limits.idle_s)

    async def _join_waiting(self, caller: socket.socket, name: str, run: "_Run") -> None:
        """Call those who wait, the latest first, until one answers."""
        while waiting := run.waiting.get(name):
            waiter = waiting.pop()
            waiter.is_called = True
            try:
                with contextlib.suppress(OSError, TimeoutError):
                    await say(waiter.connection, "call")
                    async with asyncio.timeout(self._limits.answer_s):
                        answer = await asyncio.shield(waiter.answer)
                    if answer == HERE:
                        await say(caller, "ok")
                        await splice(
                            caller,
                            waiter.connection,
                            run.count_relayed,
                            run.allowance,
                            self._limits.idle_s,
                        )
                        return
            finally:
                waiter.is_over.set()
        raise WireError(f"{name} is not served here, and nobody waits for it")

    async def _keep_waiting(self, caller: socket.socket, name: str, run: "_Run") -> None:
        loop = asyncio.get_running_loop()
        await say(caller, "ok")
        # The first byte says that a call was heard, or that the one who waits has gone.
        waiter = _Waiter(caller, loop.create_task(loop.sock_recv(caller, 1)))
        over = loop.create_task(waiter.is_over.wait())
        waiting = run.waiting.setdefault(name, deque())
        waiting.append(waiter)
        if len(waiting) > self._limits.waiting_per_name:  # the oldest is the likeliest to be lost
            waiting.popleft().is_over.set()
        try:
            await asyncio.wait([waiter.answer, over], return_when="FIRST_COMPLETED")
            if waiter.is_called:
                await over
        finally:
            await ended(waiter.answer, over)
            with contextlib.suppress(ValueError):
                waiting.remove(waiter)
            if not waiting and run.waiting.get(name) is waiting:
                del run.waiting[name]

    def _forget_idle_runs(self) -> None:
        """Make room for a run that is new to a relay, at the cost of counts of earlier ones."""
        idle = [name for name, run in self._runs.items() if run.token is None and not run.tasks]
        for name in idle[: max(0, len(self._runs) - self._limits.runs + 1)]:
            del self._runs[name]
        if len(self._runs) >= self._limits.runs:
            raise WireError(f"{len(self._runs)} runs meet at this door already, the most")


@dataclass(eq=False)
class _Waiter:
    """A connection on which somebody waits to be called."""

    connection: socket.socket
    answer: asyncio.Task[bytes]
    is_called: bool = False
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class _Run:
    """A run at a door: who may, who waits, what passed. Without a token, the door's pass counts."""

    def __init__(self) -> None:
        self.token: str | None = None
        self.allowance = Allowance(0)
        self.waiting: dict[str, deque[_Waiter]] = {}
        self.tasks: set[asyncio.Task[object]] = set()
        self._served_bytes = self._relayed_bytes = 0

    def set(self, token: str, mbps: float) -> None:
        """Replace the token and the bound of the rate."""
        self.token, self.allowance.mbps = token, mbps

    @contextlib.contextmanager
    def has(self, task: asyncio.Task[object] | None) -> Iterator[None]:
        """A connection of the run, for as long as this lasts."""
        assert task is not None
        self.tasks.add(task)
        try:
            yield
        finally:
            self.tasks.discard(task)

    def count_served(self, count: int) -> None:
        self._served_bytes += count

    def count_relayed(self, count: int) -> None:
        self._relayed_bytes += count

    def traffic(self) -> Traffic:
        waiting = sum(map(len, self.waiting.values()))
        return Traffic(len(self.tasks), waiting, self._served_bytes, self._relayed_bytes)


def _check_host(asked: Asked, nonce: str) -> None:
    """Whoever knows the token could wait in the host's place, so that nobody reaches the host."""
    if not asked.shown:
        raise WireError(
            f"only the host of run {asked.run} may wait for {asked.name}: the request lacks the "
            "signature of the run's authority"
        )
    check_proven(asked.run, to_sign(nonce, asked.name, asked.proof), asked.shown)


@contextlib.contextmanager
def _counted(counter: Counter[str], key: str) -> Iterator[None]:
    counter[key] += 1
    try:
        yield
    finally:
        counter[key] -= 1
        if not counter[key]:
            del counter[key]


def _home(host: str) -> str:
    """Whose connections are counted together: an IPv6 line has 2^64 addresses, not one."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 4 or address.ipv4_mapped:
        return host
    return str(ipaddress.ip_network((address, 64), strict=False))


async def _turn_away(caller: socket.socket, reason: str) -> None:
    """Say why, and hang up so that it is heard: unread bytes would reset the connection."""
    await refuse(caller, reason)
    with contextlib.suppress(OSError, TimeoutError):
        caller.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(1):
            for _ in range(16):
                if not await asyncio.get_running_loop().sock_recv(caller, 4096):
                    return


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.create_server(
            (host, port), family=family, backlog=128, dualstack_ipv6=host == "::"
        )
    except OSError as error:
        raise WireError(
            f"cannot listen on port {port} of {host or 'all addresses'}: "
            f"{error.strerror or error}; choose another port, or 0 for any free one"
        ) from None
    found.setblocking(False)
    return found
