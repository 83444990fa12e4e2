"""What a host answers who asks on its own machine: how its run stands, to kick, to invite."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.engine.checkpoint import list_checkpoints, step_of
from thinwire.errors import ConfigError
from thinwire.remote.authority import AuthorityBook
from thinwire.remote.control_socket import Handler
from thinwire.remote.invite import Invite
from thinwire.remote.lobby import Guest, Lobby, one_line
from thinwire.remote.seats import Formation
from thinwire.remote.standing import Standing
from thinwire.remote.status import PeerStatus
from thinwire.settings import Settings

TRY_SECONDS = 10.0  # for peers to look from outside


class HostConsole:
    """The answers of a host. `formation` and `settings` give what holds at the moment, and
    `invite` makes another invite, for so many machines, which names `addresses`.
    """

    def __init__(
        self,
        standing: Standing,
        lobby: Lobby,
        book: AuthorityBook,
        formation: Callable[[], Formation],
        settings: Callable[[], Settings],
        invite: Callable[[int], Invite],
        addresses: tuple[str, ...] = (),
    ):
        self._standing, self._lobby, self._book = standing, lobby, book
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
        formation = self._formation()
        guests = {guest.name: guest for guest in self._lobby.guests()}
        peers = [self._peer(guest, formation) for guest in guests.values()]
        peers += [PeerStatus(p.name, "kicked") for p in self._book.peers() if p.kicked]
        seats = formation.seats if len(formation.seats) > 1 else []
        report = self._standing.report(formation.epoch, seats, peers, self._last_checkpoint())
        return report.to_plain()

    def _last_checkpoint(self) -> int | None:
        run = self._settings().run
        steps = [step_of(path) for path in list_checkpoints(Path(run.out) / run.name)]
        return max(steps, default=None)

    def _kick(self, request: dict[str, Any]) -> dict[str, Any]:
        name = request.get("peer")
        if not isinstance(name, str):
            raise ConfigError("say which peer to kick")
        seats, kicked = self._formation().seats, [name]
        others = self._lobby.kick(name)
        if request.get("by_invite") is True:
            for other in others:
                self._lobby.kick(other)
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
            guest.name: {
                address: one_line(guest.tried.answers[address])
                for address in self._addresses
                if address in guest.tried.answers
            }
            for guest in self._lobby.try_door(TRY_SECONDS)
            if guest.tried and not guest.origin.startswith(("127.", "::1"))
        }
        run = self._settings().run.name
        return {"run": run, "addresses": list(self._addresses), "peers": peers}

    def _make_invite(self, request: dict[str, Any]) -> dict[str, Any]:
        machines = request.get("machines", 1)
        if not isinstance(machines, int) or machines < 1:
            raise ConfigError("an invite is for one machine or more")
        return {"text": f"thinwire join {self._invite(machines)}"}

    def _peer(self, guest: Guest, formation: Formation) -> PeerStatus:
        stage = formation.seats.index(guest.name) if guest.name in formation.seats else None
        arrived = guest.arrived
        heard = time.time() - (time.monotonic() - guest.heard)
        if stage is not None:
            heard = max(heard, self._standing.last_word(stage))
        if arrived is None:
            return PeerStatus(guest.name, "away", stage, self._blocks(stage), last_word=heard)
        figures = arrived.figures
        return PeerStatus(
            name=guest.name,
            state=self._state(guest, stage),
            stage=stage,
            blocks=self._blocks(stage),
            device=one_line(arrived.device, 60),
            tflops=figures.tflops,
            memory_bytes=int(figures.memory_gb * 1e9),
            mbps_up=figures.mbps_up,
            mbps_down=figures.mbps_down,
            round_trip_s=2 * figures.latency_ms / 1e3,
            is_reachable=guest.is_reachable,
            last_word=heard,
        )

    def _state(self, guest: Guest, stage: int | None) -> str:
        if guest.seat is None and guest.is_unfit:
            return f"gets no seat: {guest.why_unfit}"
        if guest.seat is None or stage is None:
            return guest.doing or "waiting for a seat"
        if not guest.is_launched:
            return guest.doing or ("prepared" if guest.is_prepared else "prepares its stage")
        return self._standing.doing(stage) or "starting"

    def _blocks(self, stage: int | None) -> str:
        split = self._settings().split()
        if stage is None or stage >= len(split):
            return ""
        return f"{split[stage].start}..{split[stage].stop - 1}"
