"""An invite: one line of text by which another machine finds a run, trusts it, and may join it.

It carries the fingerprint of the host's key, so whoever has it needs no other proof of whom it
talks to; and a secret, so whoever has it is let in. Send it as you would send a password.
"""

import base64
import binascii
import hashlib
import re
import struct
import time
from dataclasses import dataclass, field

from thinwire.errors import AdmissionError, printable
from thinwire.wire.keys import RUN_DIGITS
from thinwire.wire.routes import Route, Routes

PREFIX = "tw1-"
SECRET_BYTES = 16
ID_BYTES = 4
MOST_ADDRESSES = 8
LONGEST_NAME = 80  # of a run, in an invite
_LONGEST = 4096  # characters; a usual one has about 200
_CHECKSUM_BYTES = 6
_INVITED = "invite/"
_HEAD = struct.Struct(f">32s{ID_BYTES}s{SECRET_BYTES}sQ")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})")


@dataclass(frozen=True)
class Invite:
    """Where a run is, how to know it, and what lets one in. `str` gives the line to send.

    `addresses` are those of the host's door, and `relay` is one where both can meet, or empty;
    `expires` is in seconds since 1970.
    """

    run_name: str
    fingerprint: str
    addresses: tuple[str, ...]
    invite_id: str
    secret: str = field(repr=False)
    expires: int
    relay: str = ""
    relay_pass: str = field(default="", repr=False)

    @property
    def run_id(self) -> str:
        """By which doors know the run."""
        return self.fingerprint[:RUN_DIGITS]

    @property
    def door_token(self) -> str:
        """What it shows at the host's door, for as long as it is good."""
        return door_token(self.invite_id, hash_of(self.secret))

    def routes(self, token: str = "") -> tuple[Route, ...]:
        """The ways to the host, best first; with the token of a peer, or with the invite's own."""
        shown = token or self.door_token
        direct = [Route(address, "direct", shown) for address in self.addresses]
        relayed = [Route(self.relay, "relayed", self.relay_pass)] if self.relay else []
        return (*direct, *relayed)

    def service(self, name: str) -> str:
        """The name of one of the host's services at its door, such as "enrol"."""
        return f"{self.run_id}/{name}"

    def to_service(self, name: str, token: str = "") -> Routes:
        """The ways to a service of the host; as for `routes`."""
        return Routes(self.service(name), self.routes(token))

    def seconds_left(self, now: float | None = None) -> float:
        """Until it expires by this machine's clock; negative afterwards."""
        return self.expires - (time.time() if now is None else now)

    def __str__(self) -> str:
        head = _HEAD.pack(
            bytes.fromhex(self.fingerprint),
            bytes.fromhex(self.invite_id),
            bytes.fromhex(self.secret),
            self.expires,
        )
        texts = (self.run_name, self.relay, self.relay_pass, *self.addresses)
        content = head + "\n".join(texts).encode()
        whole = content + _checksum(content)
        return PREFIX + base64.urlsafe_b64encode(whole).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> "Invite":
        """The invite that a line of text says; line breaks from pasting do no harm.

        Raises AdmissionError for anything that is not an unaltered invite, and never quotes it.
        """
        content = _checked_content("".join(text[: 2 * _LONGEST].split()))
        fingerprint, invite_id, secret, expires = _HEAD.unpack_from(content)
        try:
            name, relay, relay_pass, *addresses = content[_HEAD.size :].decode().split("\n")
        except ValueError:
            raise _unreadable("it lacks parts") from None
        places = [*addresses, *([relay] if relay else [])]
        if not places or len(addresses) > MOST_ADDRESSES:
            raise _unreadable("it names no address, or too many")
        for address in places:
            if not is_address(address):
                raise _unreadable("an address in it is not HOST:PORT")
        return cls(
            printable(name, LONGEST_NAME),  # it is shown, and whoever made the invite chose it
            fingerprint.hex(),
            tuple(addresses),
            invite_id.hex(),
            secret.hex(),
            expires,
            relay,
            relay_pass,
        )


def hash_of(secret: str) -> str:
    """By which a host knows the secret of an invite again."""
    # A plain hash will do: the secret is random, and far too long to be guessed.
    return hashlib.sha256(secret.encode()).hexdigest()


def door_token(invite_id: str, secret_hash: str) -> str:
    """What the holder of an invite shows at the host's door; no peer's name has a slash."""
    secret = hashlib.sha256(f"thinwire door {secret_hash}".encode()).hexdigest()[:32]
    return f"{_INVITED}{invite_id}.{secret}"


def invite_of(who: str) -> str:
    """Which invite it is that has this name at a door; empty for a peer."""
    return who.removeprefix(_INVITED) if who.startswith(_INVITED) else ""


def is_address(text: str) -> bool:
    """Whether this is HOST:PORT, with a name, an IPv4 address or an IPv6 address in brackets."""
    matched = _ADDRESS.fullmatch(text)
    return matched is not None and 0 < int(matched[2]) < 65536


def _checked_content(line: str) -> bytes:
    if not line.startswith(PREFIX):
        raise _unreadable(f"an invite begins with {PREFIX}")
    if len(line) > _LONGEST:
        raise _unreadable("it is too long")
    body = line.removeprefix(PREFIX)
    try:
        whole = base64.b64decode(body + "=" * (-len(body) % 4), b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise _unreadable("it was altered or cut off") from None
    content, checksum = whole[:-_CHECKSUM_BYTES], whole[-_CHECKSUM_BYTES:]
    # The last character of base64 has bits that mean nothing; they must be as they were sent.
    is_exact = base64.urlsafe_b64encode(whole).decode().rstrip("=") == body
    if len(content) < _HEAD.size or checksum != _checksum(content) or not is_exact:
        raise _unreadable("it was altered or cut off")
    return content


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(b"thinwire invite " + content).digest()[:_CHECKSUM_BYTES]


def _unreadable(reason: str) -> AdmissionError:
    return AdmissionError(
        f"this invite cannot be used: {reason}; copy the whole line that the host printed, or ask "
        "for a new invite"
    )
