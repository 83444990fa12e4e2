"""Who may join a run: the invite, the host's list of peers, and how a machine gets on it.

*An invite* is one line of text: the fingerprint of the host's key, by which whoever has it knows
whom it talks to; and a secret, so whoever has it is let in. *The book* is the authority, asked at
every connection. A change is on the disk before anybody hears of it: a used invite stays used, and
a kicked peer kicked, whatever ends the process. *Enrolment* puts a key on the list, on a stream of
one who is not on it yet. The host proves its key before the joining machine says anything: whoever
stands between learns neither the secret nor the name. If an answer was lost, the machine enrols
again with the same key, and is known.
"""

import base64
import contextlib
import datetime
import hashlib
import hmac
import re
import secrets
import struct
import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from thinwire import __version__
from thinwire.errors import (
    AdmissionError,
    BreachError,
    ConfigError,
    ThinwireError,
    WireError,
    printable,
)
from thinwire.folders import private_folder, replace_file
from thinwire.wire import Grant, Identity, Listener, Pipe, Route, Routes, dial, ping
from thinwire.wire.keys import RUN_DIGITS, fingerprint_of, is_name
from thinwire.wire.sockets import split_address
from thinwire.wire.speed import SERVICE as SPEED
from thinwire.wire.stream import Stream

ENROL = "enrol"  # the name of the stream
EXCHANGE_S = 20.0  # for all that is said there
COORDINATOR = "coordinator"
MOST_ADDRESSES = 8
LONGEST_NAME = 80  # of a run, in an invite
_PREFIX, _LONGEST, _CHECKSUM_BYTES = "tw1-", 4096, 6  # of an invite; a usual one has 200 characters
_HEAD = struct.Struct(">32s4s16sQ")  # fingerprint, number, secret, when it expires
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})")
_INVITED = "invite/"  # before the number of an invite at a door: no peer's name has a slash
_VERSION, _MOST_SAID = 3, 4096
_RESERVED = re.compile(rf"{COORDINATOR}|host|relay|stage-.*")
_KEY, _PEER = "key.pem", "peer.json"

T = TypeVar("T")


@dataclass(frozen=True)
class Invite:
    """Where a run is, how to know it, and what lets one in. `str` gives the line to send."""

    run_name: str
    fingerprint: str
    addresses: tuple[str, ...]  # of the host's door
    invite_id: str
    secret: str = field(repr=False)
    expires: int  # in seconds since 1970
    relay: Route | None = None  # where both can meet

    @property
    def run_id(self) -> str:
        """By which doors know the run."""
        return self.fingerprint[:RUN_DIGITS]

    @property
    def door_token(self) -> str:
        """What it shows at the host's door, for as long as it is good."""
        return door_token(self.invite_id, hash_of(self.secret))

    def to_service(self, name: str, token: str = "") -> Routes:
        """The ways to a service of the host, with the token of a peer or with the invite's own."""
        direct = [Route(one, "direct", token or self.door_token) for one in self.addresses]
        return Routes(f"{self.run_id}/{name}", [*direct, *([self.relay] if self.relay else [])])

    def seconds_left(self) -> float:
        """Until it expires by this machine's clock; negative afterwards."""
        return self.expires - time.time()

    def __str__(self) -> str:
        parts = (bytes.fromhex(part) for part in (self.fingerprint, self.invite_id, self.secret))
        relay = (self.relay.address, self.relay.token) if self.relay else ("", "")
        texts = (self.run_name, *relay, *self.addresses)
        content = _HEAD.pack(*parts, self.expires) + "\n".join(texts).encode()
        return _PREFIX + _base64(content + _checksum(content))

    @classmethod
    def parse(cls, text: str) -> "Invite":
        """The invite in a line of text, whatever stands before it, even with line breaks in it.

        Raises AdmissionError for anything that is not an unaltered invite, and never quotes it.
        """
        _, prefix, body = "".join(text[: 2 * _LONGEST].split()).partition(_PREFIX)
        if not prefix:
            raise _unusable(f"an invite begins with {_PREFIX}")
        if len(body) > _LONGEST:
            raise _unusable("it is too long")
        whole = b""
        with contextlib.suppress(ValueError):
            whole = base64.b64decode(body + "=" * (-len(body) % 4), b"-_", validate=True)
        content, checksum = whole[:-_CHECKSUM_BYTES], whole[-_CHECKSUM_BYTES:]
        # The last character of base64 has bits that mean nothing; they must be as they were sent.
        is_exact = checksum == _checksum(content) and _base64(whole) == body
        if len(content) < _HEAD.size or not is_exact:
            raise _unusable("it was altered or cut off")
        fingerprint, invite_id, secret, expires = _HEAD.unpack_from(content)
        try:
            name, relay, relay_pass, *addresses = content[_HEAD.size :].decode().split("\n")
        except ValueError:
            raise _unusable("it lacks parts") from None
        places = [*addresses, *([relay] if relay else [])]
        if not places or len(addresses) > MOST_ADDRESSES:
            raise _unusable("it names no address, or too many")
        if not all(map(is_address, places)):
            raise _unusable("an address in it is not HOST:PORT")
        name = printable(name, LONGEST_NAME)  # it is shown, and whoever made the invite chose it
        parts = (fingerprint.hex(), tuple(addresses), invite_id.hex(), secret.hex())
        return cls(name, *parts, expires, Route(relay, "relayed", relay_pass) if relay else None)


def _unusable(why: str) -> AdmissionError:
    advice = "copy the whole line that the host printed, or ask for a new invite"
    return AdmissionError(f"this invite cannot be used: {why}; {advice}")


def hash_of(secret: str) -> str:
    """By which a host knows the secret of an invite again."""
    # A plain hash will do: the secret is random, and far too long to be guessed.
    return hashlib.sha256(secret.encode()).hexdigest()


def door_token(invite_id: str, secret_hash: str) -> str:
    """What the holder of an invite shows at the host's door."""
    secret = hashlib.sha256(f"thinwire door {secret_hash}".encode()).hexdigest()[:32]
    return f"{_INVITED}{invite_id}.{secret}"


def is_address(text: str) -> bool:
    """Whether this is HOST:PORT, with a name, an IPv4 address or an IPv6 address in brackets."""
    matched = _ADDRESS.fullmatch(text)
    return matched is not None and 0 < int(matched[2]) < 65536


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(b"thinwire invite " + content).digest()[:_CHECKSUM_BYTES]


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


# The book


@dataclass(frozen=True)
class IssuedInvite:
    """What the host keeps of an invite: not the secret, only by what to know it again."""

    invite_id: str
    secret_hash: str = field(repr=False)
    expires: int
    machines: int  # that it lets in
    used_by: list[str] = field(default_factory=list)  # fingerprints of the keys
    closed: bool = False  # lets in nobody new


@dataclass(frozen=True)
class EnrolledPeer:
    """A peer that was let in: its name, and its public key."""

    name: str
    public: str
    invite_id: str
    enrolled: float
    kicked: bool = False

    @property
    def key(self) -> str:
        """The fingerprint of its key, that it is known by."""
        return fingerprint_of(self.public)

    @property
    def why_kicked(self) -> str:
        """Why it is refused; empty while it is welcome."""
        return f"{self.name!r} was removed from this run by its host" if self.kicked else ""


@dataclass(frozen=True)
class _Book:
    run_name: str
    invites: list[IssuedInvite]
    peers: list[EnrolledPeer]
    version: int = _VERSION


class AuthorityBook:
    """The key, invites and peers of a run's host, made if need be; safe on several threads."""

    def __init__(self, folder: Path, run_name: str = "", clock: Callable[[], float] = time.time):
        self.folder, self._run_name, self._clock = folder, run_name, clock
        self._file, self._changing = folder / "book.json", threading.Lock()
        key_pem = _kept_key(folder / "authority.pem", "restore it, or start a new run", "run.out")
        self.identity = Identity(COORDINATOR, key_pem)
        self.fingerprint = self.identity.fingerprint
        self.run_id = self.fingerprint[:RUN_DIGITS]  # by which doors know the run
        self.on_enrolled: Callable[[str], None] = lambda name: None
        self._invites: dict[str, IssuedInvite] = {}
        self._peers: dict[str, EnrolledPeer] = {}
        self._load() if self._file.exists() else self._save({}, {})

    def invite(
        self,
        addresses: tuple[str, ...] | list[str],
        relay: Route | None = None,
        lasts: float = 86_400.0,
        machines: int = 1,
    ) -> Invite:
        """A new invite by these addresses or a relay, for so many seconds and machines."""
        secret, expires = secrets.token_hex(16), round(self._clock() + lasts)
        with self._changing:
            number = _unused(self._invites, lambda: secrets.token_hex(4))
            made = IssuedInvite(number, hash_of(secret), expires, machines)
            self._save({**self._invites, number: made}, self._peers)
        name, places = " ".join(self._run_name.split())[:LONGEST_NAME], tuple(addresses)
        parts = (self.fingerprint, places[:MOST_ADDRESSES], number, secret, expires)
        return Invite(name, *parts, relay)

    def enrol(self, invite_id: str, secret: str, public: str, wanted_name: str) -> str:
        """Let in who has proven to hold a key; returns its name. AdmissionError says why not.

        Who is known by its key is told its name again, with any invite that ever let it in.
        """
        key = fingerprint_of(public)
        with self._changing:
            invite, known = self._admitted(invite_id, secret, key)
            if known is None:
                name = wanted_name or _unused(self._peers, lambda: f"peer-{secrets.token_hex(2)}")
                if name in self._peers:
                    taken = f"another peer of this run is called {name!r}"
                    raise AdmissionError(f"{taken}: choose another --name")
                if not is_name(name) or _RESERVED.fullmatch(name):
                    raise AdmissionError(
                        f"a peer cannot be called {name[:80]!r}: use lower-case letters, digits "
                        f"and inner hyphens, at most 63, and not {COORDINATOR}, host, relay or "
                        "stage-..."
                    )
                known = EnrolledPeer(name, public, invite_id, self._clock())
            elif wanted_name not in ("", name := known.name):
                raise AdmissionError(
                    f"this machine has joined the run as {name!r} before: leave out --name "
                    f"{wanted_name}, or join from another folder (--folder)"
                )
            if key not in invite.used_by:
                used = replace(invite, used_by=[*invite.used_by, key])
                self._save({**self._invites, invite_id: used}, {**self._peers, name: known})
        self.on_enrolled(name)
        return name

    def check_invite(self, invite_id: str, secret: str, public: str) -> None:
        """Raise what `enrol` would, and use nothing up."""
        with self._changing:
            self._admitted(invite_id, secret, fingerprint_of(public))

    def kick(self, name: str) -> list[str]:
        """Let a peer in no more, by its key or its invites; who else came with these."""
        with self._changing:
            if (peer := self._peers.get(name)) is None:
                names = ", ".join(sorted(self._peers)) or "none"
                raise AdmissionError(f"no peer of this run is called {name!r}; its peers: {names}")
            used = [one for one in self._invites.values() if peer.key in one.used_by]
            closed = {one.invite_id: replace(one, closed=True) for one in used}
            peers = {**self._peers, name: replace(peer, kicked=True)}
            self._save({**self._invites, **closed}, peers)
        return [one.name for one in peers.values() if one.invite_id in closed and not one.kicked]

    def is_welcome(self, name: str) -> bool:
        """Whether a peer of this name may open anything."""
        return (peer := self._peers.get(name)) is not None and not peer.kicked

    def name_of(self, fingerprint: str) -> str | None:
        """Whose key it is; None if its holder may open nothing; for a `Listener`."""
        known = (p.name for p in self.peers() if p.key == fingerprint and not p.kicked)
        return next(known, None)

    def key_of(self, name: str) -> str:
        """The fingerprint of a peer's key."""
        return self._peers[name].key

    def door_token(self, name: str) -> str:
        """What a peer shows at the host's door, and the host at the peer's."""
        return self.identity.token_with(name, self._peers[name].public)

    def grant_of(self, who: str) -> Grant | None:
        """What somebody may at the host's door: a peer all, an invite enrolment and measuring."""
        if peer := self._peers.get(who):
            return Grant(self.door_token(who), refusal=peer.why_kicked)
        number = who.removeprefix(_INVITED)
        if number != who and (invite := self._invites.get(number)):
            token = door_token(number, invite.secret_hash)
            return Grant(token, frozenset({ENROL, SPEED}), self._why_closed(invite))
        return None

    def peers(self) -> list[EnrolledPeer]:
        """All that were ever let in, in that order; kicked ones too."""
        return list(self._peers.values())

    def _admitted(
        self, invite_id: str, secret: str, key: str
    ) -> tuple[IssuedInvite, EnrolledPeer | None]:
        """An invite that lets in the holder of this key, and who that is if it came before."""
        invite = self._invites.get(invite_id)
        if invite is None or not hmac.compare_digest(invite.secret_hash, hash_of(secret)):
            wrong = "wrong invite: this run did not issue it, or it was altered"
            raise AdmissionError(f"{wrong}; ask the host for a new one")
        known = next((peer for peer in self._peers.values() if peer.key == key), None)
        why = known.why_kicked if known else ""
        if not why and (known is None or key not in invite.used_by):
            why = self._why_closed(invite)
            if not why and len(invite.used_by) >= invite.machines:
                many = "one machine" if invite.machines == 1 else f"{invite.machines} machines"
                used = f"this invite was for {many} and has been used"
                why = f"{used}: ask the host for a new one (thinwire invite)"
        if why:
            raise AdmissionError(why)
        return invite, known

    def _why_closed(self, invite: IssuedInvite) -> str:
        """Why an invite opens nothing any more; empty while it does."""
        if invite.closed:
            why = "was closed, since a peer that used it was removed"
        elif invite.expires <= self._clock():
            when = datetime.datetime.fromtimestamp(invite.expires, datetime.UTC)
            why = f"expired at {when:%Y-%m-%d %H:%M} UTC"
        else:
            return ""
        return f"this invite {why}: ask the host for a new one"

    def _save(self, invites: dict[str, IssuedInvite], peers: dict[str, EnrolledPeer]) -> None:
        """Have these hold once they are on the disk; what holds is never changed in place."""
        kept = _Book(self._run_name, list(invites.values()), list(peers.values()))
        _keep(self._file, msgspec.json.format(msgspec.json.encode(kept), indent=1))
        self._invites, self._peers = invites, peers

    def _load(self) -> None:
        """A damaged book is an error: without it kicked peers could return."""
        try:
            kept = msgspec.json.decode(self._file.read_bytes(), type=_Book)
            if kept.version != _VERSION:
                raise ConfigError(f"its version is {kept.version}, not {_VERSION}")
            for peer in kept.peers:
                fingerprint_of(peer.public)  # refuses what is no key
            self._peers = {peer.name: peer for peer in kept.peers}
        except (OSError, ValueError, ThinwireError) as error:
            raise ConfigError(
                f"{self._file} is damaged ({error}): restore it, or remove the folder "
                f"{self.folder}, which makes every invite and every peer of the run unknown"
            ) from None
        self._run_name = self._run_name or kept.run_name
        self._invites = {invite.invite_id: invite for invite in kept.invites}


def _unused(taken: Container[str], draw: Callable[[], str]) -> str:
    return next(drawn for drawn in iter(draw, None) if drawn not in taken)


def _keep(path: Path, content: bytes) -> None:
    try:
        replace_file(path, content, private=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}; free some space there") from error


def _kept_key(path: Path, remedy: str, place: str) -> str:
    """The private key in a file, made if there is none yet. `remedy`: if it is damaged."""
    try:
        private_folder(path.parent)
        if not path.exists():
            replace_file(path, Identity.create("").key_pem.encode(), private=True)
        key_pem = path.read_text()
        Identity("", key_pem).fingerprint  # noqa: B018
    except OSError as error:
        what = f"cannot keep a key in {path.parent}: {error}; choose another {place}"
        raise ConfigError(what) from error
    except (UnicodeError, WireError):
        raise ConfigError(f"{path} is damaged: {remedy}") from None
    return key_pem


# Enrolment


class _Asked(msgspec.Struct):
    """What a machine says of its invite; `only` = "ask" uses nothing up."""

    invite: str
    secret: str
    name: str
    only: str = ""
    door: str = ""  # that the host is to try


class HostSays(msgspec.Struct):
    """What a host says to an invite."""

    version: str = ""  # of thinwire
    refused: str = ""  # why the invite does not let this machine in; empty if it does
    name: str = ""  # of the machine in the run
    reached: str = ""  # "yes" or "no": whether the host reached the door that it was asked about


_ASKED, _SAYS = msgspec.json.Decoder(_Asked), msgspec.json.Decoder(HostSays)


def serve_enrolment(
    listener: Listener, book: AuthorityBook, note: Callable[[str], object] = lambda text: None
) -> None:
    """Let the host's listener enrol who has an invite; `note` is told of the host's own trouble."""

    def answer(stream: Stream) -> None:
        try:
            asked = _heard(stream, _ASKED)
            who = asked.invite, asked.secret, stream.public
            if asked.only == "ask":
                book.check_invite(*who)
                says = HostSays(__version__, reached=_reaches(book, asked, stream.comes_from))
            else:
                says = HostSays(__version__, name=book.enrol(*who, asked.name))
        except WireError as refusal:
            says = HostSays(__version__, str(refusal))
        except ThinwireError as error:  # such as a full disk: not for strangers
            note(f"a machine could not join: {error}")
            says = HostSays("", "the host cannot enrol peers at the moment: its screen says why")
        stream.write(msgspec.json.encode(says))

    listener.serve(ENROL, answer)


def _reaches(book: AuthorityBook, asked: _Asked, origin: str) -> str:
    """Whether a door of this run answers where the caller comes from: nowhere else is tried."""
    grant = book.grant_of(f"{_INVITED}{asked.invite}")
    if not is_address(asked.door) or split_address(asked.door)[0] != origin or grant is None:
        return ""
    try:
        ping(Route(asked.door, token=grant.token), f"{book.run_id}/probe")
    except WireError:
        return "no"  # and not why
    return "yes"


def enrol(routes: Routes, invite: Invite, key_pem: str, wanted_name: str = "") -> Identity:
    """Join the run of an invite, whose host is found by these routes; the identity there.

    AdmissionError: the host refused, or another run answers; another WireError: nobody did.
    """
    asked = _Asked(invite.invite_id, invite.secret, wanted_name)
    says, host = _exchange(routes, invite, key_pem, asked)
    if says.refused:
        raise AdmissionError(f"the host refused: {says.refused}")
    if not is_name(says.name):
        raise WireError("the host's answer does not name this machine")
    return Identity(says.name, key_pem, host)


def ask(routes: Routes, invite: Invite, key_pem: str = "", door: str = "") -> HostSays:
    """Ask the host whether an invite would let this machine in, or with its key, let it in again;
    and whether it reaches a door of ours. Raises as `enrol` does if no host of that run is there.
    """
    key_pem = key_pem or Identity.create("").key_pem
    asked = _Asked(invite.invite_id, invite.secret, "", "ask", door)
    return _exchange(routes, invite, key_pem, asked)[0]


def _exchange(routes: Routes, invite: Invite, key_pem: str, asked: _Asked) -> tuple[HostSays, str]:
    """What the host answers once it has proved to be the invite's, and its public key."""
    identity, whom = Identity("this machine", key_pem), invite.fingerprint
    try:
        stream = dial(routes, ENROL, identity, whom, EXCHANGE_S, _MOST_SAID, tries_again=False)
    except BreachError:
        raise AdmissionError(
            "another run answers at the address of the invite, or somebody stands between: nothing "
            "was sent; ask the host for a new invite"
        ) from None
    with contextlib.closing(stream):
        stream.write(msgspec.json.encode(asked))
        texts = msgspec.structs.astuple(_heard(stream, _SAYS))
    return HostSays(*(printable(text, 500) for text in texts)), stream.public


def _heard(stream: Pipe, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(bytes(stream.read() or b""))
    except (ValueError, RecursionError):
        raise WireError("the enrolment lacks a part: install the host's version") from None


class _SavedPeer(msgspec.Struct):
    """Who a machine is in a run, as it keeps it beside its key."""

    name: str
    host: str  # its public key


def own_key(folder: Path) -> str:
    """The private key of this machine in the run of this folder, made if there is none yet."""
    remedy = "remove it, and join with a new invite and another --name"
    return _kept_key(folder / _KEY, remedy, "--folder")


def saved_identity(folder: Path, fingerprint: str) -> Identity | None:
    """Who this machine was before in the run of this host; None if it must enrol."""
    try:
        saved = msgspec.json.decode((folder / _PEER).read_bytes(), type=_SavedPeer)
        is_of_this_run = fingerprint_of(saved.host) == fingerprint and is_name(saved.name)
        return Identity(saved.name, own_key(folder), saved.host) if is_of_this_run else None
    except (OSError, ValueError, ThinwireError):
        return None


def identity_in(folder: Path, routes: Routes, invite: Invite, wanted_name: str = "") -> Identity:
    """Who this machine is in the run of an invite: as before, or enrolled now and kept there."""
    saved = saved_identity(folder, invite.fingerprint)
    if saved is not None and wanted_name in ("", saved.name):  # else the host says what is wrong
        return saved
    identity = enrol(routes, invite, own_key(folder), wanted_name)
    _keep(folder / _PEER, msgspec.json.encode(_SavedPeer(identity.name, identity.host)))
    return identity
