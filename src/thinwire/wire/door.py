"""A door: one public TCP port behind which the services of runs are found, and peers meet.

Who asks to `reach` a name is handed to the service that is served under it in this process, or is
joined to somebody elsewhere who `wait`s for that name at this door. So every door is also a relay.
It joins bytes below TLS: it can neither read nor alter what passes, only count it and bound its
rate. Each caller shows a token of its own, and what that grants is asked anew at every connection.
routes.py describes the lines that are spoken here.
"""

import contextlib
import hmac
import ipaddress
import random
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from functools import partial

from thinwire.errors import AdmissionError, WireError
from thinwire.wire.background import on_daemon_thread
from thinwire.wire.keys import RUN_DIGITS, fingerprint_of, proven_by
from thinwire.wire.routes import (
    HERE,
    MAGIC,
    VERSION,
    Take,
    check_name,
    hear,
    proof_of,
    say,
    to_sign,
    who_of,
)
from thinwire.wire.sockets import (
    accept_all,
    address_text,
    hang_up,
    listen,
    split_address,
    stop_listening,
)

LINK_MBPS = 200.0
CHUNK = 1 << 16  # bytes that a direction holds at most, between reading and writing
_LINK = "cut-"  # how the service of a link between two stages begins
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
    idle_s: float = 120.0  # for joined connections without a byte: streams say they are alive
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
    """What a run has at a door at this moment, and the bytes that passed between two others."""

    connections: int
    waiting: int
    relayed_bytes: int


class Door:
    """Listens on one public port; each connection has a thread of its own."""

    def __init__(self, host: str, port: int, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._lock = threading.RLock()  # guards all that follows
        self._served: dict[str, Take] = {}
        self._runs: dict[str, _Run] = {}
        self._pass: tuple[str, float] | None = None
        self._connections: set[socket.socket] = set()
        self._callers = Counter[str]()  # connections by address
        self._strangers = Counter[str]()
        self._waiting = Counter[str]()
        self._is_closed = False
        self._socket = listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.address = address_text(*self._socket.getsockname()[:2])
        accept_all(self._socket, self._receive)

    def serve(self, name: str, take: Take) -> None:
        """Hand over whoever reaches for the name, from now on."""
        self._served[check_name(name)] = take

    def admit(self, run: str, *tokens: str) -> None:
        """Let those meet here who prove that they know one of these tokens of the run.

        Called again, it replaces them, and cuts the connections of tokens that are gone.
        """
        grants = {who_of(token): Grant(token) for token in tokens}
        self.admit_by(run, grants.get)
        self._hang_up(run, lambda who: who not in grants)

    def admit_by(self, run: str, grant_of: GrantOf, mbps: float = 0.0) -> None:
        """Let those meet here whom `grant_of` grants it, which is asked at every connection.

        `mbps` bounds what passes between others of that run, both directions of all its links
        together; with 0 each link has the door's own bound (`Limits.link_mbps`).
        """
        check_name(f"{run}/any")
        with self._lock:
            known = self._runs.setdefault(run, _Run())
            known.grant_of, known.allowance.mbps = grant_of, mbps

    def admit_any(self, token: str, mbps: float = 0.0) -> None:
        """Let every run meet here whose peers know this pass, each within `mbps`."""
        self._pass = (token, mbps)

    def cut(self, run: str, who: str) -> None:
        """Cut all connections that were opened with somebody's token."""
        self._hang_up(run, lambda holder: holder == who)

    def traffic(self) -> dict[str, Traffic]:
        """What each run has here, by run."""
        with self._lock:
            return {name: run.traffic() for name, run in self._runs.items()}

    def strangers(self) -> int:
        """Connections that have not yet said what they want."""
        with self._lock:
            return self._strangers.total()

    def close(self) -> None:
        """Cut all connections and free the port."""
        stop_listening(self._socket)
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
        for connection in connections:
            hang_up(connection)

    def __enter__(self) -> "Door":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _hang_up(self, run: str, is_out: Callable[[str], bool]) -> None:
        with self._lock:
            held = self._runs[run].held if run in self._runs else {}
            gone = [connection for connection, who in held.items() if is_out(who)]
        for connection in gone:
            hang_up(connection)

    def _receive(self, caller: socket.socket, address: str) -> None:
        """One connection that was opened: strangers are few, and have their time."""
        limits, home = self._limits, _home(split_address(address)[0])
        with self._lock:
            is_full = (
                self._is_closed
                or self._callers.total() >= limits.connections
                or self._callers[home] >= limits.per_address
                or self._strangers.total() >= limits.strangers
                or self._strangers[home] >= limits.strangers_per_address
            )
            if not is_full:
                self._connections.add(caller)
                self._callers[home] += 1
                self._strangers[home] += 1
        if is_full:
            with caller, contextlib.suppress(OSError):
                caller.setblocking(False)
                caller.send(_FULL)
            return
        on_daemon_thread("thinwire door", partial(self._attend, caller, address, home))

    def _attend(self, caller: socket.socket, address: str, home: str) -> None:
        """The life of a connection, from its first byte to its last."""
        run = None
        with caller, contextlib.suppress(OSError):
            try:
                try:
                    asked, run = self._admit(caller)
                finally:
                    self._forget(self._strangers, home)
                grant = run.grant_of(asked.who) if run.grant_of else Grant("")
                if grant is None or grant.refusal:  # it was struck off in this very moment
                    raise WireError("the token shown does not count any more")
                self._fulfil(caller, asked, run, address, home)
            except WireError as error:
                _turn_away(caller, error)
            finally:
                self._forget(self._callers, home)
                with self._lock:
                    self._connections.discard(caller)
                    if run is not None:
                        del run.held[caller]

    def _admit(self, caller: socket.socket) -> tuple["_Asked", "_Run"]:
        """Hear what a caller wants, and whether it may; a WireError says why not."""
        nonce, seconds = secrets.token_hex(16), self._limits.preamble_s
        try:
            caller.settimeout(seconds)
            say(caller, f"{MAGIC} {VERSION} {nonce}")
            asked = _Asked(hear(caller, time.monotonic() + seconds))
        except TimeoutError:
            raise WireError(f"no request within {seconds:g} s") from None
        with self._lock:
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
        if asked.wish == "wait" and not asked.service.startswith(_LINK):
            _check_host(asked, nonce)
        with self._lock:
            if run is None:
                run = self._runs.get(asked.run) or self._new_run(asked.run, mbps)
            if len(run.held) >= self._limits.per_run:
                raise WireError(f"run {asked.run} has {len(run.held)} connections here, the most")
            most = self._limits.per_member
            if asked.who and list(run.held.values()).count(asked.who) >= most:
                raise WireError(f"{asked.who} has {most} connections here, the most")
            run.held[caller] = asked.who
        return asked, run

    def _new_run(self, name: str, mbps: float) -> "_Run":
        """Make room for a run that is new to a relay, at the cost of counts of earlier ones."""
        idle = [name for name, run in self._runs.items() if not (run.grant_of or run.held)]
        for other in idle[: max(0, len(self._runs) - self._limits.runs + 1)]:
            del self._runs[other]
        if len(self._runs) >= self._limits.runs:
            raise WireError(f"{len(self._runs)} runs meet at this door already, the most")
        self._runs[name] = run = _Run()
        run.allowance.mbps = mbps
        return run

    def _fulfil(
        self, caller: socket.socket, asked: "_Asked", run: "_Run", address: str, home: str
    ) -> None:
        caller.settimeout(self._limits.idle_s)
        if asked.wish == "ping":
            say(caller, f"ok {address} {time.time():.3f}")
        elif asked.wish == "wait":
            self._keep_waiting(caller, asked.name, run, home)
        elif take := self._served.get(asked.name):
            say(caller, "ok")
            futures.wait([take(caller.dup(), split_address(address)[0])])
        else:
            self._join_waiting(caller, asked.name, run, split_address(address)[0])

    def _join_waiting(self, caller: socket.socket, name: str, run: "_Run", host: str) -> None:
        """Call those who wait, the latest first, until one answers."""
        while waiter := self._next_waiter(run, name):
            try:
                with contextlib.suppress(OSError, TimeoutError):
                    say(waiter.connection, f"call {host}")
                    if waiter.answer.result(self._limits.answer_s) == HERE:
                        say(caller, "ok")
                        waiter.connection.settimeout(self._limits.idle_s)
                        bound = run.allowance
                        if not bound.mbps:
                            bound = Allowance(self._limits.link_mbps)
                        splice(caller, waiter.connection, run.count, bound, self._limits.idle_s)
                        return
            finally:
                hang_up(waiter.connection)
                waiter.is_over.set()
        raise WireError(f"{name} is not served here, and nobody waits for it")

    def _next_waiter(self, run: "_Run", name: str) -> "_Waiter | None":
        with self._lock:
            waiter = run.waiting[name].pop() if run.waiting.get(name) else None
            if waiter is not None:
                waiter.is_called = True
            return waiter

    def _keep_waiting(self, caller: socket.socket, name: str, run: "_Run", home: str) -> None:
        limits, waiter = self._limits, _Waiter(caller)
        with self._lock:
            if self._waiting[home] >= limits.waiting_per_address:
                raise WireError(
                    f"{limits.waiting_per_address} connections from {home} wait here, the most"
                )
            self._waiting[home] += 1
            say(caller, "ok")
            waiting = run.waiting.setdefault(name, deque())
            waiting.append(waiter)
            if len(waiting) > limits.waiting_per_name:  # the oldest is the likeliest to be lost
                hang_up(waiting.popleft().connection)
        # Not all at once: while one comes again, another of the same name still waits.
        caller.settimeout(limits.wait_s * random.uniform(0.5, 1.0))
        answer = b""
        try:  # the first byte says that a call was heard, or that the one who waits has gone
            with contextlib.suppress(OSError):
                answer = caller.recv(1)
        finally:
            with self._lock:
                self._forget(self._waiting, home)
                if waiter in waiting:
                    waiting.remove(waiter)
                if not waiting and run.waiting.get(name) is waiting:
                    del run.waiting[name]
            waiter.answer.set_result(answer)
        if waiter.is_called:
            waiter.is_over.wait()

    def _forget(self, counter: Counter[str], key: str) -> None:
        with self._lock:
            counter[key] -= 1
            counter += Counter()  # which drops what is zero


class _Asked:
    """What a caller wants, and how it proves that it may, from the line that it said."""

    def __init__(self, line: str) -> None:
        self.wish, *words = line.split(" ")
        is_whole = len(words) == 3 or (len(words) == 5 and self.wish == "wait")
        if not is_whole or self.wish not in ("reach", "wait", "ping"):
            raise WireError("the request is not one of reach, wait or ping with a name and a proof")
        name, who, self.proof, *shown = words
        self.name = check_name(name)
        self.run, _, self.service = name.partition("/")
        self.who = "" if who == "-" else who  # at a relay all show the same pass
        self.shown = " ".join(shown)  # of the host: its key, and its signature


@dataclass(eq=False)
class _Waiter:
    """A connection on which somebody waits to be called."""

    connection: socket.socket
    answer: "futures.Future[bytes]" = field(default_factory=futures.Future)
    is_called: bool = False
    is_over: threading.Event = field(default_factory=threading.Event)


class _Run:
    """A run at a door: who may, who waits, what passed. Without grants, the door's pass counts."""

    def __init__(self) -> None:
        self.grant_of: GrantOf | None = None
        self.allowance = Allowance(0)
        self.waiting: dict[str, deque[_Waiter]] = {}
        self.held: dict[socket.socket, str] = {}  # and with whose token it began
        self._relayed, self._counting = 0, threading.Lock()

    def count(self, size: int) -> None:
        """So many bytes pass between two others."""
        with self._counting:
            self._relayed += size

    def traffic(self) -> Traffic:
        return Traffic(len(self.held), sum(map(len, self.waiting.values())), self._relayed)


class Allowance:
    """Spreads bytes over time so that they stay below a rate; 0 Mbit/s is no bound.

    Time is told by the caller, so the bound can be checked by counting.
    """

    def __init__(self, mbps: float, burst_s: float = 0.25) -> None:
        self.mbps = mbps
        self._burst_s, self._paid_until = burst_s, 0.0
        self._lock = threading.Lock()

    def book(self, count: int, now: float) -> float:
        """Account for bytes that are to be passed on; the seconds to wait before that."""
        mbps = self.mbps  # which may change at any time
        if mbps <= 0:
            return 0.0
        with self._lock:
            self._paid_until = max(self._paid_until, now - self._burst_s)
            self._paid_until += count * 8 / (mbps * 1e6)
            return max(0.0, self._paid_until - now)


def splice(
    one: socket.socket,
    other: socket.socket,
    count: Callable[[int], None],
    allowance: Allowance,
    idle_s: float,
) -> None:
    """Pass bytes both ways until both directions have ended, then return; nothing is raised.

    An end of one direction is passed on while the other goes on. An error, or `idle_s` without a
    byte, ends both. `count` is told the number of bytes before they are passed on.
    """
    moved_at = time.monotonic()

    def passing(source: socket.socket, target: socket.socket) -> None:
        nonlocal moved_at
        space = memoryview(bytearray(CHUNK))
        try:
            while size := patiently(source.recv_into, space):
                count(size)
                time.sleep(allowance.book(size, time.monotonic()))
                left = space[:size]
                while left:
                    left = left[patiently(target.send, left) :]
                moved_at = time.monotonic()
            target.shutdown(socket.SHUT_WR)
        except OSError:
            hang_up(one)
            hang_up(other)

    def patiently(move: Callable[[memoryview], int], space: memoryview) -> int:
        while True:
            try:
                return move(space)
            except TimeoutError:
                if time.monotonic() - moved_at >= idle_s:
                    raise

    one.settimeout(idle_s)
    other.settimeout(idle_s)
    back = on_daemon_thread("thinwire splice", partial(passing, other, one))
    passing(one, other)
    futures.wait([back])


def _check_granted(asked: _Asked, grant: Grant, nonce: str) -> None:
    """Refuse what the token does not grant. To who was struck off, prove that it is this door."""
    if grant.refusal:
        proof = proof_of(grant.token, nonce, "gone", asked.name)
        raise AdmissionError(f"{proof} {grant.refusal}")
    if grant.services is None or asked.wish == "ping":
        return
    if asked.wish == "wait" or asked.service not in grant.services:
        names = " and ".join(sorted(grant.services))
        raise WireError(f"this token opens {names} alone: join the run first")


def _check_host(asked: _Asked, nonce: str) -> None:
    """Whoever knows the token could wait in the host's place, so that nobody reaches the host."""
    if not asked.shown:
        raise WireError(
            f"only the host of run {asked.run} may wait for {asked.name}: the request lacks its "
            "signature"
        )
    public = proven_by(to_sign(nonce, asked.name, asked.proof), asked.shown)
    if fingerprint_of(public)[:RUN_DIGITS] != asked.run:
        raise WireError(f"the key shown is not the one of the host of run {asked.run}")


def _home(host: str) -> str:
    """Whose connections are counted together: an IPv6 line has 2^64 addresses, not one."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 4 or address.ipv4_mapped:
        return host
    return str(ipaddress.ip_network((address, 64), strict=False))


def _turn_away(caller: socket.socket, error: WireError) -> None:
    """Say why, and hang up so that it is heard: unread bytes would reset the connection."""
    caller.settimeout(1)
    with contextlib.suppress(OSError):
        say(caller, f"{'gone' if isinstance(error, AdmissionError) else 'no'} {error}")
        caller.shutdown(socket.SHUT_WR)
        for _ in range(16):
            if not caller.recv(4096):
                return
