"""Enrolment: a machine with an invite shows its secret and gets a certificate for its own key.

It runs under TLS, before the joining end has a certificate. So that end checks first whom it talks
to: the host sends the authority's certificate, which must have the fingerprint of the invite, and
the host's own must be one that this authority issued to the coordinator. Until then the joining
end says nothing. Whoever stands between, with an authority of his own, learns neither the secret
nor the request.
"""

import contextlib
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cryptography import x509

from thinwire import __version__
from thinwire.errors import AdmissionError, ThinwireError, WireError, printable
from thinwire.remote.authority import COORDINATOR, AuthorityBook
from thinwire.remote.exchange import cut, cut_off_after, receive, send
from thinwire.remote.identity import (
    identity_of,
    own_key,
    save_identity,
    saved_identity,
)
from thinwire.remote.invite import Invite, is_address
from thinwire.wire.background import on_daemon_thread
from thinwire.wire.kernel import address_text
from thinwire.wire.preamble import split_address
from thinwire.wire.tls import (
    Identity,
    is_issued_by,
    names_in,
    public_key_fingerprint,
    signing_request,
)
from thinwire.wire.tunnel import Route, ping

EXCHANGE_S = 20.0  # for all that is said, handshake included
MOST_AT_ONCE = 32  # exchanges; each takes a thread. Only who has an invite passes the host's door


class EnrolServer:
    """The host's end, on a loopback address for a door to serve; a context manager."""

    def __init__(
        self,
        book: AuthorityBook,
        origins: Mapping[str, str] | None = None,
        exchange_s: float = EXCHANGE_S,
    ) -> None:
        """`origins`: from where connections come, by the local address that is seen here."""
        self._book, self._exchange_s = book, exchange_s
        self._origins = {} if origins is None else origins
        self._open: dict[ssl.SSLSocket, None] = {}  # exchanges, the oldest first
        self._counting = threading.Lock()
        self._context = self._make_context()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = address_text(*self._socket.getsockname()[:2])
        on_daemon_thread("thinwire enrol", self._accept)

    def __enter__(self) -> "EnrolServer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; exchanges that are under way end by themselves."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return
                time.sleep(0.1)  # out of descriptors, perhaps: some will be given back
                continue
            with contextlib.suppress(OSError):  # the caller has gone already
                caller = self._context.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
                self._make_room(caller)
                on_daemon_thread("thinwire enrol", partial(self._serve, caller))

    def _make_room(self, caller: ssl.SSLSocket) -> None:
        """Where there are too many, the oldest goes: an honest exchange takes a moment only."""
        with self._counting:
            if len(self._open) >= MOST_AT_ONCE:
                oldest = next(iter(self._open))
                del self._open[oldest]
                cut(oldest)
            self._open[caller] = None

    def _serve(self, connection: ssl.SSLSocket) -> None:
        """One exchange. Whatever a stranger sends, it costs one thread for a bounded time."""
        try:
            with (
                connection,
                contextlib.suppress(OSError, ThinwireError),
                cut_off_after(self._exchange_s, connection),
            ):
                connection.do_handshake()
                authority_pem = self._book.authority.certificate_pem
                send(connection, {"authority": authority_pem, "version": __version__})
                origin = self._origins.get(address_text(*connection.getpeername()[:2]), "")
                send(connection, self._answer(receive(connection), origin))
        finally:
            with self._counting:
                self._open.pop(connection, None)

    def _answer(self, asked: dict[str, Any], origin: str) -> dict[str, str]:
        values = [asked.get(key) for key in ("invite", "secret", "request", "name")]
        if not all(isinstance(value, str) for value in values):
            return {"refused": "the enrolment lacks a part: install the host's version of thinwire"}
        invite_id, secret, request, name = (str(value) for value in values)
        try:
            if asked.get("only") == "ask":
                self._book.check_invite(invite_id, secret, request)
                return {"reached": self._reaches(str(asked.get("door", "")), origin, invite_id)}
            return {"certificate": self._book.enrol(invite_id, secret, request, name)}
        except (AdmissionError, WireError) as refusal:
            return {"refused": str(refusal)}
        except ThinwireError:  # the host's own trouble, such as a full disk, is not for strangers
            return {"refused": "the host cannot enrol peers at the moment: its log says why"}

    def _reaches(self, address: str, origin: str, invite_id: str) -> str:
        """Whether a door of this run answers there; nothing else that listens there would do.

        Only where the caller itself comes from: a host is no means to look around.
        """
        grant = self._book.grant_of(f"invite/{invite_id}")
        if not is_address(address) or split_address(address)[0] != origin or grant is None:
            return ""
        try:
            ping(Route(address, token=grant.token), f"{self._book.run_id}/probe")
        except WireError:
            return "no"  # and not why
        return "yes"

    def _make_context(self) -> ssl.SSLContext:
        identity = self._book.coordinator()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Python reads a key from a file only. This one is ours alone, and gone at once.
        with tempfile.NamedTemporaryFile(dir=self._book.folder, prefix=".key-") as file:
            file.write((identity.key_pem + identity.certificate_pem).encode())
            file.flush()
            context.load_cert_chain(file.name)
        return context


@dataclass(frozen=True)
class HostSays:
    """What a host says of an invite without using it."""

    version: str  # of thinwire
    refusal: str  # why the invite would not let this machine in; empty if it would
    reached: bool | None = None  # whether the host reached the door that it was asked about


def enrol(
    address: str, invite: Invite, key_pem: str, wanted_name: str = "", timeout: float = EXCHANGE_S
) -> Identity:
    """Join the run of an invite through the enrolment service at `address`; the identity there.

    Without a wanted name the host draws one. AdmissionError says that the host refused, or that
    another run answers; any other WireError that it could not be reached.
    """
    asked = {"request": signing_request(key_pem), "name": wanted_name}
    greeting, answer = _exchange(address, invite, asked, timeout)
    if "refused" in answer:
        raise AdmissionError(f"the host refused: {_told(answer, 'refused')}")
    return identity_of(str(answer.get("certificate", "")), key_pem, greeting["authority"])


def ask(
    address: str, invite: Invite, key_pem: str = "", door: str = "", timeout: float = EXCHANGE_S
) -> HostSays:
    """Ask the host whether an invite would let this machine in, or with its key, let it in again.

    With the address of a door of ours, also whether the host can reach it. Raises as `enrol` does
    if no host of that run is there.
    """
    request = signing_request(key_pem) if key_pem else ""
    asked = {"request": request, "name": "", "only": "ask", "door": door}
    greeting, answer = _exchange(address, invite, asked, timeout)
    reached = {"yes": True, "no": False}.get(_told(answer, "reached"))
    return HostSays(_told(greeting, "version"), _told(answer, "refused"), reached)


def identity_in(folder: Path, address: str, invite: Invite, wanted_name: str = "") -> Identity:
    """Who this machine is in the run of an invite: as before, or enrolled now and kept there."""
    saved = saved_identity(folder)
    if (
        saved is not None
        and saved.authority_fingerprint == invite.fingerprint
        and wanted_name in ("", saved.name)  # else the host says what is wrong
    ):
        return saved
    identity = enrol(address, invite, own_key(folder), wanted_name)
    save_identity(folder, identity)
    return identity


def _exchange(
    address: str, invite: Invite, asked: dict[str, str], timeout: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The host's greeting, and what it answers once it has proved to be the invite's host."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # we do it, below: the authority is not known before
    try:
        with (
            socket.create_connection(split_address(address), timeout) as plain,
            context.wrap_socket(plain, do_handshake_on_connect=False) as connection,
            cut_off_after(timeout, connection),
        ):
            connection.do_handshake()
            greeting = receive(connection)
            shown = connection.getpeercert(binary_form=True) or b""
            _check_host(str(greeting.get("authority", "")), shown, invite)
            send(connection, {"invite": invite.invite_id, "secret": invite.secret, **asked})
            return greeting, receive(connection)
    except OSError as error:
        reason = "no answer in time" if isinstance(error, TimeoutError) else error
        raise WireError(
            f"cannot enrol at {address}: {printable(str(reason))}; is the host running?"
        ) from None


def _check_host(authority_pem: str, shown: bytes, invite: Invite) -> None:
    """Refuse to say anything to who is not the coordinator of the invite's run."""
    try:
        authority = x509.load_pem_x509_certificate(authority_pem.encode())
        own = x509.load_der_x509_certificate(shown)
    except ValueError:
        raise WireError("what answers is not the enrolment service of a run") from None
    if public_key_fingerprint(authority) != invite.fingerprint:
        raise AdmissionError(
            "another run answers at the address of the invite, or somebody stands between: nothing "
            "was sent; ask the host for a new invite"
        )
    if not is_issued_by(own, authority) or names_in(own) != [COORDINATOR]:
        raise AdmissionError(
            "what answers at the address of the invite is not the run's coordinator: nothing was "
            "sent; ask the host whether its address has changed"
        )


def _told(message: dict[str, Any], key: str) -> str:
    """A short text of the other end's, fit for a screen."""
    return printable(str(message.get(key, "")), 500)
