"""Links through doors: direct or relayed, from one to the other, and who may wait there."""

import contextlib
import queue
import random
import socket
from contextlib import ExitStack

import pytest
from knocking import RUN, TOKEN, ask, knock, line
from wiring import HOST, HOURLY, MAX_MESSAGE, PEER

from proxy import Proxy
from thinwire.background import on_daemon_thread
from thinwire.errors import WireError
from thinwire.wire import Door, Identity, LastingPipe, Route, Routes, Standby, dial, stream
from thinwire.wire import door as door_room
from thinwire.wire.door import proof_of, to_sign
from waiting import PATIENCE, wait_until

NAME = f"{RUN}/cut-0@1"
SECRET = b"a gradient that nobody else shall see"


class End:
    """One end of a link, with somebody who always reads: a lasting pipe wants that."""

    def __init__(self, pipe):
        self.pipe, self.write = pipe, pipe.write
        self._heard: queue.Queue[bytes | None] = queue.Queue()
        on_daemon_thread("read", self._listen)

    def read(self):
        return self._heard.get(timeout=PATIENCE)

    def outages(self):
        return self.pipe.outages

    def _listen(self):
        with contextlib.suppress(WireError):
            while (message := self.pipe.read()) is not None:
                self._heard.put(bytes(message))
        self._heard.put(None)


class Ends:
    """A stage that accepts and one that dials, and what lies between them."""

    def __init__(self, listener):
        self.listener, self._held = listener, ExitStack()

    def door(self, port=0):
        door = self._held.enter_context(Door("127.0.0.1", port))
        door.admit(RUN, TOKEN)
        return door

    def proxy(self, target, tap=lambda data: data):
        proxy = Proxy(target, tap=tap)
        self._held.callback(proxy.close)
        return proxy

    def wait_at(self, address):
        standby = self._held.enter_context(Standby(NAME, relayed(address), self.listener.take))
        wait_until(lambda: len(standby.waiting) == 2)
        return standby

    def dial(self, routes, timeout=PATIENCE, tries_again=True):
        whom, size = HOST.fingerprint, MAX_MESSAGE
        return dial(routes, "cut-0", PEER, whom, timeout, size, tries_again=tries_again)

    def accept(self, timeout=PATIENCE):
        return self.listener.accept("cut-0", timeout, PEER.fingerprint)

    def join(self, routes, is_lasting=False):
        """The end that accepted, and the one that dialed."""
        accepted = on_daemon_thread("accept", self.accept)
        above = self.dial(routes)
        below = accepted.result(PATIENCE)
        if is_lasting:
            below = LastingPipe(below, self.accept, PATIENCE)
            above = LastingPipe(above, lambda timeout: self.dial(routes, timeout), PATIENCE)
        for pipe in (above, below):
            self._held.callback(pipe.close, 0)
        return End(below), End(above)

    def close(self):
        self._held.close()


@pytest.fixture
def ends(listener):
    ends = Ends(listener)
    yield ends
    ends.close()


def direct(address):
    return Route(address, "direct", TOKEN)


def relayed(address):
    return Route(address, "relayed", TOKEN)


def exchange(below, above, size=200_000):
    """Different messages both ways at once; each arrives as it was sent."""
    there, back = random.randbytes(size), random.randbytes(size + 1)
    below.write(there)
    above.write(back)
    assert below.read() == back
    assert above.read() == there


def test_a_link_by_a_door_of_the_accepting_end(ends):
    door = ends.door()
    door.serve(NAME, ends.listener.take)
    routes = Routes(NAME, [direct(door.address)])
    below, above = ends.join(routes)
    exchange(below, above)
    assert routes.in_use == direct(door.address)
    assert below.pipe.comes_from == "127.0.0.1"
    assert door.traffic()[RUN].relayed_bytes == 0
    door.cut(RUN, "")  # of whoever showed that token
    assert above.read() is None and below.read() is None


def test_a_relayed_link_outlives_its_relay(ends):
    relay = ends.door()
    standby = ends.wait_at(relay.address)
    routes = Routes(NAME, [relayed(relay.address)])
    below, above = ends.join(routes, is_lasting=True)
    exchange(below, above)
    assert routes.in_use == relayed(relay.address)
    assert relay.traffic()[RUN].relayed_bytes > 400_000
    relay.close()
    wait_until(lambda: not standby.waiting and above.outages())
    ends.door(relay.port)
    exchange(below, above)
    wait_until(lambda: standby.waiting)


def test_a_link_goes_from_relayed_to_direct_and_back(ends):
    relay, own = ends.door(), ends.door()
    ends.wait_at(relay.address)
    routes = Routes(NAME, [direct(own.address), relayed(relay.address)])
    below, above = ends.join(routes, is_lasting=True)
    exchange(below, above)
    assert routes.in_use == relayed(relay.address)  # nothing is served at the first door yet
    own.serve(NAME, ends.listener.take)
    relay.cut(RUN, "")
    wait_until(above.outages)
    exchange(below, above)
    assert routes.in_use == direct(own.address)
    own.close()
    wait_until(lambda: above.outages() > 1)
    exchange(below, above)
    assert routes.in_use == relayed(relay.address)


def test_a_route_that_swallows_dials_does_not_hold_up_the_next(ends, monkeypatch):
    monkeypatch.setattr(door_room, "ROUTE_S", 1)
    door = ends.door()
    door.serve(NAME, ends.listener.take)
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # connects, and never says a word
        dead = "{}:{}".format(*nobody.getsockname())
        routes = Routes(NAME, [direct(dead), relayed(door.address)])
        exchange(*ends.join(routes))
        assert routes.in_use == relayed(door.address)


def test_where_no_route_works_each_says_why(ends):
    door = ends.door()
    wrong = Route(door.address, "relayed", "not the token")
    routes = Routes(NAME, [direct("127.0.0.1:1"), wrong, relayed(door.address)])
    with pytest.raises(WireError) as said:
        ends.dial(routes, tries_again=False)
    first, second, third = str(said.value).split("; ")
    assert first == ("direct by 127.0.0.1:1: Connection refused")
    assert f"the door refused: the token shown for run {RUN} is not the right one" in second
    assert third.endswith(f"{NAME} is not served here, and nobody waits for it")
    assert routes.in_use is None
    with pytest.raises(WireError, match="no route is known"):
        Routes(NAME, []).connect(1)


def test_a_relay_sees_only_tls(ends):
    seen, relay = bytearray(), ends.door()
    path = ends.proxy(relay.address, lambda data: seen.extend(data) or data)
    ends.wait_at(relay.address)
    below, above = ends.join(Routes(NAME, [relayed(path.address)]))
    below.write(SECRET * 1000)
    assert above.read() == SECRET * 1000
    above.write(SECRET)
    assert below.read() == SECRET
    assert len(seen) > 1000 * len(SECRET)
    for plain in (SECRET, SECRET[:12], PEER.public.encode(), b"thinwire stream"):
        assert plain not in seen


def test_an_altered_byte_breaks_the_connection_and_not_the_message(ends):
    passed, altered = 0, 0

    def tap(data):
        nonlocal passed, altered
        passed += len(data)
        if passed > 300_000 and not altered:
            altered += 1
            middle = len(data) // 2
            return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        return data

    relay = ends.door()
    path = ends.proxy(relay.address, tap)
    ends.wait_at(relay.address)
    below, above = ends.join(Routes(NAME, [relayed(path.address)]), is_lasting=True)
    for _ in range(4):
        exchange(below, above)
    assert altered == 1 and above.outages() == 1


def test_an_end_that_has_not_noticed_a_loss_is_told_by_the_next_dial(ends, monkeypatch):
    """Until keepalive notices, which it does not here, the dialer would be refused."""
    monkeypatch.setattr(stream, "SILENCE_S", HOURLY)
    path = ends.proxy(ends.listener.address)
    below, above = ends.join(path.address, is_lasting=True)
    path.cut(leave_listener=True)
    above.write(b"again")
    assert below.read() == b"again"


@pytest.mark.parametrize(("thief", "reason"), [
    ("without the key", "only the host of run {run} may wait for {run}/control: the request"),
    ("another key", "the key shown is not the one of the host of run {run}"),
    ("another nonce", "the key shown has not signed this request"),
    ("another name", "the key shown has not signed this request"),
    ("another token", "the key shown has not signed this request"),
    ("another's signature", "the key shown has not signed this request"),
    ("no key", "a public key cannot be read"),
    ("the wrong token", "the token shown for run {run} is not the right one"),
    ("one word", "the request is not one of reach, wait or ping with a name and a proof"),
])  # fmt: skip
def test_only_the_holder_of_its_key_waits_in_the_hosts_place(service, thief, reason):
    """Whoever was invited knows the pass, and that is not enough to take the host's calls."""
    run, other = HOST.fingerprint[:16], Identity.create("other")
    name = f"{run}/control"
    with Door("127.0.0.1", 0) as relay:
        relay.admit_any(TOKEN)
        route = Route(relay.address, "relayed", TOKEN)
        with Standby(name, route, service.take, prover=HOST.prove) as standby:
            wait_until(lambda: len(standby.waiting) == 2)
            caller = knock(relay)
            nonce = line(caller).split(" ")[2]
            token = "another" if thief == "the wrong token" else TOKEN
            proof = proof_of(token, nonce, "wait", name)
            asked = to_sign(nonce, name, proof)
            elsewhere = proof_of("x", nonce, "wait", name)
            shown = {
                "without the key": "", "no key": " AAAA ====", "one word": f" {HOST.public}",
                "another key": " " + other.prove(asked),
                "the wrong token": " " + HOST.prove(asked),  # signed as is right
                "another nonce": " " + HOST.prove(to_sign("0" * 32, name, proof)),
                "another name": " " + HOST.prove(to_sign(nonce, f"{run}/enrol", proof)),
                "another token": " " + HOST.prove(to_sign(nonce, name, elsewhere)),
                "another's signature": f" {HOST.public} {other.prove(asked).partition(' ')[2]}",
            }[thief]  # fmt: skip
            caller.sendall(f"wait {name} - {proof}{shown}\n".encode())
            assert line(caller).startswith(f"no {reason.format(run=run)}")
            assert relay.traffic()[run].waiting == 2
            joining = ask(relay, "reach", name)
            assert line(joining) == "ok"
            with service.accept() as served:  # the real host
                joining.sendall(b"hello")
                assert served.recv(5) == b"hello"


def test_who_waits_comes_again_also_if_the_end_of_a_connection_was_never_heard(monkeypatch):
    """The door has ended it; what is between lost that, and keeps the rest alive."""
    monkeypatch.setattr(door_room, "LONGEST_WAIT_S", 0.2, raising=False)
    monkeypatch.setattr(door_room, "_READY", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent, ExitStack() as held:
        silent.settimeout(PATIENCE)
        route = Route("{}:{}".format(*silent.getsockname()), "relayed", TOKEN)
        held.enter_context(Standby(NAME, route, lambda connection, host: None))
        for _ in range(2):
            waiter, _ = silent.accept()
            held.enter_context(waiter)
            waiter.sendall(b"thinwire-door 3 abc\n")
            waiter.recv(1000)
            waiter.sendall(b"ok\n")
