"""Who may join a run: the host's key, its invites and its peers, kept in the run's folder.

This list is the authority: it is asked at every connection. All of it survives a restart of the
host. A change is on the disk before anybody hears of it, so a single-use invite stays used and a
kicked peer stays kicked, whatever ends the process.
"""

import contextlib
import datetime
import hmac
import re
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from thinwire.errors import AdmissionError, ConfigError, ThinwireError, WireError
from thinwire.folders import private_folder, replace_private_file
from thinwire.run.invite import (
    ID_BYTES,
    LONGEST_NAME,
    MOST_ADDRESSES,
    SECRET_BYTES,
    Invite,
    door_token,
    hash_of,
    invite_of,
    is_address,
)
from thinwire.wire import Grant, Identity
from thinwire.wire.keys import RUN_DIGITS, fingerprint_of, is_name, shown_key
from thinwire.wire.speed import SERVICE as SPEED

COORDINATOR = "coordinator"
DAY = 24 * 3600.0
MOST_PEERS = 1000
MOST_INVITES = 1000  # expired ones make room
_VERSION = 3
_MOST_BYTES = 16 << 20
_FOR_INVITED = frozenset({"enrol", SPEED})
_RESERVED = re.compile(rf"{COORDINATOR}|host|relay|stage-.*")
_WRONG = "wrong invite: this run did not issue it, or it was altered; ask the host for a new one"


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
    """A peer that was let in: its name, and the key that it is known by."""

    name: str
    key: str  # its fingerprint
    invite_id: str
    enrolled: float
    kicked: bool = False
    public: str = ""
    certificate: str = ""  # in books of version 2, in place of the public key


@dataclass(frozen=True)
class _Book:
    """All that is kept, as it is written."""

    run_name: str
    invites: list[IssuedInvite]
    peers: list[EnrolledPeer]
    version: int = _VERSION


class AuthorityBook:
    """The key of a run's host, with its invites and peers. Safe to use from several threads.

    It is made when there is none in the folder. `clock` gives seconds since 1970.
    """

    def __init__(
        self, folder: Path, run_name: str = "", clock: Callable[[], float] = time.time
    ) -> None:
        self._file, self._clock = folder / "book.json", clock
        self._changing = threading.Lock()
        try:
            private_folder(folder)
            path = folder / "authority.pem"
            if not path.exists():
                replace_private_file(path, Identity.create(COORDINATOR).key_pem.encode())
            self.identity = Identity(COORDINATOR, path.read_text())
            self.fingerprint = self.identity.fingerprint
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"cannot keep the run's authority in {folder}: {error}") from error
        except WireError as error:
            raise WireError(f"{path}: {error}; restore the file, or start a new run") from None
        self.folder = folder
        self._run_name = run_name
        self._invites: dict[str, IssuedInvite] = {}
        self._peers: dict[str, EnrolledPeer] = {}
        if self._file.exists():
            self._load()
        else:
            self._save()

    @property
    def run_id(self) -> str:
        """By which doors know the run."""
        return self.fingerprint[:RUN_DIGITS]

    def invite(
        self,
        addresses: tuple[str, ...] | list[str],
        relay: str = "",
        relay_pass: str = "",
        lasts: float = DAY,
        machines: int = 1,
    ) -> Invite:
        """A new invite that lasts so many seconds, and lets in so many machines."""
        for address in (*addresses, *([relay] if relay else ())):
            if not is_address(address):
                raise ConfigError(f"{address!r} is not an address: write HOST:PORT")
        if not addresses and not relay:
            raise ConfigError("an invite needs an address of the host or a relay")
        secret = secrets.token_hex(SECRET_BYTES)
        with self._change():
            self._forget_expired()
            issued = IssuedInvite(
                self._fresh_id(), hash_of(secret), round(self._clock() + lasts), machines
            )
            self._invites[issued.invite_id] = issued
        return Invite(
            " ".join(self._run_name.split())[:LONGEST_NAME],
            self.fingerprint,
            tuple(addresses)[:MOST_ADDRESSES],
            issued.invite_id,
            secret,
            issued.expires,
            relay,
            relay_pass,
        )

    def enrol(self, invite_id: str, secret: str, public: str, wanted_name: str) -> str:
        """Let in who has proven to hold a key; returns its name, the wanted one if there is one.

        AdmissionError says why not: wrong, expired, used, closed, kicked, or the name is taken. A
        peer that is known by its key is told its name again, with any invite that let it in, also
        after that has expired: its time is for those who are new.
        """
        key = fingerprint_of(public)
        with self._change():
            invite, known = self._admitted(invite_id, secret, key)
            if known is not None:
                if wanted_name not in ("", known.name):
                    raise AdmissionError(
                        f"this machine has joined the run as {known.name!r} before: leave out "
                        f"--name {wanted_name}, or join from another folder (--folder)"
                    )
                name = known.name
            else:
                name = wanted_name or self._drawn_name()
                self._refuse_name(name)
                if sum(not peer.kicked for peer in self._peers.values()) >= MOST_PEERS:
                    raise AdmissionError(
                        f"the run has {MOST_PEERS} peers already: it takes no more until one is "
                        "removed (thinwire kick)"
                    )
                self._peers[name] = EnrolledPeer(name, key, invite_id, self._clock(), public=public)
            if key not in invite.used_by:
                self._invites[invite_id] = replace(invite, used_by=[*invite.used_by, key])
            return name

    def check_invite(self, invite_id: str, secret: str, public: str) -> None:
        """Raise what `enrol` would, and use nothing up."""
        with self._changing:
            self._admitted(invite_id, secret, fingerprint_of(public))

    def kick(self, name: str) -> list[str]:
        """Let a peer in no more, neither by its key nor by its invite.

        The invite it came with admits nobody new from now on: it could return with another key.
        Peers that joined with the same invite stay, and are returned: they may be the same person.
        """
        with self._change():
            peer = self._peers.get(name)
            if peer is None:
                names = ", ".join(sorted(self._peers)) or "none"
                raise AdmissionError(f"no peer of this run is called {name!r}; its peers: {names}")
            self._peers[name] = replace(peer, kicked=True)
            used = {peer.invite_id}
            for invite in self._invites.values():
                if peer.key in invite.used_by:
                    self._invites[invite.invite_id] = replace(invite, closed=True)
                    used.add(invite.invite_id)
            return [p.name for p in self._peers.values() if p.invite_id in used and not p.kicked]

    def is_welcome(self, name: str) -> bool:
        """Whether a peer of this name may open anything."""
        peer = self._peers.get(name)
        return peer is not None and not peer.kicked

    def name_of(self, fingerprint: str) -> str | None:
        """Whose key it is; None if its holder may open nothing; for a `Listener`."""
        with self._changing:
            known = [p.name for p in self._peers.values() if p.key == fingerprint and not p.kicked]
        return known[0] if known else None

    def key_of(self, name: str) -> str:
        """The fingerprint of a peer's key."""
        return self._peers[name].key

    def door_token(self, name: str) -> str:
        """What a peer shows at the host's door, and the host at the peer's."""
        return self.identity.token_with(name, self._peers[name].public)

    def grant_of(self, who: str) -> Grant | None:
        """What somebody may at the host's door, which asks this at every connection.

        A peer may all until it is kicked. An invite is good for the way to enrolment, and to what
        `doctor` measures, for as long as it lets somebody in.
        """
        if peer := self._peers.get(who):
            return Grant(self.door_token(who), refusal=_why_kicked(peer))
        if invite := self._invites.get(invite_of(who)):
            token = door_token(invite.invite_id, invite.secret_hash)
            return Grant(token, _FOR_INVITED, self._why_closed(invite))
        return None

    def peers(self) -> list[EnrolledPeer]:
        """All that were ever let in, in that order; kicked ones too."""
        with self._changing:
            return list(self._peers.values())

    def _admitted(
        self, invite_id: str, secret: str, key: str
    ) -> tuple[IssuedInvite, EnrolledPeer | None]:
        """An invite that lets in the holder of this key, and who that is if it came before."""
        invite = self._invites.get(invite_id)
        if invite is None or not hmac.compare_digest(invite.secret_hash, hash_of(secret)):
            raise AdmissionError(_WRONG)
        known = next((peer for peer in self._peers.values() if peer.key == key), None)
        if known is not None and (why := _why_kicked(known)):
            raise AdmissionError(why)
        if known is None or key not in invite.used_by:
            self._refuse_invite(invite)
        return invite, known

    def _why_closed(self, invite: IssuedInvite) -> str:
        """Why an invite opens nothing any more; empty while it does."""
        if invite.closed:
            return (
                "this invite was closed, since a peer that used it was removed: ask the host for a "
                "new one"
            )
        if invite.expires <= self._clock():
            when = datetime.datetime.fromtimestamp(invite.expires, datetime.UTC)
            return f"this invite expired at {when:%Y-%m-%d %H:%M} UTC: ask the host for a new one"
        return ""

    def _refuse_invite(self, invite: IssuedInvite) -> None:
        """Refuse an invite that lets in nobody new."""
        if why := self._why_closed(invite):
            raise AdmissionError(why)
        if len(invite.used_by) >= invite.machines:
            many = "one machine" if invite.machines == 1 else f"{invite.machines} machines"
            raise AdmissionError(
                f"this invite was for {many} and has been used: ask the host for a new one "
                "(thinwire invite)"
            )

    def _refuse_name(self, name: str) -> None:
        if not is_name(name) or _RESERVED.fullmatch(name):
            raise AdmissionError(
                f"a peer cannot be called {name[:80]!r}: use lower-case letters, digits and inner "
                f"hyphens, at most 63, and not {COORDINATOR}, host, relay or stage-..."
            )
        if name in self._peers:
            raise AdmissionError(
                f"another peer of this run is called {name!r}: choose another --name"
            )

    def _drawn_name(self) -> str:
        while True:
            name = f"peer-{secrets.token_hex(2)}"
            if name not in self._peers:
                return name

    def _fresh_id(self) -> str:
        while True:
            invite_id = secrets.token_hex(ID_BYTES)
            if invite_id not in self._invites:
                return invite_id

    def _forget_expired(self) -> None:
        """Make room for another invite, first from those that never let anybody in."""
        now = self._clock()
        over = [i for i in self._invites.values() if i.expires <= now]
        for invite in sorted(over, key=lambda i: (bool(i.used_by), i.expires)):
            if len(self._invites) < MOST_INVITES:
                return
            del self._invites[invite.invite_id]
        if len(self._invites) >= MOST_INVITES:
            raise AdmissionError(f"{MOST_INVITES} invites are open: wait until some have expired")

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """A change is kept if it reaches the disk, and undone if it fails."""
        with self._changing:
            before = dict(self._invites), dict(self._peers)
            try:
                yield
                if before != (self._invites, self._peers):
                    self._save()
            except BaseException:
                self._invites, self._peers = before
                raise

    def _save(self) -> None:
        kept = _Book(self._run_name, list(self._invites.values()), list(self._peers.values()))
        try:
            content = msgspec.json.format(msgspec.json.encode(kept), indent=1)
            replace_private_file(self._file, content)
        except OSError as error:
            raise ConfigError(f"cannot write {self._file}: {error}") from error

    def _load(self) -> None:
        """A damaged book is an error: without it kicked peers could return."""
        try:
            with self._file.open("rb") as file:
                kept = msgspec.json.decode(file.read(_MOST_BYTES), type=_Book)
            if kept.version not in (2, _VERSION):
                raise ConfigError(f"its version is {kept.version}, not {_VERSION}")
            peers = [_with_key(peer) for peer in kept.peers]
        except (OSError, ValueError, ThinwireError) as error:
            raise ConfigError(
                f"{self._file} is damaged ({error}): restore it, or remove the folder "
                f"{self.folder}, which makes every invite and every peer of the run unknown"
            ) from None
        self._run_name = self._run_name or kept.run_name
        self._invites = {invite.invite_id: invite for invite in kept.invites}
        self._peers = {peer.name: peer for peer in peers}


def _with_key(peer: EnrolledPeer) -> EnrolledPeer:
    """A peer of a book, whose public key is the one of its fingerprint."""
    if peer.certificate:
        public = shown_key(ssl.PEM_cert_to_DER_cert(peer.certificate))
        peer = replace(peer, public=public, certificate="")
    if fingerprint_of(peer.public) != peer.key:
        raise ConfigError(f"the key of {peer.name!r} is not the one of its fingerprint")
    return peer


def _why_kicked(peer: EnrolledPeer) -> str:
    return f"{peer.name!r} was removed from this run by its host" if peer.kicked else ""
