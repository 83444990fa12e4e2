"""`thinwire host`: a run whose stages are on other people's machines.

prepare the data -> open the door and print an invite -> wait for machines that can hold all stages
-> train with them -> where one is lost, leaves or is removed: place its stages anew, and go on from
the last complete checkpoint

Each placement of stages on members is a generation, counted up and written down before any member
hears of it. What is said and opened in one bears its number, so that nothing of an earlier one is
taken for one of this.
"""

import contextlib
import dataclasses
import errno
import ipaddress
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from thinwire.background import on_daemon_thread
from thinwire.data import Corpus
from thinwire.engine.checkpoint import Checkpoint, list_checkpoints
from thinwire.engine.cut import are_cuts_learned
from thinwire.errors import CheckpointError, ConfigError, StageError, WireError
from thinwire.folders import replace_file
from thinwire.report import Display
from thinwire.report.human import elapsed
from thinwire.run import formation as seating
from thinwire.run import protocol as msg
from thinwire.run.admission import ENROL, AuthorityBook, Invite, is_address, serve_enrolment
from thinwire.run.alive import ControlSocket
from thinwire.run.coordinator import Phase
from thinwire.run.hosted import LOOK_SECONDS, REMIND_SECONDS, Base, HostedPeers, probe_all
from thinwire.run.machine import Machine
from thinwire.run.members import Member, Members, one_line
from thinwire.run.peers import StageFailedError, coordinator_of, lead, neighbours
from thinwire.run.placement import ChosenSplit, choose_split, links_of, share_stages
from thinwire.run.processes import python_module
from thinwire.run.record import RunRecord
from thinwire.run.relay import is_public, outside_address
from thinwire.run.signals import Interrupted, heeding, leave_at_once
from thinwire.run.start import make_start, open_resume, opened, prepare_data
from thinwire.run.status import HostConsole, SharedDisplay, Standing
from thinwire.settings import Settings
from thinwire.wire import Door, Listener, Route, Standby, raise_descriptor_limit
from thinwire.wire.keys import fingerprint_of
from thinwire.wire.sockets import address_text, split_address
from thinwire.wire.speed import SERVICE as SPEED
from thinwire.wire.speed import SpeedService
from thinwire.wire.stream import Stream

OWN_INVITE_SECONDS = 3600.0  # for peers on this machine, which join at once
SPARES = 2  # machines that an invite lets in beyond those that the run needs
LEAVE_SECONDS = 5.0  # for them to end after the host has said goodbye


@dataclass(frozen=True)
class HostOptions:
    """Where a host is found, and whom it invites."""

    listen: str = "0.0.0.0:0"
    addresses: tuple[str, ...] = ()  # by which others find it; empty: as far as it knows itself
    relay: Route | None = None
    lasts: float = 86_400.0  # seconds for which the invite is good
    machines: int = 0  # that the invite lets in; 0: one for each stage of others, and SPARES
    stages_here: int = 0  # that this machine holds itself
    resume: bool = False  # a run that `train` began in this folder
    mbps: float = 0.0  # between peers that meet at this host, all together; 0: each link apart
    peers: int = 0  # with which the run trains at least; 0: as many as it has stages

    def check(self, stages: int) -> None:
        """Refuse a wrong address or number before anything is prepared."""
        for address in self.addresses:
            with_port(address, 1)
        neighbours(stages, self.peers or stages)  # refuses what cannot be


def host(settings: Settings, options: HostOptions, display: Display) -> dict[str, Any]:
    """Host a run to its end, or to a Ctrl-C, which stops it with a checkpoint; the summary."""
    options.check(settings.pipeline.stages)
    link = dataclasses.replace(settings.link, emulate=False)  # they are slow by themselves
    settings = dataclasses.replace(settings, link=link)
    raise_descriptor_limit()
    folder = settings.run.folder
    goes_on = (folder / seating.FORMATION_FILE).is_file() or options.resume
    resume = folder if goes_on and list_checkpoints(folder) else None
    with (
        heeding(leave_at_once),
        opened(settings, display, resume, goes_on=goes_on) as (settings, checkpoint, weights),
        ExitStack() as held,
    ):
        data = prepare_data(settings, display, weights, checkpoint)
        is_known = weights is not None and are_cuts_learned(weights.settings)
        keeps_split = is_known and are_cuts_learned(settings)
        origin = None if checkpoint else weights
        return _Hosting(settings, options, data, display, held, origin, keeps_split).run()


def comparable(peers: list[Machine]) -> list[Machine]:
    """Peers, all of which count as equal where some have no rate: nothing can be compared then."""
    if all(peer.tflops for peer in peers):
        return peers
    return [dataclasses.replace(peer, tflops=1.0, bf16_tflops=0.0, mupdates=0.0) for peer in peers]


def form(settings: Settings, peers: list[Machine], keeps_split: bool) -> ChosenSplit:
    """Choose stages and blocks among members that are here, or with `keeps_split` stages alone."""
    if keeps_split:
        split = [len(blocks) for blocks in settings.split()]
        pipeline = dataclasses.replace(settings.pipeline, split=split)
        settings = dataclasses.replace(settings, pipeline=pipeline)
    return choose_split(settings, peers)


# What a host opens


class OpenDoor:
    """The open door of a run with its services; what it needs is closed with `stack`."""

    def __init__(
        self, book: AuthorityBook, options: HostOptions, port_before: int, stack: ExitStack
    ):
        self.book, self._options = book, options
        self._relay = [options.relay] if options.relay else []
        self.listener = Listener(book.identity, None, 0, msg.MAX_MESSAGE, who=book.name_of)
        stack.callback(self.listener.close)
        self.note: Callable[[str], None] = lambda text: None  # what this host alone should know
        serve_enrolment(self.listener, book, lambda text: self.note(text))
        host, port = split_address(options.listen)
        try:
            door = Door(host, port or port_before)  # where any will do, that of earlier invites
        except WireError:
            if port or not port_before:
                raise
            door = Door(host, 0)  # another program has it by now
        stack.enter_context(door)
        door.admit_by(book.run_id, book.grant_of, options.mbps)
        self.port, self.cut = door.port, partial(door.cut, book.run_id)
        takes = self.listener.take
        services = {ENROL: takes, "control": takes, SPEED: SpeedService().take}
        for service, take in services.items():
            name = f"{book.run_id}/{service}"
            door.serve(name, take)
            for route in self._relay:
                stack.enter_context(Standby(name, route, take, prover=book.identity.prove))
        stated = options.addresses or (outside_address(host, door.port),)
        self.addresses = tuple(with_port(address, door.port) for address in stated)

    def meeting(self, peer: str) -> list[Route]:
        """Where a member meets others that it cannot reach: the relay, then the host's door."""
        own = [Route(one, "relayed", self.book.door_token(peer)) for one in self.addresses]
        return [*self._relay, *own]

    def invite(self, machines: int) -> Invite:
        """An invite for so many others."""
        return self.book.invite(self.addresses, self._options.relay, self._options.lasts, machines)

    def own_invite(self) -> Invite:
        """An invite for peers on this machine: by its inner address, and with a secret apart."""
        host, _ = split_address(self._options.listen)
        inner = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
        here, count = (address_text(inner, self.port),), self._options.stages_here
        return self.book.invite(here, lasts=OWN_INVITE_SECONDS, machines=count)


def who_is_left_out(addresses: tuple[str, ...], relay: Route | None) -> str:
    """Who cannot come by these addresses of a host, and what to do about it; empty for nobody."""
    places = [split_address(address) for address in addresses]
    if relay or any(is_public(host) and host != "localhost" for host, _ in places):
        return ""
    host, port = places[0]
    ways = (
        f"open TCP port {port} of the router to this machine, and add --address with the public "
        "address or name; or use a relay (thinwire relay, and host --relay)"
    )
    if all(one == "localhost" or ipaddress.ip_address(one).is_loopback for one, _ in places):
        inside = f"listen on all addresses (--listen 0.0.0.0:{port})"
        who = f"only this machine can use the invite: {host} is its own address"
        return f"{who}. For peers in the same network, {inside}. For others, also {ways}"
    return f"{host} is an address of this network alone. For peers from outside, {ways}"


def with_port(address: str, port: int) -> str:
    """An address of a host as others write it; without a port it has the door's."""
    for whole in (address, f"{address}:{port}"):
        if is_address(whole):
            return whole
    raise ConfigError(f"--address {address}: write a name or an address, and :PORT if it differs")


@contextlib.contextmanager
def own_peers(count: int, invite: Invite, run_folder: Path, device: str) -> Iterator[None]:
    """So many peers on this machine, like all others; they end with the context."""
    logs = run_folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(count):
            folder = (run_folder / "here" / str(number)).resolve()
            own = ("--name", f"here-{number}", "--folder", str(folder), "--device", device)
            join = ("thinwire", "join", "-", "--tied", "--no-listen", *own)
            try:
                with (logs / f"here-{number}.log").open("ab") as log:
                    process = python_module(*join, stdin=subprocess.PIPE, output=log)
            except OSError as error:
                raise StageError(f"a peer on this machine cannot be started: {error}") from error
            started.append(process)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has died: its log says why
                process.stdin.write(f"{invite}\n".encode())
                process.stdin.flush()
        yield
    finally:
        deadline = time.monotonic() + LEAVE_SECONDS
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(OSError), process:  # closes its input, and waits for its end
                process.kill()


# Its life


class _Hosting(Base):
    """The life of a host: what it opens, and the generations of its run one after the other."""

    def __init__(
        self,
        settings: Settings,
        options: HostOptions,
        data: Corpus,
        display: Display,
        opened: ExitStack,
        origin: Checkpoint | None,
        keeps_split: bool,
    ):
        """`origin`: the weights that the run starts from, as long as it has no checkpoint;
        `keeps_split`: it goes on from weights whose cuts are part of what they learned.
        """
        self._started, folder = time.monotonic(), settings.run.folder
        self._origin, self._keeps_split = origin, keeps_split
        self._least = options.peers  # 0: as many as it has stages, or had members before
        formation = seating.fitting(seating.read_formation(folder), settings)
        self._settings = formation.applied(settings)
        self._stop_asked = False
        self._failures = seating.Failures()
        book = AuthorityBook(folder / "authority", settings.run.name)
        door = OpenDoor(book, options, formation.port, opened)

        def tell_settings(stream: Stream) -> None:
            """Tell a member what is trained, by which it measures itself; a stranger nothing."""
            if book.name_of(fingerprint_of(stream.public)) is not None:
                stream.write(msgspec.json.encode(settings.to_plain()))

        door.listener.serve(msg.SETTINGS, tell_settings)
        if options.stages_here:  # they end after members have heard a farewell, so they begin first
            here = own_peers(options.stages_here, door.own_invite(), folder, settings.run.device)
            opened.enter_context(here)
        members = opened.enter_context(Members(door.listener, book, settings.link.outage, door.cut))
        notes = Standing(settings.run.name, book.run_id)
        shared = SharedDisplay(display, members.tell_all, notes)
        super().__init__(
            members, door.listener, book, door.meeting, folder, data, shared, formation
        )
        self.keep(dataclasses.replace(formation, port=door.port))
        members.note, door.note = shared.note, partial(shared.phase, "note")
        now = (lambda: self.formation), (lambda: self._settings)
        console = HostConsole(notes, members, book, *now, door.invite, door.addresses)
        opened.enter_context(ControlSocket(folder, console.handlers()))
        is_over, self._tell_members = threading.Event(), console.tell_now
        opened.callback(is_over.set)
        on_daemon_thread("thinwire news", lambda: console.tell_members(is_over.wait))
        others = max(1, settings.pipeline.stages - options.stages_here)
        machines = options.machines or others + SPARES
        self._announce(door.invite(machines), machines)

    def run(self) -> dict[str, Any]:
        """Form the run, and form it again, until it is over; the summary."""
        try:
            while True:
                try:
                    if (summary := self._form_and_run()) is not None:
                        return summary
                except (CheckpointError, ConfigError) as error:
                    if getattr(error.__cause__, "errno", 0) not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    self.display.standing.waits("room on the disk of the host")
                    self.display.note(f"{error}; trying again until there is room")
                    time.sleep(REMIND_SECONDS)
        except KeyboardInterrupt:
            self.members.say_farewell("the host was stopped; join again when it is back")
            raise
        except Exception as error:
            self.members.say_farewell(f"the run ended with an error: {error}", in_order=False)
            raise

    def _announce(self, invite: Invite, machines: int) -> None:
        """Print the invite, and keep it in the run's folder for whoever closed the window."""
        path = self.folder / "authority" / "invite.txt"
        with contextlib.suppress(OSError):
            replace_file(path, f"thinwire join {invite}\n".encode(), private=True)
        hours = invite.seconds_left() / 3600
        who = "one machine joins" if machines == 1 else f"up to {machines} machines join"
        self.display.phase("invite", f"for the next {hours:.0f} hours, {who} with")
        self.display.phase("invite", f"thinwire join {invite}")
        if left_out := who_is_left_out(invite.addresses, invite.relay):
            self.display.note(left_out)

    def _form_and_run(self) -> dict[str, Any] | None:
        """One generation; None if the run goes on with another."""
        seats = self._wait_for_members()
        checkpoint = self._newest()
        epoch = self.formation.epoch + 1
        self.keep(dataclasses.replace(self.formation, epoch=epoch, seats=seats))
        step = checkpoint.step if checkpoint else 0
        self._failures.start_from(step)
        who = ", ".join(f"{stage}: {name}" for stage, name in enumerate(seats))
        self.display.announce("form", f"epoch {epoch} from step {step}, stages {who}")
        settings, folder, groups = self._settings, self.folder, self.formation.groups()
        coordinator = coordinator_of(settings, step, groups, parts_travel=True)
        machines = {member.name: member.machine for member in self.members.all()}
        links = links_of([machines.get(name, Machine()) for name in seats])
        display, data, before = self.display, self.data, self.record
        record = RunRecord(settings, folder, data, checkpoint, display, before, links)

        def show_last_checkpoint(done: int, total: int) -> None:
            """While training goes on, checkpoints travel unseen; at its end one is waited for."""
            if coordinator.phase is Phase.COLLECTING:
                display.progress("save", done, total, "B")

        peers = HostedPeers(self, settings, checkpoint, show_last_checkpoint)

        def stop() -> None:
            self._stop_asked = True
            if not peers.is_stopping:  # else a member leaves, and the run stops already
                peers.ask_to_stop()

        try:
            with peers, record.stopping(stop):
                lead(coordinator, peers, record)
        except (Interrupted, StageError) as error:
            if self._stop_asked:
                raise
            if isinstance(error, StageError):
                self._judge(error)
            else:
                display.note(f"{peers.pauses or 'a peer leaves'}: the run pauses at once")
            return None
        finally:
            if record.has_begun:
                self.record = record
        return self._conclude(record, peers)

    def _conclude(self, record: RunRecord, peers: HostedPeers) -> dict[str, Any] | None:
        """All stages ended in good order: the run is over, or it is to be formed again."""
        done, steps = record.ledger.done, self._settings.train.steps
        is_lost = not self._stop_asked and done in record.checkpoints.failed
        if is_lost and done not in peers.unsaved and self._failures.count(""):
            is_lost = False  # it may be this machine, and to train again would not help
        if is_lost or (done < steps and not self._stop_asked):
            record.pause()
            why = "the last checkpoint is missing" if is_lost else peers.pauses or "a peer leaves"
            self.display.note(f"{why}: the run pauses after step {done}")
            return None
        peers.collector.forget()

        def say_farewell() -> None:
            self._tell_members(record.ledger.progress() if record.ledger.records else None)
            farewell = f"the run is complete: {done} steps"
            if done < steps:
                stopped = f"the host stopped the run after step {done} of {steps}"
                farewell = f"{stopped}; join again when it is back"
            self.members.say_farewell(farewell)

        moved, beside = self.members.meter.moved_bytes(), self.beside_bytes()
        return record.finish(moved, self._stop_asked, self._started, beside, say_farewell)

    def _newest(self) -> Checkpoint | None:
        """Where the run goes on; where it starts from weights, these: now its cuts are known."""
        if self._origin is not None:
            make_start(self._origin, self._settings, self.folder, self.data, self.display)
            self._origin = None
        if not list_checkpoints(self.folder):
            return None  # it begins from the seed
        return open_resume(self.folder, self._settings, self.display)

    def _judge(self, error: StageError) -> None:
        """Count the failure of whoever caused it; raise one that no peer did and that goes on."""
        culprit = error.culprit if isinstance(error, StageFailedError) else None
        if culprit is None and self._failures.count(""):
            raise error
        self.display.note(f"{error}\n  the run pauses until every stage has a peer again")
        if culprit is None:
            return
        name, deed = self.formation.seats[culprit.stage], culprit.deed
        if count := self._failures.count(name, deed == "was lost"):
            why = f"it {deed} {count} times and the run got no further, last: "
            why += f"{one_line(culprit.reason)}. It gets one again when the host is started anew"
            self.members.set_aside(name, why)
            self.display.note(f"{name} gets no stage any more: {why}")
        elif deed != "was lost" and len(self.members.here()) > len(self.formation.members()):
            # while others wait for one
            self.members.set_aside(name, f"its stage {deed}", for_good=False)

    def _wait_for_members(self) -> list[str]:
        """Wait until there is a member for each stage; says for whom, and since when."""
        began = time.monotonic()
        self.display.standing.forms()
        told, told_at, refused, why = "", 0.0, list[str](), ""
        while True:
            members = self.members.here()
            here = [member.name for member in members]
            before = self.formation.members()
            least = self._least or len(before) or self._settings.pipeline.stages
            seats = seating.fill_seats(self.formation.seats, here, least)
            unfit = {one.name: one.why_unfit for one in self.members.all() if one.is_here}
            lacking = seating.lacking_peers(least, here, unfit)
            if not before and len(here) >= least:
                if here != refused:
                    try:
                        seats = self._placed(members)
                    except ConfigError as error:
                        refused, why = here, f"waiting for other peers: {error}"
                lacking = why
            if seats is not None:
                self.display.standing.forms()
                return seats
            now = time.monotonic()
            self.display.standing.waits(lacking.removeprefix("waiting for "))
            if lacking != told or now - told_at > REMIND_SECONDS:
                since = f" (for {now - began:.0f} s)" if now - began > 1 else ""
                self.display.announce("wait", lacking + since)
                told, told_at = lacking, now
            self.members.wait_for_others(members, LOOK_SECONDS)

    def _placed(self, here: list[Member]) -> list[str]:
        """Who holds each stage of a run that is formed for the first time, by what these have
        measured; ConfigError: they cannot. Its blocks stay, whoever takes a stage later.
        """
        probe_all(here, self.book)
        peers = comparable([member.machine for member in here])
        if len(peers) < self._settings.pipeline.stages:
            return [peer.name for peer in share_stages(self._settings, peers)]
        split = form(self._settings, peers, self._keeps_split)
        self._settings = split.settings
        pipeline, simulation = split.settings.pipeline, split.simulation
        self.formation = dataclasses.replace(
            self.formation, split=list(pipeline.split), window=pipeline.window
        )
        counts = zip(split.peers, split.counts, strict=True)
        blocks = ", ".join(f"{peer.name} {count}" for peer, count in counts)
        self.display.announce(
            "split",
            f"blocks: {blocks}. {split.why} By what the peers measured, a step takes "
            f"{elapsed(simulation.step_seconds)}, with at most "
            f"{simulation.schedule.window} microbatches in flight",
        )
        return [peer.name for peer in split.peers]
