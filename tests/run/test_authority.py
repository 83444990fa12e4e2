"""The book of a run: who may join, and for how long it remembers."""

import json
import os
import socket
import ssl
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from thinwire.errors import AdmissionError, ConfigError, WireError
from thinwire.run import authority as book_module
from thinwire.run.authority import AuthorityBook
from thinwire.run.invite import Invite
from thinwire.wire import Identity
from thinwire.wire.keys import dialing_context

DAY = 24 * 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(tmp_path: Path, clock: Clock) -> AuthorityBook:
    return AuthorityBook(tmp_path / "authority", "first", clock)


@pytest.fixture
def again(tmp_path: Path, clock: Clock) -> Callable[[], AuthorityBook]:
    """The book as the next process finds it."""
    return lambda: AuthorityBook(tmp_path / "authority", "first", clock)


def enrol(book: AuthorityBook, invite: Invite, key: str, name: str = "") -> str:
    """Enrol the holder of a public key; returns its name."""
    return book.enrol(invite.invite_id, invite.secret, key, name)


def new_key() -> str:
    return Identity.create("").public


def test_an_invite_lets_in_and_names_its_run(book: AuthorityBook) -> None:
    invite = Invite.parse(
        str(book.invite(["10.0.0.1:7000"], "relay.example:7001", "pass", machines=2))
    )
    assert (invite.run_name, invite.run_id) == ("first", book.run_id)
    assert (invite.relay, invite.relay_pass) == ("relay.example:7001", "pass")
    assert enrol(book, invite, new_key(), "ada") == "ada"
    drawn = enrol(book, invite, new_key())
    assert drawn.startswith("peer-")
    assert [peer.name for peer in book.peers()] == ["ada", drawn]
    assert book.is_welcome("ada") and not book.is_welcome("bob") and not book.is_welcome("")
    assert book.name_of(book.key_of("ada")) == "ada" and book.name_of("ab" * 32) is None


def test_a_wrong_secret_and_an_unknown_invite_get_the_same_answer(book: AuthorityBook) -> None:
    invite, public = book.invite(["h:1"]), new_key()
    refusals = []
    for invite_id, secret in (
        (invite.invite_id, "00" * 16),
        ("00000000", invite.secret),
        (invite.invite_id, ""),
        (invite.invite_id, "é"),
    ):
        with pytest.raises(AdmissionError, match="wrong invite") as refusal:
            book.enrol(invite_id, secret, public, "ada")
        refusals.append(str(refusal.value))
    assert len(set(refusals)) == 1 and book.peers() == []


def test_an_expired_invite_lets_in_nobody_new(book: AuthorityBook, clock: Clock) -> None:
    invite, key = book.invite(["h:1"], lasts=3600), new_key()
    enrol(book, invite, key, "ada")
    clock.now += 3601
    with pytest.raises(AdmissionError, match=r"expired at 2027-01-15 09:00 UTC: ask the host"):
        enrol(book, invite, new_key(), "bob")
    assert enrol(book, invite, key) == "ada", "who is known comes back"


def test_an_invite_is_for_one_machine(book: AuthorityBook) -> None:
    invite, key = book.invite(["h:1"]), new_key()
    assert enrol(book, invite, key, "ada") == "ada"
    with pytest.raises(AdmissionError, match="was for one machine and has been used"):
        enrol(book, invite, new_key(), "bob")
    assert enrol(book, invite, key, "ada") == "ada", "an answer may be lost: it asks again"


def test_a_refused_name_leaves_an_invite_unused(book: AuthorityBook) -> None:
    enrol(book, book.invite(["h:1"]), new_key(), "ada")
    invite, key = book.invite(["h:1"]), new_key()
    with pytest.raises(AdmissionError, match="another peer of this run is called 'ada'"):
        enrol(book, invite, key, "ada")
    assert enrol(book, invite, new_key(), "bob") == "bob"


@pytest.mark.parametrize(
    "name", ["coordinator", "host", "relay", "stage-0", "Ada", "a_b", "-a", "x" * 64, "a\nb"]
)
def test_names_that_no_peer_may_have(book: AuthorityBook, name: str) -> None:
    with pytest.raises(AdmissionError, match="a peer cannot be called"):
        enrol(book, book.invite(["h:1"]), new_key(), name)


def test_a_machine_has_one_name_in_a_run(book: AuthorityBook) -> None:
    invite, key = book.invite(["h:1"]), new_key()
    enrol(book, invite, key, "ada")
    with pytest.raises(AdmissionError, match=r"has joined the run as 'ada' before.*--folder"):
        enrol(book, invite, key, "bob")
    assert [peer.name for peer in book.peers()] == ["ada"]


def test_a_kicked_peer_is_refused_everywhere(book: AuthorityBook) -> None:
    invite, key, other = book.invite(["h:1"], machines=9), new_key(), new_key()
    enrol(book, invite, key, "ada")
    enrol(book, invite, other, "bob")
    book.kick("ada")
    assert not book.is_welcome("ada") and book.is_welcome("bob")
    kicked = "'ada' was removed from this run by its host"
    with pytest.raises(AdmissionError, match=kicked):
        enrol(book, invite, key)
    with pytest.raises(AdmissionError, match=kicked):
        enrol(book, book.invite(["h:1"]), key)  # with another invite
    with pytest.raises(AdmissionError, match="this invite was closed"):
        enrol(book, invite, new_key(), "eve")  # with another key
    with pytest.raises(AdmissionError, match="another peer of this run is called 'ada'"):
        enrol(book, book.invite(["h:1"]), new_key(), "ada")  # nobody takes its name
    assert enrol(book, invite, other) == "bob", "who came with the same invite stays"


def test_kicking_nobody_says_who_is_there(book: AuthorityBook) -> None:
    with pytest.raises(AdmissionError, match=r"called 'eve'; its peers: none"):
        book.kick("eve")
    enrol(book, book.invite(["h:1"]), new_key(), "ada")
    with pytest.raises(AdmissionError, match=r"called 'eve'; its peers: ada"):
        book.kick("eve")


def test_what_is_no_key_is_refused(book: AuthorityBook) -> None:
    invite = book.invite(["h:1"])
    for public in ("", "x", "é", new_key()[:40]):
        with pytest.raises(WireError, match="a public key cannot be read"):
            enrol(book, invite, public, "ada")
    assert book.peers() == []


def test_the_book_survives_a_restart(
    book: AuthorityBook, again: Callable[[], AuthorityBook]
) -> None:
    key, gone = new_key(), new_key()
    once = book.invite(["h:1"])
    several = book.invite(["h:1"])
    enrol(book, once, key, "ada")
    enrol(book, several, gone, "bob")
    book.kick("bob")

    later = again()
    assert later.fingerprint == book.fingerprint
    assert later.peers() == book.peers()
    assert later.is_welcome("ada") and not later.is_welcome("bob")
    assert enrol(later, once, key) == "ada"
    with pytest.raises(AdmissionError, match="has been used"):
        enrol(later, once, new_key())
    with pytest.raises(AdmissionError, match="was removed"):
        enrol(later, several, gone)
    assert AuthorityBook(book.folder).invite(["h:1"]).run_name == "first"


def test_a_torn_write_changes_nothing(
    book: AuthorityBook, again: Callable[[], AuthorityBook], monkeypatch: pytest.MonkeyPatch
) -> None:
    invite = book.invite(["h:1"])
    whole = (book.folder / "book.json").read_bytes()

    def torn(path: Path, content: bytes) -> None:
        path.with_name(f".{path.name}.77").write_bytes(content[: len(content) // 2])
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(book_module, "replace_private_file", torn)
        with pytest.raises(ConfigError, match="No space left"):
            enrol(book, invite, new_key(), "ada")
    assert book.peers() == [] and not book.is_welcome("ada"), "what is not kept was not done"
    assert (book.folder / "book.json").read_bytes() == whole
    later = again()
    assert later.peers() == []
    assert enrol(later, invite, new_key(), "bob") == "bob"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 2}', b'{"version": 1}'])
def test_a_damaged_book_is_an_error_and_not_an_empty_book(
    book: AuthorityBook, again: Callable[[], AuthorityBook], content: bytes
) -> None:
    (book.folder / "book.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"book\.json is damaged"):
        again()
    assert (book.folder / "book.json").read_bytes() == content


def test_fields_of_a_wrong_kind_are_damage_too(
    book: AuthorityBook, again: Callable[[], AuthorityBook]
) -> None:
    book.invite(["h:1"])
    path = book.folder / "book.json"
    plain = json.loads(path.read_text())
    plain["invites"][0]["machines"] = "no"
    path.write_text(json.dumps(plain))
    with pytest.raises(ConfigError, match="Expected `int`, got `str`"):
        again()


def test_a_damaged_key_is_named(book: AuthorityBook, again: Callable[[], AuthorityBook]) -> None:
    path = book.folder / "authority.pem"
    path.write_text(path.read_text()[:100])
    with pytest.raises(WireError, match=r"authority\.pem: the key of .* is damaged"):
        again()


def test_a_book_of_the_release_before_is_read(
    book: AuthorityBook, again: Callable[[], AuthorityBook]
) -> None:
    """It kept certificates; what counts is the key in each, and that it is the one enrolled."""
    peer = Identity.create("ada")
    enrol(book, book.invite(["h:1"]), peer.public, "ada")
    path = book.folder / "book.json"
    plain = json.loads(path.read_text())
    certificate = _certificate(peer)
    plain["version"], plain["peers"][0] = 2, {**plain["peers"][0], "certificate": certificate}
    del plain["peers"][0]["public"]
    path.write_text(json.dumps(plain))
    assert again().door_token("ada") == book.door_token("ada")
    plain["peers"][0]["certificate"] = _certificate(Identity.create("eve"))
    path.write_text(json.dumps(plain))
    with pytest.raises(ConfigError, match="is not the one of its fingerprint"):
        again()


def _certificate(identity: Identity) -> str:
    """The certificate that the identity shows where it listens."""
    near, far = socket.socketpair()
    context = identity.listening_context()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(context.wrap_socket, far, True)
        dialer = dialing_context().wrap_socket(near)
        der = dialer.getpeercert(binary_form=True)
        accepted.result().close()
        dialer.close()
    return ssl.DER_cert_to_PEM_cert(der or b"")


def test_files_are_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = tmp_path / "open"
        folder.mkdir(mode=0o777)
        book = AuthorityBook(folder / "authority", "first")
        enrol(book, book.invite(["h:1"]), new_key())
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in book.folder.iterdir()}
    assert modes == {"authority.pem": 0o600, "book.json": 0o600}
    assert stat.S_IMODE(book.folder.stat().st_mode) == 0o700


def test_the_book_keeps_no_secret(book: AuthorityBook) -> None:
    invite = book.invite(["h:1"])
    text = (book.folder / "book.json").read_text()
    assert invite.invite_id in text and invite.secret not in text
    issued = next(iter(book._invites.values()))
    assert issued.secret_hash not in repr(issued)


def test_invites_are_bounded_and_expired_ones_make_room(
    book: AuthorityBook, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book_module, "MOST_INVITES", 3)
    key = new_key()
    first = book.invite(["h:1"], lasts=10)
    enrol(book, first, key, "ada")
    second = book.invite(["h:1"], lasts=10)
    book.invite(["h:1"], lasts=DAY)
    with pytest.raises(AdmissionError, match="3 invites are open"):
        book.invite(["h:1"])
    clock.now += 20
    book.invite(["h:1"])
    assert enrol(book, first, key) == "ada", "one that let somebody in is kept longest"
    with pytest.raises(AdmissionError, match="wrong invite"):
        enrol(book, second, new_key())


def test_peers_are_bounded_and_a_kicked_one_frees_its_place(
    book: AuthorityBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book_module, "MOST_PEERS", 1)
    enrol(book, book.invite(["h:1"]), new_key(), "ada")
    invite = book.invite(["h:1"])
    with pytest.raises(AdmissionError, match="the run has 1 peers already"):
        enrol(book, invite, new_key(), "bob")
    book.kick("ada")
    assert enrol(book, invite, new_key(), "bob") == "bob"


def test_an_invite_for_several_is_bounded_too(
    book: AuthorityBook, again: Callable[[], AuthorityBook]
) -> None:
    invite = book.invite(["h:1"], machines=2)
    for name in ("ada", "bob"):
        enrol(book, invite, new_key(), name)
    with pytest.raises(AdmissionError, match="was for 2 machines and has been used"):
        enrol(again(), invite, new_key(), "eve")


def test_a_kick_tells_who_else_came_by_the_same_invites(book: AuthorityBook) -> None:
    first, second = book.invite(["h:1"], machines=3), book.invite(["h:1"], machines=2)
    key = new_key()
    for name, invite in (("ada", first), ("bob", first), ("eve", second)):
        enrol(book, invite, key if name == "ada" else new_key(), name)
    enrol(book, second, key)  # ada once more
    enrol(book, book.invite(["h:1"]), new_key(), "fay")
    assert book.kick("ada") == ["bob", "eve"]
    assert book.kick("bob") == [] and book.is_welcome("fay")


def test_a_long_name_of_a_run_is_cut_in_its_invites(tmp_path: Path) -> None:
    book = AuthorityBook(tmp_path / "other", "first\nrun " + "x" * 200)
    name = book.invite(["h:1"]).run_name
    assert name.startswith("first run xxx") and len(name) == 80


def test_an_invite_needs_a_place_to_go(book: AuthorityBook) -> None:
    with pytest.raises(ConfigError, match="needs an address"):
        book.invite([])
    with pytest.raises(ConfigError, match="'nowhere' is not an address"):
        book.invite(["nowhere"])
    assert Invite.parse(str(book.invite([], "relay.example:7001"))).addresses == ()
