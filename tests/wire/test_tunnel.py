"""Links of gRPC under mutual TLS through doors: direct or relayed, and from one to the other."""

import contextlib
import functools
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from wiring import MAX_MESSAGE

from proxy import Proxy
from thinwire.errors import WireError
from thinwire.wire import (
    Authority,
    Door,
    LastingPipe,
    Listener,
    Pipe,
    Route,
    Standby,
    Tunnel,
    dial,
)
from thinwire.wire.background import on_daemon_thread
from waiting import PATIENCE

RUN, TOKEN, NAME = "0123456789abcdef", "the run's token", "0123456789abcdef/cut-0@1"
SECRET = b"a gradient that nobody else shall see"


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class End:
    """One end of a link, with somebody who always reads: a lasting pipe wants that."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe, self.write = pipe, pipe.write
        self._heard: queue.Queue[bytes | None] = queue.Queue()
        on_daemon_thread("read", self._listen)

    def read(self) -> bytes | None:
        return self._heard.get(timeout=PATIENCE)

    def outages(self) -> int:
        assert isinstance(self.pipe, LastingPipe)
        return self.pipe.outages

    def _listen(self) -> None:
        with contextlib.suppress(WireError):
            while (message := self.pipe.read()) is not None:
                self._heard.put(message)
        self._heard.put(None)


class Ends:
    """A stage that accepts and one that dials, and what lies between them."""

    def __init__(self, authority: Authority, listener: Listener) -> None:
        self._identity, self.listener = authority.issue("stage-1"), listener
        self._held = ExitStack()

    def door(self) -> Door:
        door = self._held.enter_context(Door("127.0.0.1", 0))
        door.admit(RUN, TOKEN)
        return door

    def proxy(self, target: str, tap: Callable[[bytes], bytes] = lambda data: data) -> Proxy:
        proxy = Proxy(target, tap=tap)
        self._held.callback(proxy.close)
        return proxy

    def wait_at(self, address: str) -> Standby:
        route = Route(address, "relayed", TOKEN)
        standby = Standby(NAME, route, self.listener.address)
        self._held.callback(standby.close)
        return standby

    def tunnel(self, *routes: Route) -> Tunnel:
        return self._held.enter_context(Tunnel(NAME, routes))

    def dial(self, tunnel: Tunnel, timeout: float = PATIENCE) -> Pipe:
        return dial(tunnel.address, "cut-0", self._identity, "coordinator", timeout, MAX_MESSAGE)

    def accept(self, timeout: float = PATIENCE) -> Pipe:
        return self.listener.accept("cut-0", timeout, "stage-1", is_replaceable=True)

    def join(self, tunnel: Tunnel, is_lasting: bool = False) -> tuple[End, End]:
        """The end that accepted, and the one that dialed."""
        accepted = on_daemon_thread("accept", self.accept)
        dialed = self.dial(tunnel)
        below, above = accepted.result(PATIENCE), dialed
        if is_lasting:
            below = LastingPipe(below, self.accept, PATIENCE)
            above = LastingPipe(above, lambda timeout: self.dial(tunnel, timeout), PATIENCE)
        for pipe in (above, below):
            self._held.callback(pipe.close, 0)
        return End(below), End(above)

    def close(self) -> None:
        self._held.close()


@pytest.fixture
def ends(authority: Authority, listener: Listener) -> Iterator[Ends]:
    ends = Ends(authority, listener)
    yield ends
    ends.close()


def direct(address: str) -> Route:
    return Route(address, "direct", TOKEN)


def relayed(address: str) -> Route:
    return Route(address, "relayed", TOKEN)


def exchange(below: End, above: End, size: int = 200_000) -> None:
    """Different messages both ways at once; each arrives as it was sent."""
    there, back = random.randbytes(size), random.randbytes(size + 1)
    below.write(there)
    above.write(back)
    assert below.read() == back
    assert above.read() == there


def test_a_link_by_a_door_of_the_accepting_end(ends: Ends) -> None:
    door = ends.door()
    door.serve(NAME, ends.listener.address)
    tunnel = ends.tunnel(direct(door.address))
    exchange(*ends.join(tunnel))
    assert tunnel.in_use == direct(door.address)
    assert tunnel.carried["direct"] > 400_000 and tunnel.carried["relayed"] == 0
    until(lambda: door.traffic()[RUN].served_bytes == tunnel.carried["direct"])


def test_a_link_between_two_ends_that_only_dial_out(ends: Ends) -> None:
    relay = ends.door()
    standby = ends.wait_at(relay.address)
    tunnel = ends.tunnel(relayed(relay.address))
    until(lambda: standby.waiting)
    exchange(*ends.join(tunnel))
    assert tunnel.in_use == relayed(relay.address)
    assert tunnel.carried["relayed"] > 400_000 and tunnel.carried["direct"] == 0
    until(
        lambda: standby.carried == relay.traffic()[RUN].relayed_bytes == tunnel.carried["relayed"]
    )


def test_connections_that_are_cut_come_back(ends: Ends) -> None:
    relay = ends.door()
    path = ends.proxy(relay.address)
    standby = ends.wait_at(path.address)
    tunnel = ends.tunnel(relayed(relay.address))
    until(lambda: standby.waiting)
    below, above = ends.join(tunnel, is_lasting=True)
    exchange(below, above)
    for outages in range(1, 4):
        path.cut()  # what is joined and what waits
        exchange(below, above)
        assert above.outages() >= outages
    tunnel.cut()
    exchange(below, above)
    assert above.outages() >= 4


def test_a_relay_that_restarts_is_found_again(ends: Ends) -> None:
    with Door("127.0.0.1", 0) as relay:
        relay.admit(RUN, TOKEN)
        standby = ends.wait_at(relay.address)
        tunnel = ends.tunnel(relayed(relay.address))
        until(lambda: standby.waiting)
        below, above = ends.join(tunnel, is_lasting=True)
        exchange(below, above)
    until(lambda: not standby.waiting and "Connection refused" in standby.trouble)
    with Door("127.0.0.1", relay.port) as relay:
        relay.admit(RUN, TOKEN)
        exchange(below, above)
        assert standby.trouble == "" and above.outages() >= 1


def test_a_link_goes_from_relayed_to_direct_and_back(ends: Ends) -> None:
    relay, own = ends.door(), ends.door()
    standby = ends.wait_at(relay.address)
    tunnel = ends.tunnel(direct(own.address), relayed(relay.address))
    until(lambda: standby.waiting)
    below, above = ends.join(tunnel, is_lasting=True)
    exchange(below, above)
    assert tunnel.in_use == relayed(relay.address)  # nothing is served at the first door yet

    own.serve(NAME, ends.listener.address)
    tunnel.cut()
    exchange(below, above)
    assert tunnel.in_use == direct(own.address)

    own.close()
    exchange(below, above)
    assert tunnel.in_use == relayed(relay.address)

    second = ends.door()
    second.serve(NAME, ends.listener.address)
    tunnel.reroute([direct(second.address)], cut=True)
    exchange(below, above)
    assert tunnel.in_use == direct(second.address)
    assert min(tunnel.carried.values()) > 400_000


def test_a_route_that_swallows_dials_does_not_hold_up_the_next(ends: Ends) -> None:
    door = ends.door()
    door.serve(NAME, ends.listener.address)
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # connects, and never says a word
        dead = "{}:{}".format(*nobody.getsockname())
        with Tunnel(NAME, [direct(dead), relayed(door.address)], timeout=0.2) as tunnel:
            exchange(*ends.join(tunnel))
            assert tunnel.in_use == relayed(door.address)


def test_a_tunnel_without_a_way_says_why(ends: Ends) -> None:
    door = ends.door()
    wrong = Route(door.address, "relayed", "not the token")
    tunnel = ends.tunnel(direct("127.0.0.1:1"), wrong, relayed(door.address))
    with (
        pytest.raises(WireError, match=r"cannot open a link to 'coordinator'.*; tried: direct by"),
        tunnel.explaining(),
    ):
        ends.dial(tunnel, timeout=2)
    first, second, third = tunnel.trouble.split("; ")
    assert first == "direct by 127.0.0.1:1: Connection refused"
    assert f"the door refused: the token shown for run {RUN} is not the right one" in second
    assert third.endswith(f"{NAME} is not served here, and nobody waits for it")
    assert tunnel.in_use is None
    assert ends.tunnel().carried == {"direct": 0, "relayed": 0}


def test_a_relay_sees_only_tls(ends: Ends) -> None:
    seen = bytearray()

    def tap(data: bytes) -> bytes:
        seen.extend(data)
        return data

    relay = ends.door()
    path = ends.proxy(relay.address, tap)
    standby = ends.wait_at(relay.address)
    tunnel = ends.tunnel(relayed(path.address))
    until(lambda: standby.waiting)
    below, above = ends.join(tunnel)
    below.write(SECRET * 1000)
    assert above.read() == SECRET * 1000
    above.write(SECRET)
    assert below.read() == SECRET
    assert len(seen) > 1000 * len(SECRET)
    for plain in (SECRET, SECRET[:12], b"cut-0\x00", b"Exchange"):
        assert plain not in seen


def test_an_altered_byte_breaks_the_connection_and_not_the_message(ends: Ends) -> None:
    passed, altered = 0, 0

    def tap(data: bytes) -> bytes:
        nonlocal passed, altered
        passed += len(data)
        if passed > 300_000 and not altered:
            altered += 1
            middle = len(data) // 2
            return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        return data

    relay = ends.door()
    path = ends.proxy(relay.address, tap)
    standby = ends.wait_at(relay.address)
    tunnel = ends.tunnel(relayed(path.address))
    until(lambda: standby.waiting)
    below, above = ends.join(tunnel, is_lasting=True)
    for _ in range(4):
        exchange(below, above)
    assert altered == 1 and above.outages() == 1


def test_many_links_at_one_relay(ends: Ends) -> None:
    relay, echo = ends.door(), socket.create_server(("127.0.0.1", 0), backlog=64)

    def answer(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(4096):
                connection.sendall(data)

    def serve() -> None:
        with contextlib.suppress(OSError):  # closed when the test ends
            while connection := echo.accept()[0]:
                on_daemon_thread("echo", functools.partial(answer, connection))

    on_daemon_thread("serve", serve)
    target = "{}:{}".format(*echo.getsockname())
    with ExitStack() as held:
        held.callback(echo.close)
        tunnels = []
        for number in range(20):
            name = f"{RUN}/cut-{number}@1"
            standby = Standby(name, relayed(relay.address), target)
            held.callback(standby.close)
            tunnels.append(held.enter_context(Tunnel(name, [relayed(relay.address)])))
            until(lambda standby=standby: standby.waiting)
        callers = []
        for tunnel in tunnels:
            host, port = tunnel.address.split(":")
            callers.append(socket.create_connection((host, int(port)), timeout=PATIENCE))
            callers[-1].sendall(tunnel.name.encode())
        for caller, tunnel in zip(callers, tunnels, strict=True):
            said = b""
            while len(said) < len(tunnel.name):
                said += caller.recv(100)
            assert said == tunnel.name.encode()
            caller.close()


def test_closing_ends_every_thread(ends: Ends) -> None:
    door = ends.door()
    before = set(threading.enumerate())
    standby = Standby(NAME, relayed(door.address), ends.listener.address)
    tunnel = Tunnel(NAME, [relayed(door.address)])
    until(lambda: standby.waiting == 2)
    host, port = tunnel.address.split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as caller:
        until(lambda: tunnel.in_use)
        for end in (tunnel, standby):
            end.close()
            end.close()
        with contextlib.suppress(ConnectionResetError):
            assert caller.recv(1) == b""
    until(lambda: not {t for t in threading.enumerate() if t not in before and t.is_alive()})
    until(lambda: door.traffic()[RUN].connections == 0)
