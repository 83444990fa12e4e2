"""Looks for what will go wrong before it does: this machine, and the way to a host."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from thinwire.errors import AdmissionError, ThinwireError
from thinwire.paths import peer_folder
from thinwire.remote.alive import hosted_folders
from thinwire.remote.check_machine import check_machine
from thinwire.remote.check_way import check_outside, check_way
from thinwire.remote.control_socket import ask
from thinwire.remote.enrol import saved_identity
from thinwire.remote.findings import Finding, Findings, blocks
from thinwire.remote.invite import Invite


def examine(text: str = "", folder: Path | None = None, listen: str = "") -> Findings:
    """Examine this machine, and with the text of an invite the way to its host.

    Without one, also whether peers reach the runs that this machine hosts.

    `folder` and `listen` are those that `join` would be given. It changes nothing: neither is the
    invite used, nor a key made.
    """
    return Findings(_examination(text, folder, listen))


def _examination(text: str, folder: Path | None, listen: str) -> Iterator[Finding]:
    invite = None
    if text:
        try:
            invite = Invite.parse(text)
        except AdmissionError as error:
            what, _, fix = str(error).partition("; ")
            yield blocks(what, "It says neither where the run is nor how to know it.", fix)
    place = folder or peer_folder(invite.run_id if invite else "RUN")
    yield from check_machine(place)
    if not text:
        yield from _check_hosted()
    if invite is not None:
        yield from check_way(invite, saved_identity(place, invite.fingerprint), listen)


def _check_hosted() -> Iterator[Finding]:
    """Have the peers of each run that is hosted here look from outside."""
    for folder in hosted_folders():
        with contextlib.suppress(ThinwireError):  # a run of this machine alone
            yield from check_outside(ask(folder, {"ask": "outside"}))
