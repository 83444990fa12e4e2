"""The coordinator: leads the stages of a run from their building to the last goodbye.

It is told what happens and answers what to do: no threads, clock or processes of its own.
peers.py carries out what it says.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from thinwire.engine import reports
from thinwire.engine.port import decision_number
from thinwire.engine.reports import Evaluation, Report, ShardFailed, ShardWritten, Step
from thinwire.errors import StageError, WireError
from thinwire.run import events as ev
from thinwire.run import protocol as msg
from thinwire.run.conduct import MOST_MICROBATCHES, Course, Evidence, PeerConduct, blame
from thinwire.run.signals import Interrupted
from thinwire.run.watch import TOLD_A_MINUTE, Told, Watch
from thinwire.wire import FrameKind

MOST_AHEAD = 4096  # steps that a stage may report before others, whose streams may be down
SETTLE_SECONDS = 1.5  # after a failure, how long to listen for the stage that caused it
MOST_BEHIND = 2  # steps, for one that follows to take over from a stage that lives
MOST_DEATHS = 3  # of a stage, without a step that is new, before the run ends
Commands = list[ev.Command]
Group = tuple[int, ...]  # stages that share a process
REPLACEABLE = ("died", "was lost", "got stuck")  # another takes its place: it did nothing wrong


class Phase(Enum):
    """The phase that a run is in."""

    BUILDING = "waits for layers to be built"
    LINKING = "waits for neighbours to link"
    TRAINING = "trains"
    STOPPING = "stops after this step"
    COLLECTING = "waits for the last checkpoint to arrive"
    FINISHED = "is over"


_START = (Phase.BUILDING, Phase.LINKING)


@dataclass
class Follower:
    """A process that follows stages, as far as it is."""

    ready: dict[int, msg.Ready] = field(default_factory=dict)
    linked: set[int] = field(default_factory=set)
    is_told: bool = False  # where its neighbours are
    # Cuts over which nobody feeds it any more; and by which streams another is to, once known.
    unfed: dict[int, int] = field(default_factory=dict)
    behind: int = MOST_AHEAD  # steps that the stage was ahead when it was last heard

    @property
    def is_linked(self) -> bool:
        """Whether all its stages are; they are ready before."""
        return bool(self.linked) and self.linked == self.ready.keys()

    @property
    def can_take_over(self) -> bool:
        """Whether it is linked, and fed by all neighbours."""
        return self.is_linked and not self.unfed


class Coordinator:
    """A run as a state machine: `on` takes an event and the time, and returns commands.

    With `parts_travel`, what a stage writes is on its own machine: a part counts when Travelled
    follows its ShardWritten. With a `course`, whoever saves or ends when that is not due is at
    fault. `placement` lists the stages that share a process: with it, one that is lost while the
    run trains is replaced by another process, which begins at the last complete checkpoint.
    """

    def __init__(
        self,
        stages: int,
        patience: float,
        microbatches: int = MOST_MICROBATCHES,
        parts_travel: bool = False,
        outage: float = 0.0,
        course: Course | None = None,
        placement: Sequence[Sequence[int]] = (),
        audits: bool = False,
    ):
        self.phase = Phase.BUILDING
        self.stop_asked = False
        self._all = range(stages)
        self._watch = Watch(stages, patience, outage)
        self._conduct = [PeerConduct(stage, stages, microbatches) for stage in self._all]
        self._course = course
        self._steps = [0] * stages  # reported
        self._told = Told()
        self._arrived: dict[int, Any] = {}  # who of them is built or linked: with these words
        self._finished: set[int] = set()
        self._ended = (0, False)  # the last decision that they knew, and whether it ends the run
        self._ready: dict[int, msg.Ready] = {}
        self._last_step = [0] * stages
        self._parts: dict[int, dict[int, ShardWritten | ShardFailed]] = {}  # by step and stage
        self._parts_travel = parts_travel
        self._travelling: dict[tuple[int, int], ShardWritten] = {}  # of steps and stages, not here
        self._evidence: list[Evidence] = []
        self._settled_at: float | None = None  # when it is clear who caused a failure
        self._together = {stage: list(group) for group in placement for stage in group}
        # Stages that do not train yet, at the start all. They are built, and then link, together.
        self._coming, self._is_linking = set(self._all), False
        self._lost_at: dict[int, float] = {}  # stages that are replaced, until they have caught up
        self._deaths: Counter[int] = Counter()  # since the last step that is new
        self._gone: set[int] = set()  # whose processes have ended; last words may be still to come
        self._links = [0] * max(0, stages - 1)  # how often the link over each cut was opened anew
        self._saved = 0  # the step of the last complete checkpoint, as stages were told
        self._complete = 0  # ... and as it is
        self._base = 0  # ... and from which stages were last replaced
        self._followers: dict[Group, Follower] = {}  # by the stages that they follow
        self._audits = audits
        self._promoted: set[int] = set()  # lost stages whose followers take their places
        self._followed = 0  # how many followers there were
        self._moved: dict[int, reports.Meters] = {}  # by all processes of a stage, as last reported
        self._moved_before: dict[int, reports.Meters] = {}  # ... by those that are lost

    def on(self, event: ev.Event, now: float) -> Commands:
        """What to do about an event. There is one at least every `rest` seconds, if only a Tick."""
        self._watch.pass_time(now)
        if self.is_over:
            return []
        commands: Commands = []
        try:
            commands = self._respond(event, now)
        except WireError as error:
            assert isinstance(event, ev.Said), "only what a stage says is refused"
            self._suspect(ev.Lost(event.stage, str(error), in_breach=True), now)
        if self.is_over:
            return commands
        if self._settled_at is None:
            return commands + self._on_wait(now)
        return commands + (self._settle(now) if now >= self._settled_at else [])

    def _on_wait(self, now: float) -> Commands:
        complaint = self._watch.complaint()
        commands: Commands = [ev.Say(complaint)] if complaint else []
        verdict, stuck = self._watch.verdict()
        why, silent = verdict, self._watch.frozen()
        if not verdict and (frozen := [stage for stage in silent if stage not in self._coming]):
            stuck, why = frozen[0], f"it has said nothing for {silent[frozen[0]]:.0f} s"
        culprit = None if stuck is None else ev.Suspect(3, stuck, "got stuck", why, known=True)
        if culprit is not None and self._may_replace(culprit):
            return commands + self._bury({culprit.stage}, culprit, now)
        return commands + ([self._end(StageError(verdict), culprit)] if verdict else [])

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.phase is Phase.FINISHED

    def rest(self, now: float) -> float:
        """Seconds until it needs the next event."""
        left = self._watch.tick if self._settled_at is None else self._settled_at - now
        return max(0.0, min(left, self._watch.tick))

    def waiting_for(self) -> list[int]:
        """The stages without which this phase does not end."""
        done = self._arrived if self.phase in _START else self._finished
        return [stage for stage in self._all if stage not in done]

    def _respond(self, event: ev.Event, now: float) -> Commands:
        match event:
            case ev.Said(stage, message, follows=True):
                return self._on_follower(stage, message)
            case ev.Said(stage, msg.Pulse(begun, doing)):
                self._watch.heard(stage, begun, doing)
            case ev.Said(stage, msg.LinkDown() | msg.LinkUp() as message):
                return self._on_outage(stage, message, now)
            case ev.Said(_, reports.Audited() | msg.Follows()):
                pass  # its last words as a follower: it has taken its stage's place meanwhile
            case ev.Said(stage, msg.LogLost(reason)):
                lost = f"stage {stage} keeps no log of what it sends, for {reason}"
                both = "both begin at the last checkpoint"
                return [ev.Say(f"{lost}: if a neighbour is lost before the next one, {both}")]
            case ev.Said(stage, msg.Ended() as ended):
                return self._respond(ev.Exited(stage, ended.returncode), now)
            case ev.Said(stage, message):
                self._watch.heard(stage)
                return self._on_message(stage, message, now)
            case ev.Exited(stage) | ev.Lost(stage):
                self._gone.add(stage)
                is_wrong = stage not in self._finished or self._is_missed(stage)
                if is_wrong and event != ev.Exited(stage, 0):
                    self._suspect(event, now)
            case ev.Away(stage=stage) | ev.Back(stage=stage):
                return self._on_outage(stage, event, now)
            case ev.Travelled(stage, error=error, at_fault=True):
                self._suspect(ev.Lost(stage, error, in_breach=True), now)
            case ev.Travelled():
                return self._on_travelled(event)
            case ev.Given(stages):
                for stage in stages:
                    self._watch.heard(stage)
            case ev.Completed(step):
                self._complete = step
                return self._tell_saved()
            case ev.FollowerLost(stages):
                return [self._drop(tuple(stages))]
            case ev.MoveAsked(stages, reason, at_once):
                is_calm = not (self._finished or self._evidence or self._lost_at)
                found = self._followers.get(tuple(stages))
                keeps_up = found is not None and found.can_take_over and found.behind <= MOST_BEHIND
                is_due = not self._coming if at_once else is_calm and keeps_up
                if is_due and self.phase is Phase.TRAINING:
                    return self._replace({*stages}, reason, now)
            case ev.StopAsked(why):
                return self._on_stop(why)
            case ev.Tick():
                for stage in sorted(self._gone - self._finished):
                    self._suspect(ev.Exited(stage, 0), now)
        return []

    def _on_message(self, stage: int, message: msg.OfStage, now: float) -> Commands:
        if self._is_late(stage, message) or self._is_repeated(stage, message):
            return []
        self._conduct[stage].check(message)
        if isinstance(message, msg.Failed):
            self._suspect(ev.Said(stage, message), now)
            return []
        if faults := self._faults(stage, message):
            for culprit, deed in faults:
                self._suspect(ev.Lost(culprit, deed, in_breach=True), now)
            return []
        if stage in self._coming:
            self._arrived[stage] = message
            if isinstance(message, msg.Ready):
                self._ready[stage] = message
            return self._link()
        if isinstance(message, ShardWritten | ShardFailed):
            return self._on_part(stage, message)
        if isinstance(message, Step | msg.Finished):
            moved = _sum(self._moved_before.get(stage, {}), message.meters)
            self._moved[stage] = moved
            message = dataclasses.replace(message, meters=moved)
        if isinstance(message, Step):
            self._last_step[stage] = message.step + 1
        assert isinstance(message, Step | Evaluation | msg.Finished), "all else was not due"
        self._watch.result()
        commands: Commands = [*self._caught_up(stage, now), ev.Record(stage, message)]
        if isinstance(message, msg.Finished):
            self._finished.add(stage)
            self._ended = msg.last_decision([self._ended, (message.decided, message.stops)])
            self._watch.dismiss(stage)
            commands += self._end_if_done()
        return commands

    def _end_if_done(self) -> Commands:
        """The end of the run, once all stages have finished and no part is on its way."""
        if len(self._finished) < len(self._all) or self._settled_at is not None:
            return []
        if not self._travelling:
            return [*self._tell_all(msg.Leave()), self._end()]
        if self.phase is Phase.COLLECTING:
            return []
        self.phase = Phase.COLLECTING
        stages = sorted({stage for _, stage in self._travelling})
        which = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        return [ev.Say(f"all stages have stopped; the host waits for the checkpoint of {which}")]

    def _is_missed(self, stage: int) -> bool:
        """Whether a stage that has finished is needed still, by others or the last checkpoint."""
        if not self._together:
            return False  # nobody could take its place
        waits = {stage - 1, stage + 1} & {*self.waiting_for()}
        is_travelling = any(writer == stage for _, writer in self._travelling)
        return bool(self._lost_at or waits or is_travelling)

    def _faults(self, stage: int, message: msg.OfStage) -> list[tuple[int, str]]:
        """Who saves or ends when that is not due; refused is what no stage may say now."""
        due: Any = Report | msg.Finished
        if stage in self._coming:
            due = msg.Linked if self._is_linking else msg.Ready
        if not isinstance(message, due) or stage not in self.waiting_for():
            name = type(message).__name__
            raise WireError(f"stage {stage} sent a {name} message while the run {self.phase.value}")
        self._steps[stage] += isinstance(message, Step)
        steps, least = self._steps[stage], min(self._steps)
        if steps - least > MOST_AHEAD:
            slowest = f"stage {self._steps.index(least)} only {least}"
            raise WireError(f"stage {stage} reported {steps} steps, but {slowest}")
        if self._course is None or self.phase in _START:
            return []
        return [*self._course.faults(stage, message, self.stop_asked)]

    def _link(self) -> Commands:
        """What follows once all who do not train are built, or linked."""
        is_building = self.phase is Phase.BUILDING  # imports torch and builds layers: takes time
        count = ev.Starting(len(self._arrived), "stages have their layers")
        commands: Commands = [count] if is_building else []
        if self._arrived.keys() != self._coming:
            return commands
        arrived, coming = [*self._arrived.values()], sorted(self._coming)
        self._arrived.clear()
        if self._is_linking:
            return self._start(coming, arrived)
        relinked = self._ends_alive(self._cuts_of(coming))
        commands += [ev.Tell(stage, self._connect(stage, cut)) for stage, cut in relinked]
        commands += [ev.Tell(stage, self._connect(stage)) for stage in coming]
        self._is_linking = True
        self._promoted.clear()
        self.phase = Phase.LINKING if is_building else self.phase
        return commands

    def _start(self, stages: list[int], linked: list[msg.Linked]) -> Commands:
        """Have stages train that are linked now."""
        self._coming.clear()
        self._is_linking = False
        if self.phase is Phase.LINKING:
            self.phase = Phase.TRAINING
            self._watch.result()  # the first one, mostly a validation, is waited for from now on
            ready = [self._ready[stage] for stage in self._all]
            # Nothing is decided yet, whatever one of them says.
            return [*self._tell_all(msg.Start()), ev.Begin(ready)]
        # Not before the steps that were reported, if nobody is left who knows more.
        reported = decision_number(FrameKind.VERDICT, max(self._last_step) - 1)
        known = [(one.decided, one.stops) for one in linked]
        start = msg.Start(*msg.last_decision([(reported, False), self._ended, *known]))
        told: list[msg.ToStage] = [start, msg.Stop()] if self.stop_asked else [start]
        tells = [ev.Tell(stage, message) for message in told for stage in stages]
        return [*tells, *self._feed_followers()]

    def _on_part(self, stage: int, part: ShardWritten | ShardFailed) -> Commands:
        parts = self._parts.setdefault(part.step, {})
        if self._parts_travel and isinstance(part, ShardWritten):
            parts.pop(stage, None)
            self._travelling[part.step, stage] = part
            return []
        parts[stage] = part
        return self._settle_checkpoint(part.step)

    def _on_travelled(self, event: ev.Travelled) -> Commands:
        part = self._travelling.pop((event.step, event.stage), None)
        if part is None:
            return []
        failed = ShardFailed(event.step, event.error)
        self._parts[event.step][event.stage] = failed if event.error else part
        return [*self._settle_checkpoint(event.step), *self._end_if_done()]

    def _settle_checkpoint(self, step: int) -> Commands:
        """What becomes of a checkpoint, once every part of it is here or has failed. Not while a
        stage is behind: it writes its part again, and needs what was sent since the one before.
        """
        if self._lost_at or len(self._parts[step]) < len(self._all):
            return []  # another stage may be writing still
        parts = self._parts.pop(step)
        made, error = settled_checkpoint(step, [parts[stage] for stage in self._all])
        return [made, self._end(error)] if error is not None else [made]

    def _on_outage(
        self, stage: int, said: msg.LinkDown | msg.LinkUp | ev.Away | ev.Back, now: float
    ) -> Commands:
        """A link or a control stream is down or back: no progress, and no failure yet."""
        what, key = f"the control stream of stage {stage}", f"control-{stage}"
        then = "it may come back"
        if is_link := isinstance(said, msg.LinkDown | msg.LinkUp):
            self._conduct[stage].check(said)
            what, key = f"the link between stages {stage - 1} and {stage}", f"cut-{said.cut}"
            then = "connecting again"
        if is_down := isinstance(said, msg.LinkDown | ev.Away):
            note = f"{what} is down: {said.reason}; {then}"
        else:
            note = f"{what} is back after {said.seconds:.1f} s; nothing was lost"
        self._watch.down(key, is_down)
        times = self._told.again((stage, type(said)), now)
        if times == TOLD_A_MINUTE:
            note += "; it breaks often, so for a minute no more is said of it"
        is_told = times and (is_link or stage not in self._finished)
        commands: Commands = [ev.Say(note)] if is_told else []
        if isinstance(said, msg.LinkUp) and self.phase not in _START:
            commands.append(ev.Record(stage, said))
        return commands

    def _on_stop(self, why: str) -> Commands:
        """The first time: finish the step, checkpoint, end. The second time: leave at once."""
        if self.phase in _START or self.stop_asked:
            return [self._end(Interrupted())]
        self.stop_asked = True
        if 0 in self._finished:
            return []  # too late to ask, and the end is near
        self.phase = Phase.STOPPING
        notes = [ev.Say(f"{why}: the run stops after this step, with a checkpoint")]
        if not why:
            again = ev.Say("press Ctrl-C again to exit now", for_us=True)
            notes = [ev.Say("stopping after this step, with a checkpoint"), again]
        return [*self._tell_all(msg.Stop()), *notes]

    def _suspect(self, evidence: Evidence, now: float) -> None:
        """Something is wrong: listen a moment before blaming anyone. Neighbours of one that dies
        may complain before its death is seen; only one that was killed is evidence enough.
        """
        self._evidence.append(evidence)
        killed = {e.stage for e in self._evidence if isinstance(e, ev.Exited) and e.code < 0}
        if killed and killed.issuperset(self._together.get(evidence.stage, ())) and self._together:
            self._settled_at = now
        elif self._settled_at is None:
            self._settled_at = now + SETTLE_SECONDS

    def _settle(self, now: float) -> Commands:
        """What follows from a failure: the end of the run, or others in the place of the lost."""
        evidence, self._evidence, self._settled_at = self._evidence, [], None
        culprit = blame(evidence)
        if self._may_replace(culprit):
            return self._bury({one.stage for one in evidence} | {culprit.stage}, culprit, now)
        return [self._end(StageError(self._described(culprit)), culprit)]

    def _described(self, culprit: ev.Suspect) -> str:
        step = self._last_step[culprit.stage]
        where = f"at step {step}" if step else "at the start"
        return f"stage {culprit.stage} {culprit.deed} {where}: {culprit.reason}"

    # Stages that are lost and replaced

    def _may_replace(self, culprit: ev.Suspect) -> bool:
        is_innocent = culprit.deed in REPLACEABLE or (
            culprit.deed == "failed" and not culprit.known and culprit.doubt == 2
        )
        return (
            is_innocent
            and bool(self._together)
            and self.phase in (Phase.TRAINING, Phase.STOPPING, Phase.COLLECTING)
            and self._deaths[culprit.stage] < MOST_DEATHS
        )

    def _bury(self, stages: set[int], culprit: ev.Suspect, now: float) -> Commands:
        """Have others take the place of stages that are lost, and say because of whom."""
        self._deaths[culprit.stage] += 1
        note = f"{self._described(culprit)}; another process takes its place, and the rest waits"
        return self._replace(stages, note, now)

    def _replace(self, stages: set[int], note: str, now: float) -> Commands:
        """Have others take the place of these stages, and all who share their processes."""
        lost = self._fellows(stages)
        # Whoever was linking to one of them would wait in vain, and begins anew.
        lost |= self._coming if self._is_linking else set()
        self._is_linking = False
        # Whoever still computes anew would ask for more than the logs of others that begin at a
        # newer checkpoint will have: it begins there too.
        if self._complete > self._base:
            lost |= self._fellows(self._lost_at)
            self._base = self._complete
        # What a neighbour sent that has finished and is gone is lost too.
        while gone := {s for s in self._gone if {s - 1, s + 1} & lost} - lost:
            lost |= self._fellows(gone)
        self._gone -= lost
        self._finished -= lost
        self._coming |= lost
        for stage in lost:
            self._lost_at.setdefault(stage, now)
            self._arrived.pop(stage, None)
            self._conduct[stage].is_down = False
            self._watch.replace(stage)
            self._moved_before[stage] = self._moved.get(stage, {})
        cuts = self._cuts_of(lost)
        for cut in cuts:
            self._links[cut] += 1
            self._watch.down(f"cut-{cut}", is_down=False)
        groups = sorted({tuple(self._together[stage]) for stage in lost})
        told = [ev.Tell(s, msg.Await(cut)) for s, cut in self._ends_alive(cuts)]
        commands: Commands = [*told, ev.Say(note)]
        self._promoted = (self._promoted - lost) | self._followed_among(groups, lost)
        for group in groups:
            is_promoted = self._promoted.issuperset(group)
            commands.append(ev.Replace(list(group), is_promoted))
            for stage in group if is_promoted else ():
                # Whoever fed it is lost too, and others may take long to be built.
                unfed = [
                    c for c in self._outer_cuts(stage) if msg.other_end(c, stage) in self._coming
                ]
                commands += [ev.Tell(stage, msg.Await(cut)) for cut in unfed]
                self._watch.heard(stage)
                ready = self._followers[group].ready[stage]
                self._ready[stage] = self._arrived[stage] = ready
        commands += self._unfeed(cuts, lost)
        return [*commands, *self._link()]

    def _fellows(self, stages: Iterable[int]) -> set[int]:
        """These stages, and all who share their processes."""
        return {other for stage in stages for other in self._together[stage]}

    def _followed_among(self, groups: Sequence[Group], lost: set[int]) -> set[int]:
        """The lost stages whose followers can take their places. Not beside one that begins at a
        checkpoint, for whoever follows may be behind that; nor where it is known when to stop.
        """
        able = {group for group, one in self._followers.items() if one.can_take_over}
        found = {s for group in groups if group in able and not self.stop_asked for s in group}
        anew = self._coming - (self._promoted - lost)
        while beside := {s for s in found if {s - 1, s + 1} & (anew - found)}:
            found -= self._fellows(beside)
        return found

    def _cuts_of(self, stages: Iterable[int]) -> set[int]:
        return {cut for stage in stages for cut in (stage - 1, stage)} & {*self._all[:-1]}

    def _ends_alive(self, cuts: set[int]) -> list[tuple[int, int]]:
        ends = [(stage, cut) for cut in sorted(cuts) for stage in (cut, cut + 1)]
        return [(stage, cut) for stage, cut in ends if stage not in self._coming]

    def _outer_cuts(self, stage: int) -> list[int]:
        """The cuts of a stage that are between two processes."""
        cuts = (stage - 1, stage - 1), (stage, stage + 1)
        return [c for c, other in cuts if other in self._all and other not in self._together[stage]]

    # Processes that follow a stage, to take its place at once

    def _on_follower(self, stage: int, message: msg.OfStage) -> Commands:
        group = tuple(self._together[stage])
        which, found = ", ".join(map(str, group)), self._followers.get(group)
        match message:
            case msg.Failed() | msg.Ended():
                return [self._drop(group)]
            case msg.Ready():
                self._followers.setdefault(group, Follower()).ready[stage] = message
                return self._feed_followers()
            case _ if found is None:
                pass
            case msg.Follows(step):
                found.behind = self._last_step[stage] - step
            case msg.Linked(follower=number) if found.is_linked:
                was_fed = not found.unfed
                found.unfed = {cut: n for cut, n in found.unfed.items() if n != number}
                if not (was_fed or found.unfed):
                    return [ev.Say(f"the stand-by of stage {which} follows on")]
            case msg.Linked():
                found.linked.add(stage)
                if found.is_linked:
                    return self._begin_to_follow(group, found, which)
        return []

    def _begin_to_follow(self, group: Group, follower: Follower, which: str) -> Commands:
        kinds = [[_kind_of(ready[s]) for s in group] for ready in (self._ready, follower.ready)]
        alike = self._audits and kinds[0] == kinds[1]
        start = [ev.Tell(s, msg.Start(is_alike=alike), follows=True) for s in group]
        note = f"stage {which} has a stand-by, which follows it"
        if self._audits:
            how = "equal bits" if alike else "another kind of machine, small differences"
            note += f" and compares what it sends; expected: {how}"
        return [*start, ev.Say(note)]

    def _unfeed(self, cuts: set[int], lost: set[int]) -> Commands:
        """Whoever follows a lost stage takes its place or is let go; beside one, it is fed anew."""
        commands: Commands = []
        for group, follower in [*self._followers.items()]:
            unfed = [(s, cut) for s in group for cut in self._outer_cuts(s) if cut in cuts]
            if self._promoted.issuperset(group):
                del self._followers[group]
            elif follower.is_told and (not lost.isdisjoint(group) or unfed):
                if follower.is_linked and lost.isdisjoint(group):
                    follower.unfed |= {cut: 0 for _, cut in unfed}
                    commands += [ev.Tell(s, msg.Await(cut), follows=True) for s, cut in unfed]
                else:
                    commands.append(self._drop(group))
        return commands

    def _drop(self, group: Group) -> ev.DropFollower:
        self._followers.pop(group, None)
        return ev.DropFollower(list(group))

    def _feed_followers(self) -> Commands:
        """Have neighbours feed all who follow and are not fed, unless some are replaced still."""
        commands: Commands = []
        for group, follower in [*self._followers.items()] if not self._coming else ():
            if len(follower.ready) < len(group):
                continue
            if self.phase is not Phase.TRAINING:
                commands.append(self._drop(group))
                continue
            cuts = [(stage, cut) for stage in group for cut in self._outer_cuts(stage)]
            if not follower.is_told:
                follower.is_told = True
                self._followed += 1
                told = [(stage, self._connect(stage, follower=follower)) for stage in group]
                commands += [ev.Tell(*one, follows=True) for one in told]
                commands += [self._is_to_feed(follower, *end) for end in cuts]
            for stage, cut in [end for end in cuts if follower.unfed.get(end[1]) == 0]:
                self._followed += 1
                follower.unfed[cut] = self._followed
                commands.append(ev.Tell(stage, self._connect(stage, cut, follower), follows=True))
                commands.append(self._is_to_feed(follower, stage, cut))
        return commands

    def _is_to_feed(self, follower: Follower, stage: int, cut: int) -> ev.Tell:
        """The word to the neighbour that feeds it over a cut."""
        by = msg.other_end(cut, stage)
        return ev.Tell(by, self._connect(by, cut, follower))

    def _connect(
        self, stage: int, cut: int | None = None, follower: Follower | None = None
    ) -> msg.Connect:
        """Where the stage below is; for the latest streams of a follower, with it in its place."""
        ready, number = self._ready, 0
        if follower is not None:
            ready, number = ready | follower.ready, self._followed
        below = ready[stage - 1].address if stage else ""
        return msg.Connect(below, [*self._links], cut, number)

    def _is_repeated(self, stage: int, message: msg.OfStage) -> bool:
        """Whether a stage that was replaced reports again what its lost self had reported."""
        if not isinstance(message, Report) or stage not in self._lost_at:
            return False
        if not self._conduct[stage].has_reported(message):
            return False
        if isinstance(message, ShardWritten) and message.step in self._parts:
            before = self._parts[message.step].get(stage)
            if not (self._parts_travel and isinstance(before, ShardWritten)):
                self._on_part(stage, message)  # another machine may write other bytes
        return True

    def _is_late(self, stage: int, message: msg.OfStage) -> bool:
        """Whether this is of a process that was given up and lives: its successor is not linked."""
        if self.phase in _START or stage not in self._coming:
            return False
        is_early = isinstance(message, msg.Linked) and not self._is_linking
        return is_early or isinstance(message, Report | msg.Finished)

    def _caught_up(self, stage: int, now: float) -> Commands:
        if stage not in self._lost_at:
            if not self._lost_at:
                self._deaths.clear()
            return []
        seconds = now - self._lost_at.pop(stage)
        self._watch.caught_up(stage)
        note = f"stage {stage} is back after {seconds:.1f} s; no other stage trained a step again"
        settled = [c for step in sorted(self._parts) for c in self._settle_checkpoint(step)]
        return [ev.Say(note), *settled, *self._tell_saved()]

    def _tell_saved(self) -> Commands:
        """What stages sent before a complete checkpoint is needed no more, unless one is behind."""
        if self._lost_at or self._complete <= self._saved or not self._together:
            return []
        self._saved = self._complete
        linked = [s for group, one in self._followers.items() if one.is_linked for s in group]
        followed = [ev.Tell(s, msg.Saved(self._saved), follows=True) for s in linked]
        return [*self._tell_all(msg.Saved(self._saved)), *followed]

    def _end(self, error: BaseException | None = None, culprit: ev.Suspect | None = None) -> ev.End:
        self.phase = Phase.FINISHED
        return ev.End(error, culprit)

    def _tell_all(self, message: msg.ToStage) -> Commands:
        """Who takes a lost one's place hears it once it trains."""
        return [ev.Tell(stage, message) for stage in self._all if stage not in self._coming]


def _kind_of(ready: msg.Ready) -> list[str | None]:
    """The kind of machine that a stage is on: of one kind two compute the same bits."""
    return [ready.device, *map(ready.versions.get, ("torch", "machine", "processor"))]


def _sum(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What two processes of a stage have moved together, by all that meters tell apart."""
    both = {
        key: _sum(one[key], other[key]) if isinstance(one[key], dict) else one[key] + other[key]
        for key in one.keys() & other.keys()
    }
    return {**one, **other, **both}


def settled_checkpoint(
    step: int, parts: Sequence[ShardWritten | ShardFailed]
) -> tuple[ev.Commit | ev.Discard, StageError | None]:
    """What becomes of the parts of all stages, in order; an error ends the run."""
    written = [part for part in parts if isinstance(part, ShardWritten)]
    failures = [part.error for part in parts if isinstance(part, ShardFailed)]
    if len({part.versions for part in written}) > 1:
        counted = "; ".join(f"stage {s}: {part.versions}" for s, part in enumerate(written))
        failures.append(f"stages do not agree on what they have saved: {counted}")
    if failures:
        return ev.Discard(step, failures[0]), None
    if difference := disagreement(step, [part.agreements for part in written]):
        return ev.Discard(step), StageError(difference)
    return ev.Commit(step, written), None


def disagreement(step: int, agreements: list[reports.Agreements]) -> str:
    """Why a run cannot go on: two ends of a cut remember different things; stages in order."""
    for below, above in itertools.pairwise(agreements):
        for cut in sorted(below.keys() & above.keys()):
            for leg, ours in below[cut].items():
                if ours != (theirs := above[cut].get(leg)):
                    return (
                        f"after step {step} the two ends of cut {cut} no longer remember the same "
                        f"on the {leg} leg (below {ours or 'nothing'}, above {theirs or 'nothing'})"
                        ": what the codec makes of the bytes is not what was sent. This checkpoint "
                        "is not kept; resume from an earlier one"
                    )
    return ""
