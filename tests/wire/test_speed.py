"""Rates and round trips through a door: as they are, and bounded in what they cost."""

import contextlib
import select
import socket

import pytest
from knocking import RUN, TOKEN
from wiring import HOST

from thinwire.background import on_daemon_thread
from thinwire.errors import WireError
from thinwire.wire import Door, Route, Standby, speed
from thinwire.wire.speed import SpeedService, measure_link
from waiting import PATIENCE, wait_until


@pytest.fixture
def service():
    return SpeedService()


@pytest.fixture
def door(service):
    with Door("127.0.0.1", 0) as door:
        door.admit(RUN, TOKEN)
        door.serve(f"{RUN}/speed", service.take)
        yield door


def test_a_link_is_measured_through_the_hosts_door(door):
    rates = measure_link([Route(door.address, token=TOKEN)], RUN)
    assert rates.mbps_up > 0 and rates.mbps_down > 0
    assert 0 < rates.round_trip_s < PATIENCE


def test_a_bounded_way_is_found_to_be_slow(service):
    """A relay that passes 8 Mbit/s: whoever receives takes the time, so buffers do not flatter."""
    with Door("127.0.0.1", 0) as relay:
        run = HOST.fingerprint[:16]
        relay.admit_any(TOKEN, mbps=8.0)
        route = Route(relay.address, "relayed", TOKEN)
        with Standby(f"{run}/speed", route, service.take, prover=HOST.prove) as standby:
            wait_until(lambda: standby.waiting)
            rates = measure_link([Route("127.0.0.1:9", token=TOKEN), route], run, seconds=0.5)
    # What was saved up in a quarter of a second passes at once, and what waited for a reader too;
    # unbounded it would be thousands.
    assert 0 < rates.mbps_up < 80 and 0 < rates.mbps_down < 80


def test_why_nothing_can_be_measured_is_said(door):
    with pytest.raises(WireError, match=r"could not be measured: .*not the right one"):
        measure_link([Route(door.address, token="another")], RUN)
    with pytest.raises(WireError, match="no route is known"):
        measure_link([], RUN)
    with Door("127.0.0.1", 0) as other, pytest.raises(WireError, match="nobody waits for it"):
        other.admit(RUN, TOKEN)
        measure_link([Route(other.address, token=TOKEN)], RUN)


def caller_of(service):
    near, far = socket.socketpair()
    near.settimeout(PATIENCE)
    on_daemon_thread("service", lambda: service.take(far, ""))
    return near


@pytest.mark.parametrize("asked", [b"up 100\n", b"up nan\n", b"down -1\n", b"up\n", b"x" * 1000])
def test_what_is_out_of_bounds_is_cut_off(asked, service):
    with caller_of(service) as caller:
        caller.sendall(asked)
        with contextlib.suppress(ConnectionResetError):  # it may hang up with bytes unread
            assert caller.recv(100) == b""


def test_only_a_few_are_served_at_a_time_and_one_burst_goes_after_the_other(service, monkeypatch):
    """Bursts that last until their caller hangs up, however slow this test is."""

    def burst(caller, wish, seconds):
        caller.settimeout(PATIENCE)
        caller.sendall(b"go\n")
        caller.recv(1)

    monkeypatch.setattr(speed, "_burst", burst)
    monkeypatch.setattr(speed, "_TURN_S", PATIENCE)
    with contextlib.ExitStack() as held:
        callers = [held.enter_context(caller_of(service)) for _ in range(16)]
        for caller in callers:
            caller.sendall(b"up 3\n")
            assert caller.recv(5) == b"here\n"
        with caller_of(service) as beyond:
            assert beyond.recv(1) == b""
        for _ in range(3):
            (measured,), _, _ = select.select(callers, [], [], PATIENCE)
            assert measured.recv(3) == b"go\n"
            callers.remove(measured)
            assert not select.select(callers, [], [], 0.1)[0], "no other before that has ended"
            measured.close()
