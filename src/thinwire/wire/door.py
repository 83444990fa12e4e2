"""A door: one public TCP port behind which the services of runs are found, and peers meet.

Who asks to `reach` a name is handed to the service of that name in this process, or is joined to
somebody elsewhere who `wait`s for it at this door. So every door is also a relay, which joins bytes
below TLS: it can only count them and bound their rate. What the token of a caller grants is asked
anew at every connection. routes.py describes the lines that are spoken here.
"""

import contextlib
import hmac
import ipaddress
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from functools import partial

from thinwire.background import on_daemon_thread
from thinwire.errors import AdmissionError, WireError
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
from thinwire.wire.sockets import ListeningPort, address_text, hang_up

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


class Door(contextlib.AbstractContextManager["Door"]):
    """Listens on one public port; each connection has a thread of its own."""

    def __init__(self, host: str, port: int, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._lock = threading.RLock()  # guards all that follows
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
        """Let those meet here who prove that they know one of these tokens of the run. Called
        again, it replaces them, and cuts the connections of tokens that are gone.
        """
        grants = {who_of(token): Grant(token) for token in tokens}
        self.admit_by(run, grants.get)
        self._hang_up(lambda caller: caller.run == run and caller.who not in grants)

    def admit_by(self, run: str, grant_of: GrantOf, mbps: float = 0.0) -> None:
        """Let those meet here whom `grant_of` grants it, which is asked at every connection. `mbps`
        bounds what passes between others of that run; with 0 each link has the door's own bound.
        """
        check_name(f"{run}/any")
        with self._lock:
            known = self._runs.setdefault(run, _Run(grant_of, Allowance(mbps)))
            known.grant_of, known.allowance.mbps = grant_of, mbps

    def admit_any(self, token: str, mbps: float = 0.0) -> None:
        """Let every run meet here whose peers know this pass, each within `mbps`."""
        self._guests = _Run({who_of(token): Grant(token)}.get, Allowance(mbps))

    def cut(self, run: str, who: str) -> None:
        """Cut all connections that were opened with somebody's token."""
        self._hang_up(lambda caller: (caller.run, caller.who) == (run, who))

    def traffic(self) -> dict[str, Traffic]:
        """What each run has here, by run."""
        found = {}
        with self._lock:
            for name, run in self._runs.items():
                own = [caller for caller in self._callers if caller.run == name]
                waiting = sum(bool(caller.waits_for) for caller in own)
                found[name] = Traffic(len(own), waiting, run.allowance.passed)
        return found

    def strangers(self) -> int:
        """Connections that have not yet said what they want."""
        with self._lock:
            return sum(not caller.run for caller in self._callers)

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
        """One connection that was opened: strangers are few, and have their time."""
        limits, caller = self._limits, _Caller(connection, host)
        with self._lock:
            at_home = [other for other in self._callers if other.home == caller.home]
            is_full = (
                self._is_closed
                or len(self._callers) >= limits.connections
                or len(at_home) >= limits.per_address
                or self.strangers() >= limits.strangers
                or sum(not other.run for other in at_home) >= limits.strangers_per_address
            )
            if not is_full:
                self._callers.append(caller)
        if is_full:
            with connection, contextlib.suppress(OSError):
                connection.setblocking(False)
                connection.send(_FULL)
            return
        on_daemon_thread("thinwire door", partial(self._attend, caller))

    def _attend(self, caller: "_Caller") -> None:
        """The life of a connection, from its first byte to its last."""
        connection = caller.connection
        with connection, contextlib.suppress(OSError):
            try:
                wish, run = self._admit(caller)
                grant = run.grant_of(caller.who)
                if grant is None or grant.refusal:  # it was struck off in this very moment
                    raise WireError("the token shown does not count any more")
                connection.settimeout(self._limits.idle_s)
                if wish == "ping":
                    address = address_text(*connection.getpeername()[:2])
                    say(connection, f"ok {address} {time.time():.3f}")
                elif wish == "wait":
                    self._keep_waiting(caller)
                elif take := self._served.get(caller.name):
                    say(connection, "ok")
                    futures.wait([take(connection.dup(), caller.host)])
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
        """Make room for a run that is new to a relay, at the cost of counts of earlier ones."""
        held, most = {caller.run for caller in self._callers}, self._limits.runs
        guests = [name for name, run in self._runs.items() if run.grant_of is like.grant_of]
        idle = [guest for guest in guests if guest not in held]
        for other in idle[: max(0, len(self._runs) - most + 1)]:
            del self._runs[other]
        if len(self._runs) >= most:
            raise WireError(f"{len(self._runs)} runs meet at this door already, the most")
        self._runs[name] = run = _Run(like.grant_of, Allowance(like.allowance.mbps))
        return run

    def _join_waiting(self, caller: "_Caller", run: "_Run") -> None:
        """Call those who wait, the latest first, until one answers."""
        limits = self._limits
        own = Allowance(0 if run.allowance.mbps else limits.link_mbps)

        def book(size: int) -> float:
            return max(bound.book(size, time.monotonic()) for bound in (run.allowance, own))

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
                        splice(caller.connection, waiter.connection, book, limits.idle_s)
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
                same[0].waits_for = ""
                same[0].is_over.set()
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


class Allowance:
    """Spreads bytes over time so that they stay below a rate; 0 Mbit/s is no bound."""

    def __init__(self, mbps: float, burst_s: float = 0.25) -> None:
        self.mbps = mbps
        self.passed = 0  # bytes, since it exists
        self._burst_s, self._paid_until = burst_s, 0.0
        self._lock = threading.Lock()

    def book(self, count: int, now: float) -> float:
        """Account for bytes that are to be passed on; the seconds to wait before that."""
        mbps = self.mbps  # which may change at any time
        with self._lock:
            self.passed += count
            if mbps <= 0:
                return 0.0
            self._paid_until = max(self._paid_until, now - self._burst_s)
            self._paid_until += count * 8 / (mbps * 1e6)
            return max(0.0, self._paid_until - now)


class _Caller:
    """A connection at a door: a stranger until it has proven what it may."""

    def __init__(self, connection: socket.socket, host: str) -> None:
        self.connection, self.host = connection, host
        self.home = home_of(host)  # whose connections are counted together
        self.run = self.who = self.name = ""  # once it is known
        self.waits_for = ""  # its name, while it waits to be called
        self.answer: futures.Future[bytes] = futures.Future()  # to a call
        self.is_over = threading.Event()  # what came of the call


@dataclass
class _Run:
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
    one: socket.socket, other: socket.socket, book: Callable[[int], float], idle_s: float
) -> None:
    """Pass bytes both ways until both directions have ended, or for one an error or `idle_s`
    without a byte; nothing is raised. `book` is told how many bytes are to pass, and says how long
    they wait.
    """
    moved_at = time.monotonic()

    def passing(source: socket.socket, target: socket.socket) -> None:
        nonlocal moved_at
        space = memoryview(bytearray(CHUNK))
        try:
            while size := patiently(source.recv_into, space):
                time.sleep(book(size))
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
