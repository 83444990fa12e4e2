"""Who may join a run: its authority, its invites and its peers, kept in the run's folder.

All of it survives a restart of the host. A change is on the disk before anybody hears of it, so a
single-use invite stays used and a kicked peer stays kicked, whatever ends the process.
"""

import contextlib
import datetime
import hmac
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from thinwire.errors import AdmissionError, ConfigError
from thinwire.folders import private_folder
from thinwire.remote.entries import (
    EnrolledPeer,
    Entries,
    IssuedInvite,
    read_entries,
    write_entries,
)
from thinwire.remote.invite import (
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
from thinwire.wire import Grant
from thinwire.wire.speed import SERVICE as SPEED
from thinwire.wire.tls import Authority, Identity, is_name, request_fingerprint

COORDINATOR = "coordinator"
DAY = 24 * 3600.0
MOST_PEERS = 1000
MOST_INVITES = 1000  # expired ones make room
_FOR_INVITED = frozenset({"enrol", SPEED})
_RESERVED = re.compile(rf"{COORDINATOR}|host|relay|stage-.*")
_WRONG = "wrong invite: this run did not issue it, or it was altered; ask the host for a new one"


class AuthorityBook:
    """The authority of a run with its invites and peers. Safe to use from several threads.

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
                Authority.create(run_name).save(path)
        except OSError as error:
            raise ConfigError(f"cannot keep the run's authority in {folder}: {error}") from error
        self.authority = Authority.load(path)
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
        return self.authority.run_id

    def coordinator(self) -> Identity:
        """A fresh identity for the coordinator."""
        return self.authority.issue(COORDINATOR)

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
            self.authority.fingerprint,
            tuple(addresses)[:MOST_ADDRESSES],
            issued.invite_id,
            secret,
            issued.expires,
            relay,
            relay_pass,
        )

    def enrol(self, invite_id: str, secret: str, request_pem: str, wanted_name: str) -> str:
        """Let a peer in; returns its certificate, whose name is the wanted one if there is one.

        AdmissionError says why not: wrong, expired, used, closed, kicked, or the name is taken. A
        peer that is known by its key gets its certificate again, with any invite that let it in,
        also after that has expired: its time is for those who are new.
        """
        key = request_fingerprint(request_pem)
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
                certificate = self.authority.sign(request_pem, name)
                self._peers[name] = EnrolledPeer(name, key, certificate, invite_id, self._clock())
            if key not in invite.used_by:
                self._invites[invite_id] = replace(invite, used_by=[*invite.used_by, key])
            return self._peers[name].certificate

    def check_invite(self, invite_id: str, secret: str, request_pem: str = "") -> None:
        """Raise what `enrol` would, and use nothing up; without a request, for a new machine."""
        key = request_fingerprint(request_pem) if request_pem else ""
        with self._changing:
            self._admitted(invite_id, secret, key)

    def kick(self, name: str) -> list[str]:
        """Let a peer in no more, neither by its certificate nor by its key nor by its invite.

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
        """Whether a certificate of this name opens anything; for a `Listener`."""
        peer = self._peers.get(name)
        return name == COORDINATOR or (peer is not None and not peer.kicked)

    def door_token(self, name: str) -> str:
        """What a peer shows at the host's door, and the host at the peer's."""
        return self.authority.door_token(self._peers[name].certificate)

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
        entries = Entries(self._run_name, list(self._invites.values()), list(self._peers.values()))
        try:
            write_entries(self._file, entries)
        except OSError as error:
            raise ConfigError(f"cannot write {self._file}: {error}") from error

    def _load(self) -> None:
        entries = read_entries(self._file)
        self._run_name = self._run_name or entries.run_name
        self._invites = {invite.invite_id: invite for invite in entries.invites}
        self._peers = {peer.name: peer for peer in entries.peers}


def _why_kicked(peer: EnrolledPeer) -> str:
    return f"{peer.name!r} was removed from this run by its host" if peer.kicked else ""
