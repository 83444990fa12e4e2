"""A door: one public TCP port behind which the services of runs are found, and peers meet.

Who asks to `reach` a name is joined to a local address that is served under it, or to somebody
elsewhere who `wait`s for that name at this door. So every door is also a relay. A door joins bytes
below TLS: it can neither read nor alter what passes, only count it and bound its rate. Each caller
shows a token of its own, and what that grants is asked anew at every connection.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import random
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from thinwire.errors import AdmissionError, WireError
from thinwire.wire.kernel import address_text
from thinwire.wire.loop import LoopThread, callers, ended
from thinwire.wire.preamble import (
    HERE,
    Asked,
    check_name,
    connect,
    greet,
    noted,
    proof_of,
    refuse,
    say,
    split_address,
    to_sign,
    who_of,
    why,
)
from thinwire.wire.splice import IDLE_S, Allowance, keep_pace, prepare, splice
from thinwire.wire.tls import check_proven

LINK_MBPS = 200.0
_FULL = b"no there are too many connections at this door: try again later\n"


@dataclass(frozen=True)
class Limits:
    """What a door bears of others. A stranger is who has not yet proven to belong to a run."""

    connections: int = 512
    per_address: int = 128  # several peers may share a home, or a test its machine
    per_run: int = 256
    strangers: int = 128
    strangers_per_address: int = 32
    per_member: int = 32  # who holds a token of its own
    waiting_per_name: int = 4
    waiting_per_address: int = 48
    runs: int = 256  # which a relay remembers, if it admits whoever knows its pass
    preamble_s: float = 10.0  # for a stranger to say what it wants
    wait_s: float = 240.0  # after which one who waits has to come again
    answer_s: float = 4.0  # for one who waits to answer a call
    idle_s: float = IDLE_S  # for joined connections without a byte
    link_mbps: float = LINK_MBPS  # between two others, where their run has no bound of its own


@dataclass(frozen=True)
class Grant:
    """What the holder of a token may at a door; with a refusal, nothing any more."""

    token: str = field(repr=False)
    services: frozenset[str] | None = None  # that it may reach; None: all, and links
    refusal: str = ""


GrantOf = Callable[[str], Grant | None]  # of the one whose token it is; None: not known


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
        self._waiting = Counter[str]()  # by address
        # From where the connections come that services here see come from these local addresses.
        self.origins: dict[str, str] = {}
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.address = address_text(*self._socket.getsockname()[:2])
        self._loop = LoopThread("thinwire door")
        self._loop.do(lambda: self._loop.start(self._accept()))

    def serve(self, name: str, address: str) -> None:
        """Join whoever reaches for the name to this local address, from now on."""
        check_name(name)
        self._loop.do(lambda: self._served.__setitem__(name, address))

    def withdraw(self, name: str) -> None:
        """Serve the name no more; connections that exist go on."""
        self._loop.do(lambda: self._served.pop(name, None))

    def admit(self, run: str, *tokens: str) -> None:
        """Let those meet here who prove that they know one of these tokens of the run.

        Called again, it replaces them, and cuts the connections of tokens that are gone.
        """
        grants = {who_of(token): Grant(token) for token in tokens}
        self.admit_by(run, grants.get)
        self._loop.do(lambda: self._runs[run].cut(lambda who: who not in grants))

    def admit_by(self, run: str, grant_of: GrantOf, mbps: float = 0.0) -> None:
        """Let those meet here whom `grant_of` grants it, which is asked at every connection.

        `mbps` bounds what passes between others of that run, both directions of all its links
        together; with 0 each link has the door's own bound (`Limits.link_mbps`).
        """
        check_name(f"{run}/any")
        self._loop.do(lambda: self._run(run).set(grant_of, mbps))

    def admit_any(self, token: str, mbps: float = 0.0) -> None:
        """Let every run meet here whose peers know this pass, each within `mbps`."""
        self._loop.do(lambda: setattr(self, "_pass", (token, mbps)))

    def cut(self, run: str, who: str) -> None:
        """Cut all connections that were opened with somebody's token."""
        self._loop.do(lambda: self._run(run).cut(lambda holder: holder == who))

    def dismiss(self, run: str) -> None:
        """Admit the run no more, and cut its connections."""
        self._loop.do(lambda: self._runs.pop(run, _Run()).cut(lambda who: True))

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
                    await _turn_away(caller, error)

    async def _admit(self, caller: socket.socket) -> tuple[Asked, "_Run"]:
        """Hear what a caller wants, and whether it may; a WireError says why not."""
        try:
            async with asyncio.timeout(self._limits.preamble_s):
                nonce, asked = await greet(caller)
        except TimeoutError:
            raise WireError(f"no request within {self._limits.preamble_s:g} s") from None
        run = self._runs.get(asked.run)
        if run is not None and run.grant_of is not None:
            grant, mbps = run.grant_of(asked.who), run.allowance.mbps
        elif self._pass is not None:
            token, mbps = self._pass
            grant = None if asked.who else Grant(token)
        else:
            raise WireError(f"run {asked.run} is not known at this door")
        if grant is None or not hmac.compare_digest(
            proof_of(grant.token, nonce, asked.wish, asked.name).encode(), asked.proof.encode()
        ):
            raise WireError(f"the token shown for run {asked.run} is not the right one")
        _check_granted(asked, grant, nonce)
        if asked.is_for_host:
            _check_host(asked, nonce)
        if run is None:
            self._forget_idle_runs()
            run = self._run(asked.run)
            run.allowance = Allowance(mbps)
        if len(run.tasks) >= self._limits.per_run:
            raise WireError(f"run {asked.run} has {len(run.tasks)} connections here, the most")
        if asked.who and run.connections_of(asked.who) >= self._limits.per_member:
            raise WireError(f"{asked.who} has {self._limits.per_member} connections here, the most")
        return asked, run

    async def _fulfil(self, caller: socket.socket, asked: Asked, run: "_Run", address: str) -> None:
        home, _ = split_address(address)
        with run.has(asyncio.current_task(), asked.who):
            if asked.wish == "ping":
                await say(caller, f"ok {address} {time.time():.3f}")
            elif asked.wish == "wait":
                await self._keep_waiting(caller, asked.name, run, _home(home))
            elif asked.name in self._served:
                await self._join_local(caller, asked.name, run, home)
            else:
                await self._join_waiting(caller, asked.name, run, home)

    async def _join_local(self, caller: socket.socket, name: str, run: "_Run", home: str) -> None:
        try:
            service = await connect(self._served[name])
        except OSError as error:
            raise WireError(f"{name} does not answer: {why(error)}") from None
        with service, noted(self.origins, service, home):
            await say(caller, "ok")
            await splice(caller, service, run.count_served, None, self._limits.idle_s)

    async def _join_waiting(self, caller: socket.socket, name: str, run: "_Run", home: str) -> None:
        """Call those who wait, the latest first, until one answers."""
        while waiting := run.waiting.get(name):
            waiter = waiting.pop()
            waiter.is_called = True
            try:
                with contextlib.suppress(OSError, TimeoutError):
                    await say(waiter.connection, f"call {home}")
                    async with asyncio.timeout(self._limits.answer_s):
                        answer = await asyncio.shield(waiter.answer)
                    if answer == HERE:
                        await say(caller, "ok")
                        await splice(
                            caller,
                            waiter.connection,
                            run.count_relayed,
                            run.allowance_of_link(self._limits.link_mbps),
                            self._limits.idle_s,
                        )
                        return
            finally:
                waiter.is_over.set()
        raise WireError(f"{name} is not served here, and nobody waits for it")

    async def _keep_waiting(self, caller: socket.socket, name: str, run: "_Run", home: str) -> None:
        loop, limits = asyncio.get_running_loop(), self._limits
        if self._waiting[home] >= limits.waiting_per_address:
            raise WireError(
                f"{limits.waiting_per_address} connections from {home} wait here, the most"
            )
        await say(caller, "ok")
        # The first byte says that a call was heard, or that the one who waits has gone.
        waiter = _Waiter(caller, loop.create_task(loop.sock_recv(caller, 1)))
        over = loop.create_task(waiter.is_over.wait())
        waiting = run.waiting.setdefault(name, deque())
        waiting.append(waiter)
        if len(waiting) > limits.waiting_per_name:  # the oldest is the likeliest to be lost
            waiting.popleft().is_over.set()
        # Not all at once: while one comes again, another of the same name still waits.
        seconds = limits.wait_s * random.uniform(0.5, 1.0)
        try:
            with _counted(self._waiting, home):
                ends = [waiter.answer, over]
                await asyncio.wait(ends, timeout=seconds, return_when="FIRST_COMPLETED")
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
        idle = [name for name, run in self._runs.items() if not (run.grant_of or run.tasks)]
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
    """A run at a door: who may, who waits, what passed. Without grants, the door's pass counts."""

    def __init__(self) -> None:
        self.grant_of: GrantOf | None = None
        self.allowance = Allowance(0)
        self.waiting: dict[str, deque[_Waiter]] = {}
        self.tasks: dict[asyncio.Task[object], str] = {}  # and with whose token it began
        self._served_bytes = self._relayed_bytes = 0

    def set(self, grant_of: GrantOf, mbps: float) -> None:
        """Replace what is granted to whom, and the bound of the rate."""
        self.grant_of, self.allowance.mbps = grant_of, mbps

    @contextlib.contextmanager
    def has(self, task: asyncio.Task[object] | None, who: str) -> Iterator[None]:
        """A connection of the run, for as long as this lasts."""
        assert task is not None
        self.tasks[task] = who
        try:
            yield
        finally:
            del self.tasks[task]

    def cut(self, is_out: Callable[[str], bool]) -> None:
        """Cut the connections of all whose tokens do not count any more."""
        for task, who in self.tasks.items():
            if is_out(who):
                task.cancel()

    def connections_of(self, who: str) -> int:
        return sum(holder == who for holder in self.tasks.values())

    def allowance_of_link(self, mbps: float) -> Allowance:
        """What one link may take: a part of what the run has, or a bound of its own."""
        return self.allowance if self.allowance.mbps else Allowance(mbps)

    def count_served(self, count: int) -> None:
        self._served_bytes += count

    def count_relayed(self, count: int) -> None:
        self._relayed_bytes += count

    def traffic(self) -> Traffic:
        waiting = sum(map(len, self.waiting.values()))
        return Traffic(len(self.tasks), waiting, self._served_bytes, self._relayed_bytes)


def _check_granted(asked: Asked, grant: Grant, nonce: str) -> None:
    """Refuse what the token does not grant. To who was struck off, prove that it is this door."""
    if grant.refusal:
        proof = proof_of(grant.token, nonce, "gone", asked.name)
        raise AdmissionError(f"{proof} {grant.refusal}")
    if grant.services is None or asked.wish == "ping":
        return
    if asked.wish == "wait" or asked.service not in grant.services:
        names = " and ".join(sorted(grant.services))
        raise WireError(f"this token opens {names} alone: join the run first")


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


async def _turn_away(caller: socket.socket, error: WireError) -> None:
    """Say why, and hang up so that it is heard: unread bytes would reset the connection."""
    await refuse(caller, error)
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
