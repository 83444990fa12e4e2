"""A simulator of faults: the real coordinator, ports and logs of links, on a virtual clock.

A run is drawn from a seed: its stages and processes, its schedule, and its faults, several at once.
The coordinator, the ports of stages and the state of each link (what is logged, sent again, left
out) are those of the product. Virtual are the clock, the processes and the connections, and a stage
is a toy: its weights are a number that every frame and every step changes, each order differently.
So weights, losses and frames can be held against those of a run that nothing disturbs.

    python tests/run/simulated.py 17             the story of one seed
    python tests/run/simulated.py 0..1000000     all of them, on every core
"""

import heapq
import itertools
import os
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from thinwire.codec import Leg
from thinwire.engine.checkpoint import Shard
from thinwire.engine.port import EVALUATION_WINDOW, Due, Mailbox, Port, decision_number
from thinwire.engine.reports import (
    Evaluation,
    Meters,
    ShardFailed,
    ShardWritten,
    StageCosts,
    Step,
    Versions,
)
from thinwire.engine.step_end import Verdict, global_norm, pack_tally, unpack_tally
from thinwire.errors import BreachError, WireError
from thinwire.run.conduct import Course
from thinwire.run.coordinator import MOST_DEATHS, Coordinator, Phase
from thinwire.run.events import (
    Away,
    Back,
    Command,
    Commit,
    Completed,
    End,
    Event,
    Exited,
    Lost,
    Record,
    Replace,
    Said,
    Say,
    StopAsked,
    Tell,
    Tick,
)
from thinwire.run.peers import neighbours
from thinwire.run.protocol import (
    Await,
    Connect,
    Failed,
    Finished,
    Leave,
    LinkDown,
    Linked,
    LinkUp,
    OfStage,
    Pulse,
    Ready,
    Relink,
    Saved,
    Start,
    Stop,
    ToStage,
)
from thinwire.run.watch import pulse_seconds
from thinwire.schedule import Kind, Schedule, build
from thinwire.wire import Frame, FrameKind, FrameLog, LinkState, Position, decode, encode

PATIENCE, OUTAGE = 10.0, 20.0  # seconds, as of settings
ANSWER, JOIN = 30.0, 120.0  # how long an end waits for a position, and for a connection
IDLE = 20.0  # seconds in which nobody does anything, while nothing is wrong
ENDLESS = 400.0  # ... and without a new step
VALIDATION = 2  # microbatches of one

Life = Generator[Any, None, Any]


class WrongError(Exception):
    """What a simulated run must never do."""


class NotDue(Exception):
    """A frame waits."""


def mix(*numbers: int) -> int:
    """A number that depends on these and on their order; the same in every process."""
    return hash(numbers) & 0xFFFF_FFFF_FFFF


@dataclass(frozen=True)
class Plan:
    """What a run is, but for its faults."""

    stages: int
    processes: int
    microbatches: int
    steps: int
    save_every: int
    score_every: int
    schedule: str
    hosted: bool  # on other machines: none can be killed from here, and control streams may be away

    @property
    def train(self) -> "Plan":  # as of Settings
        return self

    def is_checkpoint_step(self, done: int) -> bool:
        return done % self.save_every == 0 or done == self.steps

    def is_evaluation_step(self, done: int) -> bool:
        return done % self.score_every == 0


@dataclass
class State:
    """All that a stage saves: its weights, and what its codecs remember, by cut and leg."""

    step: int = 0
    version: int = 0
    weights: int = 1
    memory: dict[tuple[int, Leg], int] = field(default_factory=dict)

    def copy(self) -> "State":
        return State(self.step, self.version, self.weights, dict(self.memory))


@dataclass(frozen=True)
class Toy:
    """Stands for a tensor."""

    value: int
    shape: tuple[int, ...] = ()
    is_cuda: bool = False

    def to(self, dtype: object) -> "Toy":
        return self


class ToyCodec:
    """Packs by what it has seen before: an end that saw other frames unpacks something else."""

    tag, name, remembers = 1, "toy", True

    def __init__(self, memory: dict[tuple[int, Leg], int], cut: int, leg: Leg):
        self._memory, self._key = memory, (cut, leg)
        memory.setdefault(self._key, 0)

    def payload_limit(self, shape: object) -> int:
        return 8

    def pack(self, toy: Toy, place: bool) -> bytes:
        return (toy.value ^ self._see(toy.value, place)).to_bytes(8, "little")

    def unpack(self, payload: bytes, spec: object, place: bool) -> Toy:
        packed = int.from_bytes(payload, "little")
        memory = self._memory[self._key] if place.training else 0
        self._see(packed ^ memory, place)
        return Toy(packed ^ memory)

    def _see(self, value: int, place: Any) -> int:
        memory = self._memory[self._key]
        if not place.training:
            return 0
        self._memory[self._key] = mix(memory, value)
        return memory


class ToyEnd:
    """Stands for the codecs of one end of a cut (CutEnd)."""

    spec = SimpleNamespace(shape=(), dtype=None)

    def __init__(self, state: State, cut: int, microbatches: int):
        self.codecs = {leg: ToyCodec(state.memory, cut, leg) for leg in Leg}
        self.microbatches = microbatches

    def place(self, leg: Leg, step: int, microbatch: int, training: bool) -> Any:
        return SimpleNamespace(leg=leg, training=training)


class ToyMailbox(Mailbox):
    """A mailbox that nobody waits in: who asks too early asks again."""

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        if not self._failure and not condition():
            raise NotDue
        return self._failure is None

    def has(self, *keys: Any) -> bool:
        return self._failure is not None or any(key in self._items for key in keys)

    def room(self) -> bool:
        kinds = [key[0] for key in self._items]
        return kinds.count(FrameKind.EVALUATE) < EVALUATION_WINDOW


class MemoryLog(FrameLog):
    """The log of frames, without files; `full`: a disk without room."""

    def __init__(self, process: "Process"):
        super().__init__(Path("nowhere"), 1 << 30)
        self._process, self._frames = process, dict[int, bytes]()
        self._last = itertools.count()

    def _store(self, message: Any) -> tuple[Path, int]:
        if self._process.disk_full:
            raise OSError("no space left on device")
        number = next(self._last)
        self._frames[number] = bytes(message)
        return self._folder, number

    def read(self, entry: Any) -> bytes:
        return self._frames[entry.offset]


class Wire:
    """A connection between two ends: in order and whole, or lost with one of its processes.

    What TCP, TLS and LastingPipe make of packets that are dropped, doubled, swapped or changed is a
    delay, or another connection on which the rest comes again: a delay too.
    """

    def __init__(self, world: "World", cut: int, ends: list["LinkEnd"]):
        self.world, self.cut, self.ends = world, cut, ends
        self.positions: dict[LinkEnd, Position] = {}
        self._arrival = [0.0, 0.0]
        self._under_way: list[deque[Any]] = [deque(), deque()]
        self._lost_after = [float("inf")] * 2

    def other(self, end: "LinkEnd") -> "LinkEnd":
        return self.ends[self.ends[0] is end]

    def carry(self, sender: "LinkEnd", message: Any) -> None:
        way = self.ends.index(sender)
        now = self.world.now if sender.state is None else self.world.arrival(self.cut)
        arrival = max(self._arrival[way], now)
        self._arrival[way] = arrival + 1e-6
        self._under_way[way].append(message)
        self.world.at(arrival, self._arrive, way)

    def _arrive(self, way: int) -> None:
        end = self.ends[1 - way]
        if self.world.now > self._lost_after[way]:
            return
        if end.state is not None and (up := self.world.up_at(self.cut)) > self.world.now:
            self.world.at(up, self._arrive, way)
            return
        end.stage.process.awake(end.arrive, self, self._under_way[way].popleft())

    def lose(self, end: "LinkEnd") -> None:
        """The process at this end is gone: some of what it had sent still arrives."""
        tail = max(0.0, self._arrival[self.ends.index(end)] - self.world.now)
        self._lost_after[self.ends.index(end)] = self.world.now + self.world.random.random() * tail


class LinkEnd:
    """A stage's end of a link: stands for Link and LoggedPipe, without their threads."""

    def __init__(self, stage: "Stage", neighbour: int, is_inner: bool):
        self.stage, self.neighbour, self.cut = stage, neighbour, min(stage.index, neighbour)
        self.name, self.pipe = f"cut-{self.cut}", self
        process = stage.process
        self.state = (
            None if is_inner else LinkState(MemoryLog(process), stage.state.step, process.is_new)
        )
        self.wire: Wire | None = None
        self.awaits = self.is_left = self.is_lost = self.at_fault = False
        self.writer: Wire | None = None  # holds the right to write while positions are exchanged
        self._on_frame: Any = None
        self._outgoing: deque[tuple[float, bytes]] = deque()
        self._inbox: deque[bytes] = deque()
        self._free_at = 0.0

    # As of Link

    def start(self, on_frame: Any, on_broken: Any, on_end: Any) -> None:
        self._on_frame, self._on_broken, self._on_end = on_frame, on_broken, on_end

    def wait_for_room(self, frames: int) -> None:
        pass

    def send(self, item: Frame | Callable[[], Frame]) -> None:
        if self.is_left or self.is_lost:
            raise WireError(f"link {self.name} takes no more frames")
        message, world = encode(item() if callable(item) else item), self.stage.world
        if self.state is None or self.state.keep(message):
            delay = world.uplink if self.state else 0.0
            self._free_at = max(self._free_at, world.now) + delay
            self._outgoing.append((self._free_at, message))
            world.at(self._free_at, self.stage.process.awake, self.write)
        self.pump()  # a goodbye may have waited for ours

    def flushed(self) -> bool:
        return not self._outgoing or self.is_lost

    def write(self) -> None:
        """Write what has had its time on the uplink; nothing while positions are exchanged."""
        while self._outgoing and self._outgoing[0][0] <= self.stage.world.now and not self.writer:
            _, message = self._outgoing.popleft()
            if self.state is not None:
                self.state.written()
            if self.wire is not None:
                self.wire.carry(self, message)
        self.stage.poke()

    # As of LoggedPipe

    def arrive(self, wire: Wire, message: Any) -> None:
        if isinstance(message, Position):
            wire.positions[self] = message
        elif wire is self.wire:
            if self.state is not None:
                self.state.receive(message)
            self._inbox.append(message)
            self.pump()
        self.stage.poke()

    def pump(self) -> None:
        """Hand on what has arrived and is due."""
        while self._inbox and self._on_frame and not self.is_lost:
            frame = decode(self._inbox[0], 1 << 10)
            if frame.kind is FrameKind.BYE and self.state is not None and self.state.holds_goodbye:
                return
            if frame.kind is FrameKind.EVALUATE and not self.stage.mailbox.room():
                return
            try:
                if frame.kind is FrameKind.BYE:
                    self.is_left = True
                    self._on_end()
                else:
                    self._on_frame(frame)
            except NotDue:
                return
            except WireError as error:
                self.at_fault = True
                self.break_off(BreachError(f"link {self.name} is broken: {error}"))
            self._inbox.popleft()

    def break_off(self, error: WireError) -> None:
        if not self.is_left and not self.is_lost:
            self.is_lost = True
            self._on_broken(error)
            self.stage.poke()

    def await_another(self) -> None:
        self.awaits, self.wire, self.is_cut_off = True, None, True

    def exchange(self, wire: Wire) -> Life:
        """As LoggedPipe.go_on: say where this end stands, hear where the other does, send again."""
        yield lambda: self.writer is None
        self.writer, self.is_cut_off = wire, False
        assert self.state is not None
        wire.carry(self, self.state.position())
        deadline = self.stage.world.now + ANSWER
        self.stage.wake_at(deadline)
        yield lambda: self in wire.positions or self.is_cut_off or self.stage.world.now >= deadline
        try:
            if self not in wire.positions or self.is_cut_off:
                raise WireError("the other end did not say where it stands")
            entries = self.state.go_on(wire.positions[self])
            self.wire, self.awaits = wire, False
            self.stage.world.note(
                "stage %s goes on over cut %s and sends %s frames again, for %s",
                self.stage.index,
                self.cut,
                len(entries),
                self.state.theirs,
            )
            for entry in entries:
                self.stage.world.replayed += 1
                wire.carry(self, self.state.log.read(entry))
        finally:
            self.writer = None
        self.write()


class Stage:
    """A toy stage: stands for Peer, Worker and Runner."""

    def __init__(self, process: "Process", index: int, state: State):
        self.process, self.world, self.index, self.state = process, process.world, index, state
        plan = self.plan = process.world.plan
        self.last = plan.stages - 1
        self.mailbox = ToyMailbox()
        self.ends: dict[int, LinkEnd] = {}  # by neighbour
        self.ports: dict[int, Port] = {}
        self.saved = 0
        self.stop_requested = self.may_leave = self.obeys = False
        self._misses = 0
        self._heard: deque[ToStage] = deque()
        self._relinks: dict[int, Relink | None] = {}
        self._down = False
        self._tasks: list[list[Any]] = []  # generator, and what it waits for
        self._is_poked = False
        self.begun, self.doing = 0, "builds its layers"
        self.say = partial(process.say, index)
        self.begin(self.live())
        self.pulse()

    # How it moves

    def begin(self, task: Life) -> None:
        self._tasks.append([task, None])
        self.poke()

    def poke(self) -> None:
        """Something has happened: whatever waited for it goes on."""
        if self._is_poked or not self.process.is_alive or self.process.is_paused:
            return
        self._is_poked = True
        moved = True
        while moved and self.process.is_alive:
            moved = False
            for entry in [*self._tasks]:
                moved |= self._move(entry)
        self._is_poked = False

    def _move(self, entry: list[Any]) -> bool:
        task, wait = entry
        if wait is not None and not wait():
            return False
        try:
            wait = next(task)
        except StopIteration:
            self._tasks.remove(entry)
            return True
        except WireError as error:
            self._tasks.remove(entry)
            self.process.fail(self, error)
            return False
        if isinstance(wait, float):
            self.world.active_at = self.world.now
            until = self.world.now + wait * self.process.slowness
            self.wake_at(until)
            wait = lambda: self.world.now >= until
        entry[1] = wait
        return True

    def wake_at(self, time: float) -> None:
        self.world.at(time, self.process.awake, self.poke)

    def pulse(self) -> None:
        if self.process.is_alive:
            self.say(Pulse(self.begun, self.doing))
            self.world.after(pulse_seconds(PATIENCE), self.process.awake, self.pulse)

    def work(self, doing: str, seconds: float) -> Life:
        self.begun, self.doing = self.begun + 1, doing
        yield seconds * self.world.random.uniform(0.5, 1.5)

    def wait(self, doing: str, condition: Callable[[], bool]) -> Life:
        self.begun, self.doing = self.begun + 1, f"waits for {doing}"
        yield condition

    # The life of a peer (run/peer.py)

    def live(self) -> Life:
        yield from self.work("builds its layers", self.world.build)
        self.say(Ready(f"at-{self.index}", "", "cpu"))
        self.doing = "waits for its neighbours"
        connect = yield from self.receive(Connect)
        for neighbour in (self.index - 1, self.index + 1):
            if 0 <= neighbour <= self.last:
                yield from self.join(neighbour, connect)
        states = [end.state for end in self.ends.values() if end.state is not None]
        heard = [(s.theirs.decided, s.theirs.stops) for s in states if s.theirs is not None]
        self.say(Linked("", *max(heard, default=(0, False))))
        start = yield from self.receive(Start)
        for state in states:
            state.decide(start.decided, start.stops)
        self.decided, self.stops = start.decided, start.stops
        self.obeys = True
        for neighbour, end in self.ends.items():
            self.ports[neighbour] = self.port(neighbour, end)
        while self._heard:
            self.obey(self._heard.popleft())
        self.pump()
        yield from self.train()
        for end in self.ends.values():
            if not end.is_left:
                end.send(Frame(FrameKind.BYE))
            yield from self.wait("its links", end.flushed)
        self.say(Finished(self.meters()))
        yield from self.wait("the other stages to finish", lambda: self.may_leave)
        self.process.leave(self)

    def hear(self, message: ToStage) -> None:
        if self.obeys:
            self.obey(message)
        else:
            self._heard.append(message)
        self.poke()

    def receive(self, kind: type) -> Life:
        yield from self.wait("the coordinator", lambda: bool(self._heard))
        message = self._heard.popleft()
        if not isinstance(message, kind):
            raise WireError(f"expected {kind.__name__}, got {type(message).__name__}")
        return message

    def obey(self, message: ToStage) -> None:
        logged = {end.cut: end for end in self.ends.values() if end.state is not None}
        match message:
            case Stop():
                self.stop_requested = True
            case Saved(step):
                self.saved = step
                for end in logged.values():
                    end.state.trim(step)
            case Await(cut) if cut in logged:
                self._relinks[cut] = None
                logged[cut].await_another()
            case Relink(cut=cut) if cut in logged:
                self._relinks[cut] = message
                self.begin(self.relink(logged[cut], message))
            case Leave():
                self.may_leave = True

    def join(self, neighbour: int, connect: Connect) -> Life:
        is_inner = neighbour in self.process.group
        end = self.ends[neighbour] = LinkEnd(self, neighbour, is_inner)
        wire = yield from self.open(end, connect, not self.process.is_new)
        if self.process.is_new and not is_inner:
            yield from end.exchange(wire)
        else:
            end.wire = wire

    def open(self, end: LinkEnd, connect: Connect, at_start: bool) -> Life:
        """Meet the neighbour at the name of the link, and agree on the contract."""
        again = connect.links[end.cut] if connect.links else 0
        meeting = self.world.meet((self.world.life, end.cut, again), end, at_start)
        deadline = self.world.now + JOIN
        self.wake_at(deadline)
        yield lambda: bool(meeting.wire) or self.world.now >= deadline
        if meeting.wire is None:
            raise WireError(f"stage {end.neighbour} did not link within {JOIN} s")
        terms = {terms for _, terms in meeting.ends.values()}
        if len(terms) > 1:
            raise BreachError(f"the ends of cut {end.cut} do not agree: {terms}")
        return meeting.wire

    def relink(self, end: LinkEnd, message: Relink) -> Life:
        try:
            wire = yield from self.open(end, message.connect, False)
            if message is not self._relinks[end.cut]:
                return
            if end.neighbour < self.index:
                self.mention(is_down=False)
            yield from end.exchange(wire)
        except WireError as error:
            if message is self._relinks[end.cut]:
                self.process.complain(self, error)

    def mention(self, is_down: bool) -> None:
        """The connection to the stage below is lost, or there is another."""
        if is_down != self._down:
            self._down = is_down
            cut = self.index - 1
            self.say(LinkDown(cut, "it broke") if is_down else LinkUp(cut, 1.0))

    def port(self, neighbour: int, end: LinkEnd) -> Port:
        step, schedule = self.state.step, self.world.schedule
        if neighbour < self.index:
            due = Due.from_below(self.index, step, VALIDATION, schedule=schedule)
        else:
            due = Due.from_above(self.index, step)
        toy = ToyEnd(self.state, end.cut, self.plan.microbatches)
        sightings = SimpleNamespace(look=lambda *_: None, note=lambda *_: None)
        return Port(
            cast(Any, end), self.index, cast(Any, toy), self.mailbox, due, cast(Any, sightings)
        )

    def meters(self) -> Meters:
        return {end.name: {"sent": {}, "received": {}} for end in self.ends.values()}

    # Training (engine/worker.py and runner.py)

    def train(self) -> Life:
        done = self.state.step
        stop = unsaved = False
        while done < self.plan.steps and not stop:
            if done == self.process.began or self.plan.is_evaluation_step(done):
                stop = yield from self.validate(done)
                if stop and unsaved:
                    yield from self.save(done)
                if stop:
                    break
            for port in self.ports.values():
                port.open_step(done)
            self.pump()
            verdict = yield from self.train_step(done)
            self.mailbox.close_step(done)
            done = self.state.step = done + 1
            stop = verdict.stop
            unsaved = verdict.commit and not verdict.checkpoint
            if verdict.checkpoint:
                yield from self.save(done)
        if not stop:
            yield from self.validate(done)

    def train_step(self, step: int) -> Life:
        below, above = self.ports.get(self.index - 1), self.ports.get(self.index + 1)
        versions = Versions(self.state.version, 0)
        inputs: dict[int, int] = {}
        gradient = loss = 0
        for action in self.world.schedule.rows[self.index]:
            number, kind = action.microbatch, action.kind
            if kind is Kind.F:
                toy = yield from self.take(below, FrameKind.FORWARD, step, number, versions)
                inputs[number] = mix(self.state.weights, toy, step, number)
                yield from self.work(f"computes F{number} of step {step}", self.world.compute)
                if above is not None:
                    above.send_tensor(
                        FrameKind.FORWARD, Toy(inputs[number]), step, number, versions
                    )
                loss = mix(loss, inputs[number])
            elif kind is Kind.B:
                toy = yield from self.take(above, FrameKind.BACKWARD, step, number, versions)
                made = mix(self.state.weights, inputs.pop(number), toy)
                gradient = mix(gradient, made)
                yield from self.work(f"computes B{number} of step {step}", self.world.compute)
                if below is not None:
                    below.send_tensor(FrameKind.BACKWARD, Toy(made), step, number, versions)
            self.pump()
        verdict = yield from self.agree(step, gradient, below, above)
        if verdict.commit:
            self.state.version += 1
            self.state.weights = mix(self.state.weights, gradient, int(verdict.grad_norm * 64))
        self.say(self.report(step, verdict, loss))
        return verdict

    def agree(self, step: int, gradient: int, below: Port | None, above: Port | None) -> Life:
        is_bad = gradient % 23 == 0  # now and then a step is refused
        tally = [float("inf") if is_bad else gradient % 1000 + 1.0]
        parts, decided = pack_tally(tally), None
        if above is not None:
            message = yield from self.message(above, FrameKind.TALLY, step)
            parts, tally = parts + message, tally + unpack_tally(message)
        if below is not None:
            below.send_message(FrameKind.TALLY, step, parts)
        else:
            norm = global_norm(tally)
            commit = norm < float("inf")
            self._misses = 0 if commit else self._misses + 1
            stop = self._misses >= 5 or self.stops_at(FrameKind.VERDICT, step)
            saves = self.plan.is_checkpoint_step(step + 1) or stop
            decided = Verdict(norm, commit, saves and commit, stop)
        return (yield from self.pass_up(FrameKind.VERDICT, step, decided))

    def pass_up(self, kind: FrameKind, step: int, decided: Verdict | None) -> Life:
        if decided is None:
            content = yield from self.message(self.ports[self.index - 1], kind, step)
        else:
            content = decided.to_bytes()
        if self.index < self.last:
            self.ports[self.index + 1].send_message(kind, step, content)
        return Verdict.from_bytes(content)

    def stops_at(self, kind: FrameKind, step: int) -> bool:
        if (number := decision_number(kind, step)) > self.decided:
            return self.index == 0 and self.stop_requested
        return self.stops and number == self.decided

    def validate(self, step: int) -> Life:
        below, above = self.ports.get(self.index - 1), self.ports.get(self.index + 1)
        versions, score, done = Versions(self.state.version, 0), 0, 0
        for number in range(VALIDATION):
            value = mix(number)
            if below is not None:
                key, over = (FrameKind.EVALUATE, step, number), (FrameKind.VALIDATED, step, 0)
                yield from self.wait(f"validation {number}", lambda: self.mailbox.has(key, over))  # noqa: B023
                taken = below.take_evaluated(step, number, versions)
                if taken is None:
                    break
                value = cast(Any, taken).value
                self.pump()
            if not self.stops_at(FrameKind.VALIDATED, step):
                yield from self.work(f"validates {number}", self.world.compute)
                score = mix(score, value, self.state.weights)
                if above is not None:
                    above.send_tensor(FrameKind.EVALUATE, Toy(score), step, number, versions)
                done += 1
            elif below is None:
                break
        decided = None
        if below is None:
            decided = Verdict(0.0, False, False, self.stops_at(FrameKind.VALIDATED, step))
        verdict = yield from self.pass_up(FrameKind.VALIDATED, step, decided)
        if self.index == self.last and done == VALIDATION:
            self.say(Evaluation(step, float(score), 0.1))
        return verdict.stop

    def save(self, step: int) -> Life:
        yield from self.work(f"saves step {step}", self.world.save)
        if self.process.disk_full:
            self.say(ShardFailed(step, "no space left on device"))
            return
        self.world.shards[step, self.index] = self.state.copy()
        name, memory = f"stage-{self.index}.safetensors", self.state.memory
        shard = Shard(name, f"{self.state.weights}", 1, ["w"])
        agreements: dict[str, dict[str, str]] = {}
        for (cut, leg), seen in memory.items():
            agreements.setdefault(str(cut), {})[leg.value] = str(seen)
        self.say(ShardWritten(step, Versions(self.state.version, 0), shard, agreements))

    def take(
        self, port: Port | None, kind: FrameKind, step: int, number: int, made: Versions
    ) -> Life:
        if port is None:
            return mix(step, number)
        key = (kind, step, number)
        yield from self.wait(f"{kind.name} {number} of step {step}", lambda: self.mailbox.has(key))
        toy = cast(Any, port.take_tensor(kind, step, number, made)).value
        return toy

    def message(self, port: Port, kind: FrameKind, step: int) -> Life:
        yield from self.wait(
            f"{kind.name} of step {step}", lambda: self.mailbox.has((kind, step, 0))
        )
        content = port.take_message(kind, step)
        self.pump()
        return content

    def pump(self) -> None:
        """What waited for its turn in the ports may be due now."""
        for end in self.ends.values():
            end.pump()

    def report(self, step: int, verdict: Verdict, loss: int) -> Step:
        return Step(
            step=step,
            loss=float(loss) if self.index == self.last else None,
            lr=0.1,
            grad_norm=verdict.grad_norm,
            committed=verdict.commit,
            start=0.0,
            end=1.0,
            wait=0.0,
            costs=StageCosts(0.1, 0.1, 0.1),
            spans=[],
            measures={"weights": float(self.state.weights)},
            meters=self.meters(),
            dropped=self.mailbox.dropped,
        )


class Process:
    """A process that holds stages: lives, is paused, dies; stands for a machine of a hosted run."""

    def __init__(self, world: "World", group: list[int], saved: int, is_new: bool, number: int):
        self.world, self.group, self.is_new, self.number = world, group, is_new, number
        self.leader, self.began = world.leader, world.leader.began
        self.is_alive, self.is_paused, self.is_replaced = True, False, False
        self.disk_full, self.slowness = False, 1.0
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._failed: list[int] = []
        self._left: set[int] = set()
        self._control_free = self.told_free = 0.0
        self.away_until = 0.0
        self.wires: list[tuple[Wire, LinkEnd]] = []
        states = [world.state_of(stage, saved) for stage in group]
        self.stages: dict[int, Stage] = {}
        for stage, state in zip(group, states, strict=True):
            self.stages[stage] = Stage(self, stage, state)

    def __str__(self) -> str:
        return f"process {self.number} of {'+'.join(map(str, self.group))}"

    def awake(self, what: Callable[..., None], *args: Any) -> None:
        """Do something in this process, once it runs; never if it is dead."""
        if self.is_paused:
            self._backlog.append((what, args))
        elif self.is_alive:
            what(*args)

    def pause(self, is_paused: bool) -> None:
        self.is_paused = is_paused
        if not is_paused:
            backlog, self._backlog = self._backlog, []
            for what, args in backlog:
                self.awake(what, *args)
            for stage in self.stages.values():
                stage.poke()

    def tell_leader(self, event: Event) -> None:
        """In order, after a moment, and later where the stream is away."""
        world = self.world
        arrival = max(self._control_free, world.now + world.random.uniform(1e-4, 0.02))
        self._control_free = arrival = max(arrival, self.away_until)
        world.at(arrival, self.leader.hear, event, self)

    def say(self, stage: int, message: OfStage) -> None:
        if self.is_alive:
            self.tell_leader(Said(stage, message))

    def complain(self, stage: Stage, error: WireError) -> None:
        self._failed.append(stage.index)
        self.world.note("stage %s of %s fails: %s", stage.index, self, error)
        ends = stage.ends.items()
        self.say(
            stage.index,
            Failed(
                kind=type(error).__name__,
                known=True,
                error=str(error),
                trace="",
                accuses=[s for s, end in ends if end.is_lost and not end.at_fault],
                convicts=[s for s, end in ends if end.at_fault],
            ),
        )

    def fail(self, stage: Stage, error: WireError) -> None:
        self.complain(stage, error)
        self.die(1)

    def leave(self, stage: Stage) -> None:
        self._left.add(stage.index)
        if len(self._left) == len(self.group):
            self.die(0)

    def die(self, code: int, is_silent: bool = False) -> None:
        """The process ends; with `is_silent`, the machine: nobody says so."""
        if not self.is_alive:
            return
        self.is_alive, self.is_paused = False, False
        for wire, end in self.wires:
            wire.lose(end)
            other = wire.other(end).stage
            if wire.other(end).wire is wire and other.index > end.stage.index:
                self.world.after(0.05, other.process.awake, self._miss, wire, wire.other(end))
        if is_silent:
            for stage in self.group:
                self.tell_leader(Away(stage, "no answer"))
                self.world.after(OUTAGE, self.leader.hear, Lost(stage, "no answer"), self)
        else:
            for stage in self._failed or self.group:
                self.tell_leader(Exited(stage, code))

    def _miss(self, wire: Wire, end: LinkEnd) -> None:
        if end.wire is wire:
            end.stage.mention(is_down=True)


@dataclass
class Meeting:
    """Two ends that look for each other by the name of their link."""

    ends: dict[int, tuple[LinkEnd, Any]] = field(default_factory=dict)
    wire: Wire | None = None


class Leader:
    """A life of the coordinator: does what it says (stands for run/peers.py and the record)."""

    def __init__(self, world: "World", saved: int):
        plan, self.world, self.began = world.plan, world, saved
        self.groups = neighbours(plan.stages, plan.processes)
        placement = self.groups if plan.processes > 1 else []
        course = Course(cast(Any, plan), saved, plan.stages) if plan.hosted else None
        self.coordinator = Coordinator(
            plan.stages, PATIENCE, outage=OUTAGE, course=course, placement=placement
        )
        self.is_over = False
        self.told = self.completed = 0  # the last step that stages know to be saved, and that is
        self.processes: dict[int, Process] = {}
        self._tick_at = self._heard_at = world.now

    def start(self) -> None:
        for group in self.groups:
            self._seat(Process(self.world, group, self.began, False, self.world.count()))
        self._await_tick()

    def _seat(self, process: Process) -> None:
        for stage in process.group:
            self.processes[stage] = process

    def hear(self, event: Event, process: Process | None = None) -> None:
        if self.is_over or self.world.leader is not self or (process and process.is_replaced):
            return
        self._heard_at = now = self.world.now
        if not isinstance(event, Tick) and not (
            isinstance(event, Said) and isinstance(event.message, Pulse)
        ):
            self.world.note("coordinator hears %s", event)
        for command in self.coordinator.on(event, now):
            self._carry_out(command)

    def _await_tick(self) -> None:
        """A Tick whenever nothing else has happened for as long as the coordinator can rest."""
        if self.is_over or self.world.leader is not self:
            return
        due = self._heard_at + self.coordinator.rest(self._heard_at)
        if self.world.now >= due - 1e-9:
            self.hear(Tick())
            due = self.world.now + max(1e-3, self.coordinator.rest(self.world.now))
        self.world.at(due, self._await_tick)
        self.world.look()

    def _carry_out(self, command: Command) -> None:
        world = self.world
        match command:
            case Tell(stage, message):
                process = self.processes[stage]
                if isinstance(message, Saved):
                    self.told = message.step
                world.note("coordinator tells stage %s: %s", stage, message)
                at = max(process.told_free, process.away_until, world.now + 0.001)
                process.told_free = at + 1e-6
                world.at(at, process.awake, process.stages[stage].hear, message)
            case Replace(stages):
                lost = self.processes[stages[0]]
                lost.is_replaced = True
                if not world.plan.hosted:
                    lost.die(-9)
                process = Process(world, stages, world.saved, True, world.count())
                world.note("%s takes the place of %s, from step %s", process, lost, world.saved)
                self._seat(process)
            case Record(stage, report):
                world.record(stage, report)
            case Commit(step, parts):
                world.complete(step, parts)
                self.completed = step
                self.hear(Completed(step))
            case End(error):
                self.is_over = True
                world.end(error, self)
            case Say(text):
                world.note("coordinator says: %s", text)


@dataclass
class Outcome:
    """What a run has done: by stage and step what it reported, and how long it took."""

    steps: list[dict[int, tuple[Any, ...]]]
    scores: dict[int, float]
    seconds: float
    lives: int = 1
    deaths: int = 0
    replaced: int = 0
    replayed: int = 0
    faults: int = 0


class World:
    """A run on a virtual clock, and all that must hold of it."""

    uplink, latency, compute, save, build = 0.002, 0.01, 0.02, 0.03, 0.5

    def __init__(self, plan: Plan, seed: int, faults: list["Fault"], tells: bool = False):
        self.plan, self.random, self.tells = plan, random.Random(seed), tells
        self.schedule = _schedule(plan.schedule, plan.stages, plan.microbatches)
        self.story: list[str] = []
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count(1)
        self._order = itertools.count()
        self.saved, self.shards = 0, dict[tuple[int, int], State]()
        self.life = 0
        self.meetings: dict[Any, Meeting] = {}
        self._up_at: Counter[int] = Counter()
        self._lag: dict[int, float] = {}
        self.active_at = self.calm_at = self.new_at = 0.0
        self.excuses: set[str] = set()
        self.stop_asked = self.is_done = False
        self.outcome = Outcome([{} for _ in range(plan.stages)], {}, 0.0)
        self.expected = reference(plan) if faults else None
        self.faults, self.replayed = faults, 0
        self._begin()
        for fault in faults:
            self.at(fault.time, self._befall, fault)

    def _begin(self) -> None:
        """A life of the run, from the last complete checkpoint on."""
        self.first, self.scored = self.saved, set[int]()
        self.recorded: list[list[int]] = [[] for _ in range(self.plan.stages)]
        self.active_at = self.new_at = self.now
        if self.now > self.calm_at:
            self.excuses.clear()
        self.leader = Leader(self, self.saved)
        self.leader.start()

    def run(self) -> Outcome:
        while not self.is_done:
            self.now, _, what, args = heapq.heappop(self._events)
            what(*args)
        self.outcome.seconds, self.outcome.replayed = self.now, self.replayed
        return self.outcome

    def count(self) -> int:
        return next(self._numbers)

    def note(self, text: str, *args: Any) -> None:
        if self.tells:
            self.story.append(f"{self.now:9.3f}  {text % args}")

    def at(self, time: float, what: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (max(time, self.now), next(self._order), what, args))

    def after(self, seconds: float, what: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, what, *args)

    # Connections

    def up_at(self, cut: int) -> float:
        return self._up_at[cut]

    def arrival(self, cut: int) -> float:
        delay = self.latency * self.random.uniform(0.5, 1.5) * self._lag.get(cut, 1.0)
        return max(self._up_at[cut], self.now + delay)

    def meet(self, name: Any, end: LinkEnd, at_start: bool) -> Meeting:
        meeting = self.meetings.setdefault(name, Meeting())
        step = end.stage.state.step if at_start else -1
        meeting.ends[end.stage.index] = end, (at_start, step)
        if self.up_at(end.cut) > self.now + PATIENCE / 2:
            self.excuses.add("nobody can link")
        if len(meeting.ends) == 2:
            self.at(self.arrival(end.cut), self._connect, meeting)
        return meeting

    def _connect(self, meeting: Meeting) -> None:
        ends = [end for _, (end, _) in sorted(meeting.ends.items())]
        processes = [end.stage.process for end in ends]
        if not all(process.is_alive for process in processes) or meeting.wire:
            return
        if any(process.is_paused for process in processes):
            self.after(0.1, self._connect, meeting)
            return
        if any(
            process is not self.leader.processes.get(end.stage.index)
            for process, end in zip(processes, ends)
        ):
            return
        meeting.wire = Wire(self, ends[0].cut, ends)
        for process, end in zip(processes, ends, strict=True):
            process.wires.append((meeting.wire, end))
            end.stage.poke()

    # What a run leaves behind, held against one that nothing disturbs

    def state_of(self, stage: int, saved: int) -> State:
        return self.shards[saved, stage].copy() if saved else State(weights=stage + 1)

    def record(self, stage: int, report: Any) -> None:
        steps, expected = self.outcome.steps[stage], self.expected
        self.note("recorded: stage %s %s", stage, report)
        if isinstance(report, Step):
            if report.step != self.first + len(self.recorded[stage]):
                raise WrongError(f"stage {stage} step {report.step} is recorded out of turn")
            self.recorded[stage].append(report.step)
            facts = (report.loss, report.grad_norm, report.committed, report.measures["weights"])
            steps[report.step] = facts
            if expected and expected.steps[stage][report.step] != facts:
                raise WrongError(f"step {report.step} of stage {stage} computed something else")
            self.new_at = self.now
        elif isinstance(report, Evaluation):
            if report.step in self.scored:
                raise WrongError(f"the validation of step {report.step} is recorded twice")
            self.scored.add(report.step)
            self.outcome.scores[report.step] = report.loss
            if expected and expected.scores.get(report.step, report.loss) != report.loss:
                raise WrongError(f"the validation of step {report.step} has another score")

    def complete(self, step: int, parts: list[ShardWritten]) -> None:
        if step <= self.saved:
            raise WrongError(f"the checkpoint of step {step} is completed after {self.saved}")
        for stage, part in enumerate(parts):
            known = self.outcome.steps[stage][step - 1][3]
            if float(part.shard.sha256) != known or self.shards[step, stage].step != step:
                raise WrongError(f"the checkpoint of step {step} is not that of the step")
        self.saved = step
        self.note("the checkpoint of step %s is complete", step)

    def begin_again(self, leader: Leader) -> None:
        """The host was lost, or had to give up: it comes back, and so do the others."""
        if leader is not self.leader:
            return
        for process in set(leader.processes.values()):
            process.is_replaced = True
            process.die(-9)
        self.life += 1
        self.outcome.lives += 1
        if self.life > 20:
            raise WrongError("the run does not come to its end")
        self.note("a new life begins at step %s", self.saved)
        self._begin()

    def end(self, error: BaseException | None, leader: Leader) -> None:
        self.note("the coordinator ends the run: %s", error or "in good order")
        if error is not None:
            self._excuse(str(error), leader)
            self.after(1.0, self.begin_again, leader)
            return
        done = {self.first + len(steps) for steps in self.recorded}
        if len(done) > 1 or (done != {self.plan.steps} and not self.stop_asked):
            raise WrongError(f"the run ended after {done} of {self.plan.steps} steps")
        for index, process in leader.processes.items():
            stage = process.stages[index]
            known = self.outcome.steps[index].get(stage.state.step - 1)
            if stage.state.step not in done or (known and known[3] != stage.state.weights):
                raise WrongError(f"stage {index} ends with other weights")
            for end in stage.ends.values():
                if end.state and any(-1 < e.step < stage.saved for e in end.state.log.since(-1)):
                    raise WrongError(f"stage {index} still logs what was saved")
        if leader.told < leader.completed:
            raise WrongError(f"step {leader.completed} is saved, and nobody was told")
        due = {s for s in range(self.first, max(done) + 1) if self.plan.is_evaluation_step(s)}
        if not self.stop_asked and due - self.scored:
            raise WrongError(f"validations are missing: {due - self.scored}")
        self.is_done = True

    def _excuse(self, error: str, leader: Leader) -> None:
        deaths = max(leader.coordinator._deaths.values(), default=0)
        if not self.excuses and deaths < MOST_DEATHS:
            raise WrongError(f"the run ended without need: {error}")

    def look(self) -> None:
        """No wait without a reason."""
        if self.now - max(self.active_at, self.calm_at) > IDLE:
            raise WrongError(
                f"nobody does anything for {IDLE} s: {self.leader.coordinator.reasons()}"
            )
        if self.now - max(self.new_at, self.calm_at) > ENDLESS:
            raise WrongError(f"no step for {ENDLESS} s: {self.leader.coordinator.reasons()}")

    # Faults

    def _befall(self, fault: "Fault") -> None:
        leader = self.leader
        if leader.is_over:
            return
        process, cut = leader.processes[fault.stage], min(fault.stage, self.plan.stages - 2)
        if leader.coordinator.phase in (Phase.BUILDING, Phase.LINKING):
            self.excuses.add("nobody is replaced before the first step")
        self.note("FAULT %s of %s, cut %s, for %.2f s", fault.kind, process, cut, fault.seconds)
        self.outcome.faults += 1
        self.calm_at = max(self.calm_at, self.now + fault.seconds)
        FAULTS[fault.kind](self, process, cut, fault.seconds)

    def _kill(self, process: Process, cut: int, seconds: float) -> None:
        process.die(-9)

    def _kill_two(self, process: Process, cut: int, seconds: float) -> None:
        for stage in (cut, cut + 1):
            self.leader.processes[stage].die(-9)

    def _vanish(self, process: Process, cut: int, seconds: float) -> None:
        self.calm_at = self.now + OUTAGE + 5.0
        process.die(-9, is_silent=self.plan.hosted)

    def _crash(self, process: Process, cut: int, seconds: float) -> None:
        if process.is_alive and not process.is_paused:
            stage = process.group[-1]
            process.say(stage, Failed("RuntimeError", False, "out of memory", "a trace", [], []))
            process.die(1)

    def _pause(self, process: Process, cut: int, seconds: float) -> None:
        if process.is_alive and not process.is_paused:
            process.pause(True)
            self.after(seconds, self._continue, process)
            if seconds > ANSWER:
                self.excuses.add("a pause in which a neighbour waits for an answer")

    def _continue(self, process: Process) -> None:
        if process.is_alive:
            self.note("%s goes on", process)
            process.pause(False)

    def _partition(self, process: Process, cut: int, seconds: float) -> None:
        self._up_at[cut] = max(self._up_at[cut], self.now + seconds)
        ends = [
            self.leader.processes[s].stages[s].ends.get(2 * cut + 1 - s) for s in (cut, cut + 1)
        ]
        wires = [end.wire for end in ends if end and end.wire and end.state]
        for wire in set(wires):
            above = wire.ends[1]
            above.stage.process.awake(process._miss, wire, above)
            self.after(seconds, self._reconnect, wire)
            if self._up_at[cut] - self.now > OUTAGE:
                self.excuses.add("a link is down for longer than it may be")
                self.after(OUTAGE, self._give_up, wire)

    def _reconnect(self, wire: Wire) -> None:
        above = wire.ends[1]
        if above.wire is wire and self._up_at[wire.cut] <= self.now:
            above.stage.process.awake(above.stage.mention, False)

    def _give_up(self, wire: Wire) -> None:
        for end in wire.ends:
            if end.wire is wire and self._up_at[wire.cut] > self.now:
                error = WireError(f"link {end.name} is broken: no connection for {OUTAGE} s")
                end.stage.process.awake(end.break_off, error)

    def _delay(self, process: Process, cut: int, seconds: float) -> None:
        self._lag[cut] = 30.0
        self.after(seconds, self._lag.pop, cut, None)

    def _slow(self, process: Process, cut: int, seconds: float) -> None:
        process.slowness = 8.0
        self.after(seconds, setattr, process, "slowness", 1.0)

    def _away(self, process: Process, cut: int, seconds: float) -> None:
        seconds = min(seconds, OUTAGE - 1)
        if self.plan.hosted and process.is_alive and process.away_until <= self.now:
            process.away_until = self.now + seconds
            for stage in process.group:
                self.leader.hear(Away(stage, "the connection was lost"), process)
                self.after(seconds, self.leader.hear, Back(stage, seconds), process)

    def _fill(self, process: Process, cut: int, seconds: float) -> None:
        process.disk_full = True
        self.excuses.add("a log is lost")
        self.after(seconds, setattr, process, "disk_full", False)

    def _stop(self, process: Process, cut: int, seconds: float) -> None:
        if self.leader.coordinator.phase is Phase.TRAINING and not self.stop_asked:
            self.stop_asked = True
            self.leader.hear(StopAsked())

    def _restart(self, process: Process, cut: int, seconds: float) -> None:
        self.begin_again(self.leader)


@dataclass(frozen=True)
class Fault:
    """What goes wrong, when, for how long; `stage` says where, or names the cut above it."""

    time: float
    kind: str
    stage: int
    seconds: float = 0.0


FAULTS: dict[str, Callable[[World, Process, int, float], None]] = {
    "kill": World._kill,
    "kill two": World._kill_two,
    "vanish": World._vanish,
    "crash": World._crash,
    "pause": World._pause,
    "partition": World._partition,
    "delay": World._delay,
    "slow": World._slow,
    "away": World._away,
    "full disk": World._fill,
    "stop": World._stop,
    "host restart": World._restart,
}
_WEIGHTS = [6, 3, 1, 1, 4, 3, 2, 2, 2, 2, 3, 1]


@cache
def _schedule(name: str, stages: int, microbatches: int) -> Schedule:
    return build(name, stages, microbatches)


@cache
def reference(plan: Plan) -> Outcome:
    """The same run, undisturbed."""
    return World(plan, 0, []).run()


def drawn(seed: int) -> tuple[Plan, list[Fault]]:
    """The run of a seed and its faults."""
    chance = random.Random(seed)
    stages = chance.choice([2, 2, 3, 3, 3, 4])
    schedule = chance.choice(["1f1b", "gpipe"])
    plan = Plan(
        stages,
        processes=chance.choice([stages, stages, max(2, stages - 1)]),
        microbatches=stages if schedule == "1f1b" else 2,
        steps=5,
        save_every=chance.choice([2, 3]),
        score_every=2,
        schedule=schedule,
        hosted=chance.random() < 0.5,
    )
    faults, time, whole = list[Fault](), 0.0, reference(plan).seconds
    for _ in range(chance.choice([1, 2, 2, 3, 4, 6])):
        if faults and chance.random() < 0.6:
            time += chance.choice([0.0, 0.02, 0.2, 2.0]) * chance.random()
        else:
            time = chance.random() * whole * 1.1
        (kind,) = chance.choices([*FAULTS], _WEIGHTS)
        seconds = chance.choice([0.1, 1.0, 5.0, 15.0, 60.0]) * chance.random()
        faults.append(Fault(time, kind, chance.randrange(stages), seconds))
    return plan, faults


def simulate(seed: int, tells: bool = False) -> tuple[Outcome, str]:
    """The run of a seed, and what was wrong with it or nothing."""
    plan, faults = drawn(seed)
    world = World(plan, seed, faults, tells)
    wrong = ""
    try:
        world.run()
    except (WrongError, AssertionError, KeyError, IndexError, ValueError) as error:
        wrong = f"{type(error).__name__}: {error}"
        if tells and not isinstance(error, WrongError):
            raise
    if tells:
        print(f"seed {seed}: {plan}", *faults, *world.story, sep="\n")
    return world.outcome, wrong


def failing(seeds: range) -> dict[int, str]:
    """The seeds among these whose runs go wrong, with the reason."""
    return {seed: wrong for seed in seeds if (wrong := simulate(seed)[1])}


def main() -> None:
    """Simulate the seeds of the command line; the story of one, or of the first that fails."""
    first, _, last = sys.argv[1].partition("..")
    if not last:
        _, wrong = simulate(int(first), tells=True)
        sys.exit(f"seed {first} went wrong: {wrong}" if wrong else 0)
    seeds = range(int(first), int(last))
    parts = [seeds[i : i + 500] for i in range(0, len(seeds), 500)]
    wrong_seeds: dict[int, str] = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for done, found in enumerate(pool.map(failing, parts), 1):
            for seed, why in found.items():
                print(f"\rseed {seed}: {why}")
            wrong_seeds |= found
            print(f"\r{min(done * 500, len(seeds)):,} seeds, {len(wrong_seeds)} wrong", end="")
    print()
    sys.exit(1 if wrong_seeds else 0)


if __name__ == "__main__":
    main()
