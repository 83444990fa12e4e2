"""Enrolment over real sockets: who is let in, and what others learn."""

import contextlib
import json
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest

from thinwire.errors import AdmissionError, ConfigError, WireError
from thinwire.run.admission import (
    AuthorityBook,
    Invite,
    ask,
    enrol,
    identity_in,
    own_key,
    saved_identity,
    serve_enrolment,
)
from thinwire.wire import Door, Identity, Listener, Route, Routes, Standby, dial, ping
from waiting import PATIENCE, wait_until

MAX_MESSAGE = 1 << 16


@pytest.fixture
def book(tmp_path):
    return AuthorityBook(tmp_path / "host" / "authority", "first")


@pytest.fixture
def listener(book):
    listener = Listener(book.identity, "127.0.0.1", 0, MAX_MESSAGE, who=book.name_of)
    serve_enrolment(listener, book)
    yield listener
    listener.close()


@pytest.fixture
def way(listener):
    return Routes("", listener.address)


def new_key():
    return Identity.create("").key_pem


def invite_of(book, **more):
    return Invite.parse(str(book.invite(["127.0.0.1:1"], **more)))


def exchange(listener, identity, whom):
    """What arrives of a message that this identity sends."""
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, "lobby", PATIENCE, identity.name)
        try:
            pipe = dial(listener.address, "lobby", identity, whom, PATIENCE, MAX_MESSAGE)
        except WireError:
            listener.close()  # ends the wait
            raise
        pipe.write(b"hello")
        heard = accepted.result().read()
        pipe.close(0.1)
        return bytes(heard or b"")


def test_an_invite_puts_a_key_on_the_list_that_opens_links_until_it_is_kicked(book, way, listener):
    key, invite = new_key(), invite_of(book, machines=2)
    ada, bob = enrol(way, invite, key, "ada"), enrol(way, invite, new_key(), "bob")
    assert ada == Identity("ada", key, book.identity.public)
    assert book.key_of("ada") == ada.fingerprint
    wrong = replace(invite_of(book), secret="00" * 16)
    with pytest.raises(AdmissionError, match="the host refused: wrong invite"):
        enrol(way, wrong, new_key(), "eve")
    assert exchange(listener, ada, book.fingerprint) == b"hello"
    to = "lobby", Identity.create("eve"), book.fingerprint, PATIENCE, MAX_MESSAGE
    with pytest.raises(AdmissionError, match="is not welcome there"):
        dial(listener.address, *to)  # who never enrolled
    book.kick("ada")
    with pytest.raises(AdmissionError, match="was removed from this run by its host"):
        enrol(way, invite, key)
    assert exchange(listener, bob, book.fingerprint) == b"hello"
    with pytest.raises(AdmissionError, match="is not welcome there; its host removed this peer"):
        exchange(listener, ada, book.fingerprint)


def test_many_machines_enrol_at_once(book, way):
    """An invite for one machine admits one of them, whoever is first."""
    once, several = invite_of(book), invite_of(book, machines=8)

    def outcome(invite):
        try:
            return enrol(way, invite, new_key()).name
        except AdmissionError:
            return ""

    with ThreadPoolExecutor(8) as pool:
        assert sum(map(bool, pool.map(outcome, [once] * 8))) == 1
        names = list(pool.map(outcome, [several] * 8))
    assert all(names) and len(set(names)) == 8


def test_who_stands_between_learns_nothing(book, way):
    """Not even a peer of the run: it has another key, and so nothing is said to it."""
    invite, heard = invite_of(book), []
    own = enrol(way, invite, new_key(), "eve")
    impostor = Listener(own, "127.0.0.1", 0, MAX_MESSAGE)
    impostor.serve("enrol", lambda stream: heard.append(stream.read()))
    with pytest.raises(AdmissionError, match="another run answers at the address of the invite"):
        enrol(Routes("", impostor.address), invite, new_key(), "ada")
    impostor.close()
    assert heard == []


def test_a_host_that_is_not_there_or_silent_is_given_up(book, monkeypatch):
    monkeypatch.setattr("thinwire.run.admission.EXCHANGE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        way = Routes("", "{}:{}".format(*silent.getsockname()))
        with pytest.raises(WireError, match="said nothing"):
            enrol(way, invite_of(book), new_key())
    with pytest.raises(WireError, match="Connection refused"):
        enrol(way, invite_of(book), new_key())


def test_a_request_that_breaks_the_rules_ends_the_exchange(book, listener):
    stranger = Identity.create("x")
    for said in (b"true", b"\xff{}", b"[" * 4000, b'{"invite": 17}'):
        stream = dial(listener.address, "enrol", stranger, book.fingerprint, PATIENCE, MAX_MESSAGE)
        with contextlib.closing(stream):
            stream.write(said)
            assert b"lacks a part" in bytes(stream.read() or b"")
    assert book.peers() == []


def test_trouble_of_the_host_is_told_to_it_and_not_to_strangers(book, listener, way, monkeypatch):
    noted = []
    serve_enrolment(listener, book, noted.append)
    full = ConfigError(f"cannot write {book.folder}/book.json: No space left on device")
    invite = invite_of(book)
    monkeypatch.setattr(book, "_save", Mock(side_effect=full))
    with pytest.raises(AdmissionError, match="cannot enrol peers at the moment") as refusal:
        enrol(way, invite, new_key())
    assert str(book.folder) not in str(refusal.value)
    assert noted == [f"a machine could not join: {full}"]


@contextlib.contextmanager
def host_door(book, listener, is_relayed):
    """An invite to a host that is found by its own door, or waits at a relay."""
    with (
        Door("127.0.0.1", 0) as door,
        Door("127.0.0.1", 0) as relay,
        contextlib.ExitStack() as held,
    ):
        name = f"{book.run_id}/enrol"
        route = Route(relay.address, "relayed", "open-sesame")
        invite = book.invite([door.address], route, machines=9)
        if is_relayed:  # the host's own door is shut
            relay.admit_any("open-sesame")
            standby = Standby(name, route, listener.take, prover=book.identity.prove)
            held.enter_context(standby)
            wait_until(lambda: standby.waiting)
        else:
            door.admit_by(book.run_id, book.grant_of)
            door.serve(name, listener.take)
        yield Invite.parse(str(invite))


@pytest.mark.parametrize("is_relayed", [False, True], ids=["direct", "relayed"])
def test_a_host_opens_no_connection_but_to_where_its_caller_comes_from(
    book, listener, is_relayed, monkeypatch
):
    """Else whoever has an invite looks around in the host's network, port by port."""
    with (
        socket.create_server(("127.0.0.2", 0)) as inner,
        socket.create_server(("127.0.0.1", 0)) as own,
        host_door(book, listener, is_relayed) as invite,
    ):
        silent = "{}:{}".format(*own.getsockname())
        monkeypatch.setattr(
            "thinwire.run.admission.ping",
            lambda route, name: ping(route, name, 0.5 if route.address == silent else PATIENCE),
        )
        to = invite.to_service("enrol")
        for listening, is_dialled in ((inner, False), (own, True)):
            asked = "{}:{}".format(*listening.getsockname())
            assert ask(to, invite, door=asked).reached == ("no" if is_dialled else "")
            listening.settimeout(0)
            with contextlib.nullcontext() if is_dialled else pytest.raises(BlockingIOError):
                listening.accept()[0].close()
        with Door("127.0.0.1", 0) as ours, Door("127.0.0.1", 0) as other:
            ours.admit(invite.run_id, invite.door_token)
            assert ask(to, invite, door=ours.address).reached == "yes"
            assert ask(to, invite, door=other.address).reached == "no"
            assert ask(to, invite, door="nowhere").reached == ""
            answer = ask(to, replace(invite, secret="00" * 16), door=ours.address)
        assert answer.refused and answer.reached == ""
        identity = enrol(to, invite, new_key())  # all it has is the invite
        assert book.is_welcome(identity.name)


def test_a_machine_keeps_its_identity(book, way, tmp_path):
    folder, invite = tmp_path / "ada" / "peers" / book.run_id, invite_of(book)
    assert saved_identity(folder, book.fingerprint) is None
    first = identity_in(folder, way, invite)
    nowhere = Routes("", "127.0.0.1:1")
    assert identity_in(folder, nowhere, invite, first.name) == first, "nobody is asked"
    assert saved_identity(folder, Identity.create("x").fingerprint) is None, "of another run"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {"key.pem": 0o600, "peer.json": 0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with pytest.raises(AdmissionError, match=f"as '{first.name}' before"):
        identity_in(folder, way, invite, "bob")
    (folder / "peer.json").write_text(json.dumps({"name": first.name})[:9])
    assert identity_in(folder, way, invite).name == first.name
    (folder / "key.pem").write_text("x")
    with pytest.raises(ConfigError, match=r"key\.pem is damaged: remove it"):
        own_key(folder)
