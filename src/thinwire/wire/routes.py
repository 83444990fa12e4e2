"""Routes to a peer: directly, or by a door where both ends meet. Here is the side of who calls.

A connection begins at a door with a few short lines, before any byte of TLS:

    door     thinwire-door 3 NONCE
    caller   reach RUN/SERVICE WHO PROOF    or wait, or ping
    door     ok ...                         or: no REASON, or: gone PROOF REASON

A token is WHO.SECRET: each peer and each invite has its own. A relay has one pass without a WHO,
and the line a hyphen there. The proof is an HMAC of nonce and wish under the token. That itself
never crosses the network, and a proof that was overheard does not work a second time. To who was
struck off, the door proves with the same token that it says so.

Many know the pass of a relay, such as peers that were removed from the run. So who waits for a
service of the host, which is any name but that of a link, shows after the proof also the host's
public key and a signature: RUN is the beginning of that key's fingerprint.
"""

import contextlib
import hashlib
import hmac
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from typing import Literal

from thinwire.background import on_daemon_thread
from thinwire.errors import AdmissionError, WireError, printable
from thinwire.wire.sockets import connect, hang_up, why

VERSION = 3
MAGIC = "thinwire-door"
LONGEST_LINE = 320  # bytes, of what either side says before bytes are passed on
HERE = b"+"  # what one who waits answers to a call
ROUTE_S = 4.0  # for one route to answer: a firewall may swallow a dial, and another route is next
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
_READY = 2  # connections that wait at a door
LONGEST_WAIT_S = 300.0  # on one of them: a door ends it before that, and that word may be lost
_NAME = re.compile(r"[0-9a-f]{16}/[a-z0-9][a-z0-9@._-]{0,79}")

Wish = Literal["reach", "wait", "ping"]
Kind = Literal["direct", "relayed"]
Prover = Callable[[str], str]  # `Identity.prove` of the host
Take = Callable[[socket.socket, str], "futures.Future[None]"]
"""Serves a connection from a host; the result is there when it is over (`Listener.take`)."""


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
        """A connection to the other end; a WireError says for each route why it does not work, an
        AdmissionError that a door has struck off our token.
        """
        if not self.name:
            return connect(self.routes[0].address, timeout)
        problems, refusal, deadline = [], None, time.monotonic() + timeout
        for route in self.routes:
            try:
                left = max(0.1, min(ROUTE_S, deadline - time.monotonic()))
                connection, _ = call(route, "reach", self.name, left)
                self.in_use = route
                return connection
            except WireError as error:
                refusal = refusal or (error if isinstance(error, AdmissionError) else None)
                problems.append(f"{route.kind} by {error}")
        raise refusal or WireError("; ".join(problems) or "no route is known")


@dataclass(frozen=True)
class Seen:
    """What a door answered to a ping: how it sees the caller, and how far off clocks are."""

    address: str  # the caller's, as the door sees it
    ahead_s: float  # by which the door's clock is ahead of ours
    round_trip_s: float


def ping(route: Route, name: str, timeout: float = ROUTE_S) -> Seen:
    """Ask a door what it sees of us; a WireError says why there is no answer. The name is one of a
    run that the door admits; its service need not exist.
    """
    begin = time.time()
    connection, said = call(route, "ping", name, timeout)
    end = time.time()
    connection.close()
    address, _, clock = said.partition(" ")
    try:
        # Four trips of equal length: connect, greeting, request, answer.
        ahead = float(clock) - (begin + (end - begin) * 3 / 4)
    except ValueError:
        raise WireError(f"{route.address}: the answer to a ping is not one") from None
    return Seen(address, ahead, (end - begin) / 2)


def ping_all(routes: Sequence[Route], name: str) -> dict[Route, Seen | WireError]:
    """What each door answers to a ping, or why it does not; all are asked at once."""

    def outcome(route: Route) -> Seen | WireError:
        try:
            return ping(route, name)
        except WireError as error:
            return error

    with futures.ThreadPoolExecutor(len(routes) or 1) as pool:
        return dict(zip(routes, pool.map(outcome, routes), strict=True))


class Standby(contextlib.AbstractContextManager["Standby"]):
    """The acceptor's end at a door elsewhere: waits there, and has who calls served by `take`.
    While the door is away it comes back by itself, with growing pauses. A host that waits for those
    who want its services needs its prover; the ends of links need none.
    """

    def __init__(self, name: str, route: Route, take: Take, prover: Prover | None = None) -> None:
        self.name, self.route = check_name(name), route
        self.trouble = ""  # why the last attempt to wait there failed; empty if it did not
        self._take, self._prover = take, prover
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._waiting: set[socket.socket] = set()
        for _ in range(_READY):
            on_daemon_thread("thinwire standby", self._stand_by)

    @property
    def waiting(self) -> int:
        """How many connections wait at the door now."""
        return len(self._waiting)

    def close(self) -> None:
        """Wait no more; what was taken goes on."""
        with self._lock:
            self._is_over.set()
            for connection in self._waiting:
                hang_up(connection)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _stand_by(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._is_over.is_set():
            begin = time.monotonic()
            try:
                connection, _ = call(self.route, "wait", self.name, ROUTE_S, self._prover)
                self.trouble = ""
                if (home := self._wait_for_call(connection)) is not None:
                    self._take(connection, home)
                    pause = _FIRST_PAUSE_S
                    continue
                connection.close()
            except WireError as error:
                self.trouble = str(error)
            if time.monotonic() - begin > _LONGEST_PAUSE_S:
                pause = _FIRST_PAUSE_S
            self._is_over.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _wait_for_call(self, connection: socket.socket) -> str | None:
        """Wait for a call, and answer it; from which host it came, None if the wait has ended."""
        with self._lock:
            if self._is_over.is_set():
                return None
            self._waiting.add(connection)
        try:
            word, _, home = hear(connection, time.monotonic() + LONGEST_WAIT_S).partition(" ")
            if word == "call":
                connection.sendall(HERE)
                return home
        except (OSError, WireError):
            pass
        finally:
            with self._lock:
                self._waiting.discard(connection)
        return None


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


def hear(connection: socket.socket, deadline: float | None) -> str:
    """One line. It is read byte by byte: what follows it is not ours."""
    line = bytearray()
    while True:
        left = None if deadline is None else max(0.001, deadline - time.monotonic())
        connection.settimeout(left)
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
