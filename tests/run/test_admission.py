"""Who may join a run: an invite is whole or refused; the book of a host forgets nothing."""

import base64
import hashlib
import os
import stat
import string
from dataclasses import replace
from types import SimpleNamespace

import pytest

from thinwire.errors import AdmissionError, ConfigError, WireError
from thinwire.run import admission as book_module
from thinwire.run.admission import AuthorityBook, Invite, is_address
from thinwire.wire import Identity, Route

RELAY = Route("relay.example:7001", "relayed", "open-sesame")


@pytest.fixture
def clock():
    return SimpleNamespace(now=1_800_000_000.0)


@pytest.fixture
def again(tmp_path, clock):
    """The book as the next process finds it."""
    return lambda: AuthorityBook(tmp_path / "authority", "first", lambda: clock.now)


@pytest.fixture
def book(again):
    return again()


def enrol(book, invite, key, name=""):
    """Enrol the holder of a public key; returns its name."""
    return book.enrol(invite.invite_id, invite.secret, key, name)


def refused(book, invite, key="", name=""):
    """Why the holder of a public key, or of a new one, is not enrolled."""
    with pytest.raises(AdmissionError) as refusal:
        enrol(book, invite, key or new_key(), name)
    return str(refusal.value)


def new_key():
    return Identity.create("").public


def test_an_invite_lets_in_and_names_its_run(book):
    made = book.invite(["10.0.0.1:7000"], RELAY, machines=2)
    invite = Invite.parse(str(made))
    assert (invite.run_name, invite.run_id) == ("first", book.run_id)
    assert invite.relay == RELAY
    assert enrol(book, invite, new_key(), "ada") == "ada"
    drawn = enrol(book, invite, new_key())
    assert drawn.startswith("peer-")
    assert [peer.name for peer in book.peers()] == ["ada", drawn]
    assert book.is_welcome("ada") and not book.is_welcome("bob") and not book.is_welcome("")
    assert book.name_of(book.key_of("ada")) == "ada" and book.name_of("ab" * 32) is None
    assert "was for 2 machines and has been used" in refused(book, invite, name="eve")
    with pytest.raises(AdmissionError, match=rf"called 'eve'; its peers: ada, {drawn}"):
        book.kick("eve")


def test_a_wrong_secret_and_an_unknown_invite_get_the_same_answer(book):
    invite = book.invite(["h:1"])
    wrong = [{"secret": "00" * 16}, {"secret": ""}, {"secret": "é"}, {"invite_id": "00000000"}]
    (answer,) = {refused(book, replace(invite, **change), name="ada") for change in wrong}
    assert "wrong invite" in answer and book.peers() == []


def test_an_expired_invite_lets_in_nobody_new(book, clock):
    invite, key = book.invite(["h:1"], lasts=3600), new_key()
    enrol(book, invite, key, "ada")
    clock.now += 3601
    expired = "expired at 2027-01-15 09:00 UTC: ask the host"
    assert expired in refused(book, invite, name="bob")
    assert enrol(book, invite, key) == "ada", "who is known comes back"


def test_names_that_a_peer_may_not_have_leave_an_invite_unused(book):
    first, key = book.invite(["h:1"]), new_key()
    enrol(book, first, key, "ada")
    other_name = refused(book, first, key, "bob")
    assert "has joined the run as 'ada' before" in other_name and "--folder" in other_name
    invite = book.invite(["h:1"])
    assert "another peer of this run is called 'ada'" in refused(book, invite, name="ada")
    for name in ("coordinator", "host", "relay", "stage-0", "Ada", "a_b", "-a", "x" * 64, "a\nb"):
        assert "a peer cannot be called" in refused(book, invite, name=name)
    for public in ("", "x", "é", new_key()[:40]):
        with pytest.raises(WireError, match="a public key cannot be read"):
            enrol(book, invite, public, "bob")
    assert enrol(book, invite, new_key(), "bob") == "bob"


def test_a_kicked_peer_is_refused_everywhere(book):
    invite, key, other = book.invite(["h:1"], machines=9), new_key(), new_key()
    enrol(book, invite, key, "ada")
    enrol(book, invite, other, "bob")
    book.kick("ada")
    assert not book.is_welcome("ada") and book.is_welcome("bob")
    another = book.invite(["h:1"])
    for shown in (invite, another):
        assert "'ada' was removed from this run by its host" in refused(book, shown, key)
    assert "this invite was closed" in refused(book, invite, name="eve"), "with another key"
    taken = "another peer of this run is called 'ada'"
    assert taken in refused(book, another, name="ada"), "nobody takes its name"
    assert enrol(book, invite, other) == "bob", "who came with the same invite stays"
    third = book.invite(["h:1"], machines=2)
    enrol(book, third, new_key(), "fay")
    enrol(book, third, other)  # bob once more, by another invite
    assert book.kick("bob") == ["fay"], "who else came by its invites is told"


def test_the_book_survives_a_restart(book, again):
    key, gone = new_key(), new_key()
    once, other = book.invite(["h:1"]), book.invite(["h:1"])
    enrol(book, once, key, "ada")
    enrol(book, other, gone, "bob")
    book.kick("bob")

    later = again()
    assert later.fingerprint == book.fingerprint
    assert later.peers() == book.peers()
    assert later.is_welcome("ada") and not later.is_welcome("bob")
    assert enrol(later, once, key) == "ada"
    assert "has been used" in refused(later, once)
    assert "was removed" in refused(later, other, gone)
    assert AuthorityBook(book.folder).invite(["h:1"]).run_name == "first"


def test_a_torn_write_changes_nothing(book, again, monkeypatch):
    invite = book.invite(["h:1"])
    whole = (book.folder / "book.json").read_bytes()

    def torn(path, content, private):
        path.with_name(f".{path.name}.77").write_bytes(content[: len(content) // 2])
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(book_module, "replace_file", torn)
        with pytest.raises(ConfigError, match="No space left"):
            enrol(book, invite, new_key(), "ada")
    assert book.peers() == [] and not book.is_welcome("ada"), "what is not kept was not done"
    assert (book.folder / "book.json").read_bytes() == whole
    later = again()
    assert later.peers() == [] and enrol(later, invite, new_key(), "bob") == "bob"


def test_a_damaged_book_is_an_error_and_not_an_empty_book(book, again):
    enrol(book, book.invite(["h:1"]), new_key(), "ada")
    path, key = book.folder / "book.json", book.folder / "authority.pem"
    lacking = b'{"run_name": 1, "invites": [], "peers": []}'
    for content in (b"", b"{", b'{"version": 2}', lacking):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"book\.json is damaged"):
            again()
        assert path.read_bytes() == content
    key.write_text(key.read_text()[:100])
    with pytest.raises(ConfigError, match=r"authority\.pem is damaged: restore it"):
        again()


def test_files_are_for_this_user_alone(tmp_path):
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
    invite = book.invite(["h:1"])
    text = (book.folder / "book.json").read_text()
    assert invite.invite_id in text and invite.secret not in text
    issued = next(iter(book._invites.values()))
    assert issued.secret_hash not in repr(issued), "and nothing that leads to the secret is shown"


def test_an_invite_may_lead_by_a_relay_alone(book):
    assert Invite.parse(str(book.invite([], RELAY))).addresses == ()


# The line of an invite

SECRET = "00112233445566778899aabbccddeeff"
INVITE = Invite(
    "first run", "ab" * 32, ("203.0.113.7:7000", "[2001:db8::7]:7000", "host.example:7000"),
    "deadbeef", SECRET, expires=1_900_000_000, relay=RELAY,
)  # fmt: skip


def with_checksum(content):
    """A line whose checksum is right, whatever it says."""
    whole = content + hashlib.sha256(b"thinwire invite " + content).digest()[:6]
    return "tw1-" + base64.urlsafe_b64encode(whole).decode().rstrip("=")


def test_an_invite_survives_its_text():
    text = str(INVITE)
    assert Invite.parse(text) == INVITE == Invite.parse(f"[invite] thinwire join {text}\n")
    assert text.startswith("tw1-") and len(text) < 300
    assert set(text) <= set(string.ascii_letters + string.digits + "-_")
    assert INVITE.run_id == "ab" * 8
    assert SECRET not in repr(INVITE) and "sesame" not in repr(INVITE)


def test_any_altered_or_missing_character_is_noticed():
    """Line breaks from pasting do no harm."""
    text = str(INVITE)
    assert Invite.parse(f"  {text[:80]}\r\n   {text[80:]}\n") == INVITE
    for place in range(len(text)):
        others = [text[:place] + c + text[place + 1 :] for c in "Ab9-" if text[place] != c]
        for other in [text[:place], *others]:
            with pytest.raises(AdmissionError, match="this invite cannot be used"):
                Invite.parse(other)
    for length in range(3):  # base64 has bits at its end that decoders pass over
        text = str(Invite("r" * length, "ab" * 32, ("h:1",), "deadbeef", SECRET, 1))
        for character in set(string.ascii_letters + string.digits) - {text[-1]}:
            with pytest.raises(AdmissionError, match="altered or cut off"):
                Invite.parse(text[:-1] + character)


def test_what_is_no_invite_is_refused():
    head = bytes(60)
    for text, reason in (
        ("tw2-AAAA", "begins with tw1-"),
        ("tw1-", "altered or cut off"),
        ("tw1-é", "altered or cut off"),
        ("tw1-" + "A" * 5000, "too long"),
        (with_checksum(head + b"name"), "lacks parts"),
        (with_checksum(head + b"\xff\xfe"), "lacks parts"),
        (with_checksum(head + b"name\n\n"), "names no address"),
        (with_checksum(head + b"name\n\n" + b"\nh:1" * 9), "or too many"),
        (with_checksum(head + b"name\nrelay\n\nhost:1"), "not HOST:PORT"),
    ):
        with pytest.raises(AdmissionError, match=reason) as refusal:
            Invite.parse(text)
        assert len(str(refusal.value)) < 250, "it does not quote what it was given"


def test_the_name_of_a_run_cannot_steer_a_terminal(tmp_path):
    invite = Invite("a\x1b[2Jb" + "c" * 200, "ab" * 32, ("h:1",), "deadbeef", SECRET, 1)
    name = Invite.parse(str(invite)).run_name
    assert name.startswith("a[2Jbccc") and len(name) < 120
    book = AuthorityBook(tmp_path / "other", "first\nrun " + "x" * 200)
    name = book.invite(["h:1"]).run_name
    assert name.startswith("first run xxx") and len(name) == 80


def test_addresses():
    assert all(map(is_address, ["h:1", "10.0.0.1:65535", "[::1]:80", "a-b.c_d.example:7000"]))
    wrong = ["", "h", ":80", "h:", "h:0", "h:65536", "::1:80", "a b:1", "h:1\n", "h:-1", "x/y:1"]
    assert not any(map(is_address, wrong))
