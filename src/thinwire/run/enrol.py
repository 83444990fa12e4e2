"""Enrolment: a machine with an invite shows its secret, and the host puts its key on the list.

It is a stream to the host like any other, but of one who is not on the list yet. The host has
proven the key whose fingerprint is in the invite before the joining machine says anything; whoever
stands between, with a key of his own, learns neither the secret nor the name. The machine's own key
is made before the first enrolment and never leaves it. So if it enrols again, because an answer was
lost, it is known to the host.
"""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire import __version__
from thinwire.errors import (
    AdmissionError,
    BreachError,
    ConfigError,
    ThinwireError,
    WireError,
    printable,
)
from thinwire.folders import replace_private_file
from thinwire.run.authority import AuthorityBook
from thinwire.run.invite import Invite, is_address
from thinwire.wire import Identity, Listener, Pipe, Route, Routes, dial, ping
from thinwire.wire.keys import fingerprint_of, is_name
from thinwire.wire.sockets import split_address
from thinwire.wire.stream import Stream

ENROL = "enrol"  # the name of the stream
EXCHANGE_S = 20.0  # for all that is said
_MOST_BYTES = 4096
_KEY, _PEER = "key.pem", "peer.json"


def serve_enrolment(listener: Listener, book: AuthorityBook) -> None:
    """Let the host's listener enrol who has an invite."""

    def answer(stream: Stream) -> None:
        said = _message(stream)
        stream.write(json.dumps(_answer(book, said, stream.public, stream.comes_from)).encode())

    listener.serve(ENROL, answer)


def _answer(book: AuthorityBook, asked: dict[str, Any], public: str, origin: str) -> dict[str, str]:
    values = [asked.get(key) for key in ("invite", "secret", "name")]
    if not all(isinstance(value, str) for value in values):
        return {"refused": "the enrolment lacks a part: install the host's version of thinwire"}
    invite_id, secret, name = (str(value) for value in values)
    try:
        if asked.get("only") == "ask":
            book.check_invite(invite_id, secret, public)
            door = str(asked.get("door", ""))
            reached = _reaches(book, door, origin, invite_id)
            return {"version": __version__, "reached": reached}
        return {"version": __version__, "name": book.enrol(invite_id, secret, public, name)}
    except (AdmissionError, WireError) as refusal:
        return {"version": __version__, "refused": str(refusal)}
    except ThinwireError:  # the host's own trouble, such as a full disk, is not for strangers
        return {"refused": "the host cannot enrol peers at the moment: its log says why"}


def _reaches(book: AuthorityBook, address: str, origin: str, invite_id: str) -> str:
    """Whether a door of this run answers there; nothing else that listens there would do.

    Only where the caller itself comes from: a host is no means to look around.
    """
    grant = book.grant_of(f"invite/{invite_id}")
    if not is_address(address) or split_address(address)[0] != origin or grant is None:
        return ""
    try:
        ping(Route(address, token=grant.token), f"{book.run_id}/probe")
    except WireError:
        return "no"  # and not why
    return "yes"


@dataclass(frozen=True)
class HostSays:
    """What a host says of an invite without using it."""

    version: str  # of thinwire
    refusal: str  # why the invite would not let this machine in; empty if it would
    reached: bool | None = None  # whether the host reached the door that it was asked about


def enrol(
    routes: Routes, invite: Invite, key_pem: str, wanted_name: str = "", timeout: float = EXCHANGE_S
) -> Identity:
    """Join the run of an invite, whose host is found by these routes; the identity there.

    Without a wanted name the host draws one. AdmissionError says that the host refused, or that
    another run answers; any other WireError that it could not be reached.
    """
    answer, host = _exchange(routes, invite, key_pem, {"name": wanted_name}, timeout)
    if "refused" in answer:
        raise AdmissionError(f"the host refused: {_told(answer, 'refused')}")
    if not is_name(name := _told(answer, "name")):
        raise WireError("the host's answer does not name this machine")
    return Identity(name, key_pem, host)


def ask(
    routes: Routes,
    invite: Invite,
    key_pem: str = "",
    door: str = "",
    timeout: float = EXCHANGE_S,
) -> HostSays:
    """Ask the host whether an invite would let this machine in, or with its key, let it in again.

    With the address of a door of ours, also whether the host can reach it. Raises as `enrol` does
    if no host of that run is there.
    """
    key_pem = key_pem or Identity.create("").key_pem
    asked = {"name": "", "only": "ask", "door": door}
    answer, _ = _exchange(routes, invite, key_pem, asked, timeout)
    reached = {"yes": True, "no": False}.get(_told(answer, "reached"))
    return HostSays(_told(answer, "version"), _told(answer, "refused"), reached)


def _exchange(
    routes: Routes, invite: Invite, key_pem: str, asked: dict[str, str], timeout: float
) -> tuple[dict[str, Any], str]:
    """What the host answers once it has proved to be the invite's, and its public key."""
    identity, whom = Identity("this machine", key_pem), invite.fingerprint
    try:
        stream = dial(routes, ENROL, identity, whom, timeout, _MOST_BYTES, tries_again=False)
    except BreachError:
        raise AdmissionError(
            "another run answers at the address of the invite, or somebody stands between: nothing "
            "was sent; ask the host for a new invite"
        ) from None
    with contextlib.closing(stream):
        said = {"invite": invite.invite_id, "secret": invite.secret, **asked}
        stream.write(json.dumps(said).encode())
        return _message(stream), stream.public


def _message(stream: Pipe) -> dict[str, Any]:
    raw = stream.read()
    try:
        message = json.loads(bytes(raw or b""))
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise WireError("a message of enrolment cannot be read")
    return message


def _told(message: dict[str, Any], key: str) -> str:
    """A short text of the other end's, fit for a screen."""
    return printable(str(message.get(key, "")), 500)


def own_key(folder: Path) -> str:
    """The private key of this machine in the run of this folder, made if there is none yet."""
    path = folder / _KEY
    try:
        if not path.exists():
            replace_private_file(path, Identity.create("").key_pem.encode())
        key_pem = path.read_text()
        Identity("", key_pem).fingerprint  # noqa: B018
    except OSError as error:
        raise ConfigError(
            f"cannot keep this machine's key in {folder}: {error}; choose another --folder"
        ) from error
    except (UnicodeError, WireError):
        raise ConfigError(
            f"{path} is damaged: remove it, and join with a new invite and another --name"
        ) from None
    return key_pem


def saved_identity(folder: Path, fingerprint: str) -> Identity | None:
    """Who this machine was before in the run of this host; None if it must enrol."""
    try:
        saved = json.loads((folder / _PEER).read_bytes())
        identity = Identity(str(saved["name"]), own_key(folder), str(saved["host"]))
        is_of_this_run = fingerprint_of(identity.host) == fingerprint and is_name(identity.name)
    except (OSError, ValueError, KeyError, TypeError, ThinwireError):
        return None
    return identity if is_of_this_run else None


def identity_in(folder: Path, routes: Routes, invite: Invite, wanted_name: str = "") -> Identity:
    """Who this machine is in the run of an invite: as before, or enrolled now and kept there."""
    saved = saved_identity(folder, invite.fingerprint)
    if saved is not None and wanted_name in ("", saved.name):  # else the host says what is wrong
        return saved
    identity = enrol(routes, invite, own_key(folder), wanted_name)
    kept = json.dumps({"name": identity.name, "host": identity.host})
    try:
        replace_private_file(folder / _PEER, kept.encode())
    except OSError as error:
        raise ConfigError(f"cannot write {folder / _PEER}: {error}") from error
    return identity
