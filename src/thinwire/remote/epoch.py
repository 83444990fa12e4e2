"""One forming of a run, from the peers that are here to the end of their training together."""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from thinwire.data import Corpus
from thinwire.engine.checkpoint import Checkpoint
from thinwire.engine.shard_check import ShardCheck
from thinwire.errors import ThinwireError
from thinwire.remote.fetch import SeatServer
from thinwire.remote.lobby import Guest, Lobby
from thinwire.remote.messages import TakeSeat, seat_name, store_name
from thinwire.remote.news import SharedDisplay
from thinwire.remote.peers import RemotePeers
from thinwire.remote.reception import Reception
from thinwire.remote.seats import Formation
from thinwire.remote.store import ShardCollector, incoming_folder, most_shard_bytes
from thinwire.remote.tokens import TokenServer
from thinwire.remote.ways import DoorOf, Ways, probe_all, token_of_links
from thinwire.run.conduct import Course
from thinwire.run.coordinator import Coordinator, Phase
from thinwire.run.events import Command, Commit
from thinwire.run.explosion import watch_losses
from thinwire.run.messages import Assign, Way
from thinwire.run.order import tokens_name
from thinwire.run.peers import lead
from thinwire.run.record import RunRecord
from thinwire.settings import Settings
from thinwire.train import stopping
from thinwire.wire import LastingPipe, Listener, Meter, Pipe

LOOK_SECONDS = 1.0


@dataclass
class Base:
    """What all epochs of a run share."""

    lobby: Lobby
    listener: Listener
    run_id: str
    token_of: Callable[[str], str]  # at doors, of a peer
    key_of: Callable[[str], str]  # the fingerprint of a peer's key
    meeting: Callable[[str], list[Way]]  # of a peer: where it finds those whom it cannot reach
    folder: Path
    data: Corpus
    display: SharedDisplay
    beside: dict[str, Meter] = field(  # what travels beside the cuts, by what it is
        default_factory=lambda: {"checkpoints": Meter(), "states": Meter(), "token ids": Meter()}
    )
    control_bytes: int = 0  # of all control streams
    record: RunRecord | None = None  # of the last epoch that trained

    def beside_bytes(self) -> dict[str, int]:
        """Every byte of that so far, both ways, frame headers included."""
        return {what: m.sent_bytes() + m.received_bytes() for what, m in self.beside.items()}


class Epoch:
    """The run with these peers in these seats. It may fail; then the next one goes on."""

    def __init__(
        self, base: Base, formation: Formation, settings: Settings, checkpoint: Checkpoint | None
    ):
        self._base, self._formation, self._settings = base, formation, settings
        self._checkpoint = checkpoint
        self._seats = formation.seats
        self._links = token_of_links(formation.epoch)
        self._reception = Reception(base.listener)
        self._coordinator = Coordinator(
            len(self._seats),
            settings.run.patience,
            Assign({}, "", "", ""),
            parts_travel=True,
            outage=settings.link.outage,
            losses=watch_losses(settings, base.folder, checkpoint),
            course=Course(settings, checkpoint.step if checkpoint else 0, len(self._seats)),
        )
        self.record = RunRecord(
            settings,
            base.folder,
            base.data,
            checkpoint,
            base.display,
            goes_on=True,
            earlier=base.record,
            uplinks=self._uplinks(),
        )
        self.peers: RemotePeers | None = None

    def gather(self) -> str:
        """Have all peers prepare their seats; returns why the epoch cannot begin, if it cannot."""
        server = None
        if self._checkpoint is not None:
            server = SeatServer(self._checkpoint, self._settings, self._base.beside["states"])
        for stage, name in enumerate(self._seats):
            if server is not None:
                stream = seat_name(stage, self._formation.epoch)
                self._reception.serve(stream, name, partial(_serve_seat, server, stage))
        seats = {name: self._seat(stage) for stage, name in enumerate(self._seats)}
        self._base.lobby.give_seats(seats)
        try:
            return self._wait_until_prepared()
        finally:
            if server is not None:
                server.close()

    def run(self, on_stop: Callable[[], None]) -> None:
        """Train with these peers to the end; raises what ends it early.

        `on_stop` is told when this host is asked to stop.
        """
        base, settings = self._base, self._settings
        doors = self._doors()
        meeting, keys = map(base.meeting, self._seats), map(base.key_of, self._seats)
        ways = Ways(base.run_id, self._links, doors, list(meeting), list(keys))
        limits = [most_shard_bytes(settings, stage) for stage in range(len(self._seats))]
        check = ShardCheck(settings, base.data, incoming_folder(base.folder))
        peers = RemotePeers(
            self._formation,
            base.lobby,
            self._reception,
            settings.link.outage,
            ways.connect,
            partial(
                ShardCollector,
                base.folder,
                limits,
                check.objection,
                patience=settings.run.patience,
                meter=base.beside["checkpoints"],
                on_progress=self._show_last_checkpoint,
            ),
            base.display.standing,
        )
        self.peers = peers

        def stop() -> None:
            on_stop()
            if not peers.is_stopping:  # else a peer leaves, and the run stops already
                peers.ask_to_stop()

        with peers, stopping(stop, self.record):
            self._offer_streams(peers.collector)
            peers.start()
            try:
                lead(self._coordinator, peers, partial(self._carry_out, peers.collector))
            finally:
                self.record.close()
                base.control_bytes += peers.control_bytes()
                if self.record.has_begun:
                    base.record = self.record

    def abandon(self, reason: str) -> None:
        """The epoch cannot begin: its peers wait for another."""
        self._reception.close()
        self._base.lobby.vacate(self._formation.epoch, reason)

    def _seat(self, stage: int) -> TakeSeat:
        return TakeSeat(
            self._formation.epoch,
            stage,
            self._settings.to_plain(),
            self._checkpoint is not None,
            self._base.data.fingerprint,
            self._links,
        )

    def _carry_out(self, collector: ShardCollector, command: Command) -> None:
        self.record.carry_out(command)
        if isinstance(command, Commit):
            collector.settled(command.step)

    def _show_last_checkpoint(self, done: int, total: int) -> None:
        """While training goes on, checkpoints travel unseen; at its end one is waited for."""
        if self._coordinator.phase is Phase.COLLECTING:
            self._base.display.progress("save", done, total, "B")

    def _wait_until_prepared(self) -> str:
        base, told = self._base, ""
        while True:
            is_settled = base.lobby.wait(self._is_settled, LOOK_SECONDS)
            if (lacking := self._lacking()) or is_settled:
                return lacking
            waits = "; ".join(
                f"{guest.name} {guest.doing or 'prepares its stage'}"
                for guest in self._guests()
                if not guest.is_prepared
            )
            if waits != told:
                told = waits
                base.display.standing.waits(waits)
                base.display.announce("wait", waits)

    def _guests(self) -> list[Guest]:
        return [guest for guest in self._base.lobby.guests() if guest.name in self._seats]

    def _uplinks(self) -> list[float]:
        """Mbit/s of each stage's uplink, as its peer measured the way to this host."""
        arrived = {guest.name: guest.arrived for guest in self._guests()}
        said = [arrived.get(name) for name in self._seats]
        return [it.figures.mbps_up if it is not None else 0.0 for it in said]

    def _is_settled(self) -> bool:
        """Whether all peers are prepared, or one of them cannot take its seat."""
        return bool(self._lacking()) or all(guest.is_prepared for guest in self._guests())

    def _lacking(self) -> str:
        """Which peer cannot take its seat, and why."""
        present = {guest.name: guest for guest in self._guests()}
        for name in self._seats:
            guest = present.get(name)
            if guest is None:
                return f"{name} was removed from the run"
            if guest.is_unfit:
                return f"{name} cannot take its seat: {guest.why_unfit}"
            if guest.is_leaving:
                return f"{name} left"
            away = time.monotonic() - guest.since
            if not guest.is_here and away > self._settings.link.outage:
                return f"{name} has been away for {away:.0f} s"
        return ""

    def _doors(self) -> list[DoorOf]:
        """The doors of all seats, probed at once."""
        guests = {guest.name: guest for guest in self._guests()}
        seated = [guests.get(name) for name in self._seats]
        doors = probe_all(seated, self._base.run_id, self._base.token_of)
        for name, door in zip(self._seats, doors, strict=True):
            if name in guests:
                guests[name].is_reachable = bool(door.outside)
        return doors

    def _offer_streams(self, collector: ShardCollector) -> None:
        """Accept what this epoch needs beside the control streams: shards, and token ids."""
        has_corpus = {guest.name: guest.has_corpus for guest in self._guests()}
        for stage, name in enumerate(self._seats):
            collect = partial(collector.collect_from, name, [stage])
            self._reception.serve(store_name(name), name, collect)
            if not has_corpus.get(name):
                threading.Thread(target=self._serve_tokens, args=(stage, name), daemon=True).start()

    def _serve_tokens(self, stage: int, name: str) -> None:
        stream = tokens_name(stage, self._formation.epoch)

        def accept(timeout: float | None) -> Pipe:
            return self._reception.accept(stream, name, timeout)

        outage = self._settings.link.outage
        with contextlib.suppress(ThinwireError):  # the stage says what it lacks
            first = accept(None)
            pipe = LastingPipe(first, accept, outage) if outage else first
            TokenServer(pipe, self._base.data, self._settings, self._base.beside["token ids"])


def _serve_seat(server: SeatServer, stage: int, pipe: Pipe) -> None:
    server.serve(pipe, stage)
