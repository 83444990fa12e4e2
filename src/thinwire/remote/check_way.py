"""Whether a machine reaches the host of an invite, and is let in there; and who can reach it."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import thinwire
from thinwire.errors import AdmissionError, WireError
from thinwire.remote.enrol import HostSays, ask
from thinwire.remote.findings import Finding, blocks, fine, note
from thinwire.remote.invite import Invite
from thinwire.report.human import duration
from thinwire.wire import Door, Identity, Route, Routes, Seen, ping
from thinwire.wire.sockets import address_text, split_address
from thinwire.wire.speed import measure_link

SKEW_S = 30.0  # beyond which clocks are worth a note
LOW_MBPS_UP = 5.0
_NEW_INVITE = "ask the host for a new invite"


def check_way(invite: Invite, known: Identity | None = None, listen: str = "") -> Iterator[Finding]:
    """Try every way that the invite names, ask the host, and measure the best way.

    `known` is who this machine is if it has joined before. `listen` is where it would accept
    connections from outside, HOST:PORT; empty for nowhere.
    """
    answers = _ping_all(invite, invite.routes(known.door_token if known else ""))
    refusals = [str(answer) for answer in answers.values() if isinstance(answer, AdmissionError)]
    if refusals:
        yield blocks(f"the host refuses this invite: {refusals[0]}", "", _NEW_INVITE)
        return
    yield from _check_answers(answers)
    ways = {route: answer for route, answer in answers.items() if isinstance(answer, Seen)}
    if not ways:
        yield _check_time(invite)
        return
    seen, *_ = ways.values()
    yield check_clock(seen.ahead_s)
    yield from _check_host(invite, list(ways), known.key_pem if known else "", listen, seen)
    yield _check_rate(invite, list(ways))


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
            yield note(
                f"{run} was not reached from outside at {address}: {name} tried ({why})",
                "Nobody new can join by this address.",
                f"forward TCP port {port} in the router, open it here (sudo ufw allow {port}/tcp), "
                "and host with --address and the public address; or use thinwire relay",
            )
        else:
            yield fine(f"{run} at {address}: no peer on another machine is there that could try")


def _ping_all(invite: Invite, routes: tuple[Route, ...]) -> dict[Route, Seen | WireError]:
    """What each way answered, or why it did not; best first."""

    def outcome(route: Route) -> Seen | WireError:
        try:
            return ping(route, invite.service("probe"))
        except WireError as error:
            return error

    with ThreadPoolExecutor(len(routes)) as pool:
        return dict(zip(routes, pool.map(outcome, routes), strict=True))


def _check_answers(answers: dict[Route, Seen | WireError]) -> Iterator[Finding]:
    is_reached = any(isinstance(answer, Seen) for answer in answers.values())
    for route, answer in answers.items():
        who = "the host" if route.kind == "direct" else "the relay"
        if isinstance(answer, Seen):
            seen, _ = split_address(answer.address)
            trip = f"{1e3 * answer.round_trip_s:.0f} ms"
            yield fine(
                f"{who} answers at {route.address} in {trip}, and sees this machine as {seen}"
            )
            continue
        what, fix = f"{who} does not answer: {answer}", _way_out(str(answer), route)
        if is_reached:
            yield note(what, "Another way works; the run will use that.", fix)
        else:
            yield blocks(what, "This machine cannot reach the run.", fix)


def _way_out(reason: str, route: Route) -> str:
    """What to do about a door that does not answer."""
    _, port = split_address(route.address)
    command = "thinwire host" if route.kind == "direct" else "thinwire relay"
    if "refused" in reason and "the door refused" not in reason:
        return (
            f"nothing listens there: is `{command}` running, and does the router in front of it "
            f"forward TCP port {port} to it?"
        )
    if "the door refused" in reason:
        return f"another run is at home there, or the pass of the relay has changed: {_NEW_INVITE}"
    if "no answer" in reason:
        return (
            f"a firewall or a router swallows the connection. There: open TCP port {port} (sudo "
            f"ufw allow {port}/tcp) and forward it in the router. Here: allow connections out to "
            f"port {port}; thinwire does not use a proxy. Or let both meet at a third machine: "
            "thinwire relay, and thinwire host --relay"
        )
    if "Name or service" in reason or "name resolution" in reason or "nodename" in reason:
        return f"the name of the host is unknown here: check this machine's DNS, or {_NEW_INVITE}"
    if "unreachable" in reason or "No route" in reason:
        return "this machine has no way there: is it connected to the internet?"
    return _NEW_INVITE


def _check_time(invite: Invite) -> Finding:
    """Whether an invite has expired, where its host cannot be asked."""
    left = invite.seconds_left()
    if left <= 0:
        return note(
            f"the invite expired {duration(-left)} ago",
            "It lets in nobody new. A machine that joined with it before can join again.",
            _NEW_INVITE,
        )
    return fine(f"invite to run {invite.run_name!r} ({invite.run_id}), for {duration(left)} more")


def check_clock(ahead_s: float) -> Finding:
    """Whether the clocks here and at the host agree; nothing fails where they do not."""
    direction = "behind" if ahead_s > 0 else "ahead of"
    here = f"the clock here is {duration(abs(ahead_s))} {direction} the host's"
    fix = "set this machine's clock by the network: sudo timedatectl set-ntp true"
    if abs(ahead_s) > SKEW_S:
        return note(here, "Times in logs and invites will not agree.", fix)
    return fine(f"the clocks here and at the host agree within {SKEW_S:g} s")


def _check_host(
    invite: Invite, ways: list[Route], key_pem: str, listen: str, seen: Seen
) -> Iterator[Finding]:
    """Ask the host whether it lets this machine in, and whether it reaches a door here."""
    with contextlib.ExitStack() as held:
        door = ""
        if listen:
            try:
                door = _open_door(held, invite, listen, seen)
            except WireError as error:
                trouble = "Then it accepts no connections from outside."
                yield note(
                    f"no door can be opened here: {error}", trouble, "choose another --listen"
                )
        try:
            says = ask(Routes(invite.service("enrol"), ways), invite, key_pem, door)
        except AdmissionError as error:
            yield blocks(f"the host cannot be trusted: {error}", "Joining will fail.", _NEW_INVITE)
            return
        except WireError as error:
            yield blocks(
                f"the host does not enrol peers: {error}",
                "Joining will fail.",
                "ask the host whether `thinwire host` is running, and try again",
            )
            return
    yield from _check_answer(invite, says, door)


def _open_door(held: contextlib.ExitStack, invite: Invite, listen: str, seen: Seen) -> str:
    """A door as `join` would have it; the address at which others would look for it."""
    host, port = split_address(listen)
    door = held.enter_context(Door(host, port))
    door.admit(invite.run_id, invite.door_token)
    is_any = host in ("", "0.0.0.0", "::")
    return address_text(split_address(seen.address)[0] if is_any else host, door.port)


def _check_answer(invite: Invite, says: HostSays, door: str) -> Iterator[Finding]:
    if says.refusal:
        yield blocks(f"the host refuses this invite: {says.refusal}", "", _NEW_INVITE)
    else:
        run = f"run {invite.run_name!r} ({invite.run_id})"
        yield fine(f"the host of {run} would let this machine in")
    if says.version != thinwire.__version__:
        yield blocks(
            f"thinwire {thinwire.__version__} here, {says.version} at the host",
            "Both ends of a link must compute and pack alike.",
            f"pip install thinwire=={says.version}",
        )
    if says.reached is True:
        yield fine(f"this machine can be reached from outside, at {door}: its links are direct")
    elif says.reached is False:
        _, port = split_address(door)
        yield note(
            f"nobody outside reaches this machine at {door}",
            "A link to another machine that cannot be reached either passes the host or a relay, "
            "and shares its rate with others. All else works.",
            f"nothing, or: forward a TCP port in the router, open it here (sudo ufw allow {port}"
            f"/tcp), and join with --listen 0.0.0.0:{port}",
        )


def _check_rate(invite: Invite, ways: list[Route]) -> Finding:
    try:
        rates = measure_link(ways, invite.run_id)
    except WireError as error:
        return fine(f"rates were not measured: {error}")
    here = (
        f"{rates.mbps_up:.1f} Mbit/s up, {rates.mbps_down:.1f} Mbit/s down, round trip "
        f"{1e3 * rates.round_trip_s:.0f} ms to the host"
    )
    if rates.mbps_up < LOW_MBPS_UP:
        return note(
            here,
            "Each step waits for the slowest uplink of the run; this one may be it.",
            "use a cable instead of wireless, and stop other uploads; the host can choose thinner "
            "cuts: thinwire init --recipe thin100 or thin200",
        )
    return fine(here)
