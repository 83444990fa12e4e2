"""A run whose stages are on other people's machines: invited, formed, led, and formed again.

prepare the data -> open the door and print an invite -> wait for a peer for each stage -> train
with them -> where one is lost, leaves or is removed: wait for another, and go on from the last
complete checkpoint
"""

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

from thinwire.engine.checkpoint import Checkpoint, list_checkpoints
from thinwire.engine.cut import are_cuts_learned
from thinwire.errors import StageError
from thinwire.folders import replace_private_file
from thinwire.remote.authority import AuthorityBook
from thinwire.remote.control_socket import ControlSocket
from thinwire.remote.epoch import Base, Epoch
from thinwire.remote.forming import form
from thinwire.remote.here import own_peers
from thinwire.remote.host_console import HostConsole
from thinwire.remote.invite import Invite
from thinwire.remote.lobby import Guest, Lobby, one_line
from thinwire.remote.news import SharedDisplay
from thinwire.remote.opening import HostOptions, Opened, who_is_left_out
from thinwire.remote.seats import (
    Failures,
    Formation,
    fill_seats,
    is_hosted,
    read_formation,
    write_formation,
)
from thinwire.remote.standing import Standing
from thinwire.report import Display
from thinwire.report.human import elapsed
from thinwire.run.claim import claim_folder
from thinwire.run.peers import StageFailedError
from thinwire.run.prepare import describe, prepare_data
from thinwire.run.resume import open_resume, refuse_other_data
from thinwire.run.signals import Interrupted, heeding, leave_at_once
from thinwire.run.start import adopted, make_start, open_origin
from thinwire.schedule import OPEN
from thinwire.settings import Settings
from thinwire.wire import raise_descriptor_limit

REMIND_SECONDS = 60.0  # between two lines on a wait that goes on
LOOK_SECONDS = 1.0


def host(settings: Settings, options: HostOptions, display: Display) -> dict[str, Any]:
    """Host a run to its end, or to a Ctrl-C, which stops it with a checkpoint; the summary."""
    options.check()
    settings = over_real_links(settings)
    for line in describe(settings):
        display.phase("config", line)
    raise_descriptor_limit()
    folder = Path(settings.run.out) / settings.run.name
    goes_on = is_hosted(folder) or options.resume
    checkpoint = _newest(folder, settings, display) if goes_on else None
    weights = checkpoint or open_origin(settings, display)
    keeps_split = False
    if weights is not None:
        settings = adopted(settings, weights.settings)
        keeps_split = are_cuts_learned(weights.settings) and are_cuts_learned(settings)
    with heeding(leave_at_once), claim_folder(folder, checkpoint, goes_on):
        data = prepare_data(settings, display, weights)
        if checkpoint is not None:
            refuse_other_data(checkpoint, data.fingerprint)
        book = AuthorityBook(folder / "authority", settings.run.name)
        with contextlib.ExitStack() as opened:
            origin = weights if checkpoint is None else None
            hosting = _Hosting(
                settings, options, folder, data, book, display, opened, origin, keeps_split
            )
            return hosting.run()


def over_real_links(settings: Settings) -> Settings:
    """The same run without an emulated network: links between machines are slow by themselves."""
    return dataclasses.replace(settings, link=dataclasses.replace(settings.link, emulate=False))


class _Hosting:
    """The life of a host: what it opens, and the epochs of its run one after the other."""

    def __init__(
        self,
        settings: Settings,
        options: HostOptions,
        folder: Path,
        data: Any,
        book: AuthorityBook,
        display: Display,
        opened: contextlib.ExitStack,
        origin: Checkpoint | None,
        keeps_split: bool,
    ):
        """`origin`: the weights that the run starts from, as long as it has no checkpoint.

        `keeps_split`: it goes on from weights whose cuts are part of what they learned.
        """
        self._started = time.monotonic()
        self._folder, self._data, self._origin = folder, data, origin
        self._keeps_split = keeps_split
        self._formation = _fitting(read_formation(folder), settings)
        self._settings = self._formation.applied(settings)
        self._stop_asked = False
        self._refused: tuple[list[str], str] = ([], "")  # peers that cannot hold the run, and why
        self._failures = Failures()
        door = Opened(book, options, self._formation.port, opened)
        self._formation = dataclasses.replace(self._formation, port=door.port)
        write_formation(folder, self._formation)
        self._lobby = opened.enter_context(Lobby(door.listener, book, door.cut))
        self._standing = Standing(settings.run.name, book.run_id, "host")
        self._display = SharedDisplay(display, self._lobby.tell_all, self._standing)
        self._lobby.note = self._display.note
        console = HostConsole(
            self._standing,
            self._lobby,
            book,
            lambda: self._formation,
            lambda: self._settings,
            door.invite,
            door.addresses,
        )
        opened.enter_context(ControlSocket(folder, console.handlers()))
        self._base = Base(
            self._lobby,
            door.listener,
            book.run_id,
            book.door_token,
            book.key_of,
            door.meeting,
            folder,
            data,
            self._display,
        )
        machines = options.machines or max(1, settings.pipeline.stages - options.stages_here)
        self._announce(door.invite(machines), machines)
        if options.stages_here:
            here = own_peers(options.stages_here, door.own_invite(), folder, settings.run.device)
            opened.enter_context(here)

    def run(self) -> dict[str, Any]:
        """Form the run, and form it again, until it is over; the summary."""
        try:
            while True:
                if (summary := self._form_and_run()) is not None:
                    return summary
        except KeyboardInterrupt:
            self._lobby.say_farewell("the host was stopped; join again when it is back")
            raise
        except Exception as error:
            self._lobby.say_farewell(f"the run ended with an error: {error}", in_order=False)
            raise

    def _announce(self, invite: Invite, machines: int) -> None:
        """Print the invite, and keep it in the run's folder for whoever closed the window."""
        path = self._folder / "authority" / "invite.txt"
        with contextlib.suppress(OSError):
            replace_private_file(path, f"thinwire join {invite}\n".encode())
        hours = invite.seconds_left() / 3600
        who = "one machine joins" if machines == 1 else f"up to {machines} machines join"
        self._display.phase("invite", f"for the next {hours:.0f} hours, {who} with")
        self._display.phase("invite", f"thinwire join {invite}")
        if left_out := who_is_left_out(invite.addresses, invite.relay):
            self._display.note(left_out)

    def _form_and_run(self) -> dict[str, Any] | None:
        """One epoch; None if the run goes on with another."""
        seats = self._wait_for_peers()
        checkpoint = self._newest()
        self._formation = dataclasses.replace(
            self._formation, epoch=self._formation.epoch + 1, seats=seats
        )
        write_formation(self._folder, self._formation)
        step = checkpoint.step if checkpoint else 0
        self._failures.start_from(step)
        who = ", ".join(f"{stage}: {name}" for stage, name in enumerate(seats))
        self._display.announce(
            "form", f"epoch {self._formation.epoch} from step {step}, stages {who}"
        )
        epoch = Epoch(self._base, self._formation, self._settings, checkpoint)
        try:
            lacking = epoch.gather()
        except BaseException:
            epoch.abandon("the host was interrupted")
            raise
        if lacking:
            epoch.abandon(lacking)
            self._display.note(lacking)
            for guest in self._lobby.guests():
                if guest.name in seats and guest.is_unfit:
                    self._count_failure(guest.name, "declined its seat", guest.why_unfit)
            return None
        try:
            epoch.run(self._on_stop)
        except Interrupted:
            if self._stop_asked:
                raise
            self._display.note(f"{_leaver(epoch)} left before training began")
            return None
        except StageError as error:
            if self._stop_asked:
                raise
            self._judge(error)
            return None
        return self._conclude(epoch)

    def _conclude(self, epoch: Epoch) -> dict[str, Any] | None:
        """All stages ended in good order: the run is over, or it goes on without who left."""
        record = epoch.record
        if not self._stop_asked and record.ledger.done < self._settings.train.steps:
            record.pause()
            self._display.note(f"{_leaver(epoch)} left after step {record.ledger.done}")
            return None
        assert epoch.peers is not None
        epoch.peers.collector.forget()
        summary = record.finish(
            self._base.control_bytes,
            self._stop_asked,
            self._started,
            self._base.beside_bytes(),
        )
        done, steps = record.ledger.done, self._settings.train.steps
        if done < steps:
            stopped_at = f"the host stopped the run after step {done} of {steps}"
            self._lobby.say_farewell(f"{stopped_at}; join again when it is back")
        else:
            self._lobby.say_farewell(f"the run is complete: {done} steps")
        return summary

    def _newest(self) -> Checkpoint | None:
        """Where the run goes on; where it starts from weights, these: now its cuts are known."""
        if self._origin is not None:
            make_start(self._origin, self._settings, self._folder, self._data, self._display)
            self._origin = None
        return _newest(self._folder, self._settings, self._display)

    def _judge(self, error: StageError) -> None:
        """Count the failure of whoever caused it; raise one that no peer did and that goes on."""
        culprit = error.culprit if isinstance(error, StageFailedError) else None
        if culprit is None and self._failures.count(""):
            raise error
        self._display.note(f"{error}\n  the run pauses until every stage has a peer again")
        if culprit is not None:
            name = self._formation.seats[culprit.stage]
            self._count_failure(name, culprit.deed, culprit.reason)

    def _count_failure(self, name: str, deed: str, reason: str) -> None:
        """A peer that keeps failing gets no seat any more, and one that failed none for now."""
        is_absence = deed in ("was lost", "declined its seat")
        if count := self._failures.count(name, is_absence):
            why = (
                f"it {deed} {count} times and the run got no further, last: "
                f"{one_line(reason)}. It gets one again when the host is started anew"
            )
            self._lobby.set_aside(name, why)
            self._display.note(f"{name} gets no seat any more: {why}")
        elif not is_absence and len(self._lobby.here()) > len(self._formation.seats):
            self._lobby.mark_unfit(name, f"its stage {deed}")  # while others wait for one

    def _on_stop(self) -> None:
        self._stop_asked = True

    def _wait_for_peers(self) -> list[str]:
        """Wait until there is a peer for each stage; says for whom, and since when."""
        stages, began = self._settings.pipeline.stages, time.monotonic()
        self._standing.forms()
        told, told_at = "", 0.0
        while True:
            guests = self._lobby.here()
            here = [guest.name for guest in guests]
            if self._formation.seats or len(here) < stages:
                seats = fill_seats(self._formation.seats, stages, here)
                unfit = {g.name: g.why_unfit for g in self._lobby.guests() if g.is_here}
                lacking = lacking_peers(self._expected(), stages, here, unfit)
            else:
                seats, lacking = self._choose(guests)
            if seats is not None:
                self._standing.forms()
                return seats
            now = time.monotonic()
            self._standing.waits(lacking.removeprefix("waiting for "))
            if lacking != told or now - told_at > REMIND_SECONDS:
                since = f" (for {now - began:.0f} s)" if now - began > 1 else ""
                self._display.announce("wait", lacking + since)
                told, told_at = lacking, now
            self._lobby.wait(
                lambda known=here: [g.name for g in self._lobby.here()] != known,  # type: ignore[misc]
                LOOK_SECONDS,
            )

    def _expected(self) -> list[str]:
        """Peers that had seats and may have them again."""
        welcome = {guest.name for guest in self._lobby.guests() if not guest.is_unfit}
        return [name for name in self._formation.seats if name in welcome]

    def _choose(self, here: list[Guest]) -> tuple[list[str] | None, str]:
        """Seats and blocks for a run that is formed for the first time, by what peers measured.

        They stay: whoever takes a seat later takes its blocks. Without seats, why there are none.
        """
        names = [guest.name for guest in here]
        if names == self._refused[0]:
            return None, self._refused[1]
        base = self._base
        forming = form(self._settings, here, base.run_id, base.token_of, self._keeps_split)
        if (split := forming.split) is None:
            self._refused = names, f"waiting for other peers: {forming.lacking}"
            return None, self._refused[1]
        self._settings = split.settings
        pipeline = split.settings.pipeline
        self._formation = dataclasses.replace(
            self._formation, split=list(pipeline.split), window=pipeline.window
        )
        blocks = ", ".join(
            f"{peer.name} {count}" for peer, count in zip(split.peers, split.counts, strict=True)
        )
        self._display.announce(
            "split",
            f"blocks: {blocks}. {split.why} By what the peers measured, a step takes "
            f"{elapsed(split.simulation.step_seconds)}, with at most "
            f"{split.simulation.schedule.window} microbatches in flight",
        )
        return [peer.name for peer in split.peers], ""


def _fitting(before: Formation, settings: Settings) -> Formation:
    """The forming of before, without its seats where the run has another number of stages now."""
    if len(before.seats) in (0, settings.pipeline.stages):
        return before
    return dataclasses.replace(before, seats=[], split=[], window=OPEN)


def _leaver(epoch: Epoch) -> str:
    return (epoch.peers and epoch.peers.leaving) or "a peer"


def lacking_peers(before: list[str], stages: int, here: list[str], unfit: dict[str, str]) -> str:
    """For whom a run waits; and who is there but gets no seat, with the reason."""
    missing = stages - len(here)
    gone = [name for name in before if name not in here]
    which = f" ({', '.join(gone)} or another)" if gone else ""
    there = f"; here: {', '.join(here)}" if here else ""
    others = "".join(f"; {name} gets no seat: {why}" for name, why in unfit.items() if why)
    return f"waiting for {missing} more peer{'s' if missing != 1 else ''}{which}{there}{others}"


def _newest(folder: Path, settings: Settings, display: Display) -> Checkpoint | None:
    """The checkpoint from which the run goes on; None to begin from the seed."""
    if not list_checkpoints(folder):
        return None
    return open_resume(folder, settings, display)
