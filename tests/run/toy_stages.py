"""Toy stages for the simulator of faults: stages, their links and their processes, without threads.

The ports and the state of each link (what is logged, sent again, left out) are those of the
product. What stands for the rest says so, and does what it does in the same order.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from thinwire.codec import Leg
from thinwire.engine import reports as rp
from thinwire.engine.checkpoint import Shard
from thinwire.engine.cut import CutEnd
from thinwire.engine.port import EVALUATION_WINDOW, Due, Mailbox, Port, decision_number
from thinwire.engine.step_end import Verdict, global_norm, pack_tally, unpack_tally
from thinwire.engine.worker import PATIENCE as MISSES
from thinwire.errors import BreachError, WireError
from thinwire.run import events as ev
from thinwire.run import protocol as pr
from thinwire.run.watch import pulse_seconds
from thinwire.schedule.build import Kind
from thinwire.wire import Frame, FrameKind, FrameLog, LinkState, Position, decode, encode
from thinwire.wire.logged import Lacking

PATIENCE, OUTAGE = 10.0, 20.0  # seconds, as of settings
ANSWER, JOIN = 30.0, 120.0  # how long an end waits for a position, and for a connection
VALIDATION = 2  # microbatches of one
UNREAD = 4  # frames that a follower may leave unread before whoever feeds it waits


class NotDue(Exception):
    """A frame comes too early, and waits."""


def mix(*numbers):
    """A number that depends on these and on their order; the same in every process."""
    return hash(numbers) & 0xFFFF_FFFF_FFFF


@dataclass(frozen=True)
class Plan:
    """What a run is, but for its faults; in part as of Settings."""

    stages: int
    processes: int
    microbatches: int
    steps: int
    save_every: int
    score_every: int
    schedule: str
    hosted: bool  # by machines: none can be killed from here, and parts of checkpoints travel
    delay: int = 0
    window: int = 0
    works: tuple[float, ...] = (1.0,)  # what stages compute, as Speeds.compute

    log_mb, precision = 0, "fp32"
    train = run = property(lambda self: self)
    checkpoint_every = property(lambda self: self.save_every)

    def is_checkpoint_step(self, done):
        return done % self.save_every == 0 or done == self.steps

    def is_evaluation_step(self, done):
        return done % self.score_every == 0

    def is_pause(self, done):
        return self.is_checkpoint_step(done) or self.is_evaluation_step(done)

    def split(self):
        return [range(stage, stage + 1) for stage in range(self.stages)]


@dataclass(frozen=True)
class Speeds:
    """Seconds of a frame on the uplink and on its way, of each piece of work, of a process until it
    is built, and until one that takes a place has its state; and what depends on such things.
    """

    uplink: float = 0.002
    latency: float = 0.01
    compute: tuple[float, ...] = (0.02,)  # of a forward and of a backward, by stage
    save: float = 0.03
    build: float = 0.5
    fetch: float = 0.0
    upload: float = 0.1
    patience: float = PATIENCE
    pause: float = 0.4  # between a stand-by that was lost and the next
    lag: float = 0.0  # at most, until the coordinator hears what has arrived
    keeps: int = 0  # bytes that a log keeps for those who follow
    deaths: float = 0.0  # the chance that a machine dies in a step


@dataclass
class State:
    """All that a stage saves: its weights, those without the last update (each with a version), and
    what its codecs remember, by cut and leg.
    """

    step: int = 0
    version: int = 0
    weights: int = 1
    before: tuple[int, int] | None = None
    memory: dict[tuple[int, Leg], int] = field(default_factory=dict)

    def copy(self):
        return State(self.step, self.version, self.weights, self.before, dict(self.memory))

    def of_step(self, step, delay):
        """Version and weights that a step is computed with, as it begins."""
        latest = self.version, self.weights
        return self.before or latest if delay and step == self.step else latest


@dataclass
class ToyStep:
    """A step under way."""

    version: int
    weights: int
    later: tuple[int, int] = (0, 0)  # the same, of the microbatches that are not delayed
    inputs: dict[int, int] = field(default_factory=dict)
    gradient: int = 0
    loss: int = 0


@dataclass(frozen=True)
class Toy:
    """Stands for a tensor."""

    value: int
    shape: tuple[int, ...] = ()
    is_cuda: bool = False

    def to(self, dtype):
        return self


class ToyCodec:
    """Packs by what it has seen before: an end that saw other frames unpacks something else."""

    tag, name, remembers, remembers_examples = 1, "toy", True, False

    def __init__(self, memory, cut, leg):
        self._memory, self._key = memory, (cut, leg)
        memory.setdefault(self._key, 0)

    def payload_limit(self, shape):
        return 8

    def pack(self, toy, place):
        return (toy.value ^ self._before(toy.value, 0, place)).to_bytes(8, "little")

    def unpack(self, payload, spec, place):
        packed = int.from_bytes(payload, "little")
        return Toy(packed ^ self._before(packed, self._memory[self._key], place))

    def _before(self, value, mask, place):
        memory = self._memory[self._key]
        if not place.training:
            return 0
        self._memory[self._key] = mix(memory, value ^ mask)
        return memory


class ToyEnd(CutEnd):
    """An end of a cut whose codecs are toys."""

    def __init__(self, state, cut, is_lower):
        codecs = {leg: ToyCodec(state.memory, cut, leg) for leg in Leg}
        spec = SimpleNamespace(shape=(), dtype=None)
        super().__init__(codecs, spec, is_lower, cut)


class ToyMailbox(Mailbox):
    """A mailbox in which nobody waits: who asks too early asks again."""

    def wait_until(self, condition):
        if not self._failure and not condition():
            raise NotDue
        return self._failure is None

    def has(self, *keys):
        return self._failure is not None or any(key in self._items for key in keys)

    def is_full(self):
        return sum(key[0] is FrameKind.EVALUATE for key in self._items) >= EVALUATION_WINDOW


class MemoryLog(FrameLog):
    """The log of frames, without files."""

    def __init__(self, process):
        super().__init__(Path("nowhere"), 1 << 30, process.world.speeds.keeps)
        self._process, self._frames = process, list[bytes]()

    def _store(self, message):
        if self._process.disk_full:
            raise OSError("no space left on device")
        self._frames.append(bytes(message))
        return self._folder, len(self._frames) - 1

    def read(self, entry):
        return self._frames[entry.offset]


class Wire:
    """A connection between two ends: in order and whole, or lost with one of its processes.

    What TCP, TLS and LastingPipe make of packets that are dropped, doubled, swapped or changed is a
    delay, or another connection on which the rest comes again: a delay too.
    """

    def __init__(self, world, cut, ends, chance):
        self.world, self.cut, self.ends, self._chance = world, cut, ends, chance
        self.positions: dict[LinkEnd, Position] = {}
        self._under_way: list[deque[Any]] = [deque(), deque()]
        self._arrival = [0.0, 0.0]
        self._lost_after = [float("inf")] * 2

    def carry(self, sender, message, uplink=0.0):
        """`uplink`: seconds on it, if it was not there yet."""
        way, chance = self.ends.index(sender), self._chance
        if sender.state and sender.state.follows and not isinstance(message, Position):
            raise AssertionError(f"{sender.stage.process} follows, and sends a frame")
        arrival = self.world.now if sender.state is None else self.world.arrival(self.cut, chance)
        self._arrival[way] = arrival = max(self._arrival[way] + uplink, arrival)
        self._under_way[way].append(message)
        self.world.at(arrival, self._arrive, way)

    def _arrive(self, way):
        end = self.ends[1 - way]
        if end.state is not None and (up := self.world.up_at[self.cut]) > self.world.now:
            self.world.at(up, self._arrive, way)
        elif self.world.now <= self._lost_after[way]:
            end.stage.process.do(end.arrive, self, self._under_way[way].popleft())

    def unread(self, sender):
        """How much the other end has not taken yet; stands for the window of TCP."""
        way = self.ends.index(sender)
        return len(self._under_way[way]) + len(self.ends[1 - way].inbox)

    def lose(self, end):
        """The process at this end is gone: some of what it had sent still arrives."""
        way, now = self.ends.index(end), self.world.now
        tail = max(0.0, self._arrival[way] - now) * self._chance.random()
        self._lost_after[way] = now + tail
        other = self.ends[1 - way]
        if other is self.ends[1]:  # the stage above notices, for it would dial
            self.world.after(0.05, other.stage.process.do, other.miss, self)
        self.world.after(OUTAGE, other.give_up, self)


class LinkEnd:
    """A stage's end of a link: stands for Link and LoggedPipe, without their threads."""

    def __init__(self, stage, neighbour, is_inner):
        self.stage, self.world, self.neighbour = stage, stage.world, neighbour
        self.cut = min(stage.index, neighbour)
        self.name, self.pipe = f"cut-{self.cut}", self
        self.state: LinkState | None = None
        if not is_inner:
            log, is_new = MemoryLog(stage.process), stage.process.is_new
            self.state = LinkState(log, stage.state.step, is_new, stage.follows)
        self.wire: Wire | None = None
        self.is_left = self.is_lost = self.at_fault = False
        self._exchange_on: Wire | None = None  # nothing is written while positions are exchanged
        self._on_frame: Any = None
        self._outgoing: deque[bytes] = deque()
        self.inbox: deque[bytes] = deque()

    def start(self, on_frame, on_broken, on_end):
        self._on_frame, self._on_broken, self._on_end = on_frame, on_broken, on_end
        for message in self.inbox if self.state is not None else ():  # nobody read it before
            self.state.receive(message)
        if self.is_lost:
            on_broken(WireError(f"link {self.name} is broken"))

    def wait_for_room(self, frames):
        """There is always room."""

    def send(self, item):
        if self.is_left or self.is_lost:
            raise WireError(f"link {self.name} takes no more frames")
        self._outgoing.append(encode(item() if callable(item) else item))
        self.write()
        self.pump()  # a goodbye may have waited for ours

    def is_flushed(self):
        return not self._outgoing or self.is_lost

    def write(self):
        """Log and write what the other end has not got."""
        while self._outgoing and not self._exchange_on:
            message, uplink = self._outgoing.popleft(), 0.0
            if self.state is not None:
                if not self.state.keep(message):
                    continue
                uplink = self.world.speeds.uplink
            if self.wire is not None:
                self.wire.carry(self, message, uplink)
        self.stage.poke()

    def arrive(self, wire, message):
        if isinstance(message, Position):
            wire.positions[self] = message
        elif wire is self.wire:
            if self.state is not None and self._on_frame:
                self.state.receive(message)
            self.inbox.append(message)
            self.pump()
        self.stage.poke()

    def pump(self):
        """Hand on what has arrived and is due."""
        while self.inbox and self._on_frame and not self.is_lost:
            frame = decode(self.inbox[0], 1 << 10)
            if frame.kind is FrameKind.EVALUATE and self.stage.mailbox.is_full():
                return
            try:
                if frame.kind is not FrameKind.BYE:
                    self._on_frame(frame)
                elif self.state is None or not self.state.holds_goodbye:
                    self.is_left = True
                    self._on_end()
                else:
                    return
            except NotDue:
                return
            except WireError as error:
                self.at_fault = True
                self.break_off(BreachError(f"link {self.name} is broken: {error}"))
            self.inbox.popleft()

    def miss(self, wire):
        if self.wire is wire:
            self.stage.mention(is_down=True)

    def give_up(self, wire):
        """There was no other connection for as long as a link may be down."""
        if self.wire is wire:
            error = WireError(f"link {self.name} is broken: no connection for {OUTAGE} s")
            self.stage.process.do(self.break_off, error)

    def break_off(self, error):
        if not self.is_left and not self.is_lost:
            self.is_lost = True
            self.world.note("stage %s loses cut %s: %s", self.stage.index, self.cut, error)
            if self._on_frame:
                self._on_broken(error)
            self.stage.poke()

    def starve(self, wire):
        """Whoever fed this follower does so no more."""
        if self.wire is wire:
            self.break_off(WireError("the other end feeds this follower no more"))

    def await_another(self):
        self.wire = self._exchange_on = None
        if not self._on_frame:
            self.inbox.clear()

    def _exchange(self, wire, matters=lambda: True, check=None):
        """Say where this end stands, and hear where the other does: first, if that is checked."""
        deadline = self.world.now + ANSWER
        if check is None:
            wire.carry(self, self.state.position())
        self.stage.poke_at(deadline)
        yield lambda: self in wire.positions or not matters() or self.world.now >= deadline
        if matters() and self not in wire.positions:
            raise WireError("the other end did not say where it stands")
        if check is not None:
            check(wire.positions[self])
            wire.carry(self, self.state.position())
        return wire.positions.get(self)

    def go_on(self, wire):
        """As LoggedPipe.go_on: another process is at the other end, or this is such a process."""
        self._exchange_on = wire
        try:
            theirs = yield from self._exchange(wire, lambda: self._exchange_on is wire)
        finally:
            matters = self._exchange_on is wire
            self._exchange_on = None if matters else self._exchange_on
        if not matters:
            return
        entries, self.wire = self.state.go_on(theirs), wire
        what = self.stage.index, len(entries), self.cut, self.state.theirs
        self.world.note("stage %s sends %s frames again over cut %s, for %s", *what)
        for entry in entries:
            wire.carry(self, self.state.log.read(entry), self.world.speeds.uplink)
        self.write()

    def follow(self, wire):
        """As LoggedPipe.follow."""
        self._exchange_on = wire
        yield from self._exchange(wire, lambda: self._exchange_on is wire)
        if self._exchange_on is not wire:
            raise WireError("whoever was to feed this follower is lost too")
        self._exchange_on, self.wire = None, wire

    def feed(self, wire):
        """As LoggedPipe.feed, without its thread: the log goes to whoever follows a neighbour."""
        log, (other,) = self.state.log, {*wire.ends} - {self}
        theirs = yield from self._exchange(wire, check=self.state.check_reach)
        lacks, count = Lacking(theirs), None
        while other.stage.process.is_alive:
            ends, entries = log.after(count)
            count, room = ends - len(entries), UNREAD - wire.unread(self)
            for entry in entries:
                if room <= 0:
                    break
                count += 1
                if lacks(entry.step, entry.kind):
                    wire.carry(self, log.read(entry), self.world.speeds.uplink)
                    room -= 1
            has_more = partial(lambda log, ends: log.after(ends)[1], log, ends)
            yield has_more if count == ends else 0.2


class Stage:
    """A toy stage: stands for Peer and Worker, which have threads or tensors."""

    def __init__(self, process, index, state):
        self.process, self.world, self.index, self.state = process, process.world, index, state
        self.plan, self.last = self.world.plan, self.world.plan.stages - 1
        self.seconds = self.world.speeds.compute[index % len(self.world.speeds.compute)]
        self.follows = process.follows
        self.mailbox = ToyMailbox()
        self.ends: dict[int, LinkEnd] = {}  # by neighbour
        self._unsaid: deque[Any] = deque()
        self.below: Port | None = None
        self.above: Port | None = None
        self.saved = self.decided = self._misses = self._begun = self._pause = 0
        self._decided: dict[int, Verdict] = {}
        self.is_finished = self.stops = self._stop_asked = self._is_stopping = False
        self._may_leave = self._obeys = self._is_down = False
        self._heard: deque[Any] = deque()
        self._relinks: dict[int, pr.Connect | None] = {}
        self._tasks: list[list[Any]] = []  # lives, and what each waits for
        self._is_poked, self._doing = False, "builds its layers"
        self._begin(self.live())
        self._pulse()

    def _begin(self, task):
        self._tasks.append([task, None])
        self.poke()

    def poke(self):
        """Something has happened: whatever waited for it goes on."""
        if self._is_poked:
            return
        self._is_poked = True
        while self.process.runs and sum(self._move(entry) for entry in [*self._tasks]):
            pass
        self._is_poked = False

    def _move(self, entry):
        task, wait = entry
        if not self.process.runs or (wait is not None and not wait()):
            return False
        try:
            wait = next(task)
        except StopIteration:
            self._tasks.remove(entry)
            return True
        except WireError as error:
            self._tasks.remove(entry)
            self.process.complain(self, error)
            self.process.die(1)
            return False
        if isinstance(wait, float):
            until = self.world.now + wait * self.process.slowness
            self.poke_at(until)
            entry[1] = lambda: self.world.now >= until
        else:
            entry[1] = wait
        return True

    def poke_at(self, time):
        self.world.at(time, self.process.do, self.poke)

    def _pulse(self):
        self.say(pr.Pulse(self._begun, self._doing))
        self.world.after(pulse_seconds(self.world.speeds.patience), self.process.do, self._pulse)

    def work(self, doing, seconds):
        self._begun, self._doing = self._begun + 1, doing
        if not self.follows:
            self.world.active_at = self.world.now
        yield seconds * self.process.random.uniform(0.8, 1.2)

    def compute(self, doing):
        """Work that takes as many times longer as processes of this machine compute just now."""
        self.process.computes += 1
        others = [p for p in self.process.leader.all_processes() if p.member == self.process.member]
        share = sum(process.computes for process in others if process.runs)
        yield from self.work(doing, self.seconds * max(1, share))
        self.process.computes -= 1

    def wait(self, doing, condition):
        self._begun, self._doing = self._begun + 1, f"waits for {doing}"
        yield condition

    # As run/peer.py

    def live(self):
        yield from self.work("builds its layers", self.process.build)
        self.say(pr.Ready(f"at-{self.index}", "", "cpu"))
        connect = yield from self._receive(pr.Connect)
        for neighbour in (self.index - 1, self.index + 1):
            if 0 <= neighbour <= self.last:
                yield from self._join(neighbour, connect)
        self.say(self._linked())
        self._decide((yield from self._receive(pr.Start)))
        self._obeys = True
        self.below, self.above = self._port(self.index - 1), self._port(self.index + 1)
        while self._heard:
            self._obey(self._heard.popleft())
        self.pump()
        yield from self.train()
        for end in self.ends.values():
            if not end.is_left:
                end.send(Frame(FrameKind.BYE))
            yield from self.wait("its links", end.is_flushed)
        states = [end.state for end in self.ends.values() if end.state is not None]
        known = ((s.decided, s.stops) for s in states)
        decided = pr.last_decision([(self.decided, self.stops), *known])
        self.say(pr.Finished(self._meters(), 0, *decided))
        self.is_finished = True
        yield from self.wait("the other stages to finish", lambda: self._may_leave)
        self.process.leave(self.index)

    def _linked(self):
        known = [end.state.theirs for end in self.ends.values() if end.state is not None]
        heard = [(theirs.decided, theirs.stops) for theirs in known if theirs is not None]
        return pr.Linked("", *pr.last_decision(heard))

    def _decide(self, start):
        self.decided, self.stops = start.decided, start.stops
        for end in self.ends.values():
            if end.state is not None:
                end.state.decide(start.decided, start.stops)

    def hear(self, message):
        if self._obeys:
            self._obey(message)
        else:
            self._heard.append(message)
        self.poke()

    def _receive(self, kind):
        yield from self.wait("the coordinator", lambda: bool(self._heard))
        message = self._heard.popleft()
        if not isinstance(message, kind):
            raise WireError(f"expected {kind.__name__}, got {type(message).__name__}")
        return message

    def _obey(self, message):
        logged = {end.cut: end for end in self.ends.values() if end.state is not None}
        match message:
            case pr.Stop():
                self._stop_asked = True
            case pr.Saved(step):
                self.saved = step
                kept = [one for one in self._unsaid if getattr(one, "step", step) >= step]
                self._unsaid = deque(kept)
                for end in logged.values():
                    end.state.trim(step)
            case pr.Await(cut) if cut in logged:
                self._relinks[cut] = None
                logged[cut].await_another()
            case pr.Connect(cut=None):
                self._begin(self._take_over(message, logged))
            case pr.Connect(cut=cut) if cut in logged:
                if message.follower and not self.follows:
                    self._begin(self._feed(logged[cut], message))
                    return
                self._relinks[cut] = message
                self._begin(self._relink(logged[cut], message))
            case pr.Start():
                self._decide(message)
                self._speak_up()
            case pr.Leave():
                self._may_leave = True

    def _join(self, neighbour, connect):
        is_inner = neighbour in self.process.group
        end = self.ends[neighbour] = LinkEnd(self, neighbour, is_inner)
        wire = yield from self._open(end, connect, not self.process.is_new)
        if self.process.is_new and not is_inner:
            yield from end.follow(wire) if self.follows else end.go_on(wire)
        else:
            end.wire = wire

    def _open(self, end, connect, at_start):
        """Meet the neighbour by the name of the link, and agree on the contract."""
        name = (self.world.life, end.cut, connect.links[end.cut], connect.follower)
        meeting = self.world.meet(name, end, at_start)
        deadline = self.world.now + JOIN
        self.poke_at(deadline)
        yield lambda: meeting.wire is not None or self.world.now >= deadline
        if meeting.wire is None:
            raise WireError(f"stage {end.neighbour} did not link within {JOIN} s")
        if len(terms := {terms for _, terms in meeting.ends.values()}) > 1:
            raise BreachError(f"the ends of cut {end.cut} do not agree: {terms}")
        return meeting.wire

    def _relink(self, end, message):
        try:
            wire = yield from self._open(end, message, False)
            if message is not self._relinks[end.cut]:
                return False
            if end.neighbour < self.index:
                self.mention(is_down=False)
            if number := message.follower:
                yield from end.follow(wire)
                self.say(pr.Linked(follower=number))
            else:
                yield from end.go_on(wire)
        except WireError as error:
            if message is self._relinks[end.cut]:
                self.process.complain(self, error, [end.neighbour])
            return False
        return True

    def _feed(self, end, connect):
        fed: set[LinkEnd] = set()
        try:
            wire = yield from self._open(end, connect, False)
            fed = {*wire.ends} - {end}
            yield from end.feed(wire)
        except WireError as error:
            self.world.note("stage %s feeds no more over cut %s: %s", self.index, end.cut, error)
            for other in fed:
                other.stage.process.do(other.starve, wire)

    def _take_over(self, connect, logged):
        for cut, end in logged.items():
            self._relinks[cut] = connect
            end.await_another()
        for end in logged.values():
            if not (yield from self._relink(end, connect)):
                return
        self.process.say(self.index, self._linked())

    def _speak_up(self):
        self.follows = False
        while self._unsaid:
            self.say(self._unsaid.popleft())

    def say(self, message):
        if self.follows and isinstance(message, rp.Report | pr.Finished | pr.LinkDown | pr.LinkUp):
            self._unsaid.append(message)
            if isinstance(message, rp.ShardWritten | rp.ShardFailed):
                self.process.say(self.index, pr.Follows(message.step))
        else:
            self.process.say(self.index, message)

    def _audit(self, step):
        """Stands for Audit, which knows who lies: here that is said by the simulator."""
        holder = self.process.leader.processes[self.index].member
        if self.follows and holder == self.world.liar:
            self.say(rp.Audited(step, 1, 0.05, 0.0, "gradient", 0))

    def mention(self, is_down):
        """The connection to the stage below is lost, or there is another."""
        if is_down != self._is_down and not self.follows:
            self._is_down, cut = is_down, self.index - 1
            self.say(pr.LinkDown(cut, "it broke") if is_down else pr.LinkUp(cut, 1.0))

    def _port(self, neighbour):
        if neighbour not in self.ends:
            return None
        end, step = self.ends[neighbour], self.state.step
        due = Due(self.index, neighbour < self.index, step, self.world.schedule, VALIDATION)
        toy = ToyEnd(self.state, end.cut, neighbour > self.index)
        blind = SimpleNamespace(look=lambda *_: None, note=lambda *_: None)
        return Port(end, toy, self.mailbox, due, blind)

    def ports(self):
        return [port for port in (self.below, self.above) if port is not None]

    def _meters(self):
        return {end.name: {"sent": {}, "received": {}} for end in self.ends.values()}

    # As engine/worker.py and step_end.py

    def train(self):
        done, unsaved = self.state.step, False
        stop = self.stops and self.decided < decision_number(FrameKind.VALIDATED, done)
        while done < self.plan.steps and not stop:
            if done == self.process.began or self.plan.is_evaluation_step(done):
                stop = yield from self.validate(done)
                if stop and unsaved:
                    yield from self.save(done)
                if stop:
                    break
            verdict = yield from self.train_until_pause(done)
            done = self.state.step
            stop, unsaved = verdict.stop, verdict.commit and not verdict.checkpoint
            if verdict.checkpoint:
                yield from self.save(done)
        if not stop:
            yield from self.validate(done)

    def train_until_pause(self, first):
        plan, schedule = self.plan, self.world.schedule
        self._pause = first + 1
        while plan.delay and self._pause < plan.steps and not plan.is_pause(self._pause):
            self._pause += 1
        last = self._pause - 1
        running: dict[int, ToyStep] = {}
        for step, action in schedule.stream(self.index, first, self._pause):
            if step > last:
                continue
            if action.kind is Kind.U:
                verdict = yield from self._conclude(step, running.pop(step))
                if verdict.stop:
                    last = min(last, step + min(plan.delay, 1))
                if step == last:
                    break
                continue
            if action.kind is Kind.F and action.microbatch == 0:
                for port in self.ports():
                    port.open_step(step)
                self.pump()
                running[step] = ToyStep(*self.state.of_step(step, plan.delay))
            yield from self._compute(step, action, running[step])
            if action.kind is Kind.B and action.microbatch == schedule.microbatches - 1:
                yield from self._gather(step, running[step].gradient)
        return verdict

    def _compute(self, step, action, now):
        number, is_forward, inputs = action.microbatch, action.kind is Kind.F, now.inputs
        if is_forward and number == self.plan.delay:  # the update of the step before is made
            now.later = self.state.version, self.state.weights
        version, weights = (now.version, now.weights) if number < self.plan.delay else now.later
        versions = rp.Versions(version, 0)
        kind = FrameKind.FORWARD if is_forward else FrameKind.BACKWARD
        source, to = (self.below, self.above) if is_forward else (self.above, self.below)
        given = mix(step, number)
        if source is not None:
            yield from self._await(kind, step, number)
            given = source.take_tensor(kind, step, number, versions).value
        yield from self.compute(f"computes {action} of step {step}")
        if is_forward:
            made = inputs[number] = mix(weights, given, step, number)
            now.loss = mix(now.loss, made)
        else:
            made = mix(weights, inputs.pop(number), given)
            now.gradient = mix(now.gradient, made)
        if to is not None:
            to.send_tensor(kind, Toy(made), step, number, versions)
        self.pump()

    def _conclude(self, step, now):
        verdict = self._decided.pop(step, None)
        if verdict is None:
            verdict = yield from self._pass_up(FrameKind.VERDICT, step, None)
        state = self.state
        state.before = state.version, state.weights
        if verdict.commit:
            state.version += 1
            state.weights = mix(state.weights, now.gradient, int(verdict.grad_norm * 64))
        self.say(self._report(step, verdict, now.loss))
        self.mailbox.close_step(step)
        for port in self.ports():
            port.close_step(step)
        state.step = step + 1
        self._audit(step + 1)
        return verdict

    def _gather(self, step, gradient):
        tally = [float("inf") if gradient % 23 == 0 else gradient % 1000 + 1.0]
        parts = pack_tally(tally)
        if self.above is not None:
            yield from self._await(FrameKind.TALLY, step)
            parts += (message := self.above.take_message(FrameKind.TALLY, step))
            tally += unpack_tally(message)
        if self.below is not None:
            self.below.send_message(FrameKind.TALLY, step, parts)
        else:
            norm = global_norm(tally)
            commit = norm < float("inf")
            self._misses = 0 if commit else self._misses + 1
            self._is_stopping |= self._misses >= MISSES
            self._is_stopping |= self._stops_at(FrameKind.VERDICT, step)
            if self._is_stopping:
                self._pause = min(self._pause, step + 1 + min(self.plan.delay, 1))
            saves = self.plan.is_checkpoint_step(step + 1) or self._is_stopping
            saves = saves and commit and step + 1 == self._pause
            decided = Verdict(norm, commit, saves, self._is_stopping)
            self._decided[step] = yield from self._pass_up(FrameKind.VERDICT, step, decided)

    def _pass_up(self, kind, step, decided):
        content = b"" if decided is None else decided.to_bytes()
        if self.below is not None:
            yield from self._await(kind, step)
            content = self.below.take_message(kind, step)
        if self.above is not None:
            self.above.send_message(kind, step, content)
        return Verdict.from_bytes(content)

    def _stops_at(self, kind, step):
        number = decision_number(kind, step)
        if number > self.decided and not self.stops and self.index == 0 and self._stop_asked:
            self.decided, self.stops = number, True
        return self.stops and number == self.decided

    def validate(self, step):
        versions, score, done = rp.Versions(self.state.version, 0), 0, 0
        for number in range(VALIDATION):
            given = Toy(number)
            if self.below is not None:
                yield from self._await(FrameKind.EVALUATE, step, number, FrameKind.VALIDATED)
                given = self.below.take_tensor(FrameKind.EVALUATE, step, number, versions)
                self.pump()
            if given is None or self._stops_at(FrameKind.VALIDATED, step):
                break
            yield from self.compute(f"validates {number}")
            score = mix(score, given.value, self.state.weights)
            if self.above is not None:
                self.above.send_tensor(FrameKind.EVALUATE, Toy(score), step, number, versions)
            done += 1
        decided = Verdict(0.0, False, False, self._stops_at(FrameKind.VALIDATED, step))
        verdict = yield from self._pass_up(FrameKind.VALIDATED, step, decided)
        if self.index == self.last and done == VALIDATION:
            self.say(rp.Evaluation(step, float(score), 0.1))
        return verdict.stop

    def save(self, step):
        yield from self.work(f"saves step {step}", self.world.speeds.save)
        if self.process.disk_full:
            self.say(rp.ShardFailed(step, "no space left on device"))
            return
        self.world.shards[step, self.index] = self.state.copy()
        self.world.disks[self.process.member, self.index] = step, self.world.speeds.fetch
        shard = Shard(f"stage-{self.index}.safetensors", str(self.state.weights), 1, ["w"])
        agreements: dict[str, dict[str, str]] = {}
        for (cut, leg), seen in self.state.memory.items():
            agreements.setdefault(str(cut), {})[leg.value] = str(seen)
        self.say(rp.ShardWritten(step, rp.Versions(self.state.version, 0), shard, agreements))

    def _await(self, kind, step, number=0, other=None):
        keys = [(kind, step, number), (other, step, 0)]
        doing = f"{kind.name} {number} of step {step}"
        yield from self.wait(doing, lambda: self.mailbox.has(*keys))

    def pump(self):
        """What has waited in the ports for its turn may be due now."""
        for end in self.ends.values():
            end.pump()

    def _report(self, step, verdict, loss):
        own_loss = float(loss) if self.index == self.last else None
        more = {"weights": float(self.state.weights)}, self._meters(), self.mailbox.dropped
        facts = (step, own_loss, 0.1, verdict.grad_norm, verdict.commit, 0.0, 1.0, 0.0)
        return rp.Step(*facts, rp.StageCosts(0, 0, 0), [], *more)


class Process:
    """A process of a machine that holds stages or follows them: it lives, is paused, dies."""

    def __init__(self, leader, group, saved, member, follows=False):
        self.leader, self.world, self.group, self.member = leader, leader.world, group, member
        self.number, self.began, self.is_new = self.world.count(), leader.began, saved is not None
        self.random, self.follows = random.Random(self.world.seed * 1000 + self.number), follows
        self.is_alive, self.is_paused, self.is_replaced, self.disk_full = True, False, False, False
        # Nothing is heard of it, not even a first word, and nothing reaches it but its end.
        self.is_hung = self.is_new and not follows and self.world.hangs
        self.world.hangs &= not self.is_hung
        self.slowness, self.away_until, self.told_at, self._said_at = 1.0, 0.0, 0.0, 0.0
        self.has_left = False  # in good order: its machine still has what it wrote
        self.wires: list[tuple[Wire, LinkEnd]] = []
        self._backlog: list[tuple[Any, ...]] = []
        self._failed: list[int] = []
        self._left: set[int] = set()
        self.start = leader.began if saved is None else saved
        self.computes = 0  # stages that do, at the moment
        self.build = self.world.speeds.build
        self._fetch: tuple[float, float] | None = None  # when it begins and ends
        if self.is_new and self.start:  # else it begins with the first weights
            self._fetch = self.world.fetch(member, group[0], self.start)
            self.build += self._fetch[1] - self.world.now
        states = {stage: self.world.state_of(stage, self.start) for stage in group}
        self.stages = {stage: Stage(self, stage, state) for stage, state in states.items()}

    def __str__(self):
        role = "that follows" if self.follows else "of"
        stages = "+".join(map(str, self.group))
        return f"process {self.number} {role} stage {stages} on {self.member}"

    @property
    def runs(self):
        return self.is_alive and not self.is_paused and not self.is_hung

    def do(self, *what):
        """Do something in this process, once it runs; never if it is dead."""
        if self.is_paused:
            self._backlog.append(what)
        elif self.is_alive and (not self.is_hung or what[0] == self.die):
            what[0](*what[1:])

    def pause(self, is_paused):
        if self.is_alive:
            self.is_paused, backlog = is_paused, self._backlog
            self._backlog = []
            for what in [*backlog, *((stage.poke,) for stage in self.stages.values())]:
                self.do(*what)

    def tell(self, event):
        """Tell the coordinator: in order, after a moment, later where the stream is away."""
        soon = self.world.now + self.random.uniform(1e-4, 0.02)
        self._said_at = max(self._said_at, soon, self.away_until)
        self.world.at(self._said_at, self.leader.hear, event, self)

    def say(self, stage, message):
        if self.is_alive and not self.is_hung:
            self.tell(ev.Said(stage, message))

    def complain(self, stage, error, cannot_link=()):
        self._failed.append(stage.index)
        ends, what = stage.ends.items(), (type(error).__name__, True, str(error))
        accused = [s for s, end in ends if end.is_lost and not end.at_fault] + [*cannot_link]
        convicted = [s for s, end in ends if end.at_fault]
        self.say(stage.index, pr.Failed(*what, accused, convicted))

    def leave(self, stage):
        self._left.add(stage)
        if len(self._left) == len(self.group):
            self.has_left = True
            self.die(0)

    def stop_fetching(self):
        """What is fetched stays on the disk."""
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            self.world.keep(self.member, self.group[0], self.start, *fetch)

    def die(self, code, is_silent=False):
        """The process ends; with `is_silent`, nobody says so."""
        if not self.is_alive:
            return
        self.is_alive, self.is_paused = False, False
        self.stop_fetching()
        for wire, end in self.wires:
            wire.lose(end)
        if is_silent:
            self.tell(ev.Away(self.group[0], "no answer"))
        else:
            for stage in self._failed or self.group:
                self.tell(ev.Exited(stage, code))
