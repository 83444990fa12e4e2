"""A simulator of faults: the real coordinator, ports, logs and placement on a virtual clock.

A run is drawn from a seed: its stages and processes, its schedule, and its faults, several at once.
The coordinator, the ports of stages, the state of each link (what is logged, sent again, left out)
and the choice of who takes lost stages are those of the product; machines that hold nothing follow
stages as they do there, from what the neighbours have logged. Virtual are the clock, machines
and connections, and a stage is a toy: its weights are a number that every frame and every step
changes, each order differently. So all that a run leaves behind can be held against what a run
leaves that nothing disturbs.

    python tests/run/simulated.py 17             the story of one seed
    python tests/run/simulated.py 0..1000000     all of them, on every core
    python tests/run/simulated.py goodput        what deaths cost a run of a 160m model
"""

import argparse
import heapq
import itertools
import os
import random
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any
from unittest import mock

from toy_stages import ANSWER, OUTAGE, PATIENCE, LinkEnd, Plan, Process, Speeds, State, Wire, mix

from thinwire.engine.reports import Audited, Evaluation, ShardWritten, Step
from thinwire.run import events as ev
from thinwire.run import formation
from thinwire.run import protocol as pr
from thinwire.run.conduct import Course
from thinwire.run.coordinator import MOST_DEATHS, Coordinator, Phase
from thinwire.run.hosted import STANDBY_PAUSE
from thinwire.run.machine import Machine
from thinwire.run.peer import FOR_FOLLOWERS
from thinwire.run.peers import neighbours
from thinwire.schedule import OPEN, build
from thinwire.wire.frame import HEADER_BYTES

FOREVER = float("inf")
IDLE, ENDLESS = 20.0, 400.0  # seconds without any work, and without a new step, if all is well
START = (Phase.BUILDING, Phase.LINKING)
OF_FOLLOWERS = (pr.Ready, pr.Linked, pr.Failed, pr.Follows)


class WrongError(Exception):
    """What a simulated run must never do."""


@dataclass
class Meeting:
    """Two ends that look for each other by the name of their link."""

    chance: random.Random
    ends: dict[int, tuple[LinkEnd, Any]] = field(default_factory=dict)
    wire: Wire | None = None


class ToyFigures:
    """Stands for the memory that stages take of machines, and what they compute."""

    def __init__(self, plan, here):
        self.fullness = lambda number, stage, blocks: 0.3
        self.work = lambda blocks: plan.works[blocks.start % len(plan.works)]


class Leader:
    """A life of the coordinator: carries out what it says. Stands for LocalPeers and HostedPeers,
    whose methods those of the same names are, without their threads.
    """

    def __init__(self, world, began):
        plan, self.world, self.began = world.plan, world, began
        self.groups = neighbours(plan.stages, plan.processes)
        course = Course(plan, began, plan.stages) if plan.hosted else None
        self.coordinator = Coordinator(
            plan.stages, world.speeds.patience, parts_travel=plan.hosted, outage=OUTAGE,
            course=course, placement=self.groups, audits=bool(world.liar),
        )  # fmt: skip
        self.is_over, self.told, self.told_at, self.completed = False, 0, 0.0, 0
        self.recorded: list[int] = [began] * plan.stages
        self.scored: set[int] = set()
        self.seats = [f"m{i}" for i, group in enumerate(self.groups) for _ in group]
        spares = [f"spare{i}" for i in range(world.spares)]
        self.members = dict.fromkeys([*self.seats, *spares], 0.0)  # until when each is away
        self.members |= dict.fromkeys(world.set_aside, FOREVER)
        self.processes: dict[int, Process] = {}
        self.standbys: dict[tuple[int, ...], Process] = {}  # by the stages that they follow
        self.down: dict[str, float] = {}  # members that cannot be reached, and since when
        self._is_saved = False
        self._heard_at = self._arrived_at = self._standby_after = world.now

    def start(self):
        for group in self.groups:
            self._seat(group, None, self.seats[group[0]])
        self._tick()

    def _seat(self, group, saved, member):
        process = Process(self, group, saved, member)
        self.processes |= dict.fromkeys(group, process)
        if saved is not None:
            self.world.note("%s begins at step %s", process, saved)
            self.hear(ev.Given(group), process)

    def all_processes(self):
        return [*dict.fromkeys([*self.processes.values(), *self.standbys.values()])]

    def hear(self, event, process=None):
        """Something arrives, as HostedPeers._on_happening has it: it is heard in turn."""
        if process is not None and process.is_replaced:
            return
        if process is not None and self.standbys.get(tuple(process.group)) is process:
            match event:
                case ev.Said(stage, Audited()):
                    self._doubt(stage)
                    return
                case ev.Said(stage, said) if isinstance(said, OF_FOLLOWERS):
                    event = ev.Said(stage, said, follows=True)
                case ev.Exited(stage, code):
                    event = ev.Said(stage, pr.Ended.by(code, ""), follows=True)
                case ev.Away():
                    event = ev.FollowerLost(process.group)
                case _:
                    return
        part = getattr(event, "message", None)
        if self.world.plan.hosted and process and isinstance(part, ShardWritten):
            self.world.after(self.world.speeds.upload, self._fetch, process, event.stage, part)
        if self.world.speeds.lag:
            soon = self.world.now + self.world.random.random() * self.world.speeds.lag
            self._arrived_at = max(self._arrived_at, soon)
            self.world.at(self._arrived_at, self.heed, event)
        else:
            self.heed(event)

    def heed(self, event):
        if self.is_over or self.world.leader is not self:
            return
        self._heard_at = self.world.now
        if not isinstance(getattr(event, "message", event), ev.Tick | pr.Pulse):
            self.world.note("coordinator hears %s", event)
        for command in self.coordinator.on(event, self.world.now):
            self._carry_out(command)
        if self.coordinator.phase is Phase.TRAINING and self.world.plan.hosted:
            self._spread()
            self._find_standby()

    def _doubt(self, stage):
        """The holder of a stage lies, as who follows it says."""
        if self.coordinator.phase is Phase.TRAINING and not self.processes[stage].is_replaced:
            self.world.set_aside.add(self.seats[stage])
            self.members[self.seats[stage]] = FOREVER
            self.hear(ev.MoveAsked(self.processes[stage].group, "it lies", at_once=True))

    def _fetch(self, process, stage, part):
        """The part of a checkpoint is here, unless its process is gone: then another says so."""
        if (process.runs or process.has_left) and not process.is_replaced:
            self.hear(ev.Travelled(stage, part.step))
        else:
            lost = ev.Travelled(stage, part.step, "no byte of it came")
            self.world.after(15.0 + self.world.speeds.upload, self.hear, lost)

    def _tick(self):
        """A Tick whenever nothing else has happened for as long as the coordinator can rest."""
        if self.is_over or self.world.leader is not self:
            return
        self._give_up_the_absent()
        due = self._heard_at + self.coordinator.rest(self._heard_at)
        if self.world.now >= due - 1e-9:
            self.heed(ev.Tick())
            due = self.world.now + max(1e-3, self.coordinator.rest(self.world.now))
        self.world.at(due, self._tick)
        self.world.look()

    def _carry_out(self, command):
        world = self.world
        match command:
            case ev.Tell(stage, message, follows=True):
                for group, process in self.standbys.items():
                    if stage in group:
                        world.note("coordinator tells who follows stage %s: %s", stage, message)
                        self._tell(process, stage, message)
                        if isinstance(message, pr.Start):  # what was saved before, it need not know
                            process.start = max(process.start, self.told)
            case ev.Tell(stage, message):
                if isinstance(message, pr.Saved):
                    self.told, self.told_at, self._is_saved = message.step, world.now, True
                world.note("coordinator tells stage %s: %s", stage, message)
                self._tell(self.processes[stage], stage, message)
            case ev.Replace(stages, by_follower=True):
                self._promote(stages)
            case ev.Replace(stages):
                lost = self.processes[stages[0]]
                lost.is_replaced = True
                if not world.plan.hosted:
                    lost.die(-9)
                world.outcome.replaced += 1
                self._find_holder(stages, lost)
            case ev.DropFollower(stages):
                self._drop_standby(tuple(stages))
            case ev.Record(stage, report):
                world.record(stage, report)
            case ev.Commit(step, parts):
                world.complete(step, parts)
                if not self.coordinator.is_over:
                    self.completed = step
                    self.heed(ev.Completed(step))
            case ev.End(error):
                self.is_over = True
                world.end(error)
            case ev.Say(text):
                world.note("coordinator says: %s", text)

    def _tell(self, process, stage, message):
        soon = self.world.now + 0.001
        process.told_at = max(process.told_at, process.away_until, soon) + 1e-6
        self.world.at(process.told_at, process.do, process.stages[stage].hear, message)

    def _release(self, process):
        """Nothing more is heard of a process, and it ends once it can be told so."""
        process.is_replaced = True
        process.stop_fetching()
        self.world.at(max(self.world.now + 0.001, process.away_until), process.do, process.die, -9)

    def _here(self):
        """Members that can be reached."""
        frozen = {p.member for p in self.all_processes() if p.is_paused}
        names = [n for n, until in self.members.items() if until <= self.world.now]
        unable = frozen | self.down.keys()
        here = [name for name in names if name not in unable]
        return [Machine(name=n, memory_gb=8.0, tflops=self.world.rate_of(n)) for n in here]

    def _placing(self):
        """The host's own choices, of what is here."""
        standbys = {group: process.member for group, process in self.standbys.items()}
        plan, here = self.world.plan, self._here()
        return formation.Placing(plan, self.groups, self.seats, standbys, here)

    def _find_holder(self, stages, lost):
        """Another process in the place of a lost one: on the machine that the host would choose."""
        if self.world.leader is not self or self.processes[stages[0]] is not lost:
            return
        placing = self._placing()
        member = placing.holder(stages) if self.world.plan.hosted else lost.member
        if member is None:
            self.world.calm_at = max(self.world.calm_at, self.world.now + 1.0)
            self.world.after(0.5, self._find_holder, stages, lost)
            return
        for group in placing.displaced(stages, member):
            self._drop_standby(tuple(group))
            self.world.after(0.0, self.hear, ev.FollowerLost(group))
        self._take_seat(stages, member)
        self._seat(stages, self.world.saved, member)

    def _take_seat(self, stages, member):
        self._release(self.processes[stages[0]])
        for stage in stages:
            self.seats[stage] = member

    def _promote(self, stages):
        process = self.standbys.pop(tuple(stages), None)
        if process is None:
            for stage in stages:
                self.world.after(0.0, self.hear, ev.Lost(stage, "nobody stands by for it"))
            return
        self.world.note("%s holds them from now on", process)
        self.world.outcome.promoted += 1
        self._take_seat(stages, process.member)
        self.processes |= dict.fromkeys(stages, process)

    def _drop_standby(self, group):
        if process := self.standbys.pop(group, None):
            self.world.note("%s follows no more", process)
            self._standby_after = self.world.now + self.world.speeds.pause
            self._release(process)

    def _find_standby(self):
        if self.world.now < self._standby_after:
            return
        if any(process.is_replaced for process in self.processes.values()):
            return
        stages, member = self._placing().next_standby()
        if member is None:
            if stages:
                self._standby_after = self.world.now + self.world.speeds.pause
            return
        process = Process(self, stages, self.world.saved, member, follows=True)
        self.standbys[tuple(stages)] = process
        self.world.note("%s begins at step %s", process, self.world.saved)

    def _spread(self):
        is_due, self._is_saved = self._is_saved, False
        if is_due and (found := self._placing().next_move()):
            stages, crowded, name = found
            self.world.outcome.moved += 1
            self.hear(ev.MoveAsked(stages, f"stages {stages} move from {crowded} to {name}"))

    def lose_touch(self, process, seconds):
        """A member that holds stages cannot be reached for a while."""
        self.down.setdefault(process.member, self.world.now)
        self.members[process.member] = self.world.now + seconds
        self.world.after(seconds, self._come_back, process)

    def _come_back(self, process):
        """It can again; its processes live still, or are lost."""
        held = [s for s, p in self.processes.items() if p is process and not p.is_replaced]
        if self.down.pop(process.member, None) is None or not held:
            return
        for stage in held[:1] if process.is_alive else held:
            back = ev.Back(stage, 1.0) if process.is_alive else ev.Lost(stage, "it began anew")
            process.tell(back)

    def _give_up_the_absent(self):
        for name, since in [*self.down.items()]:
            held = [s for s, p in self.processes.items() if p.member == name and not p.is_replaced]
            limit = (self._placing().patience(held) if held else None) or OUTAGE
            if held and self.world.now - since > limit:
                del self.down[name]
                for stage in held:
                    self.hear(ev.Lost(stage, f"{name} could not be reached for {limit} s"))


@dataclass
class Outcome:
    """What a run leaves behind: what stages reported, by step, and what it took."""

    steps: list[dict[int, tuple[Any, ...]]]
    scores: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0
    trained: float = 0.0  # when the last step ended
    replaced: int = 0
    promoted: int = 0
    moved: int = 0
    faults: int = 0


@dataclass(frozen=True)
class Fault:
    """What goes wrong, when, and for how long; `stage` says where, or the cut above it."""

    time: float
    kind: str
    stage: int
    seconds: float = 0.0
    of_standby: bool = False  # that follows it, if one does


class World:
    """A run on a virtual clock, and all that must hold of it."""

    def __init__(
        self, plan, seed, faults=(), speeds=None, spares=0, liar="", tells=False, expected=None
    ):
        """`spares`: members that hold nothing at first; `liar`: one that sends what it did not
        compute, as those find who follow it; `expected`: what the run is to leave.
        """
        self.plan, self.seed, self.random, self.tells = plan, seed, random.Random(seed), tells
        self.speeds, self.schedule = speeds or Speeds(), schedule_of(plan)
        self.expected = expected
        self.spares, self.liar, self.set_aside = spares, liar, set[str]()
        self.rates: dict[str, float] = {}
        self.story: list[str] = []
        self.now = self.active_at = self.calm_at = self.new_at = 0.0
        self._events: list[tuple[float, int, Any]] = []
        self._order, self._processes = itertools.count(), itertools.count(1)
        self.count = partial(next, self._processes)
        self.saved, self.life, self.shards = 0, 0, dict[tuple[int, int], State]()
        self.meetings: dict[Any, Meeting] = {}
        self.up_at: Counter[int] = Counter()  # by cut: when a partition ends
        self._lag: dict[int, float] = {}
        self.disks: dict[tuple[str, int], tuple[int, float]] = {}
        self._lines: dict[str, float] = {}  # of machines, and until when they fetch
        self.excuses: set[str] = set()  # for the end of a life
        self.hangs = False  # the next process that takes a place
        self.stop_asked = self.is_done = False
        self.outcome = Outcome([{} for _ in range(plan.stages)])
        self.leader = Leader(self, 0)
        self.leader.start()
        for fault in faults:
            self.at(fault.time, self._befall, fault)

    def run(self):
        with mock.patch.object(formation, "StageFigures", ToyFigures):
            while not self.is_done:
                self.now, _, what = heapq.heappop(self._events)
                what[0](*what[1:])
        self.outcome.seconds, self.outcome.trained = self.now, self.new_at
        return self.outcome

    def note(self, text, *args):
        if self.tells:
            self.story.append(f"{self.now:9.3f}  {text % args}")

    def at(self, time, *what):
        heapq.heappush(self._events, (max(time, self.now), next(self._order), what))

    def rate_of(self, member):
        """What a machine computes; all about the same."""
        if member not in self.rates:
            self.rates[member] = 1 + self.random.random() / 1000
        return self.rates[member]

    def after(self, seconds, *what):
        self.at(self.now + seconds, *what)

    def arrival(self, cut, chance):
        delay = self.speeds.latency * chance.uniform(0.8, 1.2) * self._lag.get(cut, 1.0)
        return max(self.up_at[cut], self.now + delay)

    def meet(self, name, end, at_start):
        """Who comes second finds the first; then there is a connection, if both still live."""
        meeting = self.meetings.get(name)
        if meeting is None:
            meeting = self.meetings[name] = Meeting(random.Random(mix(self.seed, *name)))
        meeting.ends[end.stage.index] = end, end.stage.state.step if at_start else "replaced"
        if self.up_at[end.cut] > self.now + PATIENCE / 2 and not name[-1]:  # no follower's
            self.excuses.add("a partition keeps neighbours from linking")
        if len(meeting.ends) == 2:
            self.at(self.arrival(end.cut, meeting.chance), self._connect, meeting)
        return meeting

    def _connect(self, meeting):
        ends = [end for _, (end, _) in sorted(meeting.ends.items())]
        processes = [end.stage.process for end in ends]
        if any(process.is_paused for process in processes):
            self.after(0.1, self._connect, meeting)
        elif all(process.is_alive for process in processes):
            meeting.wire = Wire(self, ends[0].cut, ends, meeting.chance)
            for process, end in zip(processes, ends, strict=True):
                process.wires.append((meeting.wire, end))
                end.stage.poke()

    # What machines have on their disks of states, by stage: of which step, and seconds worth of it

    def fetch(self, member, stage, step):
        """When a machine begins to fetch what it lacks of a state, after others, and ends."""
        kept, seconds = self.disks.get((member, stage), (step, 0.0))
        lacks = self.speeds.fetch - (seconds if kept == step else 0.0)
        begins = max(self.now, self._lines.get(member, 0.0))
        self._lines[member] = begins + lacks
        return begins, begins + lacks

    def keep(self, member, stage, step, began, ends):
        """Its process is gone: what was fetched stays."""
        if self._lines[member] == ends:
            self._lines[member] = min(self.now, ends)
        kept, _ = self.disks.get((member, stage), (0, 0.0))
        if began < self.now and kept <= step:
            left = max(0.0, ends - self.now)
            self.disks[member, stage] = step, self.speeds.fetch - left

    # What a run leaves behind, held against one that nothing disturbs

    def state_of(self, stage, saved):
        return self.shards[saved, stage].copy() if saved else State(weights=stage + 1)

    def record(self, stage, report):
        leader, expected = self.leader, self.expected
        if isinstance(report, Step):
            if report.step != leader.recorded[stage]:
                raise WrongError(f"step {report.step} of stage {stage} is recorded out of turn")
            leader.recorded[stage] += 1
            facts = (report.loss, report.grad_norm, report.committed, report.measures["weights"])
            self.outcome.steps[stage][report.step] = facts
            if expected and expected.steps[stage][report.step] != facts:
                raise WrongError(f"step {report.step} of stage {stage} computed something else")
            self.new_at = self.now
            if stage == 0 and self.random.random() < self.speeds.deaths:
                kind, stages = "vanish" if self.plan.hosted else "kill", self.plan.stages
                fault = Fault(0.0, kind, self.random.randrange(stages), 60.0)
                self.after(self.random.random(), self._befall, fault)
        elif isinstance(report, Evaluation):
            if report.step in leader.scored:
                raise WrongError(f"the validation of step {report.step} is recorded twice")
            leader.scored.add(report.step)
            self.outcome.scores[report.step] = report.loss
            if expected and expected.scores.get(report.step, report.loss) != report.loss:
                raise WrongError(f"the validation of step {report.step} has another score")

    def complete(self, step, parts):
        weights = [float(self.shards[step, stage].weights) for stage in range(self.plan.stages)]
        known = [steps[step - 1][3] for steps in self.outcome.steps]
        if step <= self.saved or weights != known or len(parts) != self.plan.stages:
            raise WrongError(f"the checkpoint of step {step} is not that of the step")
        self.saved = step
        self.note("the checkpoint of step %s is complete", step)

    def end(self, error):
        leader = self.leader
        self.note("the coordinator ends the run: %s", error or "in good order")
        if error is not None:
            deaths = max(leader.coordinator._deaths.values(), default=0)
            if not self.excuses and deaths < MOST_DEATHS:
                raise WrongError(f"the run ended without need: {error}")
            self.after(1.0, self._begin_again, leader)
            return
        done, *others = sorted(set(leader.recorded))
        if others or (done != self.plan.steps and not self.stop_asked):
            raise WrongError(f"the run ended after steps {leader.recorded} of {self.plan.steps}")
        for index, process in leader.processes.items():
            stage = process.stages[index]
            known = self.outcome.steps[index].get(done - 1, (0, 0, 0, stage.state.weights))
            if stage.state.step != done or known[3] != stage.state.weights:
                raise WrongError(f"stage {index} ends with other weights")
            knows = process.has_left or max(stage.saved, process.start) >= leader.told
            if not knows and self.now - max(leader.told_at, self.calm_at) > 0.5:
                raise WrongError(f"stage {index} was not told what is saved")
            logs = [end.state.log for end in stage.ends.values() if end.state]
            logged = [log.after(None)[1] for log in logs]
            old = [[e.length for e in some if -1 < e.step < stage.saved] for some in logged]
            # One that follows may hear of a state before it is there, and logs until the next.
            if any(sum(some) > self.speeds.keeps for some in old) and not process.follows:
                raise WrongError(f"stage {index} still logs what was saved")
        if leader.told < leader.completed and self.now - self.calm_at > 1:
            raise WrongError(f"step {leader.completed} is saved, and nobody was told")
        due = {s for s in range(leader.began, done + 1) if self.plan.is_evaluation_step(s)}
        if not self.stop_asked and due - leader.scored:
            raise WrongError(f"validations are missing: {due - leader.scored}")
        if strangers := {*leader.seats} - leader.members.keys():
            raise WrongError(f"{strangers} took part")
        self.is_done = True

    def _begin_again(self, leader):
        """The host was lost, or gave up: it comes back with a new coordinator, and all others."""
        if leader is not self.leader:
            return
        for process in leader.all_processes():
            process.is_replaced = True
            process.die(-9)
        self.life += 1
        if self.life > 20:
            raise WrongError("the run does not come to its end")
        self.note("a new life begins at step %s", self.saved)
        self.active_at = self.new_at = self.now
        if self.now > self.calm_at:
            self.excuses.clear()
        self.leader = Leader(self, self.saved)
        self.leader.start()

    def look(self):
        """No wait without a reason: neither is anybody at work, nor is anything wrong."""
        if self.speeds.fetch > IDLE:
            return  # a build may take minutes
        if self.now - max(self.active_at, self.calm_at) > IDLE:
            why = self.leader.coordinator._watch.doing()
            raise WrongError(f"nobody does anything for {IDLE} s: {why}")
        if self.now - max(self.new_at, self.calm_at) > ENDLESS:
            raise WrongError(f"no step ended for {ENDLESS} s")

    # Faults

    def _befall(self, fault):
        leader, cut = self.leader, min(fault.stage, self.plan.stages - 2)
        if leader.is_over:
            return
        process, seconds = leader.processes[fault.stage], fault.seconds
        if fault.of_standby:
            process = next(iter(leader.standbys.values()), process)
        is_held = process in leader.processes.values()
        if leader.coordinator.phase in START:
            self.excuses.add("nobody is replaced before the first step")
        self.note("FAULT: %s, %s, cut %s, %.2f s", fault.kind, process, cut, seconds)
        self.outcome.faults += 1
        self.calm_at = max(self.calm_at, self.now + seconds)
        match fault.kind:
            case "kill":
                process.die(-9)
            case "hang":  # of whoever takes its place; ten times the longest wait may be usual
                self.hangs = True
                self.calm_at = max(self.calm_at, self.now + 20 * PATIENCE)
                process.die(-9)
            case "kill two":
                for stage in (cut, cut + 1):
                    leader.processes[stage].die(-9)
            case "vanish" if self.plan.hosted:  # the machine, until it comes back
                self.calm_at = max(self.calm_at, self.now + OUTAGE + 1)
                for other in leader.all_processes():
                    if other.member == process.member:
                        leader.lose_touch(other, seconds)
                        other.die(-9, is_silent=True)
            case "crash" if process.runs and not process.stages[process.group[-1]].is_finished:
                stage, what = process.group[-1], ("RuntimeError", False, "out of memory")
                process.say(stage, pr.Failed(*what, [], []))
                process.die(1)
            case "pause" if process.runs:
                process.pause(True)
                self.after(seconds, process.pause, False)
                if self.plan.hosted and not is_held and seconds > OUTAGE / 4:
                    gone = ev.Away(process.group[0], "it does not answer")
                    self.after(OUTAGE / 4, leader.hear, gone, process)
                if seconds > ANSWER and is_held:
                    self.excuses.add("a pause in which a neighbour waits for an answer")
            case "partition":
                self._partition(cut, seconds)
            case "delay":
                self._lag[cut] = 30.0
                self.after(seconds, self._lag.pop, cut, None)
            case "slow":
                process.slowness = 8.0
                self.after(seconds, setattr, process, "slowness", 1.0)
            case "away" if self.plan.hosted and process.is_alive and process.away_until < self.now:
                seconds = min(seconds, OUTAGE - 1)
                for other in leader.all_processes():
                    if other.member == process.member:
                        other.away_until = self.now + seconds
                        leader.hear(ev.Away(other.group[0], "the connection was lost"), other)
                        leader.lose_touch(other, seconds)
            case "full disk":
                process.disk_full = True
                if is_held:
                    self.excuses.add("a log is lost")
                self.after(seconds, setattr, process, "disk_full", False)
            case "stop" if leader.coordinator.phase is Phase.TRAINING and not self.stop_asked:
                self.stop_asked = True
                leader.hear(ev.StopAsked())
            case "host restart":
                self._begin_again(leader)

    def _partition(self, cut, seconds):
        self.up_at[cut] = max(self.up_at[cut], self.now + seconds)
        end = self.leader.processes[cut].stages[cut].ends.get(cut + 1)
        if end is None or end.wire is None or end.state is None:
            if seconds > PATIENCE / 2:
                self.excuses.add("a partition keeps neighbours from linking")
            return
        above = end.wire.ends[1]
        above.stage.process.do(above.miss, end.wire)
        self.after(seconds, self._reconnect, end.wire)
        if seconds > OUTAGE:
            self.excuses.add("a link is down for longer than it may be")
            self.after(OUTAGE, self._give_up, end.wire)

    def _reconnect(self, wire):
        above = wire.ends[1]
        if above.wire is wire and self.up_at[wire.cut] <= self.now:
            above.stage.process.do(above.stage.mention, False)

    def _give_up(self, wire):
        for end in wire.ends:
            if self.up_at[wire.cut] > self.now:
                end.give_up(wire)


FAULTS = [*["kill"] * 6, *["kill two"] * 3, *["pause"] * 4, *["partition", "stop"] * 3]
FAULTS += ["vanish", "delay", "slow", "away", "full disk"] * 2 + ["crash", "host restart", "hang"]
"""What can go wrong, as often as it does."""


@cache
def schedule_of(plan):
    return build(plan.schedule, plan.stages, plan.microbatches, plan.window, delay=plan.delay)


@cache
def reference(plan):
    """The same run, undisturbed."""
    return World(plan, 0).run()


def drawn(seed, delay=0):
    """The run of a seed, its faults, and all else that a world takes.

    With delayed updates it is longer and pauses less often, so that steps overlap.
    """
    chance = random.Random(seed)
    stages, schedule = chance.choice([2, 2, 3, 3, 3, 4]), chance.choice(["1f1b", "gpipe"])
    processes = chance.choice([stages, stages, max(2, stages - 1)])
    microbatches, save_every = stages if schedule == "1f1b" else 2, chance.choice([2, 3])
    hosted = chance.random() < 0.6
    steps = chance.choice([5, 5, 8]) if hosted else 5
    plan = Plan(stages, processes, microbatches, steps, save_every, 2, schedule, hosted)
    if delay:
        count = stages + chance.randrange(3)
        plan = Plan(stages, processes, count, steps + 4, save_every + 2, 4, "1f1b", hosted)
        plan = replace(plan, delay=chance.randint(1, count))
    faults, time, whole = list[Fault](), 0.0, reference(plan).seconds
    for _ in range(chance.choice([1, 2, 2, 3, 4, 6])):
        if faults and chance.random() < 0.6:  # soon after the one before
            time += chance.choice([0.0, 0.02, 0.2, 2.0]) * chance.random()
        else:
            time = chance.random() * whole * 1.1
        seconds = chance.choice([0.1, 1.0, 5.0, 15.0, 60.0]) * chance.random()
        faults.append(Fault(time, chance.choice(FAULTS), chance.randrange(stages), seconds))
    others: dict[str, Any] = {"faults": faults, "expected": reference(plan)}
    if hosted:
        plan = replace(plan, works=chance.choice([(1.0,), (1.0, 1.0, 3.0)]))
        others["spares"] = chance.choice([0, 1, 1, 2, 2, 3])
        others["liar"] = chance.choice(["", "", "", f"m{chance.randrange(processes)}"])
        lag, keeps = chance.choice([0.0, 0.0, 0.01]), chance.choice([0, 500, 10_000])
        build = chance.choice([0.1, 0.5])
        others["speeds"] = Speeds(build=build, lag=lag, keeps=keeps)
        others["faults"] = [replace(f, of_standby=chance.random() < 0.2) for f in faults]
    return plan, others


def simulate(seed, tells=False, delay=0):
    """The run of a seed, and what was wrong with it or nothing; with its story, if asked."""
    plan, others = drawn(seed, delay)
    world, wrong = World(plan, seed, tells=tells, **others), ""
    try:
        world.run()
    except Exception as error:  # also of the code under test
        wrong = f"{type(error).__name__}: {error}"
    if tells:
        rest = [item for item in others.items() if item[0] not in ("faults", "expected")]
        print(f"seed {seed}: {plan} {rest}", *others["faults"], *world.story, sep="\n")
    return world.outcome, wrong


def failing(seeds, delay=0):
    """The seeds among these whose runs go wrong, with the reason."""
    return {seed: wrong for seed in seeds if (wrong := simulate(seed, delay=delay)[1])}


def goodput(steps=500, deaths=0.01):
    """Print how much of its speed a run keeps that loses a machine in one of a hundred steps.

    As `thinwire plan` has it for preset 160m, recipe thin32, 4 stages of 20 TFLOP/s, links of 80
    Mbit/s and 25 ms. Steps of 16,384 tokens: 8 microbatches, 6 ms for a forward or a backward (18
    ms on the last stage), 10 ms for a frame on the uplink, also for one that is sent again. Steps
    of 524,288 tokens, a usual batch: 32 microbatches, 52 ms (147 ms), 80 ms. Assumed: a process
    starts and builds its layers in 6 s, a checkpoint is saved every 50 steps in 0.5 s, a state of
    0.8 GB (12 bytes for each parameter) travels for 80 s, and a machine that died is back after
    60 s. What is sent to stand-bys takes nothing from the uplink here.
    """
    for tokens, microbatches, compute, uplink in [
        (16_384, 8, (0.006, 0.006, 0.006, 0.018), 0.01),
        (524_288, 32, (0.052, 0.052, 0.052, 0.147), 0.08),
    ]:
        plan = Plan(4, 4, microbatches, steps, 50, steps + 1, "1f1b", True, 0, OPEN, compute)
        keeps = FOR_FOLLOWERS // int(uplink * 1e7) * (HEADER_BYTES + 8)
        rest = 0.5, 6.0, 80.0, 80.0, 300.0, STANDBY_PAUSE, 0.0, keeps
        figures = Speeds(uplink, 0.025, compute, *rest)
        here = replace(plan, hosted=False), replace(figures, fetch=0.0)
        undisturbed = World(plan, 0, speeds=figures).run().trained
        print(f"steps of {tokens:,} tokens, {undisturbed / steps:.2f} s each", flush=True)
        for name, (plan_of, speeds), spares in [
            ("processes of one machine", here, 0),
            ("no stand-by", (plan, figures), 0),
            ("two stand-bys", (plan, figures), 2),
            ("a stand-by for each stage", (plan, figures), 4),
        ]:
            speeds = replace(speeds, deaths=deaths)
            runs = [World(plan_of, seed, speeds=speeds, spares=spares).run() for seed in range(2)]
            lost, seconds = sum(run.faults for run in runs), sum(run.trained for run in runs)
            share, each = len(runs) * undisturbed / seconds, seconds - len(runs) * undisturbed
            promoted = sum(run.promoted for run in runs)
            print(
                f"  {name}: goodput {share:.2f}, {lost} deaths, {each / lost:.1f} s lost by each, "
                f"{promoted} times a stand-by took over",
                flush=True,
            )


def main():
    """Simulate the seeds of the command line: tell the story of one, or which of many go wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", help="one seed, as 17; several, as 0..1000; or the word goodput")
    seeds_or_word = parser.parse_args().seeds
    if seeds_or_word == "goodput":
        goodput()
        return
    first, _, last = seeds_or_word.partition("..")
    if not last:
        _, wrong = simulate(int(first), tells=True)
        sys.exit(f"seed {first} goes wrong: {wrong}" if wrong else 0)
    seeds, done, wrongs = range(int(first), int(last)), 0, 0
    parts = [seeds[i : i + 500] for i in range(0, len(seeds), 500)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for part, found in zip(parts, pool.map(failing, parts), strict=True):
            done, wrongs = done + len(part), wrongs + len(found)
            for seed, why in found.items():
                print(f"\rseed {seed} goes wrong: {why}")
            print(f"\r{done:,} seeds, {wrongs} wrong", end="", flush=True)
    print()
    sys.exit(1 if wrongs else 0)


if __name__ == "__main__":
    main()
