"""An invite is one line: whole, or refused by name."""

import base64
import hashlib
import string

import pytest

from thinwire.errors import AdmissionError
from thinwire.run.invite import Invite, door_token, hash_of, is_address

SECRET = "00112233445566778899aabbccddeeff"
INVITE = Invite(
    run_name="first run",
    fingerprint="ab" * 32,
    addresses=("203.0.113.7:7000", "[2001:db8::7]:7000", "host.example:7000"),
    invite_id="deadbeef",
    secret=SECRET,
    expires=1_900_000_000,
    relay="relay.example:7001",
    relay_pass="open-sesame",
)


def with_checksum(content: bytes) -> str:
    """A line whose checksum is right, whatever it says."""
    whole = content + hashlib.sha256(b"thinwire invite " + content).digest()[:6]
    return "tw1-" + base64.urlsafe_b64encode(whole).decode().rstrip("=")


def test_an_invite_survives_its_text() -> None:
    text = str(INVITE)
    assert Invite.parse(text) == INVITE
    assert text.startswith("tw1-") and len(text) < 300
    assert set(text) <= set(string.ascii_letters + string.digits + "-_")
    assert INVITE.run_id == "ab" * 8
    assert INVITE.seconds_left(now=1_899_999_990) == 10


def test_line_breaks_from_pasting_do_no_harm() -> None:
    text = str(INVITE)
    assert Invite.parse(f"  {text[:80]}\r\n   {text[80:]}\n") == INVITE


def test_any_altered_character_is_noticed() -> None:
    text = str(INVITE)
    for place in range(len(text)):
        for other in ("A", "b", "9", "-"):
            if text[place] != other:
                with pytest.raises(AdmissionError, match="this invite cannot be used"):
                    Invite.parse(text[:place] + other + text[place + 1 :])


def test_the_last_character_counts_in_full() -> None:
    """base64 has bits at its end that decoders pass over."""
    for length in range(3):
        text = str(Invite("r" * length, "ab" * 32, ("h:1",), "deadbeef", SECRET, 1))
        for other in string.ascii_letters + string.digits:
            if other != text[-1]:
                with pytest.raises(AdmissionError, match="altered or cut off"):
                    Invite.parse(text[:-1] + other)


def test_a_cut_off_invite_is_noticed_wherever_it_was_cut() -> None:
    text = str(INVITE)
    for length in range(len(text)):
        with pytest.raises(AdmissionError, match="this invite cannot be used"):
            Invite.parse(text[:length])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "begins with tw1-"),
        ("run.toml", "begins with tw1-"),
        ("tw2-AAAA", "begins with tw1-"),
        ("tw1-", "altered or cut off"),
        ("tw1-é", "altered or cut off"),
        ("tw1-" + "A" * 5000, "too long"),
        ("tw1-" + "A" * 1_000_000, "too long"),
        (with_checksum(bytes(60) + b"name"), "lacks parts"),
        (with_checksum(bytes(60) + b"\xff\xfe"), "lacks parts"),
        (with_checksum(bytes(60) + b"name\n\n"), "names no address"),
        (with_checksum(bytes(60) + b"name\n\n" + b"\nh:1" * 9), "or too many"),
        (with_checksum(bytes(60) + b"name\n\n\nhost:99999"), "not HOST:PORT"),
        (with_checksum(bytes(60) + b"name\nrelay\n\nhost:1"), "not HOST:PORT"),
    ],
)
def test_what_is_no_invite_is_refused(text: str, reason: str) -> None:
    with pytest.raises(AdmissionError, match=reason) as refusal:
        Invite.parse(text)
    assert len(str(refusal.value)) < 250, "it does not quote what it was given"


def test_the_name_of_a_run_cannot_steer_a_terminal() -> None:
    invite = Invite("a\x1b[2Jb" + "c" * 200, "ab" * 32, ("h:1",), "deadbeef", SECRET, 1)
    name = Invite.parse(str(invite)).run_name
    assert name.startswith("a[2Jbccc") and len(name) < 120


def test_secrets_are_not_in_the_repr() -> None:
    assert SECRET not in repr(INVITE) and "sesame" not in repr(INVITE)
    assert "first run" in repr(INVITE)


def test_a_door_token_is_not_what_a_door_shows_to_all() -> None:
    token = INVITE.door_token
    assert token == door_token(INVITE.invite_id, hash_of(INVITE.secret))
    assert INVITE.secret not in token and hash_of(INVITE.secret) not in token
    assert INVITE.run_id not in token and token != door_token(INVITE.invite_id, hash_of("00" * 16))


@pytest.mark.parametrize("text", ["h:1", "10.0.0.1:65535", "[::1]:80", "a-b.c_d.example:7000"])
def test_addresses(text: str) -> None:
    assert is_address(text)


@pytest.mark.parametrize(
    "text", ["", "h", ":80", "h:", "h:0", "h:65536", "::1:80", "a b:1", "h:1\n", "h:-1", "x/y:1"]
)
def test_what_is_no_address(text: str) -> None:
    assert not is_address(text)
