"""Doors, where the services of runs are found and peers meet, and the routes of who calls there.

A door is one public TCP port. Who asks to `reach` a name is handed to the service of that name in
the door's process, or is joined to somebody elsewhere who `wait`s for it at this door. So every
door is also a relay, which joins bytes below TLS: it can only count them and bound their rate.
A connection begins with a few short lines (docs/wire.md), and what the token of its caller grants
is asked anew each time.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import random
import re
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, TypeVar

from thinwire.background import on_daemon_thread
from thinwire.errors import AdmissionError, WireError, printable
from thinwire.occupancy import Occupancy
from thinwire.wire.keys import RUN_DIGITS, fingerprint_of, proven_by
from thinwire.wire.sockets import ListeningPort, address_text, connect, hang_up, why

VERSION = 3
MAGIC = "thinwire-door"
LONGEST_LINE = 320  # bytes, of what either side says before bytes are passed on
HERE = b"+"  # what one who waits answers to a call
ROUTE_S = 4.0  # for one route to answer: a firewall may swallow a dial, and another route is next
LINK_MBPS = 200.0
CHUNK = 1 << 16  # bytes that a direction holds at most, between reading and writing
_LINK = "cut-"  # how the service of a link between two stages begins
_FULL = b"no there are too many connections at this door: try again later\n"
_PAUSE_S = 2.0  # before one who waits comes again
_READY = 2  # connections that wait at a door
LONGEST_WAIT_S = 300.0  # on one of them: a door ends it before that, and that word may be lost
_NAME = re.compile(r"[0-9a-f]{16}/[a-z0-9][a-z0-9@._-]{0,79}")

T = TypeVar("T")
Wish = Literal["reach", "wait", "ping"]
Kind = Literal["direct", "relayed"]
Prover = Callable[[str], str]  # `Identity.prove` of the host
Take = Callable[[socket.socket, str], None]  # serves a connection from a host to its end


@dataclass(frozen=True)
class Route:
    """A way to a name: the address of a door, whose bytes pass another's machine or do not."""

    address: str
    kind: Kind = "direct"
    token: str = field(default="", repr=False)  # WHO.SECRET, or the pass of a relay


class Routes:
    """The ways to a name at doors, best first. Without a name, the one address of a listener. Each
    connection takes the first that works; so after a break the best is tried again.
    """

    def __init__(self, name: str, routes: Sequence[Route] | str) -> None:
        self.name = check_name(name) if name else ""
        self.routes = (Route(routes),) if isinstance(routes, str) else tuple(routes)
        self.in_use: Route | None = None  # of the latest connection

    def __str__(self) -> str:
        return " or ".join(route.address for route in self.routes) or "nowhere"

    def connect(self, timeout: float) -> socket.socket:
        """A connection to the other end."""
        if not self.name:
            return connect(self.routes[0].address, timeout)
        deadline = time.monotonic() + timeout

        def reach(route: Route) -> socket.socket:
            left = max(0.1, min(ROUTE_S, deadline - time.monotonic()))
            return call(route, "reach", self.name, left)[0]

        self.in_use, connection = first_that_works(self.routes, reach)
        return connection


def first_that_works(routes: Sequence[Route], attempt: Callable[[Route], T]) -> tuple[Route, T]:
    """The first route on which an attempt succeeds, and what came of it; else a WireError says of
    each why not, or an AdmissionError that a door has struck off our token.
    """
    problems, refusal = [], None
    for route in routes:
        try:
            return route, attempt(route)
        except WireError as error:
            refusal = refusal or (error if isinstance(error, AdmissionError) else None)
            problems.append(f"{route.kind} by {error}")
    raise refusal or WireError("; ".join(problems) or "no route is known")


class Seen(NamedTuple):
    """What a door answered to a ping."""

    address: str  # the caller's, as the door sees it
    round_trip_s: float


def ping(route: Route, name: str, timeout: float = ROUTE_S) -> Seen:
    """Ask a door what it sees of us; a WireError says why there is no answer. The name is one of a
    run that the door admits; its service need not exist.
    """
    begin = time.monotonic()
    connection, said = call(route, "ping", name, timeout)
    connection.close()
    # Four trips of equal length: connect, greeting, request, answer.
    return Seen(said.partition(" ")[0], (time.monotonic() - begin) / 2)


def ping_all(routes: Sequence[Route], name: str) -> dict[Route, Seen | BaseException]:
    """What each door answers to a ping, or why it does not; all are asked at once."""
    asked = {one: on_daemon_thread("thinwire ping", partial(ping, one, name)) for one in routes}
    return {route: answer.exception() or answer.result() for route, answer in asked.items()}


class Standby(contextlib.AbstractContextManager["Standby"]):
    """The acceptor's end at a door elsewhere: waits there, and has who calls served by `take`;
    while the door is away it tries again. For its services a host needs its prover, links do not.
    """

    def __init__(self, name: str, route: Route, take: Take, prover: Prover | None = None) -> None:
        self.name, self.route = check_name(name), route
        self._take, self._prover = take, prover
        self._is_over = threading.Event()
        self.waiting: set[socket.socket] = set()  # at the door now
        for _ in range(_READY):
            on_daemon_thread("thinwire standby", self._stand_by)

    def close(self) -> None:
        """Wait no more; what was taken goes on."""
        self._is_over.set()
        for connection in [*self.waiting]:
            hang_up(connection)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _stand_by(self) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(WireError):
                connection, _ = call(self.route, "wait", self.name, ROUTE_S, self._prover)
                if (home := self._wait_for_call(connection)) is not None:
                    on_daemon_thread("thinwire taken", partial(self._take, connection, home))
                    continue
                connection.close()
            self._is_over.wait(_PAUSE_S)

    def _wait_for_call(self, connection: socket.socket) -> str | None:
        """Wait for a call, and answer it; from which host it came, None if the wait has ended."""
        caller = None
        self.waiting.add(connection)
        with contextlib.suppress(OSError, WireError):
            if not self._is_over.is_set():  # else nobody hangs up on it
                word, _, home = hear(connection, time.monotonic() + LONGEST_WAIT_S).partition(" ")
                if word == "call":
                    connection.sendall(HERE)
                    caller = home
        self.waiting.discard(connection)
        return caller


def call(
    route: Route, wish: Wish, name: str, timeout: float, prover: Prover | None = None
) -> tuple[socket.socket, str]:
    """Ask a door: the connection once it agreed, and what it said beside its ok. An AdmissionError
    says that the door knows this token, and that its holder was struck off.
    """
    check_name(name)
    token, deadline = route.token, time.monotonic() + timeout
    connection = connect(route.address, timeout)
    try:
        magic, _, rest = hear(connection, deadline).partition(" ")
        version, _, nonce = rest.partition(" ")
        if magic == "no":
            raise WireError(f"the door refused: {rest}")
        if magic != MAGIC:
            raise WireError("what listens there is not a thinwire door")
        if version != str(VERSION):
            raise WireError(
                f"the door has version {version} and this process {VERSION}: install the same "
                "version of thinwire at both ends"
            )
        proof = proof_of(token, nonce, wish, name)
        shown = f" {prover(to_sign(nonce, name, proof))}" if prover else ""
        say(connection, f"{wish} {name} {who_of(token) or '-'} {proof}{shown}")
        word, _, more = hear(connection, deadline).partition(" ")
        if word == "gone":
            shown, _, more = more.partition(" ")
            expected = proof_of(token, nonce, "gone", name)
            if hmac.compare_digest(expected.encode(), shown.encode()):
                raise AdmissionError(f"the door refused: {more}")
        if word != "ok":
            raise WireError(f"the door refused: {more or word}")
        return connection, more
    except (OSError, WireError) as error:
        connection.close()
        if isinstance(error, TimeoutError):
            raise WireError(f"{route.address}: no answer within {timeout:.3g} s") from None
        if isinstance(error, OSError):
            raise WireError(f"{route.address}: {why(error)}") from None
        raise type(error)(f"{route.address}: {error}") from None


def check_name(name: str) -> str:
    """The name, if it is one: RUN/SERVICE, where RUN has 16 hexadecimal digits."""
    if not _NAME.fullmatch(name):
        raise WireError(
            f"{printable(name, 100)!r} is not a name at a door: it is 16 hexadecimal digits, a "
            'slash, and a service such as "control" or "cut-2@5"'
        )
    return name


def who_of(token: str) -> str:
    """Whose token it is; empty for the pass of a relay."""
    return token.rpartition(".")[0]


def proof_of(token: str, nonce: str, wish: str, name: str) -> str:
    """Shows that one knows the token, for one wish on one connection."""
    said = f"{MAGIC} {VERSION} {nonce} {wish} {name}".encode()
    return hmac.new(token.encode(), said, hashlib.sha256).hexdigest()


def to_sign(nonce: str, name: str, proof: str) -> str:
    """What a host signs that waits; with the proof, it counts at one door only."""
    return f"{MAGIC} {VERSION} {nonce} wait {name} {proof}"


def hear(connection: socket.socket, deadline: float) -> str:
    """One line. It is read byte by byte: what follows it is not ours."""
    line = bytearray()
    while True:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        byte = connection.recv(1)
        if byte == b"\n":
            return printable(line.decode("ascii", errors="replace"))
        if not byte:
            raise WireError("the other end closed the connection")
        line += byte
        if len(line) > LONGEST_LINE:
            raise WireError(f"a line at a door has at most {LONGEST_LINE} bytes")


def say(connection: socket.socket, line: str) -> None:
    """Send one line; one that is too long loses its end."""
    text = printable(line).replace("\n", " ").encode("ascii", errors="replace")
    connection.sendall(text[:LONGEST_LINE] + b"\n")


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


class Traffic(NamedTuple):
    """What a run has at a door at this moment, and the bytes that passed between two others."""

    connections: int
    waiting: int
    relayed_bytes: int


class Door(contextlib.AbstractContextManager["Door"]):
    """Listens on one public port; each connection has a thread of its own."""

    def __init__(self, host: str, port: int, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._lock = threading.Lock()  # guards all that follows
        self._served: dict[str, Take] = {}
        self._runs: dict[str, _Run] = {}
        self._guests: _Run | None = None  # what counts for runs that are not known beforehand
        self._callers: list[_Caller] = []  # in the order in which they came
        self._is_closed = False
        self._port = ListeningPort(host, port, self._receive)
        self.port, self.address = self._port.number, self._port.address

    def serve(self, name: str, take: Take) -> None:
        """Hand over whoever reaches for the name, from now on."""
        self._served[check_name(name)] = take

    def admit(self, run: str, *tokens: str) -> None:
        """Let who proves to know one of these tokens of a run meet here; cut who has others."""
        grants = {who_of(token): Grant(token) for token in tokens}
        self.admit_by(run, grants.get)
        self._hang_up(lambda caller: caller.run == run and caller.who not in grants)

    def admit_by(self, run: str, grant_of: GrantOf, mbps: float = 0.0) -> None:
        """Let those meet here whom `grant_of` grants it, which is asked at every connection. `mbps`
        bounds what passes between others of that run; with 0 each link has the door's own bound.
        """
        with self._lock:
            self._runs[run] = _Run(grant_of, Allowance(mbps))

    def admit_any(self, token: str, mbps: float = 0.0) -> None:
        """Let every run meet here whose peers know this pass, each within `mbps`."""
        self._guests = _Run({who_of(token): Grant(token)}.get, Allowance(mbps))

    def cut(self, run: str, who: str) -> None:
        """Cut all connections that were opened with somebody's token."""
        self._hang_up(lambda caller: (caller.run, caller.who) == (run, who))

    def traffic(self) -> dict[str, Traffic]:
        """What each run has here, by run."""
        with self._lock:
            held = Counter(caller.run for caller in self._callers)
            waiting = Counter(caller.run for caller in self._callers if caller.waits_for)
            return {
                name: Traffic(held[name], waiting[name], run.allowance.passed)
                for name, run in self._runs.items()
            }

    def close(self) -> None:
        """Cut all connections and free the port."""
        self._port.close()
        with self._lock:
            self._is_closed = True
        self._hang_up(lambda caller: True)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _hang_up(self, is_out: Callable[["_Caller"], bool]) -> None:
        with self._lock:
            for caller in filter(is_out, self._callers):
                hang_up(caller.connection)

    def _receive(self, connection: socket.socket, host: str) -> None:
        """The life of a connection, from its first byte to its last."""
        limits, caller = self._limits, _Caller(connection, host)
        with self._lock:
            at_home = [other for other in self._callers if other.home == caller.home]
            is_full = (
                self._is_closed
                or len(self._callers) >= limits.connections
                or len(at_home) >= limits.per_address
                or sum(not other.run for other in self._callers) >= limits.strangers
                or sum(not other.run for other in at_home) >= limits.strangers_per_address
            )
            if not is_full:
                self._callers.append(caller)
        with connection, contextlib.suppress(OSError):
            if is_full:
                connection.setblocking(False)
                connection.send(_FULL)
                return
            try:
                wish, run = self._admit(caller)
                grant = run.grant_of(caller.who)
                if grant is None or grant.refusal:  # it was struck off in this very moment
                    raise WireError("the token shown does not count any more")
                connection.settimeout(limits.idle_s)
                if wish == "ping":
                    address = address_text(*connection.getpeername()[:2])
                    say(connection, f"ok {address} {time.time():.3f}")
                elif wish == "wait":
                    self._keep_waiting(caller)
                elif take := self._served.get(caller.name):
                    say(connection, "ok")
                    take(connection.dup(), caller.host)
                else:
                    self._join_waiting(caller, run)
            except WireError as error:
                _turn_away(connection, error)
            finally:
                with self._lock:
                    self._callers.remove(caller)

    def _admit(self, caller: "_Caller") -> tuple[str, "_Run"]:
        """Hear what a caller wants, and whether it may; a WireError says why not."""
        nonce, limits = secrets.token_hex(16), self._limits
        try:
            caller.connection.settimeout(limits.preamble_s)
            say(caller.connection, f"{MAGIC} {VERSION} {nonce}")
            request = hear(caller.connection, time.monotonic() + limits.preamble_s)
        except TimeoutError:
            raise WireError(f"no request within {limits.preamble_s:g} s") from None
        wish, *words = request.split(" ")
        is_whole = len(words) == 3 or (len(words) == 5 and wish == "wait")
        if not is_whole or wish not in ("reach", "wait", "ping"):
            raise WireError("the request is not one of reach, wait or ping with a name and a proof")
        name, who, proof, *shown = words
        run_name, _, service = check_name(name).partition("/")
        who = "" if who == "-" else who  # at a relay all show the same pass
        with self._lock:
            run = self._runs.get(run_name) or self._guests
            if run is None:
                raise WireError(f"run {run_name} is not known at this door")
            grant = run.grant_of(who)
        if grant is None or not hmac.compare_digest(
            proof_of(grant.token, nonce, wish, name).encode(), proof.encode()
        ):
            raise WireError(f"the token shown for run {run_name} is not the right one")
        if grant.refusal:  # prove to who was struck off that it is this door that says so
            raise AdmissionError(f"{proof_of(grant.token, nonce, 'gone', name)} {grant.refusal}")
        opens = grant.services  # None: all
        if wish != "ping" and opens is not None and (wish == "wait" or service not in opens):
            raise WireError(
                f"this token opens {' and '.join(sorted(opens))} alone: join the run first"
            )
        if wish == "wait" and not service.startswith(_LINK):
            # Whoever knows the token could wait in the host's place, and nobody reach the host.
            if not shown:
                raise WireError(
                    f"only the host of run {run_name} may wait for {name}: the request lacks its "
                    "signature"
                )
            public = proven_by(to_sign(nonce, name, proof), " ".join(shown))
            if fingerprint_of(public)[:RUN_DIGITS] != run_name:
                raise WireError(f"the key shown is not the one of the host of run {run_name}")
        with self._lock:
            run = self._runs.get(run_name) or self._new_guest(run_name, run)
            held = [other.who for other in self._callers if other.run == run_name]
            if len(held) >= limits.per_run:
                raise WireError(f"run {run_name} has {len(held)} connections here, the most")
            if who and held.count(who) >= limits.per_member:
                raise WireError(f"{who} has {limits.per_member} connections here, the most")
            caller.run, caller.who, caller.name = run_name, who, name
        return wish, run

    def _new_guest(self, name: str, like: "_Run") -> "_Run":
        """Make room for a run that is new to a relay, at the cost of counts of an earlier one."""
        if len(self._runs) >= self._limits.runs:
            idle = self._runs.keys() - {caller.run for caller in self._callers}
            if not idle:
                raise WireError(f"{len(self._runs)} runs meet at this door already, the most")
            del self._runs[idle.pop()]
        self._runs[name] = run = _Run(like.grant_of, Allowance(like.allowance.mbps))
        return run

    def _join_waiting(self, caller: "_Caller", run: "_Run") -> None:
        """Call those who wait, the latest first, until one answers."""
        limits = self._limits
        bounds = run.allowance, Allowance(0 if run.allowance.mbps else limits.link_mbps)
        while True:
            with self._lock:
                waiting = [other for other in self._callers if other.waits_for == caller.name]
                if not waiting:
                    raise WireError(f"{caller.name} is not served here, and nobody waits for it")
                waiter = waiting[-1]
                waiter.waits_for = ""
            try:
                with contextlib.suppress(OSError, TimeoutError):
                    say(waiter.connection, f"call {caller.host}")
                    if waiter.answer.result(limits.answer_s) == HERE:
                        say(caller.connection, "ok")
                        splice(caller.connection, waiter.connection, bounds, limits.idle_s)
                        return
            finally:
                hang_up(waiter.connection)
                waiter.is_over.set()

    def _keep_waiting(self, caller: "_Caller") -> None:
        limits, connection = self._limits, caller.connection
        with self._lock:
            same = [other for other in self._callers if other.waits_for == caller.name]
            say(connection, "ok")
            caller.waits_for = caller.name
            if len(same) >= limits.waiting_per_name:  # the oldest is the likeliest to be lost
                hang_up(same[0].connection)
        # Not all at once: while one comes again, another of the same name still waits.
        connection.settimeout(limits.wait_s * random.uniform(0.5, 1.0))
        answer = b""
        with contextlib.suppress(OSError):
            answer = connection.recv(1)  # that a call was heard; or the end, of who has gone
        with self._lock:
            is_called, caller.waits_for = not caller.waits_for, ""
        caller.answer.set_result(answer)
        if is_called:
            caller.is_over.wait()


class Allowance(Occupancy):
    """Spreads bytes over time so that they stay below a rate; 0 Mbit/s is no bound."""

    def __init__(self, mbps: float, burst_s: float = 0.25) -> None:
        super().__init__(mbps)
        self.passed = 0  # bytes, since it exists
        self._burst_s = burst_s
        self._lock = threading.Lock()

    def book(self, count: int, now: float) -> float:
        """Account for bytes that are to be passed on; the seconds to wait before that."""
        with self._lock:
            self.passed += count
            earliest = now - self._burst_s  # what was not used until then is lost
            return max(0.0, self.carry(count, earliest, earliest)[1] - now)


class _Caller:
    """A connection at a door: a stranger until it has proven what it may."""

    def __init__(self, connection: socket.socket, host: str) -> None:
        self.connection, self.host = connection, host
        self.home = home_of(host)  # whose connections are counted together
        self.run = self.who = self.name = ""  # once it is known
        self.waits_for = ""  # its name, while it waits to be called
        self.answer: futures.Future[bytes] = futures.Future()  # to a call
        self.is_over = threading.Event()  # what came of the call


class _Run(NamedTuple):
    """A run at a door: who its peers are, and what may pass between them."""

    grant_of: GrantOf
    allowance: Allowance


def home_of(host: str) -> str:
    """Whose connections are counted together: an IPv6 line has 2^64 addresses, not one."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 4 or address.ipv4_mapped:
        return host
    return str(ipaddress.ip_network((address, 64), strict=False))


def splice(
    one: socket.socket, other: socket.socket, bounds: Sequence[Allowance], idle_s: float
) -> None:
    """Pass bytes both ways, within bounds, until both directions have ended, or for one an error or
    `idle_s` without a byte in either; nothing is raised.
    """
    moved_at = time.monotonic()  # who reads nothing for long still says that it is alive

    def passing(source: socket.socket, target: socket.socket) -> None:
        nonlocal moved_at
        space = memoryview(bytearray(CHUNK))
        try:
            while size := patiently(source.recv_into, space):
                time.sleep(max(bound.book(size, time.monotonic()) for bound in bounds))
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


def _turn_away(caller: socket.socket, error: WireError) -> None:
    """Say why, and hang up so that it is heard: unread bytes would reset the connection."""
    caller.settimeout(1)
    with contextlib.suppress(OSError):
        say(caller, f"{'gone' if isinstance(error, AdmissionError) else 'no'} {error}")
        caller.shutdown(socket.SHUT_WR)
        for _ in range(16):
            if not caller.recv(4096):
                return
