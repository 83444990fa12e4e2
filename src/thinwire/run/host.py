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
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from thinwire.background import on_daemon_thread
from thinwire.data import Corpus
from thinwire.engine.checkpoint import Checkpoint, list_checkpoints
from thinwire.engine.cut import are_cuts_learned
from thinwire.engine.reports import Audited, ShardFailed, ShardWritten
from thinwire.engine.state import ShardCheck, most_shard_bytes
from thinwire.errors import (
    BreachError,
    CheckpointError,
    ConfigError,
    StageError,
    ThinwireError,
    WireError,
    printable,
)
from thinwire.folders import replace_private_file
from thinwire.report import Display
from thinwire.report.human import elapsed
from thinwire.run import events as ev
from thinwire.run import protocol as msg
from thinwire.run.admission import ENROL, AuthorityBook, Invite, is_address, serve_enrolment
from thinwire.run.alive import ControlSocket
from thinwire.run.coordinator import Coordinator, Phase
from thinwire.run.formation import (
    FORMATION_FILE,
    Failures,
    Formation,
    Placing,
    fill_seats,
    fitting,
    lacking_peers,
    read_formation,
    stage_names,
    write_formation,
)
from thinwire.run.machine import Machine
from thinwire.run.members import Happening, Member, Members, ignore, one_line
from thinwire.run.peers import (
    EXIT_SECONDS,
    Peers,
    StageFailedError,
    coordinator_of,
    lead,
    neighbours,
    placement,
)
from thinwire.run.placement import ChosenSplit, choose_split, links_of, share_stages
from thinwire.run.processes import python_module
from thinwire.run.record import RunRecord
from thinwire.run.relay import is_public, outside_address
from thinwire.run.signals import Interrupted, heeding, leave_at_once
from thinwire.run.start import make_start, open_resume, opened, prepare_data
from thinwire.run.status import HostConsole, SharedDisplay, Standing, doubt_text
from thinwire.run.tokens import TokenServer
from thinwire.run.transfer import SeatServer, ShardCollector, incoming_folder
from thinwire.settings import Settings
from thinwire.wire import (
    Door,
    LastingPipe,
    Listener,
    Meter,
    Pipe,
    Route,
    Standby,
    ping,
    raise_descriptor_limit,
)
from thinwire.wire.keys import fingerprint_of
from thinwire.wire.sockets import address_text, split_address
from thinwire.wire.speed import SERVICE as SPEED
from thinwire.wire.speed import SpeedService
from thinwire.wire.stream import Stream

REMIND_SECONDS = 60.0  # between two lines on a wait that goes on
LOOK_SECONDS = 1.0
PROBE_SECONDS = 3.0
OWN_INVITE_SECONDS = 3600.0  # for peers on this machine, which join at once
ANSWER_SECONDS = 3.0  # for whoever had lost stages to say that it is there
AWAY_TICK = 0.1  # between two looks at who is back, while somebody is away and stages wait
STANDBY_PAUSE = 5.0  # between a stand-by that was lost and the next one
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
        try:
            split_address(self.listen)
        except WireError as error:
            raise ConfigError(f"--listen: {error}") from None
        neighbours(stages, self.peers or stages)  # refuses what cannot be


def host(settings: Settings, options: HostOptions, display: Display) -> dict[str, Any]:
    """Host a run to its end, or to a Ctrl-C, which stops it with a checkpoint; the summary."""
    options.check(settings.pipeline.stages)
    link = dataclasses.replace(settings.link, emulate=False)  # they are slow by themselves
    settings = dataclasses.replace(settings, link=link)
    raise_descriptor_limit()
    folder = settings.run.folder
    goes_on = (folder / FORMATION_FILE).is_file() or options.resume
    resume = folder if goes_on and list_checkpoints(folder) else None
    with (
        heeding(leave_at_once),
        opened(settings, display, resume, goes_on=goes_on) as (settings, checkpoint, weights),
        ExitStack() as held,
    ):
        data = prepare_data(settings, display, weights, checkpoint)
        book = AuthorityBook(folder / "authority", settings.run.name)
        before = [weights.settings] if weights else []
        keeps_split = bool(before) and all(map(are_cuts_learned, [*before, settings]))
        origin = None if checkpoint else weights
        return _Hosting(settings, options, data, book, display, held, origin, keeps_split).run()


def comparable(peers: list[Machine]) -> list[Machine]:
    """Peers, all of which count as equal where some have no rate: nothing can be compared then."""
    if all(peer.tflops for peer in peers):
        return peers
    return [dataclasses.replace(peer, tflops=1.0, bf16_tflops=0.0, mupdates=0.0) for peer in peers]


def form(settings: Settings, peers: list[Machine], keeps_split: bool) -> ChosenSplit:
    """Choose stages and blocks among members that are here; ConfigError: why there is no way yet.
    `keeps_split`: the blocks of each stage stay as the settings have them.
    """
    if keeps_split:
        split = [len(blocks) for blocks in settings.split()]
        pipeline = dataclasses.replace(settings.pipeline, split=split)
        settings = dataclasses.replace(settings, pipeline=pipeline)
    return choose_split(settings, peers)


# How neighbours on other machines reach each other: the stage below accepts, so it waits at doors;
# the one above dials. A link is direct where either end has a door that can be reached, and goes
# by the relay or the host's door where neither has.


@dataclass(frozen=True)
class DoorOf:
    """A member's door: its address for its own processes, and for others if it is open."""

    own: str = ""
    outside: str = ""  # probed


@dataclass(frozen=True)
class Ways:
    """The doors of a generation: of each stage's member, and where all can meet."""

    run: str
    token: str = field(repr=False)  # at the doors of its members
    doors: list[DoorOf]
    meeting: list[list[Route]] = field(repr=False)  # for each stage: the relay, the host's own door
    keys: list[str] = field(default_factory=list)  # fingerprints of the members, by stage
    word: str = field(default_factory=lambda: secrets.token_hex(8), repr=False)

    def connect(self, stage: int, told: msg.Connect) -> msg.Connect:
        """The word to connect, for a stage whose neighbours are on other machines."""
        own, met = self.doors[stage].own, self.meeting[stage]
        below, above = self.doors[:stage][-1:], self.doors[stage + 1 :][:1]
        reach = [route for door in below for route in [*self._direct(door.outside, own), *met]]
        wait = [route for door in above for route in [*self._direct(own, door.outside), *met]]
        known = dataclasses.replace(told, seats=self.keys, run=self.run, word=self.word)
        return dataclasses.replace(known, reach=reach, wait=wait)

    def _direct(self, *addresses: str) -> list[Route]:
        return [Route(address, "direct", self.token) for address in addresses if address]


def probe_all(members: list[Member], book: AuthorityBook) -> list[DoorOf]:
    """The doors of several members, tried at once; one that is away has none."""

    def look(member: Member) -> DoorOf:
        if (hello := member.hello) is None:
            return DoorOf()
        return probe(hello, member.origin, book.run_id, book.door_token(member.name))

    probing = [on_daemon_thread("thinwire probe", partial(look, member)) for member in members]
    doors = [one.result() for one in probing]
    for member, door in zip(members, doors, strict=True):
        member.is_reachable = bool(door.outside)
    return doors


def probe(hello: msg.Hello, origin: str, run: str, token: str) -> DoorOf:
    """A member's door as others find it: tried, not believed.

    Only where the member's own stream comes from, its `origin`: a host is no means to look around.
    """
    if origin and hello.outside.rpartition(":")[0].strip("[]") == origin:
        with contextlib.suppress(WireError):
            ping(Route(hello.outside, "direct", token), f"{run}/control", PROBE_SECONDS)
            return DoorOf(hello.door, hello.outside)
    return DoorOf(hello.door)


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
        door = stack.enter_context(_open_door(options.listen, port_before))
        door.admit_by(book.run_id, book.grant_of, options.mbps)
        self.port, self.cut = door.port, partial(door.cut, book.run_id)
        takes = self.listener.take
        services = {ENROL: takes, "control": takes, SPEED: SpeedService().take}
        for service, take in services.items():
            name = f"{book.run_id}/{service}"
            door.serve(name, take)
            for route in self._relay:
                stack.enter_context(Standby(name, route, take, prover=book.identity.prove))
        stated = tuple(with_port(address, door.port) for address in options.addresses)
        host, _ = split_address(options.listen)
        self.addresses = stated or (outside_address(host, door.port),)

    def meeting(self, peer: str) -> list[Route]:
        """Where a member meets others that it cannot reach: the relay, then the host's door."""
        own = [Route(one, "relayed", self.book.door_token(peer)) for one in self.addresses]
        return [*self._relay, *own]

    def invite(self, machines: int) -> Invite:
        """An invite for so many others."""
        own = self._options
        return self.book.invite(self.addresses, own.relay, own.lasts, machines)

    def own_invite(self) -> Invite:
        """An invite for peers on this machine: by its inner address, and with a secret apart."""
        host, _ = split_address(self._options.listen)
        inner = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
        here, count = (address_text(inner, self.port),), self._options.stages_here
        return self.book.invite(here, lasts=OWN_INVITE_SECONDS, machines=count)


def tell_settings(book: AuthorityBook, settings: Settings, stream: Stream) -> None:
    """Tell a member what is trained, with which it measures its machine; a stranger nothing."""
    if book.name_of(fingerprint_of(stream.public)) is not None:
        stream.write(msgspec.json.encode(settings.to_plain()))


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


def _open_door(listen: str, port_before: int) -> Door:
    """The public port; where any will do, the one that earlier invites name."""
    host, port = split_address(listen)
    if not port and port_before:
        with contextlib.suppress(WireError):  # another program has it by now
            return Door(host, port_before)
    return Door(host, port)


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
            process.kill()
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()


# One generation


IsDue = Callable[[], bool]  # whether something may still come


class Streams:
    """What members open for one generation beside their own stream; it ends with `close`."""

    def __init__(self, listener: Listener):
        self._listener = listener
        self._is_over = threading.Event()

    def accept(
        self, name: str, peer: str, timeout: float | None, is_due: IsDue = lambda: True
    ) -> Pipe:
        """Wait for a member to dial by this name, while it may; whoever else does is refused."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._is_over.is_set() and is_due():
            left = LOOK_SECONDS / 2 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise WireError(f"{peer} did not dial as {name!r} within {timeout:.0f} s")
            with contextlib.suppress(WireError):  # nobody came: look whether to go on
                return self._listener.accept(name, min(left, LOOK_SECONDS / 2), peer, True)
            time.sleep(0.01)  # the listener may be closed, and then says so at once
        raise WireError(f"nobody waits for {name!r} any more")

    def serve(
        self, name: str, peer: str, handle: Callable[[Pipe], None], is_due: IsDue = lambda: True
    ) -> None:
        """Handle one stream of this name after the other, on a thread of its own."""

        def run() -> None:
            while not self._is_over.is_set() and is_due():
                with contextlib.suppress(ThinwireError):  # the member dials again
                    handle(self.accept(name, peer, None, is_due))

        threading.Thread(target=run, name=f"thinwire {name}", daemon=True).start()

    def close(self) -> None:
        """Accept nothing more."""
        self._is_over.set()


@dataclass
class Base:
    """What all generations of a run share."""

    members: Members
    door: OpenDoor
    folder: Path
    data: Corpus
    display: SharedDisplay
    formation: Formation  # the latest
    beside: dict[str, Meter] = field(  # what travels beside the cuts, by what it is
        default_factory=lambda: {"checkpoints": Meter(), "states": Meter(), "token ids": Meter()}
    )
    fed_bytes: int = 0  # that stages sent to those who stand by for their neighbours
    record: RunRecord | None = None  # of the last generation that trained

    def keep(self, formation: Formation) -> None:
        """Write a placement down before any member hears of it."""
        self.formation = formation
        write_formation(self.folder, formation)

    def beside_bytes(self) -> dict[str, int]:
        """Every byte of that so far, both ways, frame headers included."""
        moved = {what: m.sent_bytes() + m.received_bytes() for what, m in self.beside.items()}
        return {**moved, **({"frames to stand-bys": self.fed_bytes} if self.fed_bytes else {})}


class HostedPeers(Peers):
    """The members that hold the stages of one generation, as its coordinator sees them."""

    def __init__(
        self,
        base: Base,
        settings: Settings,
        checkpoint: Checkpoint | None,
        on_progress: Callable[[int, int], None],
    ):
        formation = base.formation
        stages = len(formation.seats)
        super().__init__(stages)
        self._base, self._settings, self._checkpoint = base, settings, checkpoint
        self._homeless: list[list[int]] = []  # stages that are lost, and wait for a holder
        self._asked_at = 0.0  # when members were asked whether they are there
        self._alone_at = 0.0  # when no member could be reached
        self._again = 0  # how often stages were given anew
        self._given: dict[tuple[str, int], int] = {}  # by member and stage: as of which of these
        self._groups = formation.groups()  # the stages that share a process
        self._is_saved = False  # a checkpoint is complete since the placement was last looked at
        self._collected: dict[str, list[int]] = {}  # by member: the stages whose shards it has
        self._standbys = base.display.standing.standbys
        self._standby_after = 0.0  # no other stand-by begins before
        self._replaces = bool(placement(settings, self._groups))  # those who are lost
        self._given_up: set[tuple[str, float]] = set()  # members that were away for too long
        self._links = f"epoch/{formation.epoch}.{secrets.token_hex(16)}"
        self._ways: dict[tuple[int, ...], Ways] = {}  # by who follows, of the holders by ()
        self._words: dict[int, str] = {}  # of stages whose processes have ended
        self._ended: set[int] = set()
        self._streams = Streams(base.door.listener)
        self._states: list[SeatServer] = []
        self._doors: dict[str, DoorOf] = {}  # of members, as they were found
        self._is_waiting = self.is_training = False
        self.pauses = ""  # why the run is to be formed again, if all is in good order
        self.unsaved: set[int] = set()  # steps of which members could not write their parts
        self._unable: set[str] = set()  # these members, as long as they could train
        self._unheard: set[int] = set()  # stages that others are to hold for that
        self.is_stopping = False
        self.collector = ShardCollector(
            base.folder,
            [most_shard_bytes(settings, stage) for stage in range(stages)],
            ShardCheck(settings, base.data, incoming_folder(base.folder)).objection,
            patience=settings.run.patience,
            meter=base.beside["checkpoints"],
            on_progress=on_progress,
            tell=self.said.note,
        )

    def __exit__(self, *error: object) -> None:
        self._base.members.on_happening = ignore
        self._streams.close()
        self.end_states()
        self.collector.close()
        for name in [*self._base.formation.members(), *self._standbys.values()]:
            self._tell(name, msg.Release("the run is formed again"))

    def start(self) -> None:
        self._base.members.on_happening = self._on_happening
        self._ways_between()
        for stages in self._groups:
            name = self._base.formation.seats[stages[0]]
            if not self._give(stages, name, self._checkpoint):
                self._lose(name, f"{name} is away")

    def _give(
        self,
        stages: list[int],
        name: str,
        checkpoint: Checkpoint | None,
        began: int = msg.OF_NO_STEP,
        follows: bool = False,
    ) -> bool:
        """Tell a member to hold stages, and serve what it needs; False if it is away."""
        self._given |= {(name, stage): self._again for stage in stages}
        if not follows:
            self._collect(name, stages)
        self._serve(name, stages, checkpoint, follows)
        plain, corpus = self._settings.to_plain(), self._base.data.fingerprint
        resumes = checkpoint is not None
        hold = msg.Hold(stages, plain, resumes, corpus, self._links, began, self._again, follows)
        return self._tell(name, hold)

    def _tell(self, name: str, message: Any, stage: int = msg.OF_NO_STAGE) -> bool:
        return self._base.members.tell(name, message, stage, self._base.formation.epoch)

    def on_begin(self) -> None:
        self.end_states()
        self.is_training = True

    def replace(self, stages: list[int], by_follower: bool = False) -> None:
        self.said.forget(stages)
        if not by_follower:
            self._homeless.append(stages)
            self._ask_who_is_there()
        elif name := self._standbys.get(tuple(stages), ""):
            self._take_seat(stages, name)
            self._forget_standby(stages)  # behind it: its streams are served all along
            self._collect(name, stages)
            stood_by = f"{stage_names(stages)}: {name}, which stood by"
            self._base.display.announce("form", stood_by)
        else:  # it has just got other stages
            for stage in stages:
                self.said.note(ev.Lost(stage, "who stood by for it does so no more"))

    def next_event(self, coordinator: Coordinator) -> ev.Event:
        somebody_is_away = self._give_up_the_absent()
        self._spread()
        for stages in [*self._homeless]:
            self._find_holder(stages)
        if self.is_training and not self._homeless and not self.is_stopping:
            self._find_standby()
            one_holds_all = len(self._groups) == 1
            if one_holds_all and (name := self._placing().next_share()) is not None:
                self._pause(f"{name} takes some of the stages, which one machine holds")
        rest = coordinator.rest(time.monotonic())
        return self.said.next(min(rest, AWAY_TICK) if somebody_is_away or self._homeless else rest)

    def _ask_who_is_there(self) -> None:
        """A machine may be frozen while its stream is open: who is to hold stages answers first."""
        self._asked_at = time.monotonic()
        for member in self._base.members.here():
            self._base.members.tell(member.name, msg.AskAlive())

    def _find_holder(self, stages: list[int]) -> None:
        """Give lost stages to whoever is best for them, or wait for somebody who is."""
        waited, display = time.monotonic() - self._asked_at, self._base.display
        placing = self._placing(lambda member: member.heard >= self._asked_at)
        best, name = self._placing().holder(stages), placing.holder(stages)
        if (name is None or name != best) and waited < ANSWER_SECONDS:
            return  # a better one may answer: a spare, or whoever had them and has the files
        before = self._base.formation.seats[stages[0]]
        if name is None and before in self._unable & {one.name for one in self._base.members.up()}:
            name = before  # it cannot save, but nobody else can even train them
        which = stage_names(stages)
        if name is None:
            if waited > REMIND_SECONDS or not self._is_waiting:
                self._is_waiting = True
                display.standing.waits(f"a peer for {which}")
                display.announce("wait", f"waiting for a peer that can hold {which}")
                self._ask_who_is_there()
            return
        self._homeless.remove(stages)
        self._is_waiting = False
        self._again += 1
        for group in placing.displaced(stages, name):
            self._drop_standby(group)
            self.said.note(ev.FollowerLost(group))
        self._take_seat(stages, name)
        display.announce("form", f"{which}: {name}, from the last checkpoint and the logs")
        if self._give(stages, name, *self._where_to_begin()):
            self.said.note(ev.Given(stages))
        else:
            self._homeless.append(stages)

    def _where_to_begin(self) -> tuple[Checkpoint | None, int]:
        """The last complete checkpoint, and where this generation began."""
        saved = Checkpoint.open(self.saved, allow_plugins=True) if self.saved else self._checkpoint
        return saved, self._checkpoint.step if self._checkpoint else 0

    # Stand-bys: members that hold nothing, and follow stages whose loss would cost most

    def _find_standby(self) -> None:
        """Have a member that holds nothing follow stages that nobody follows."""
        if not self._replaces or time.monotonic() < self._standby_after:
            return
        stages, name = self._placing().next_standby()
        if name is None:
            if stages:
                self._standby_after = time.monotonic() + STANDBY_PAUSE
            return
        self._again += 1
        self._standbys[tuple(stages)] = name
        self._doors.pop(name, None)
        if not self._give(stages, name, *self._where_to_begin(), follows=True):
            self._forget_standby(stages)

    def on_follower(self, command: ev.OfFollower) -> None:
        match command:
            case ev.DropFollower(stages):
                self._drop_standby(stages)
            case ev.Doubt(stage, found, replaces):
                placing = self._placing()
                holder, standby = placing.seats[stage], placing.followed.get(stage, "")
                self._base.display.announce("audit", doubt_text(stage, holder, standby, found))
                if replaces:
                    reason = f"{standby} computed other values than it sent for stage {stage}"
                    self._base.members.set_aside(holder, reason)

    def _placing(self, counts: Callable[[Member], bool] = lambda member: True) -> Placing:
        """Who holds and follows what. `counts`: whether a member that is here can be chosen."""
        here = [member.machine for member in self._base.members.here() if counts(member)]
        seats, standbys = self._base.formation.seats, dict(self._standbys)
        return Placing(self._settings, self._groups, seats, standbys, here)

    def _forget_standby(self, stages: list[int]) -> str:
        """Who followed these stages, and does so no more; nobody: nothing."""
        name = self._standbys.pop(tuple(stages), "")
        self._ways.pop(tuple(stages), None)
        if name not in self._standbys.values():
            self._base.display.standing.audits.pop(name, None)
        return name

    def _drop_standby(self, stages: list[int]) -> None:
        if name := self._forget_standby(stages):
            self._standby_after = time.monotonic() + STANDBY_PAUSE  # it may fail again at once
            self._tell(name, msg.Release("its stage is placed anew", stages))

    def _take_seat(self, stages: list[int], name: str) -> None:
        """Note who holds stages from now on, and let go of whoever did."""
        before = self._base.formation.seats[stages[0]]
        try:
            self._base.keep(self._base.formation.given(stages, name))
        except ConfigError as error:  # a full disk: only a host that is started anew would read it
            self._base.display.note(f"{error}; the run goes on")
        self._ended -= {*stages}
        self._unheard -= {*stages}
        if before != name:
            left = [s for s in self._collected[before] if s not in stages]
            self._collected[before][:] = left  # whoever collects from it looks there
            self.collector.retract(stages)
            reason = f"{name} holds {stage_names(stages)} now"
            self._tell(before, msg.Release(reason, stages))
        self._ways.clear()  # whoever follows the stage beside it is fed from elsewhere
        for changed in (before, name):
            self._doors.pop(changed, None)
        self._ways_between()

    def _give_up_the_absent(self) -> bool:
        """Have others hold the stages of a member that cannot be reached, if there are others: else
        its stream says when it has been away for too long. Whether somebody is still waited for.
        """
        now, is_waiting = time.monotonic(), False
        for member in self._base.members.all() if self._replaces else ():
            held, away = self._base.formation.held_by(member.name), (member.name, member.down_since)
            if not held or not member.is_down or away in self._given_up:
                continue
            placing, since = self._placing(), max(member.down_since, self._alone_at)
            if not placing.here:
                self._alone_at = now  # all are away, so it may be this machine: they get their time
            elif (limit := placing.patience(held)) is not None and now - since > limit:
                self._given_up.add(away)
                self._lose(member.name, f"{member.name} could not be reached for {limit:g} s")
            is_waiting |= away not in self._given_up
        return is_waiting

    def _spread(self) -> None:
        """After a complete checkpoint, have a member that holds nothing take over one of several
        groups of stages that another holds since members were lost: it follows them by now.
        """
        is_due, self._is_saved = self._is_saved and self.is_training, False
        if not is_due or self._homeless or self.is_stopping:
            return
        if found := self._placing().next_move():
            stages, crowded, name = found
            moves = f"{stage_names(stages)} moves from {crowded} to {name}"
            self.said.note(ev.MoveAsked(stages, moves))

    def tell(self, stage: int, message: msg.ToStage, follows: bool = False) -> None:
        self._is_saved |= isinstance(message, msg.Saved)
        placing = self._placing()
        name = placing.followed.get(stage, "") if follows else placing.seats[stage]
        if not name:
            return
        if isinstance(message, msg.Connect):
            fed = stage
            if message.cut is not None and not follows:
                fed = msg.other_end(message.cut, stage)
            groups = [group for group in placing.standbys if fed in group and message.follower]
            message = self._ways_between(*groups).connect(stage, message)
        self._tell(name, message, stage)

    def ask_to_stop(self, why: str = "") -> None:
        self.is_stopping = True
        super().ask_to_stop(why)

    def wait_for_exits(self) -> None:
        deadline = time.monotonic() + EXIT_SECONDS
        while self._ended < {*self._stages} and time.monotonic() < deadline:
            time.sleep(0.02)

    def last_words(self, culprit: ev.Suspect) -> str:
        who = f"\n  stage {culprit.stage} was held by {self._base.formation.seats[culprit.stage]}"
        words = "" if culprit.known else self._words.get(culprit.stage, "")
        return who + "".join(f"\n  | {printable(line)}" for line in words.splitlines())

    def end_states(self) -> None:
        """All stages have their states: serve these no longer."""
        for states in self._states:
            states.close()
        self._states.clear()

    def _ways_between(self, followed: tuple[int, ...] = ()) -> Ways:
        """The ways between the members of all stages; or as they were if whoever follows some held
        these. Doors that are not known are probed at once.
        """
        if followed not in self._ways:  # both ends of a link need the same word
            door, book, known = self._base.door, self._base.door.book, self._doors
            follower = self._standbys.get(followed, "")
            seats = self._base.formation.given([*followed], follower).seats
            new = {*seats} - known.keys()
            members = [member for member in self._base.members.all() if member.name in new]
            known |= zip((member.name for member in members), probe_all(members, book), strict=True)
            doors = [known.get(name, DoorOf()) for name in seats]
            meeting, keys = [door.meeting(name) for name in seats], [*map(book.key_of, seats)]
            self._ways[followed] = Ways(book.run_id, self._links, doors, meeting, keys)
        return self._ways[followed]

    def _serve(
        self, name: str, stages: list[int], checkpoint: Checkpoint | None, follows: bool
    ) -> None:
        """Accept what stages on a member open beside its own stream: states and token ids."""
        generation, again = self._base.formation.epoch, self._again

        def is_due() -> bool:
            """Whether they are the member's still, and not given anew: it dials by other names."""
            whose = self._standbys.get(tuple(stages)), self._base.formation.seats[stages[0]]
            return name in whose and self._given[name, stages[0]] == again

        if checkpoint is not None:
            meter, lost = self._base.beside["states"], ev.FollowerLost(stages)
            on_gone = partial(self.said.note, lost) if follows else None
            states = SeatServer(checkpoint, self._settings, meter, on_gone)
            self._states.append(states)
            stream = msg.stream_name("state", stages[0], generation, again)
            serve = partial(states.serve, stages=tuple(stages))
            self._streams.serve(stream, name, serve, is_due)
        for stage in stages:
            tokens = msg.stream_name("tokens", stage, generation, again)
            on_daemon_thread("thinwire tokens", partial(self._serve_tokens, tokens, name, is_due))

    def _collect(self, name: str, stages: list[int]) -> None:
        is_known = name in self._collected
        self._collected.setdefault(name, []).extend(stages)
        if not is_known:
            collect = partial(self.collector.collect_from, name, self._collected[name])
            self._streams.serve(msg.store_name(name), name, collect)

    def _serve_tokens(self, stream: str, name: str, is_due: IsDue) -> None:
        def accept(timeout: float | None) -> Pipe:
            return self._streams.accept(stream, name, timeout, is_due)

        outage = max(self._settings.link.outage, msg.LEAST_OUTAGE_S)
        with contextlib.suppress(ThinwireError):  # the stage says what it lacks
            pipe = LastingPipe(accept(None), accept, outage)
            TokenServer(pipe, self._base.data, self._settings, self._base.beside["token ids"])

    def _on_happening(self, name: str, what: Happening) -> bool:
        """On the thread of a member's stream, which may wait for room in the queue: so no stage of
        this generation says too much.
        """
        epoch = self._base.formation.epoch
        homeless = {s for group in [*self._homeless] for s in group} | self._unheard
        placing = self._placing()
        held = [stage for stage in self._base.formation.held_by(name) if stage not in homeless]
        declined = getattr(getattr(what, "message", None), "stages", [])
        if isinstance(what, msg.Envelope) and what.generation == epoch:
            about = [what.stage] if what.stage >= 0 else declined
            given = {stage: self._given.get((name, stage)) for stage in about}
            if never := [stage for stage, again in given.items() if again is None]:
                raise BreachError(f"{name} sent a message of stage {never[0]}, which it never held")
            if any(again != what.again for again in given.values()):
                return False  # of a process whose place another has got, here
        match what:
            case ev.Lost() | ev.Away() | msg.Envelope(msg.Leaving() | msg.Declined()):
                for group in placing.followed_by(name):
                    if not declined or not {*group}.isdisjoint(declined):
                        self.said.note(ev.FollowerLost(group))
        match what:
            case msg.Envelope(msg.Hello() | msg.Alive()):
                self.said.note(ev.Tick())  # somebody may be waited for
            case msg.Envelope(message, stage, said) if (
                said == epoch and placing.followed.get(stage, "") == name
            ):
                self.said.note(ev.Said(stage, message, follows=True))
                if isinstance(message, Audited):
                    self._base.display.standing.audits[name] = message
            case msg.Envelope(_, stage, said) if said == epoch and stage >= 0 and stage not in held:
                return False  # others hold it now; it counts as talk
            case ev.Back() if not held:
                self._tell(name, msg.Release("others hold its stages now"))
            case _ if not held:
                pass
            case msg.Envelope(message, stage, said) if stage >= 0 and said == epoch:
                self._hear(stage, message)
                return True
            case msg.Envelope(msg.Leaving()):
                self._on_leaving(name, held)
            case msg.Envelope(msg.Declined(reason, stages), generation=said) if said == epoch:
                lost = [s for s in held if s in stages or not stages]
                self._unable.discard(name)
                self._lose(name, f"it cannot hold its stage: {one_line(reason)}", stages=lost)
            case ev.Lost(_, reason, in_breach):
                self._ended |= set(held)
                self._lose(name, reason, in_breach)
            case ev.Away() | ev.Back():
                self.said.note(msgspec.structs.replace(what, stage=held[0]))
        return False

    def _hear(self, stage: int, message: Any) -> None:
        if isinstance(message, ShardFailed) and self._moves_from(stage, message):
            return
        if isinstance(message, msg.Ended):
            self._words[stage] = message.words
            self._ended.add(stage)
        self.said.hear(stage, message)
        self._base.display.standing.heard(stage, message)
        match message:
            case ShardWritten():
                self.collector.announce(stage, message)
            case ShardFailed(step=step, error=error):
                self.collector.give_up(step, error)
            case msg.Finished(fed_bytes=fed):
                self._base.fed_bytes += max(0, fed)
                self.is_training = False  # the run is at its end

    def _moves_from(self, stage: int, failed: ShardFailed) -> bool:
        """Whether others take a stage from a member that cannot write its part of a checkpoint:
        they write it anew. Where nobody can, this checkpoint fails, and the run goes on.
        """
        name, reason = self._base.formation.seats[stage], one_line(failed.error)
        group = next(group for group in self._groups if stage in group)
        self.unsaved.add(failed.step)
        self._unable.add(name)
        self._base.members.set_aside(name, reason, for_good=False)
        if not self._replaces or self._placing().patience(group) is None:
            return False
        self._unheard |= {*group}
        self._lose(name, reason, stages=[stage])
        return True

    def _on_leaving(self, name: str, held: list[int]) -> None:
        """A member leaves: others take its stages; where nobody can, the run stops with a
        checkpoint, and waits for somebody. In a run that stops it stays until then.
        """
        others = self._placing(lambda member: member.name != name)
        can_move = self.is_training and self._replaces and not self.is_stopping
        if can_move and others.patience(held) is not None:
            self._lose(name, f"{name} leaves")
            return
        self._pause(f"{name} leaves")

    def _pause(self, why: str) -> None:
        """Have the run stop with a checkpoint, and be formed again; at once where stages that are
        lost wait for a holder, for then no step ends.
        """
        self.pauses = self.pauses or why
        times = 0 if self.is_stopping else 2 if self._homeless else 1
        for _ in range(times):  # asked twice, a coordinator leaves at once
            self.ask_to_stop(why)

    def _lose(
        self, name: str, reason: str, in_breach: bool = False, stages: list[int] | None = None
    ) -> None:
        for stage in self._base.formation.held_by(name) if stages is None else stages:
            self.said.note(ev.Lost(stage, reason, in_breach))


# All of them


class _Hosting(Base):
    """The life of a host: what it opens, and the generations of its run one after the other."""

    def __init__(
        self,
        settings: Settings,
        options: HostOptions,
        data: Corpus,
        book: AuthorityBook,
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
        formation = fitting(read_formation(folder), settings)
        self._settings = formation.applied(settings)
        self._stop_asked = False
        self._refused: tuple[list[str], str] = ([], "")  # members that cannot hold the run, and why
        self._failures = Failures()
        door = OpenDoor(book, options, formation.port, opened)
        door.listener.serve(msg.SETTINGS, partial(tell_settings, book, settings))
        if options.stages_here:  # they end after members have heard a farewell, so they begin first
            here = own_peers(options.stages_here, door.own_invite(), folder, settings.run.device)
            opened.enter_context(here)
        members = opened.enter_context(Members(door.listener, book, settings.link.outage, door.cut))
        notes = Standing(settings.run.name, book.run_id)
        shared = SharedDisplay(display, members.tell_all, notes)
        super().__init__(members, door, folder, data, shared, formation)
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
                    self.members.wait(lambda: False, REMIND_SECONDS)
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
            replace_private_file(path, f"thinwire join {invite}\n".encode())
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
        coordinator = coordinator_of(settings, folder, checkpoint, groups, parts_travel=True)
        machines = {member.name: member.machine for member in self.members.all()}
        links = links_of([machines.get(name, Machine()) for name in seats])
        earlier = self.record
        display, data = self.display, self.data
        record = RunRecord(settings, folder, data, checkpoint, display, True, earlier, links)

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
        except Interrupted:
            if self._stop_asked:
                raise
            display.note(f"{peers.pauses or 'a peer leaves'}: the run pauses at once")
            return None
        except StageError as error:
            if self._stop_asked:
                raise
            self._judge(error)
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
            why = "the last checkpoint is missing" if is_lost else peers.pauses
            self.display.note(f"{why or 'a peer leaves'}: the run pauses after step {done}")
            return None
        peers.collector.forget()

        def say_farewell() -> None:
            self._tell_members(record.ledger.progress() if record.ledger.records else None)
            farewell = f"the run is complete: {done} steps"
            if done < steps:
                stopped = f"the host stopped the run after step {done} of {steps}"
                farewell = f"{stopped}; join again when it is back"
            self.members.say_farewell(farewell)

        moved, beside = self.members.moved_bytes(), self.beside_bytes()
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
            last = f"it {deed} {count} times and the run got no further, last: "
            last += one_line(culprit.reason)
            why = f"{last}. It gets one again when the host is started anew"
            self.members.set_aside(name, why)
            self.display.note(f"{name} gets no stage any more: {why}")
        elif deed != "was lost" and len(self.members.here()) > len(self.formation.members()):
            # while others wait for one
            self.members.set_aside(name, f"its stage {deed}", for_good=False)

    def _wait_for_members(self) -> list[str]:
        """Wait until there is a member for each stage; says for whom, and since when."""
        began = time.monotonic()
        self.display.standing.forms()
        told, told_at = "", 0.0
        while True:
            members = self.members.here()
            here = [member.name for member in members]
            before = self.formation.members()
            least = self._least or len(before) or self._settings.pipeline.stages
            if before:
                seats = fill_seats(self.formation.seats, here, least)
                lacking = "" if seats else self._lacking(here, least)
            elif len(here) < least:
                seats, lacking = None, self._lacking(here, least)
            else:
                seats, lacking = self._choose(members)
            if seats is not None:
                self.display.standing.forms()
                return seats
            now = time.monotonic()
            self.display.standing.waits(lacking.removeprefix("waiting for "))
            if lacking != told or now - told_at > REMIND_SECONDS:
                since = f" (for {now - began:.0f} s)" if now - began > 1 else ""
                self.display.announce("wait", lacking + since)
                told, told_at = lacking, now
            self.members.wait(partial(self._has_changed, here), LOOK_SECONDS)

    def _has_changed(self, known: list[str]) -> bool:
        return [member.name for member in self.members.here()] != known

    def _lacking(self, here: list[str], least: int) -> str:
        unfit = {one.name: one.why_unfit for one in self.members.all() if one.is_here}
        return lacking_peers(least, here, unfit)

    def _choose(self, here: list[Member]) -> tuple[list[str] | None, str]:
        """Stages and blocks for a run that is formed for the first time, by what peers measured.

        They stay: whoever takes a stage later takes its blocks. Without seats, why there are none.
        """
        names = [member.name for member in here]
        if names == self._refused[0]:
            return None, self._refused[1]
        probe_all(here, self.door.book)
        try:
            return self._placed(comparable([member.machine for member in here])), ""
        except ConfigError as error:
            self._refused = names, f"waiting for other peers: {error}"
            return None, self._refused[1]

    def _placed(self, peers: list[Machine]) -> list[str]:
        """Whoever holds each stage of these; with fewer peers than stages the split stays."""
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
