"""Looks for what will go wrong before it does: on this machine, and on the way to a host.

Findings say what was looked at, and where something will go wrong what, and the fix. torch is
imported late: it may be what is missing.
"""

import contextlib
import os
import platform
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import thinwire
from thinwire.errors import AdmissionError, ThinwireError, WireError
from thinwire.paths import peers_folder
from thinwire.report.human import duration, human_bytes
from thinwire.run.admission import HostSays, Invite, saved_identity
from thinwire.run.admission import ask as ask_host
from thinwire.run.machine import device_name, existing_folder, free_disk, free_memory
from thinwire.wire import Door, Identity, Route, Routes, Seen, ping_all
from thinwire.wire.sockets import address_text, split_address
from thinwire.wire.speed import measure_link

_NEW_INVITE = "ask the host for a new invite"
# Commands in a fix are to be copied: no word is broken.
_WRAPPER = textwrap.TextWrapper(
    96, subsequent_indent=" " * 4, break_long_words=False, break_on_hyphens=False
)
_MARKS = {"blocks": "BLOCKS", "note": "note", "fine": "fine"}  # the worst first


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; one that blocks keeps the machine out, a note does not."""

    level: Literal["blocks", "note", "fine"]
    what: str
    trouble: str = ""
    fix: str = ""


def fine(what: str) -> Finding:
    """Nothing to do."""
    return Finding("fine", what)


class Findings:
    """All findings, the worst first, each with a number."""

    def __init__(self, found: Iterable[Finding]) -> None:
        self.all = sorted(found, key=lambda finding: [*_MARKS].index(finding.level))

    @property
    def is_blocked(self) -> bool:
        """Whether something keeps this machine from taking part."""
        return any(finding.level == "blocks" for finding in self.all)

    def to_plain(self) -> dict[str, Any]:
        """For programs."""
        findings = [{"number": n, **vars(finding)} for n, finding in enumerate(self.all, 1)]
        return {"blocked": self.is_blocked, "findings": findings}

    def text(self) -> str:
        """For people: what to do first."""
        lines = []
        for number, finding in enumerate(self.all, 1):
            starts = f"{number:>2}. {_MARKS[finding.level]}: ", "    ", "    fix: "
            texts = finding.what, finding.trouble, finding.fix
            for start, text in zip(starts, texts, strict=True):
                lines += _WRAPPER.wrap(start + text) if text else []
        levels = [finding.level for finding in self.all]
        notes = "; the notes say what could be better" if "note" in levels else ""
        verdict = f"Nothing keeps this machine out{notes}."
        if count := levels.count("blocks"):
            verdict = f"{count} of these {'keeps' if count == 1 else 'keep'} this machine out."
        return "\n".join([*lines, "", verdict])


def examine(text: str = "", folder: Path | None = None, listen: str = "") -> Iterator[Finding]:
    """Examine this machine, and the way to the host of an invite, or to runs that are hosted here.

    `folder` and `listen` are those that `join` would be given. It changes nothing.
    """
    invite = None
    if text:
        try:
            invite = Invite.parse(text)
        except AdmissionError as error:
            what, _, fix = str(error).partition("; ")
            trouble = "It says neither where the run is nor how to know it."
            yield Finding("blocks", what, trouble, fix)
    place = folder or peers_folder() / (invite.run_id if invite else "RUN")
    system = f"{platform.system()} {platform.machine()}"
    python = platform.python_version()  # an older one than thinwire needs cannot import this
    yield fine(f"thinwire {thinwire.__version__}, Python {python} on {system}")
    yield from _check_device()
    yield check_folder(place)
    if invite is not None:
        yield from check_way(invite, saved_identity(place, invite.fingerprint), listen)
    elif not text:
        yield from _check_hosted()


def _check_device() -> Iterator[Finding]:
    try:
        import torch

        from thinwire.engine.build import choose_device
    except (ImportError, OSError) as error:  # OSError: a library of the system is missing
        what, trouble = f"torch cannot be imported: {error}", "A stage computes with it."
        yield Finding("blocks", what, trouble, "install it: pip install torch")
        return
    yield fine(f"torch {torch.__version__}")
    device = choose_device("auto", 0)
    yield check_memory(free_memory(device), device_name(device))


def check_memory(free: int, device: str) -> Finding:
    """Whether a stage of some size fits into the free memory of the device."""
    what = f"device {device}, {human_bytes(free)} of memory free"
    fix = "close other programs, or take part with another machine"
    if free < 0.5e9:
        return Finding("blocks", what, "No stage of a useful size fits into that.", fix)
    small = "Only a small stage fits: each parameter takes about 16 bytes while it is trained."
    return Finding("note", what, small, fix) if free < 2e9 else fine(what)


def check_folder(folder: Path) -> Finding:
    """Whether this machine can keep its key and the shards of its stage there."""
    place = existing_folder(folder)
    fix = "choose another place: thinwire join --folder DIR, or set THINWIRE_DATA"
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        trouble = f"This machine's key and shards would be kept in {folder}."
        return Finding("blocks", f"nothing can be written to {place}", trouble, fix)
    free, fix = free_disk(folder), f"free some space, or {fix}"
    what = f"disk: {human_bytes(free)} free for {folder}"
    if free < 0.2e9:
        return Finding("blocks", what, "The shards of a stage do not fit.", fix)
    few = "A shard takes about 12 bytes for each parameter of the stage, and several are kept."
    return Finding("note", what, few, fix) if free < 5e9 else fine(what)


def _check_hosted() -> Iterator[Finding]:
    """Have the peers of each run that is hosted here look from outside."""
    with contextlib.suppress(ImportError, OSError):  # without torch none is hosted
        from thinwire.run.alive import ask, hosted_folders

        for folder in hosted_folders():
            with contextlib.suppress(ThinwireError):  # a run of this machine alone
                yield from check_outside(ask(folder, {"ask": "outside"}))


def check_outside(told: dict[str, Any]) -> Iterator[Finding]:
    """Whether others reach a host of this machine, by what the peers of its run found (TryDoor)."""
    run, peers = f"run {told['run']!r}", told["peers"]
    for address in told["addresses"]:
        tried = {name: found[address] for name, found in peers.items() if address in found}
        if reached := [name for name, why in tried.items() if not why]:
            yield fine(f"{run} can be reached from outside at {address}: {', '.join(reached)} did")
        elif tried:
            (name, why), *_ = tried.items()
            _, port = split_address(address)
            yield Finding(
                "note",
                f"{run} was not reached from outside at {address}: {name} tried ({why})",
                "Nobody new can join by this address.",
                f"forward TCP port {port} in the router, open it here (sudo ufw allow {port}/tcp), "
                "and host with --address and the public address; or use thinwire relay",
            )
        else:
            yield fine(f"{run} at {address}: no peer on another machine is there that could try")


def check_way(invite: Invite, known: Identity | None = None, listen: str = "") -> Iterator[Finding]:
    """Try every way that the invite names, ask the host, and measure the best way.

    `known`: who this machine is if it has joined before; `listen`: where it would accept others.
    """
    probe = invite.to_service("probe", known.door_token if known else "")
    answers = ping_all(probe.routes, probe.name)
    refusals = [str(answer) for answer in answers.values() if isinstance(answer, AdmissionError)]
    if refusals:
        yield Finding("blocks", f"the host refuses this invite: {refusals[0]}", "", _NEW_INVITE)
        return
    ways = {route: answer for route, answer in answers.items() if isinstance(answer, Seen)}
    for route, answer in answers.items():
        yield _check_route(route, answer, is_reached=bool(ways))
    if ways:
        seen, *_ = ways.values()
        yield from _check_host(invite, list(ways), known.key_pem if known else "", listen, seen)
        try:
            rates = measure_link(list(ways), invite.run_id)
            both = f"{rates.mbps_up:.1f} Mbit/s up, {rates.mbps_down:.1f} Mbit/s down"
            yield fine(f"{both}, round trip {1e3 * rates.round_trip_s:.0f} ms to the host")
        except WireError as error:
            yield fine(f"rates were not measured: {error}")
    elif (left := invite.seconds_left()) <= 0:  # which its host cannot say now
        trouble = "It lets in nobody new. A machine that joined with it before can join again."
        yield Finding("note", f"the invite expired {duration(-left)} ago", trouble, _NEW_INVITE)


def _check_route(route: Route, answer: Seen | BaseException, is_reached: bool) -> Finding:
    who = "the host" if route.kind == "direct" else "the relay"
    if isinstance(answer, Seen):
        seen, _ = split_address(answer.address)
        trip = f"{1e3 * answer.round_trip_s:.0f} ms"
        return fine(f"{who} answers at {route.address} in {trip}, and sees this machine as {seen}")
    _, port = split_address(route.address)
    command = "thinwire host" if route.kind == "direct" else "thinwire relay"
    fix = (
        f"there: see that `{command}` runs, open TCP port {port} in the firewall (sudo ufw allow "
        f"{port}/tcp) and forward TCP port {port} in the router. Here: look at the connection and "
        f"the name server, and allow connections out to port {port}; thinwire does not use a "
        "proxy. Or let both meet at a third machine: thinwire relay, and thinwire host --relay. If "
        f"another run is at home there by now, {_NEW_INVITE}"
    )
    what = f"{who} does not answer: {answer}"
    if is_reached:
        return Finding("note", what, "Another way works; the run will use that.", fix)
    return Finding("blocks", what, "This machine cannot reach the run.", fix)


def _check_host(
    invite: Invite, ways: list[Route], key_pem: str, listen: str, seen: Seen
) -> Iterator[Finding]:
    """Ask the host whether it lets this machine in, and whether it reaches a door here."""
    with contextlib.ExitStack() as held:
        address = ""
        if listen:  # a door as `join` would have it, and where others would look for it
            try:
                host, port = split_address(listen)
                door = held.enter_context(Door(host, port))
                door.admit(invite.run_id, invite.door_token)
                host = split_address(seen.address)[0] if host in ("", "0.0.0.0", "::") else host
                address = address_text(host, door.port)
            except WireError as error:
                trouble = "Then it accepts no connections from outside."
                what = f"no door can be opened here: {error}"
                yield Finding("note", what, trouble, "choose another --listen")
        try:
            enrol = Routes(f"{invite.run_id}/enrol", ways)
            says = ask_host(enrol, invite, key_pem, address)
        except WireError as error:
            trouble, fix = "does not enrol peers", "ask the host whether `thinwire host` is running"
            if isinstance(error, AdmissionError):
                trouble, fix = "cannot be trusted", _NEW_INVITE
            yield Finding("blocks", f"the host {trouble}: {error}", "Joining will fail.", fix)
            return
    yield from check_answer(invite, says, address)


def check_answer(invite: Invite, says: HostSays, door: str) -> Iterator[Finding]:
    """What follows from the words of a host that was asked about a door here."""
    if says.refused:
        yield Finding("blocks", f"the host refuses this invite: {says.refused}", "", _NEW_INVITE)
    else:
        run = f"run {invite.run_name!r} ({invite.run_id})"
        yield fine(f"the host of {run} would let this machine in")
    if says.version != thinwire.__version__:
        what = f"thinwire {thinwire.__version__} here, {says.version} at the host"
        trouble = "Both ends of a link must compute and pack alike."
        yield Finding("blocks", what, trouble, f"pip install thinwire=={says.version}")
    if says.reached == "yes":
        yield fine(f"this machine can be reached from outside, at {door}: its links are direct")
    elif says.reached == "no":
        _, port = split_address(door)
        yield Finding(
            "note",
            f"nobody outside reaches this machine at {door}",
            "A link to another machine that cannot be reached either passes the host or a relay, "
            "and shares its rate with others. All else works.",
            f"nothing, or: forward a TCP port in the router, open it here (sudo ufw allow {port}"
            f"/tcp), and join with --listen 0.0.0.0:{port}",
        )
