"""Enrolment over real sockets: who is let in, and what others learn."""

import contextlib
import json
import socket
import ssl
import stat
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import thinwire
from thinwire.errors import AdmissionError, ConfigError, WireError
from thinwire.remote.authority import AuthorityBook
from thinwire.remote.enrol import MOST_AT_ONCE, EnrolServer, HostSays, ask, enrol, identity_in
from thinwire.remote.identity import (
    identity_of,
    own_key,
    saved_identity,
)
from thinwire.remote.invite import Invite
from thinwire.wire import Authority, Door, Identity, Listener, Route, Standby, Tunnel, dial
from thinwire.wire.tls import new_key, signing_request

PATIENCE = 30.0
MAX_MESSAGE = 1 << 16


@pytest.fixture
def book(tmp_path: Path) -> AuthorityBook:
    return AuthorityBook(tmp_path / "host" / "authority", "first")


@pytest.fixture
def server(book: AuthorityBook) -> Iterator[EnrolServer]:
    with EnrolServer(book) as server:
        yield server


@pytest.fixture
def listener(book: AuthorityBook) -> Iterator[Listener]:
    listener = Listener(book.coordinator(), "127.0.0.1", 0, MAX_MESSAGE, is_welcome=book.is_welcome)
    yield listener
    listener.close()


def invite_of(book: AuthorityBook, server: EnrolServer, **more: object) -> Invite:
    return Invite.parse(str(book.invite([server.address], **more)))  # type: ignore[arg-type]


def exchange(listener: Listener, identity: Identity, name: str = "lobby") -> bytes:
    """What arrives of a message that this identity sends."""
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, name, PATIENCE)
        try:
            pipe = dial(listener.address, name, identity, "coordinator", PATIENCE, MAX_MESSAGE)
        except WireError:
            listener.close()  # ends the wait
            raise
        pipe.write(b"hello")
        heard = accepted.result().read()
        pipe.close(0.1)
        return heard or b""


class Impostor:
    """Listens where an invite points, shows what it has, and keeps all that it hears."""

    def __init__(self, identity: Identity, greeting: dict[str, str], folder: Path) -> None:
        self.heard = b""
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        pem = folder / "impostor.pem"
        pem.write_text(identity.key_pem + identity.certificate_pem)
        self._context.load_cert_chain(pem)
        self._greeting = json.dumps(greeting).encode()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._socket.getsockname())
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        caller, _ = self._socket.accept()
        with contextlib.suppress(OSError), self._context.wrap_socket(caller, True) as connection:
            connection.sendall(struct.pack(">I", len(self._greeting)) + self._greeting)
            while part := connection.recv(1 << 16):
                self.heard += part

    def end(self) -> bytes:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self._socket.close()
        return self.heard


def test_an_invite_gives_an_identity_that_opens_links(
    book: AuthorityBook, server: EnrolServer, listener: Listener
) -> None:
    key = new_key()
    identity = enrol(server.address, invite_of(book, server), key, "ada")
    assert (identity.name, identity.key_pem) == ("ada", key)
    assert identity.authority_fingerprint == book.authority.fingerprint
    assert exchange(listener, identity) == b"hello"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda i: {"secret": "00" * 16}, "wrong invite"),
        (lambda i: {"invite_id": "00000000"}, "wrong invite"),
    ],
)
def test_a_wrong_invite_is_refused(
    book: AuthorityBook, server: EnrolServer, spoil: object, reason: str
) -> None:
    invite = invite_of(book, server)
    changed = Invite(**{**vars(invite), **spoil(invite)})  # type: ignore[operator]
    with pytest.raises(AdmissionError, match=reason) as refusal:
        enrol(server.address, changed, new_key(), "ada")
    assert invite.secret not in str(refusal.value)
    assert book.peers() == []


def test_an_expired_and_a_used_invite_are_refused(book: AuthorityBook, server: EnrolServer) -> None:
    with pytest.raises(AdmissionError, match="the host refused: this invite expired at"):
        enrol(server.address, invite_of(book, server, lasts=-1.0), new_key())
    once, key = invite_of(book, server), new_key()
    name = enrol(server.address, once, key).name
    with pytest.raises(AdmissionError, match="the host refused: this invite was for one machine"):
        enrol(server.address, once, new_key())
    assert enrol(server.address, once, key).name == name


def test_two_machines_cannot_have_one_name(book: AuthorityBook, server: EnrolServer) -> None:
    invite = invite_of(book, server, machines=2)
    enrol(server.address, invite, new_key(), "ada")
    with pytest.raises(AdmissionError, match="called 'ada': choose another --name"):
        enrol(server.address, invite, new_key(), "ada")


def test_many_machines_enrol_at_once(book: AuthorityBook, server: EnrolServer) -> None:
    """An invite for one machine admits one of them, whoever is first."""
    once, several = invite_of(book, server), invite_of(book, server, machines=8)

    def outcome(invite: Invite) -> str:
        try:
            return enrol(server.address, invite, new_key()).name
        except AdmissionError:
            return ""

    with ThreadPoolExecutor(8) as pool:
        assert sum(map(bool, pool.map(outcome, [once] * 8))) == 1
        names = list(pool.map(outcome, [several] * 8))
    assert all(names) and len(set(names)) == 8


@pytest.mark.parametrize("who", ["another authority", "a borrowed authority", "an enrolled peer"])
def test_who_stands_between_learns_nothing(
    book: AuthorityBook, server: EnrolServer, tmp_path: Path, who: str
) -> None:
    invite = invite_of(book, server)
    shown = book.authority.certificate_pem  # anybody can get it, and show it
    match who:
        case "another authority":
            own = Authority.create("first").issue("coordinator")
            shown, reason = own.authority_pem, "another run answers"
        case "a borrowed authority":
            own = Authority.create("first").issue("coordinator")
            reason = "not the run's coordinator"
        case _:
            own = enrol(server.address, invite, new_key(), "eve")
            reason = "not the run's coordinator"
    impostor = Impostor(own, {"authority": shown}, tmp_path)
    with pytest.raises(AdmissionError, match=reason):
        enrol(impostor.address, invite, new_key(), "ada")
    assert impostor.end() == b"", "neither the secret nor the request"


def test_what_answers_without_a_certificate_is_no_host(
    book: AuthorityBook, server: EnrolServer, tmp_path: Path
) -> None:
    impostor = Impostor(Authority.create("x").issue("coordinator"), {"colour": "red"}, tmp_path)
    with pytest.raises(WireError, match="not the enrolment service of a run"):
        enrol(impostor.address, invite_of(book, server), new_key())
    assert impostor.end() == b""


def test_a_host_that_is_not_there_is_named(book: AuthorityBook, server: EnrolServer) -> None:
    invite = invite_of(book, server)
    server.close()
    with pytest.raises(WireError, match=r"cannot enrol at .*is the host running\?"):
        enrol(server.address, invite, new_key())


def test_a_silent_host_is_given_up(book: AuthorityBook, server: EnrolServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        with pytest.raises(WireError, match="cannot enrol at"):
            enrol(address, invite_of(book, server), new_key(), timeout=0.3)


@pytest.mark.parametrize(
    "first", [b"", b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01\xff\xff", bytes(1000), b"\x16"]
)
def test_a_stranger_has_little_time(book: AuthorityBook, first: bytes) -> None:
    with EnrolServer(book, exchange_s=0.2) as server:
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port)), PATIENCE) as caller:
            caller.sendall(first)
            with contextlib.suppress(ConnectionError):
                while caller.recv(1 << 12):
                    pass
        assert enrol(server.address, invite_of(book, server), new_key())


def test_those_who_hold_connections_keep_nobody_out(book: AuthorityBook) -> None:
    before = threading.active_count()
    with EnrolServer(book) as server, contextlib.ExitStack() as held:
        host, port = server.address.split(":")
        idle = [
            held.enter_context(socket.create_connection((host, int(port)), PATIENCE))
            for _ in range(2 * MOST_AT_ONCE)
        ]
        assert idle[0].recv(1) == b"", "the oldest had to go"
        assert threading.active_count() < before + 3 * MOST_AT_ONCE
        assert enrol(server.address, invite_of(book, server), new_key())


def _enrol_when_free(server: EnrolServer | Tunnel, invite: Invite) -> Identity:
    for _ in range(100):
        with contextlib.suppress(WireError):
            return enrol(server.address, invite, new_key())
        threading.Event().wait(0.1)
    raise AssertionError("nobody is served")


@pytest.mark.parametrize(
    "said",
    [
        struct.pack(">I", 1 << 31),
        struct.pack(">I", 4) + b"true",
        struct.pack(">I", 3) + b"\xff{}",
        struct.pack(">I", 16 << 10) + b"[" * (16 << 10),
    ],
    ids=["endless", "not an object", "not JSON", "deep"],
)
def test_a_request_that_breaks_the_rules_ends_the_exchange(
    book: AuthorityBook, server: EnrolServer, said: bytes
) -> None:
    with _stranger(server) as connection:
        connection.sendall(said)
        assert connection.recv(1 << 16) == b""
    assert book.peers() == []


def test_a_request_that_lacks_a_part_is_told_so(server: EnrolServer) -> None:
    with _stranger(server) as connection:
        connection.sendall(struct.pack(">I", 14) + b'{"invite": 17}')
        assert b"lacks a part" in connection.recv(1 << 16)


@contextlib.contextmanager
def _stranger(server: EnrolServer) -> Iterator[ssl.SSLSocket]:
    """One who trusts anybody, and has heard the greeting."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, port = server.address.split(":")
    with context.wrap_socket(socket.create_connection((host, int(port)), PATIENCE)) as connection:
        (size,) = struct.unpack(">I", connection.recv(4))
        while size:
            size -= len(connection.recv(size))
        yield connection


def test_trouble_of_the_host_is_not_told_to_strangers(
    book: AuthorityBook, server: EnrolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ConfigError(f"cannot write {book.folder}/book.json: No space left on device")

    invite = invite_of(book, server)
    monkeypatch.setattr(book, "_save", fail)
    with pytest.raises(AdmissionError, match="cannot enrol peers at the moment") as refusal:
        enrol(server.address, invite, new_key())
    assert str(book.folder) not in str(refusal.value)


def test_asking_uses_nothing_up(book: AuthorityBook, server: EnrolServer) -> None:
    once, key = invite_of(book, server), new_key()
    assert ask(server.address, once) == HostSays(thinwire.__version__, "")
    assert ask(server.address, once, key) == HostSays(thinwire.__version__, "")
    name = enrol(server.address, once, key).name
    assert "has been used" in ask(server.address, once).refusal
    assert "has been used" in ask(server.address, once, new_key()).refusal
    assert ask(server.address, once, key).refusal == ""
    book.kick(name)
    assert "was removed" in ask(server.address, once, key).refusal
    assert "expired" in ask(server.address, invite_of(book, server, lasts=-1.0)).refusal


def test_the_host_says_whether_it_reaches_a_door_of_its_run(
    book: AuthorityBook, server: EnrolServer
) -> None:
    invite = invite_of(book, server)
    with Door("127.0.0.1", 0) as ours, Door("127.0.0.1", 0) as other, host_door(book) as way:
        ours.admit(invite.run_id, invite.door_token)
        assert ask(way, invite, door=ours.address).reached is True
        assert ask(way, invite, door=other.address).reached is False
        assert ask(way, invite, door="nowhere").reached is None
        wrong = Invite(**{**vars(invite), "secret": "00" * 16})
        answer = ask(way, wrong, door=ours.address)
        assert "wrong invite" in answer.refusal and answer.reached is None
        ours.close()
        assert ask(way, invite, door=ours.address).reached is False


@pytest.mark.parametrize("way", ["direct", "relayed"])
def test_a_host_opens_no_connection_but_to_where_its_caller_comes_from(
    book: AuthorityBook, server: EnrolServer, way: str
) -> None:
    """Else whoever has an invite looks around in the host's network, port by port."""
    invite = invite_of(book, server)
    with (
        socket.create_server(("127.0.0.2", 0)) as inner,
        socket.create_server(("127.0.0.1", 0)) as own,
        host_door(book, is_relayed=way == "relayed") as address,
    ):
        for listening, is_dialled in ((inner, False), (own, True)):
            asked = "{}:{}".format(*listening.getsockname())
            assert ask(address, invite, door=asked).reached is (False if is_dialled else None)
            listening.settimeout(0)
            with contextlib.nullcontext() if is_dialled else pytest.raises(BlockingIOError):
                listening.accept()[0].close()
        assert ask(server.address, invite, door=asked).reached is None, "it came by no door"


@contextlib.contextmanager
def host_door(book: AuthorityBook, is_relayed: bool = False) -> Iterator[str]:
    """The local end of a way to the enrolment of a host: by its own door, or by a relay."""
    with contextlib.ExitStack() as held:
        door = held.enter_context(Door("127.0.0.1", 0))
        server = held.enter_context(EnrolServer(book, door.origins))
        name, invite = f"{book.run_id}/enrol", book.invite([door.address])
        route = Route(door.address, token=invite.door_token)
        if is_relayed:
            relay = held.enter_context(Door("127.0.0.1", 0))
            relay.admit_any("open-sesame")
            route = Route(relay.address, "relayed", "open-sesame")
            prover, origins = book.authority.prover(), door.origins
            standby = Standby(name, route, server.address, prover=prover, origins=origins)
            held.enter_context(standby)
            while not standby.waiting:
                threading.Event().wait(0.01)
        else:
            door.admit_by(book.run_id, book.grant_of)
            door.serve(name, server.address)
        yield held.enter_context(Tunnel(name, [route])).address


@pytest.mark.parametrize("way", ["direct", "relayed"])
def test_enrolment_passes_doors(book: AuthorityBook, server: EnrolServer, way: str) -> None:
    """A joining machine has the invite and nothing else: neither a port nor a certificate."""
    with (
        Door("127.0.0.1", 0) as door,
        Door("127.0.0.1", 0) as relay,
        contextlib.ExitStack() as held,
    ):
        name = f"{book.run_id}/enrol"
        if way == "direct":
            door.admit_by(book.run_id, book.grant_of)
            door.serve(name, server.address)
        else:  # the host's own door is shut, and it waits at the relay
            relay.admit_any("open-sesame")
            route = Route(relay.address, "relayed", "open-sesame")
            prover = book.authority.prover()
            held.enter_context(Standby(name, route, server.address, prover=prover))
        invite = Invite.parse(str(book.invite([door.address], relay.address, "open-sesame")))
        with Tunnel(invite.service("enrol"), invite.routes()) as tunnel:
            identity = _enrol_when_free(tunnel, invite)
    assert book.is_welcome(identity.name)


def test_a_kicked_peer_opens_no_more_links(
    book: AuthorityBook, server: EnrolServer, listener: Listener
) -> None:
    invite = invite_of(book, server, machines=2)
    ada = enrol(server.address, invite, new_key(), "ada")
    bob = enrol(server.address, invite, new_key(), "bob")
    assert exchange(listener, ada) == exchange(listener, bob) == b"hello"
    book.kick("ada")
    with pytest.raises(AdmissionError, match="was removed from this run by its host"):
        enrol(server.address, invite, ada.key_pem)
    assert exchange(listener, bob) == b"hello"
    with pytest.raises(AdmissionError, match="refused: 'ada' is not welcome there"):
        exchange(listener, ada)  # at once: its certificate itself stays valid


def test_a_certificate_of_the_authority_alone_opens_nothing(
    book: AuthorityBook, listener: Listener
) -> None:
    """A name that never enrolled is not welcome, whoever signed it."""
    with pytest.raises(AdmissionError, match="'eve' is not welcome there"):
        exchange(listener, book.authority.issue("eve"))


def test_a_machine_keeps_its_identity(
    book: AuthorityBook, server: EnrolServer, tmp_path: Path
) -> None:
    folder, invite = tmp_path / "ada" / "peers" / book.run_id, invite_of(book, server)
    assert saved_identity(folder) is None
    first = identity_in(folder, server.address, invite)
    assert identity_in(folder, "127.0.0.1:1", invite, first.name) == first, "nobody is asked"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {"key.pem": 0o600, "certificate.pem": 0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with pytest.raises(AdmissionError, match=f"as '{first.name}' before"):
        identity_in(folder, server.address, invite, "bob")


def test_what_is_kept_can_be_damaged(
    book: AuthorityBook, server: EnrolServer, tmp_path: Path
) -> None:
    folder, invite = tmp_path / "ada", invite_of(book, server)
    first = identity_in(folder, server.address, invite)
    (folder / "certificate.pem").write_text(first.certificate_pem[:50])
    assert identity_in(folder, server.address, invite).name == first.name
    (folder / "key.pem").write_text("x")
    with pytest.raises(ConfigError, match=r"key\.pem is damaged: remove it"):
        own_key(folder)


def test_a_certificate_for_another_key_is_refused(book: AuthorityBook) -> None:
    certificate = book.authority.sign(signing_request(new_key()), "ada")
    with pytest.raises(WireError, match="for another key, or of another run"):
        identity_of(certificate, new_key(), book.authority.certificate_pem)
    other = Authority.create("other").certificate_pem
    key = new_key()
    certificate = book.authority.sign(signing_request(key), "ada")
    with pytest.raises(WireError, match="for another key, or of another run"):
        identity_of(certificate, key, other)
    with pytest.raises(WireError, match="not a certificate"):
        identity_of("", key, other)


def test_nothing_is_printed_or_logged(
    book: AuthorityBook,
    server: EnrolServer,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    invite = invite_of(book, server)
    enrol(server.address, invite, new_key())
    with pytest.raises(AdmissionError):
        enrol(server.address, Invite(**{**vars(invite), "invite_id": "00000000"}), new_key())
    said = capfd.readouterr()
    assert said.out + said.err + caplog.text == ""
