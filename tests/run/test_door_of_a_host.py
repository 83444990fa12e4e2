"""What peers, invites and those who were removed may at the door of a host."""

import contextlib

import pytest

from thinwire.errors import AdmissionError, WireError
from thinwire.run.admission import AuthorityBook
from thinwire.wire import Door, Identity, Route, Traffic
from thinwire.wire.door import call
from waiting import PATIENCE, wait_until


class Host:
    """A book, and a door that asks it."""

    def __init__(self, folder, door):
        self.now = 1_800_000_000.0
        self.book = AuthorityBook(folder / "authority", "first", lambda: self.now)
        self.door = door
        door.admit_by(self.book.run_id, self.book.grant_of)
        for name in ("enrol", "control"):
            door.serve(f"{self.book.run_id}/{name}", _hold)

    def enrol(self, invite, name):
        identity = Identity.create(name, self.book.identity.public)
        self.book.enrol(invite.invite_id, invite.secret, identity.public, name)
        return identity

    def call(self, token, wish, service):
        """The connection that somebody gets with a token; an error says why it gets none."""
        name = f"{self.book.run_id}/{service}"
        connection, _ = call(Route(self.door.address, token=token), wish, name, PATIENCE)
        connection.settimeout(PATIENCE)
        return connection


@pytest.fixture
def host(tmp_path):
    with Door("127.0.0.1", 0) as door:
        yield Host(tmp_path, door)


def _hold(connection, home):
    """A service that says nothing, until its caller goes."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(PATIENCE)
        connection.recv(1)


def test_a_removed_peer_is_cut_off_from_the_door_and_others_stay(host):
    ana, ben = (host.enrol(host.book.invite(["h:1"]), name) for name in ("ana", "ben"))
    assert ana.door_token == host.book.door_token("ana")
    held = [
        host.call(one.door_token, wish, name)
        for one in (ana, ben)
        for wish, name in (("wait", f"cut-0@1.{one.name}"), ("reach", "control"))
    ]
    host.book.kick("ana")
    host.door.cut(host.book.run_id, "ana")
    for connection in held[:2]:
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    wishes = ("reach", "control"), ("reach", "enrol"), ("wait", "cut-0@2"), ("ping", "x")
    for wish, name in wishes:
        with pytest.raises(AdmissionError, match="'ana' was removed from this run by its host"):
            host.call(ana.door_token, wish, name)
    forged = f"ben.{ana.door_token.partition('.')[2]}"
    with pytest.raises(WireError, match=r"the token shown for run .* is not the right one"):
        host.call(forged, "reach", "control")
    wait_until(lambda: host.door.traffic()[host.book.run_id] == Traffic(2, 1, 0))  # those of ben


def test_an_invite_opens_the_enrolment_alone_and_only_while_it_is_good(host):
    invite = host.book.invite(["h:1"], lasts=60)
    host.call(invite.door_token, "reach", "enrol").close()
    for wish, name in (("reach", "control"), ("reach", "cut-0@1"), ("wait", "cut-0@1")):
        with pytest.raises(WireError, match="this token opens enrol and speed alone"):
            host.call(invite.door_token, wish, name)
    host.enrol(invite, "eve")
    host.now += 61
    with pytest.raises(AdmissionError, match="this invite expired at"):
        host.call(invite.door_token, "reach", "enrol")
    later = host.book.invite(["h:1"])
    host.enrol(later, "fay")
    host.book.kick("fay")
    with pytest.raises(AdmissionError, match="this invite was closed"):
        host.call(later.door_token, "reach", "enrol")
