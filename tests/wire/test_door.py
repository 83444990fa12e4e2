"""A door: who may meet there, who is refused and in which words, and what others may cost it."""

import contextlib
import random
import socket
import threading
import time

import pytest
from knocking import RUN, TOKEN, ask, knock, line

from proxy import Proxy
from thinwire.errors import AdmissionError, WireError
from thinwire.wire import Door, Route, Standby, Traffic, ping
from thinwire.wire.door import LONGEST_LINE, Limits, home_of, proof_of
from thinwire.wire.sockets import split_address
from waiting import PATIENCE, wait_until

OTHER_RUN = "fedcba9876543210"


@contextlib.contextmanager
def opened(**limits):
    """A door that admits the run."""
    with Door("127.0.0.1", 0, Limits(**limits)) as door:
        door.admit(RUN, TOKEN)
        yield door


@contextlib.contextmanager
def relaying(mbps=0.0, **limits):
    """A door that admits every run with the pass."""
    with Door("127.0.0.1", 0, Limits(**limits)) as relay:
        relay.admit_any("pass", mbps=mbps)
        yield relay


@pytest.fixture
def door():
    with opened() as door:
        yield door


def ok(caller):
    assert line(caller) == "ok"
    return caller


def reach(door, service, token=TOKEN):
    return ask(door, "reach", f"{RUN}/{service}", token)


def read_to_end(connection):
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize("waits", [False, True])
def test_services_and_who_waits_are_reached_and_each_direction_ends_by_itself(waits, door, service):
    with contextlib.ExitStack() as held:
        if waits:
            standby = Standby(f"{RUN}/cut-x", Route(door.address, token=TOKEN), service.take)
            held.enter_context(standby)
            wait_until(lambda: len(standby.waiting) == 2)
        else:
            door.serve(f"{RUN}/cut-x", service.take)
        caller, served = ok(reach(door, "cut-x")), service.accept()
        caller.sendall(b"there")
        caller.shutdown(socket.SHUT_WR)
        assert read_to_end(served) == b"there"
        served.sendall(b"and back")  # after the other direction has ended
        served.close()
        assert read_to_end(caller) == b"and back"
        left = Traffic(2, 2, relayed_bytes=13) if waits else Traffic(0, 0, relayed_bytes=0)
        wait_until(lambda: door.traffic() == {RUN: left})


@contextlib.contextmanager
def joined(door):
    """Two who dial out, as the door has joined them: who reached, and who waited."""
    waiter = ok(ask(door, "wait", f"{RUN}/cut-x"))
    caller = reach(door, "cut-x")
    assert line(waiter) == "call 127.0.0.1"
    waiter.sendall(b"+")
    with ok(caller), waiter:
        yield caller, waiter


def test_a_lost_end_ends_the_other(door):
    with joined(door) as (caller, served):
        served.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        served.close()  # as a process that is killed with bytes unread
        with contextlib.suppress(ConnectionResetError):
            assert caller.recv(1) == b""
        wait_until(lambda: door.traffic()[RUN].connections == 0)


@pytest.mark.parametrize(("wish", "name", "token", "reason"), [
    ("reach", f"{RUN}/control", "another", f"the token shown for run {RUN} is not the right"),
    ("wait", f"{RUN}/cut-0@1", "", f"the token shown for run {RUN} is not the right one"),
    ("ping", f"{RUN}/door", "another", f"the token shown for run {RUN} is not the right one"),
    ("reach", f"{OTHER_RUN}/control", TOKEN, f"run {OTHER_RUN} is not known at this door"),
    ("reach", f"{RUN}/cut-9@1", TOKEN, f"{RUN}/cut-9@1 is not served here, and nobody waits"),
    ("reach", "control", TOKEN, "'control' is not a name at a door: it is 16 hexadecimal"),
    ("reach", f"{RUN}/../etc", TOKEN, "is not a name at a door"),
    ("steal", f"{RUN}/control", TOKEN, "the request is not one of reach, wait or ping"),
])  # fmt: skip
def test_refusals_say_why(door, wish, name, token, reason):
    answer = line(ask(door, wish, name, token))
    assert answer.startswith("no ") and reason in answer


def test_a_proof_that_was_overheard_does_not_work_again(door):
    first, second = knock(door), knock(door)
    nonce = line(first).split(" ")[2]
    request = f"ping {RUN}/door - {proof_of(TOKEN, nonce, 'ping', f'{RUN}/door')}\n".encode()
    line(second)
    first.sendall(request)
    second.sendall(request)
    assert line(first).startswith("ok ")
    assert "is not the right one" in line(second)


def test_the_token_does_not_cross_the_network(door):
    heard = bytearray()
    path = Proxy(door.address, tap=lambda data: heard.extend(data) or data)
    ping(Route(path.address, token=TOKEN), f"{RUN}/door")
    path.close()
    assert b"ping" in heard and TOKEN.encode() not in heard


def test_a_request_that_is_too_long_or_too_slow_is_refused():
    with opened(preamble_s=PATIENCE) as door:
        caller = knock(door)
        line(caller)
        caller.sendall(b"x" * (LONGEST_LINE + 1000))
        assert line(caller) == f"no a line at a door has at most {LONGEST_LINE} bytes"
    with opened(preamble_s=0.2) as door:
        caller = knock(door)
        line(caller)
        caller.sendall(b"reach ")
        assert line(caller) == "no no request within 0.2 s"
        assert caller.recv(1) == b""
        wait_until(lambda: not door._callers)


@pytest.mark.parametrize("has_one_ended", [False, True])
def test_joined_connections_without_a_byte_are_cut(has_one_ended):
    with opened(idle_s=0.2) as door, joined(door) as (caller, served):
        if has_one_ended:
            with contextlib.suppress(OSError):  # it may be cut already
                caller.shutdown(socket.SHUT_WR)
        for end in (caller, served):
            with contextlib.suppress(ConnectionResetError):
                assert end.recv(1) == b""
        wait_until(lambda: door.traffic()[RUN].connections == 0)


def test_a_slow_reader_slows_the_sender_and_loses_nothing():
    """Also one that reads nothing for longer than a silence may last, and says that it is alive."""
    with opened(link_mbps=0, idle_s=1.0) as door, joined(door) as (caller, served):
        sent, data = 0, random.randbytes(1 << 20)
        caller.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            while True:  # until all buffers on the way are full
                sent += caller.send(data[sent % len(data) :])
        assert door.traffic()[RUN].relayed_bytes <= sent
        for _ in range(15):
            served.sendall(b"-")
            time.sleep(0.1)
        caller.shutdown(socket.SHUT_WR)
        expected = (data * (sent // len(data) + 1))[:sent]
        assert read_to_end(served) == expected


@pytest.mark.parametrize("limit", ["connections", "per_address", "strangers"])
def test_connections_are_bounded(limit):
    with opened(preamble_s=PATIENCE, **{limit: 2}) as door:
        kept = [knock(door), knock(door)]
        assert all(line(caller).startswith("thinwire-door") for caller in kept)
        with pytest.raises(WireError, match="the door refused: there are too many connections"):
            ping(Route(door.address, token=TOKEN), f"{RUN}/door")
        kept.pop().close()
        wait_until(lambda: len(door._callers) == 1)
        ping(Route(door.address, token=TOKEN), f"{RUN}/door")


def test_the_addresses_of_one_ipv6_line_count_as_one():
    assert home_of("192.0.2.7") == "192.0.2.7"
    assert home_of("::ffff:192.0.2.7") == "::ffff:192.0.2.7"
    assert home_of("2001:db8:1:2::a") == home_of("2001:db8:1:2:ffff::1%eth0") == "2001:db8:1:2::/64"
    assert home_of("2001:db8:1:3::a") != home_of("2001:db8:1:2::a")


def test_a_door_on_all_addresses_sees_callers_as_they_are():
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with Door("::", 0) as door:
        door.admit(RUN, TOKEN)
        for host in ("127.0.0.1", "[::1]"):
            seen = ping(Route(f"{host}:{door.port}", token=TOKEN), f"{RUN}/door")
            assert seen.address.startswith(f"{host}:")


def test_connections_of_a_run_and_of_one_member_are_bounded():
    with Door("127.0.0.1", 0, Limits(per_run=3, per_member=2)) as door:
        door.admit(RUN, "ana.x", "ben.y")

        def wait(name, token):
            held.append(ask(door, "wait", f"{RUN}/cut-{name}", token))
            return line(held[-1])

        held: list[socket.socket] = []
        assert [wait(name, "ana.x") for name in "ab"] == ["ok", "ok"]
        assert wait("c", "ana.x") == "no ana has 2 connections here, the most"
        assert wait("c", "ben.y") == "ok"
        assert wait("d", "ben.y") == f"no run {RUN} has 3 connections here, the most"


def test_waiting_is_bounded_by_address_and_in_time():
    with relaying(per_address=1) as relay:
        waiting = ok(ask(relay, "wait", f"{RUN}/cut-a", "pass"))
        assert "too many connections" in line(knock(relay))
        waiting.close()
        wait_until(lambda: relay.traffic()[RUN].connections == 0)
        ok(ask(relay, "wait", f"{RUN}/cut-b", "pass"))
    with relaying(wait_s=0.1) as relay:
        waiting = ok(ask(relay, "wait", f"{RUN}/cut-a", "pass"))
        assert waiting.recv(1) == b"", "its time is over"


def test_nobody_else_can_say_that_a_caller_was_struck_off(service):
    """Whoever is on the way could end a peer by that word."""

    def answer(proof):
        with service.accept() as caller:
            caller.sendall(b"thinwire-door 3 abc\n")
            caller.recv(1000)
            caller.sendall(f"gone {proof} you were removed\n".encode())

    route, name = Route(service.address, token=TOKEN), f"{RUN}/door"
    right = proof_of(TOKEN, "abc", "gone", name)
    for proof, kind in (("0" * 64, WireError), (right, AdmissionError)):
        threading.Thread(target=answer, args=(proof,)).start()
        with pytest.raises(WireError, match="you were removed") as refused:
            ping(route, name)
        assert refused.type is kind


def test_the_latest_who_waits_is_called_and_the_oldest_gives_way():
    with opened(waiting_per_name=2) as door:
        waiting = [ok(ask(door, "wait", f"{RUN}/cut-a")) for _ in range(3)]
        assert waiting[0].recv(1) == b""
        caller = reach(door, "cut-a")
        assert line(waiting[2]) == "call 127.0.0.1"
        waiting[2].sendall(b"+hello")
        assert ok(caller).recv(5) == b"hello"


def test_one_who_waits_and_does_not_answer_is_passed_over():
    with opened(answer_s=2.0) as door:  # for the one that answers, too
        alive, gone, silent = (ok(ask(door, "wait", f"{RUN}/cut-a")) for _ in range(3))
        gone.close()
        wait_until(lambda: door.traffic()[RUN].waiting == 2)
        caller = reach(door, "cut-a")
        assert line(alive) == "call 127.0.0.1"  # once the silent one had its time
        alive.sendall(b"+")
        ok(caller)
        assert line(silent) == "call 127.0.0.1" and silent.recv(1) == b""


def test_one_who_speaks_without_being_called_is_cut(door):
    waiter = ok(ask(door, "wait", f"{RUN}/cut-a"))
    waiter.sendall(b"+")
    assert waiter.recv(1) == b""
    assert "nobody waits for it" in line(reach(door, "cut-a"))


def test_a_relay_admits_every_run_that_knows_its_pass():
    with relaying(5, runs=2) as relay:
        held = [ok(ask(relay, "wait", f"{RUN}/cut-a", "pass"))]
        assert "is not the right one" in line(ask(relay, "wait", f"{OTHER_RUN}/cut-a", TOKEN))
        assert relay.traffic().keys() == {RUN}
        assert "nobody waits" in line(ask(relay, "reach", f"{OTHER_RUN}/cut-a", "pass"))
        # Runs that have nobody here any more give way to others; those that have do not.
        assert line(ask(relay, "ping", f"{OTHER_RUN}/cut-a", "pass")).startswith("ok ")
        wait_until(lambda: relay.traffic()[OTHER_RUN].connections == 0)
        held.append(ok(ask(relay, "wait", f"{'0' * 16}/cut-a", "pass")))
        fourth = ask(relay, "wait", f"{'1' * 16}/cut-a", "pass")
        assert line(fourth) == "no 2 runs meet at this door already, the most"
        assert relay.traffic().keys() == {RUN, "0" * 16}


@pytest.mark.parametrize(("mbps", "link_mbps"), [(8.0, 0.0), (0.0, 8.0)])
def test_what_passes_between_others_stays_below_the_bound(service, mbps, link_mbps):
    """Of the run, or where it has none, of each link."""
    with relaying(mbps, link_mbps=link_mbps) as relay:
        route = Route(relay.address, token="pass")
        with Standby(f"{RUN}/cut-a", route, service.take) as standby:
            wait_until(lambda: len(standby.waiting) == 2)
            caller, served = ok(ask(relay, "reach", f"{RUN}/cut-a", "pass")), service.accept()
            begin = time.monotonic()
            threading.Thread(
                target=lambda: (caller.sendall(bytes(800_000)), caller.shutdown(socket.SHUT_WR))
            ).start()
            assert len(read_to_end(served)) == 800_000
            # A loaded machine may take longer; nothing makes it faster than 10^6 bytes a second.
            assert time.monotonic() - begin >= 0.8 - 0.25
            served.close()


def test_a_ping_tells_our_address(door):
    seen = ping(Route(door.address, token=TOKEN), f"{RUN}/door")
    assert seen.address.startswith("127.0.0.1:")
    assert 0 < seen.round_trip_s < PATIENCE
    assert ping(Route(door.address, token=TOKEN), f"{RUN}/door").address != seen.address


def test_pings_of_what_is_no_door_say_so(service):
    def answer(said):
        with service.accept() as caller:
            caller.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                caller.recv(1)

    for said, reason in [
        (b"SSH-2.0-x\r\n", "what listens there is not a thinwire door"),
        (b"thinwire-door 2 abc\n", "the door has version 2 and this process 3: install the same"),
        (b"x" * 1000, "a line at a door has at most"),
    ]:
        threading.Thread(target=answer, args=(said,)).start()
        with pytest.raises(WireError, match=f"{service.address}: {reason}"):
            ping(Route(service.address), f"{RUN}/door", PATIENCE)
    with pytest.raises(WireError, match="no answer within"):  # nobody speaks
        ping(Route(service.address), f"{RUN}/door", timeout=0.1)
    service.close()
    with pytest.raises(WireError, match="Connection refused"):
        ping(Route(service.address), f"{RUN}/door")


def test_a_port_in_use_and_addresses_that_are_none(door):
    with pytest.raises(WireError, match=r"port .*: Address already in use"):
        Door("127.0.0.1", door.port)
    assert split_address("[::1]:80") == ("::1", 80)
    for address in ("", "host", "host:", ":80", "host:x", "host:99999"):
        with pytest.raises(WireError, match="is not an address: write HOST:PORT"):
            split_address(address)


def test_closing_cuts_all_and_ends_every_thread(service):
    before = set(threading.enumerate())
    door = Door("127.0.0.1", 0)
    door.admit(RUN, TOKEN)
    door.serve(f"{RUN}/control", service.take)
    ends = knock(door), ok(reach(door, "control")), ok(ask(door, "wait", f"{RUN}/cut-a"))
    standby = Standby(f"{RUN}/cut-b", Route(door.address, token=TOKEN), service.take)
    wait_until(lambda: len(standby.waiting) == 2)
    door.close()
    for end in ends:
        with contextlib.suppress(ConnectionResetError):
            read_to_end(end)
    service.accept().close()
    standby.close()
    door.close()  # a second time does nothing
    wait_until(lambda: set(threading.enumerate()) <= before)
    Door("127.0.0.1", door.port).close()
