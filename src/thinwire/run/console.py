"""What a host and a joined peer answer to who asks on their own machines (control_socket.py).

A host: how its run stands, to kick, to invite, and whether others reach it. A peer: how it stands,
and to leave.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from thinwire.engine.checkpoint import list_checkpoints, step_of
from thinwire.errors import ConfigError
from thinwire.run.admission import AuthorityBook, Invite
from thinwire.run.control_socket import Handler
from thinwire.run.formation import Formation
from thinwire.run.members import Member, Members, one_line
from thinwire.run.status import PeerStatus, Standing, blocks_text
from thinwire.settings import Settings

if TYPE_CHECKING:
    from thinwire.run.join import JoinedPeer

TRY_SECONDS = 10.0  # for peers to look from outside


class HostConsole:
    """The answers of a host. `formation` and `settings` give what holds at the moment, and
    `invite` makes another invite, for so many machines, which names `addresses`.
    """

    def __init__(
        self,
        standing: Standing,
        members: Members,
        book: AuthorityBook,
        formation: Callable[[], Formation],
        settings: Callable[[], Settings],
        invite: Callable[[int], Invite],
        addresses: tuple[str, ...] = (),
    ):
        self._standing, self._members, self._book = standing, members, book
        self._formation, self._settings, self._invite = formation, settings, invite
        self._addresses = addresses

    def handlers(self) -> dict[str, Handler]:
        """For a `ControlSocket`."""
        return {
            "status": self._status,
            "kick": self._kick,
            "invite": self._make_invite,
            "outside": self._outside,
        }

    def _status(self, request: dict[str, Any]) -> dict[str, Any]:
        formation, settings = self._formation(), self._settings()
        peers = [self._peer(member, formation, settings) for member in self._members.all()]
        peers += [PeerStatus(p.name, "kicked") for p in self._book.peers() if p.kicked]
        saved = list_checkpoints(settings.run.folder)
        last = max(map(step_of, saved), default=None)
        return self._standing.report(formation.epoch, formation.seats, peers, last).to_plain()

    def _peer(self, member: Member, formation: Formation, settings: Settings) -> PeerStatus:
        stage = formation.seats.index(member.name) if member.name in formation.seats else None
        split, hello, machine = settings.split(), member.hello, None
        heard = time.time() - (time.monotonic() - member.heard)
        if stage is not None:
            heard = max(heard, self._standing.last_word(stage))
        if hello is not None:
            device = one_line(hello.machine.device, 60)
            machine = dataclasses.replace(
                hello.machine, name=member.name, device=device, reachable=member.is_reachable
            )
        return PeerStatus(
            name=member.name,
            state=self._state(member, stage) if hello else "away",
            stage=stage,
            blocks=blocks_text(split[stage]) if stage is not None and stage < len(split) else "",
            last_word=heard,
            machine=machine,
        )

    def _state(self, member: Member, stage: int | None) -> str:
        if stage is not None:
            return self._standing.doing(stage) or "starting"
        return f"gets no stage: {member.why_unfit}" if member.is_unfit else "waiting for a stage"

    def _kick(self, request: dict[str, Any]) -> dict[str, Any]:
        name = request.get("peer")
        if not isinstance(name, str):
            raise ConfigError("say which peer to kick")
        seats, kicked = self._formation().seats, [name]
        others = self._members.kick(name)
        if request.get("by_invite") is True:
            for other in others:
                self._members.kick(other)
            kicked, others = [name, *others], []
        text = (
            f"{', '.join(kicked)} {'was' if len(kicked) == 1 else 'were'} removed from the run and "
            "not let in again, nor is anybody new by the same invite; `thinwire invite` makes "
            "another"
        )
        for stage in sorted(seats.index(one) for one in kicked if one in seats):
            text += f"; stage {stage} waits for another peer"
        if others:
            text += (
                f"\nby the same invite came, and stay: {', '.join(others)}; `thinwire kick {name} "
                "--by-invite` removes them too"
            )
        return {"text": text}

    def _outside(self, request: dict[str, Any]) -> dict[str, Any]:
        """By which of its addresses peers on other machines reach this host."""
        peers = {
            member.name: {
                address: one_line(member.tried.answers[address])
                for address in self._addresses
                if address in member.tried.answers
            }
            for member in self._members.try_door(TRY_SECONDS)
            if member.tried and not member.origin.startswith(("127.", "::1"))
        }
        run = self._settings().run.name
        return {"run": run, "addresses": list(self._addresses), "peers": peers}

    def _make_invite(self, request: dict[str, Any]) -> dict[str, Any]:
        machines = request.get("machines", 1)
        if not isinstance(machines, int) or machines < 1:
            raise ConfigError("an invite is for one machine or more")
        return {"text": f"thinwire join {self._invite(machines)}"}


def member_handlers(member: "JoinedPeer", invite: Invite) -> dict[str, Handler]:
    """The answers of a joined peer, for a `ControlSocket`."""

    def leave(request: dict[str, Any]) -> dict[str, Any]:
        member.leave()
        return {"text": "this peer leaves the run after this step, with a checkpoint"}

    return {"status": lambda request: _member_status(member, invite), "leave": leave}


def _member_status(member: "JoinedPeer", invite: Invite) -> dict[str, Any]:
    """A peer knows itself, its stage, and what the host tells everybody."""
    standing = Standing(invite.run_name, invite.run_id, "member")
    held, away, news = member.held, member.away_for, member.news
    state = "waiting for a stage"
    if held is not None:
        state = "training" if held.is_running else "prepares its stage"
    if news is not None:
        standing.stepped(news)
    if away is not None:
        standing.waits("the host, which cannot be reached")
    elif held is None:
        standing.waits("a stage")
    elif not held.is_running:
        standing.goes_on("preparing its stage")
    name = member.identity.name
    itself = PeerStatus(
        name=name,
        state=state,
        stage=held.stages[0] if held else None,
        blocks=blocks_text(held.settings.split()[held.stages[0]]) if held else "",
        is_this_machine=True,
        machine=dataclasses.replace(member.machine, name=name, reachable=member.is_open),
    )
    report = standing.report(held.generation if held else 0, [], [itself])
    if report.waiting_for:
        since = time.time() - away if away is not None else member.seatless_since
        report = msgspec.structs.replace(report, waiting_since=since)
    return report.to_plain()
