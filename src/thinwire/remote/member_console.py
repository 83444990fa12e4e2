"""What a joined peer answers to who asks it on its own machine: how it stands, and to leave."""

import dataclasses
import time
from typing import Any

from thinwire.remote.control_socket import Handler
from thinwire.remote.invite import Invite
from thinwire.remote.member import Member
from thinwire.remote.standing import Standing
from thinwire.remote.status import PeerStatus


def member_handlers(member: Member, invite: Invite) -> dict[str, Handler]:
    """For a `ControlSocket`."""

    def status(request: dict[str, Any]) -> dict[str, Any]:
        return _report(member, invite)

    def leave(request: dict[str, Any]) -> dict[str, Any]:
        member.leave()
        return {"text": "this peer leaves the run after this step, with a checkpoint"}

    return {"status": status, "leave": leave}


def _report(member: Member, invite: Invite) -> dict[str, Any]:
    """A peer knows itself, its seat, and what the host tells everybody."""
    standing = Standing(invite.run_name, invite.run_id, "member")
    held, away, news = member.held, member.away_for, member.news
    if news is not None:
        standing.stepped(news)
    if away is not None:
        standing.waits("the host, which cannot be reached")
    elif held is None:
        standing.waits("a seat")
    elif not held.is_running:
        standing.goes_on("preparing its stage")
    report = standing.report(held.epoch if held else 0, [], [_itself(member)])
    since = time.time() - away if away is not None else member.seatless_since
    if report.waiting_for:
        report = dataclasses.replace(report, waiting_since=since)
    return report.to_plain()


def _itself(member: Member) -> PeerStatus:
    held, machine = member.held, member.machine
    link = machine.link
    state = "waiting for a seat"
    if held is not None:
        state = "training" if held.is_running else "prepares its stage"
    blocks = held.settings.split()[held.stage] if held else None
    return PeerStatus(
        name=member.identity.name,
        state=state,
        stage=held.stage if held else None,
        blocks=f"{blocks.start}..{blocks.stop - 1}" if blocks else "",
        device=machine.device,
        tflops=machine.flops_per_s / 1e12,
        memory_bytes=machine.memory_bytes,
        mbps_up=link.mbps_up if link else 0.0,
        mbps_down=link.mbps_down if link else 0.0,
        round_trip_s=link.round_trip_s if link else 0.0,
        is_reachable=member.is_open,
        is_this_machine=True,
    )
