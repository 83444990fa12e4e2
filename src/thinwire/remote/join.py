"""Joining a run: from an invite to a member of it, on this machine."""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from thinwire.errors import AdmissionError, ConfigError, DataError, WireError
from thinwire.folders import lock, private_folder
from thinwire.paths import peer_folder
from thinwire.remote.control_socket import ControlSocket
from thinwire.remote.enrol import identity_in
from thinwire.remote.holding import Terms
from thinwire.remote.invite import Invite
from thinwire.remote.measure import MachineFigures, measure_machine
from thinwire.remote.member import Member, Place
from thinwire.remote.member_console import member_handlers
from thinwire.report import Display
from thinwire.wire import Door, Identity, Route, ping, raise_descriptor_limit
from thinwire.wire.keys import is_name
from thinwire.wire.sockets import address_text, split_address
from thinwire.wire.speed import measure_link

LINK_SECONDS = 0.5  # of a burst each way


@dataclass(frozen=True)
class JoinOptions:
    """How a machine takes part: its name, its folder, its door, and its terms."""

    name: str = ""
    folder: Path | None = None
    listen: str = "0.0.0.0:0"  # empty: accepts nothing from outside
    terms: Terms = field(default_factory=Terms)


def join(invite: Invite, options: JoinOptions, display: Display) -> str:
    """Take part in the run of an invite; returns in a sentence how that ended."""
    _check(options)
    raise_descriptor_limit()
    folder = options.folder or peer_folder(invite.run_id)
    with _claimed(folder):
        display.phase("join", f"run {invite.run_name!r}, of which this machine keeps {folder}")
        identity = _identity(folder, invite, options.name)
        display.phase("join", f"enrolled as {identity.name}")
        host = invite.to_service("control", identity.door_token)
        routes = host.routes
        with _door(options.listen) as door:
            addresses = _addresses(door, options.listen, _seen(routes, invite))
            admit = partial(_admit, door, invite.run_id, identity.door_token)
            place = Place(folder, host, *addresses, admit)
            machine = _measured(options.terms.device, folder, routes, invite.run_id, display)
            member = Member(place, identity, options.terms, machine, display)
            with ControlSocket(folder, member_handlers(member, invite)):
                return member.run()


def _check(options: JoinOptions) -> None:
    """Refuse what cannot work before the host hears of this machine."""
    if options.name and not is_name(options.name):
        raise ConfigError(
            f"--name {options.name}: a name has lower-case letters, digits and inner hyphens, at "
            "most 63"
        )
    if options.listen:
        split_address(options.listen)
    terms = options.terms
    for name in ("data", "valid_data", "tokenizer", "template"):
        option, path = f"--{name.replace('_', '-')}", getattr(terms, name)
        if path is not None and not path.exists():
            raise DataError(f"{option} {path}: there is no such file or folder")
        if path is not None and terms.data is None:
            raise ConfigError(f"{option} goes with --data: name the run's data too")


def _identity(folder: Path, invite: Invite, name: str) -> Identity:
    try:
        return identity_in(folder, invite.to_service("enrol"), invite, name)
    except AdmissionError:
        raise
    except WireError as error:
        raise WireError(
            f"cannot reach the host of run {invite.run_name!r}: {error}; `thinwire doctor` with "
            "the same invite looks for the cause"
        ) from None


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Hold the folder: two processes must not be the same peer."""
    try:
        private_folder(folder)
        held = (folder / ".lock").open("a")
    except OSError as error:
        raise ConfigError(f"cannot use {folder}: {error}; choose another --folder") from error
    with held:
        try:
            lock(held.fileno())
        except BlockingIOError:
            raise ConfigError(
                f"another process takes part in this run with the folder {folder}: stop it, or "
                "join as a further peer with --folder and --name"
            ) from None
        yield


@contextlib.contextmanager
def _door(listen: str) -> Iterator[Door | None]:
    if not listen:
        yield None
        return
    with Door(*split_address(listen)) as door:
        yield door


def _admit(door: Door | None, run: str, own: str, links: str) -> None:
    """Admit the host, which knows this peer's own token, and the peers of the epoch at the door."""
    if door is not None:
        door.admit(run, own, *([links] if links else []))


def _seen(routes: tuple[Route, ...], invite: Invite) -> str:
    """As which host others see this machine; empty where no way leads there at the moment.

    An AdmissionError says that this peer was removed from the run.
    """
    for route in routes:
        try:
            return split_address(ping(route, invite.service("control")).address)[0]
        except AdmissionError:
            raise
        except WireError:
            continue
    return ""


def _addresses(door: Door | None, listen: str, seen: str) -> tuple[str, str]:
    """The door's address for this machine's own processes, and the one by which others may try."""
    if door is None:
        return "", ""
    host, _ = split_address(listen)
    if host not in ("0.0.0.0", "::", ""):
        return door.address, door.address
    outside = address_text(seen, door.port) if seen else ""
    return address_text("127.0.0.1", door.port), outside


def _measured(
    device: str, folder: Path, routes: tuple[Route, ...], run_id: str, display: Display
) -> MachineFigures:
    """What this machine can give; a way to the host that cannot be measured now is left open."""
    machine = measure_machine(device, folder)
    try:
        machine = dataclasses.replace(machine, link=measure_link(routes, run_id, LINK_SECONDS))
    except WireError as error:
        display.note(str(error))
    display.phase("join", f"this machine: {machine.describe()}")
    return machine
