"""What peers may say and do, beyond the form of each message, and which of them ended a run."""

import signal
from collections.abc import Iterator, Sequence

from thinwire.engine.reports import Evaluation, Report, ShardFailed, ShardWritten, Step
from thinwire.engine.trace import BACKWARD, FORWARD, GRADIENT, INPUT, NORMS, PLACES
from thinwire.engine.worker import PATIENCE
from thinwire.errors import WireError, printable
from thinwire.run.events import Exited, Lost, Said, Suspect
from thinwire.run.protocol import Failed, Finished, LinkDown, LinkUp, OfStage
from thinwire.settings import Settings
from thinwire.settings.crossing import checkpoint_steps

# What a report may hold, for reports of fast stages wait until those of slow ones are there
MOST_MICROBATCHES = 1 << 12
SPANS, OTHER_SPANS = 10, 64  # for each microbatch, and beside them
Evidence = Said | Exited | Lost  # of what stages say, only that they failed
_SAVED, _ENDED = "saved a checkpoint", "ended"


class PeerConduct:
    """The results of one stage so far, which decide what it may send next."""

    def __init__(self, stage: int, stages: int, microbatches: int = MOST_MICROBATCHES):
        self._stage = stage
        self._others = set(range(stages)) - {stage}
        self._is_last = stage == stages - 1
        self._links = {f"cut-{cut}" for cut in (stage - 1, stage) if 0 <= cut < stages - 1}
        # nothing comes from below the first stage, and nothing from above the last
        nowhere = {INPUT} if stage == 0 else set()
        nowhere |= {GRADIENT, NORMS} if self._is_last else set()
        self._places = {"", *PLACES} - nowhere
        self.is_down = False  # the link to the stage below, as far as this process has said
        self._most_spans = SPANS * microbatches + OTHER_SPANS
        self._latest: dict[type, int] = {}  # the step of the last report of each kind

    def check(self, message: OfStage) -> None:
        """WireError for a message, of all in order, that is of another stage, or of no step."""
        for wrong in self._wrongs(message):
            raise WireError(f"stage {self._stage} sent a {type(message).__name__} message {wrong}")

    def has_reported(self, report: Report) -> bool:
        """Whether it has reported this step before, or a later one, in a report of this kind."""
        return report.step <= self._latest.get(_kind(report), -1)

    def _wrongs(self, message: OfStage) -> Iterator[str]:
        """What is wrong with a message; if nothing is, it is remembered."""
        last = self._latest.get(Step)
        if isinstance(message, Step | Finished) and message.meters.keys() != self._links:
            yield f"with meters of {', '.join(sorted(message.meters)) or 'no link'}"
        match message:
            case Step(step, loss, spans=spans, not_finite=place):
                if last not in (None, step - 1):
                    yield f"{step} after step {last}"
                if self._is_last != (loss is not None):
                    yield "without its loss" if self._is_last else "with a loss"
                if place not in self._places:
                    yield f"with non-finite values in {printable(place, 40)!r}"
                if len(spans) > self._most_spans:
                    yield f"with {len(spans)} spans of time"
                self._latest[Step] = step
            case Evaluation() if not self._is_last:
                yield "that only the last stage may send"
            case ShardWritten(shard=shard) if shard.file != f"stage-{self._stage}.safetensors":
                yield f"of the file {shard.file!r}"
            case Evaluation(step) | ShardWritten(step) | ShardFailed(step):
                # Results come after their step, once: else they could pile up without limit.
                if last is not None and step != last + 1:
                    yield f"of step {step} after step {last + 1}"
                if self.has_reported(message):
                    yield f"of step {step} twice"
                self._latest[_kind(message)] = step
            case LinkDown(cut) | LinkUp(cut):
                if cut != self._stage - 1:
                    yield f"of cut {cut}"
                if self.is_down != isinstance(message, LinkUp):
                    yield "twice"
                self.is_down = not self.is_down
            case Failed() if not {*message.accuses, *message.convicts} <= self._others:
                yield "that blames an unknown stage"


def _kind(report: Report) -> type[Report]:
    """What counts as one report of a step: a part of a checkpoint is written, or fails."""
    return ShardWritten if isinstance(report, ShardFailed) else type(report)


class Course:
    """Verifies what stages do after each step: save, end, both or neither.

    The first stage decides that, and its verdict tells the others. But what is due follows from the
    settings and from what the coordinator asked: so it must do that, and the others what it does.
    """

    def __init__(self, settings: Settings, first_step: int, stages: int):
        self._settings, self._first = settings, first_step
        self._saves_after = checkpoint_steps(settings)
        # What each stage did after the first step and each that it reported; the last may go on.
        self._deeds: list[list[frozenset[str]]] = [[frozenset()] for _ in range(stages)]
        self._is_committed, self._misses = False, 0  # as the first stage says
        self._gives_up = False

    def faults(self, stage: int, report: OfStage, stop_asked: bool) -> Iterator[tuple[int, str]]:
        """Stages that a report shows to be at fault, with what each did."""
        own, steps = self._deeds[stage], self._settings.train.steps
        at, done = len(own) - 1, self._first + len(own) - 1
        is_stop_due = stop_asked or self._gives_up
        match report:
            case Step(step=step, committed=committed):
                if step != done or step >= steps:
                    yield stage, f"it reported step {step + 1} after step {done} of {steps}"
                if stage == 0:
                    yield from self._omission(is_due=self._saves_after(done))
                    self._is_committed = committed
                    self._misses = 0 if committed else self._misses + 1
                    self._gives_up |= self._misses >= PATIENCE
                own.append(frozenset())
                yield from self._differences(stage, at)
            case ShardWritten(step=step) | ShardFailed(step=step):
                is_due = self._saves_after(done) or is_stop_due
                if step != done or step == self._first:
                    yield stage, f"it saved a checkpoint of step {step} after step {done}"
                elif stage == 0 and not (is_due and self._is_committed):
                    yield 0, f"it had a checkpoint saved after step {done}, where none is due"
                own[at] |= {_SAVED}
            case Finished() if _ENDED not in own[at]:  # else it was lost, and another ends for it
                if stage == 0:
                    if done < steps and not is_stop_due:
                        of = f"step {done} of {steps}"
                        yield 0, f"it ended the run after {of}, and nobody had asked it to stop"
                    yield from self._omission(self._saves_after(done) or done < steps)
                own[at] |= {_ENDED}
                yield from self._differences(stage, at)

    def _omission(self, is_due: bool) -> Iterator[tuple[int, str]]:
        """The first stage goes on: the checkpoint of its last step is due, and was not saved."""
        deeds, done = self._deeds[0][-1], self._first + len(self._deeds[0]) - 1
        if is_due and self._is_committed and _SAVED not in deeds:
            yield 0, f"it had no checkpoint saved after step {done}, where one is due"

    def _differences(self, stage: int, at: int) -> Iterator[tuple[int, str]]:
        """What others did after a step and the first did not, or the reverse, once it is known."""
        step = self._first + at
        for other in [stage] if stage else range(1, len(self._deeds)):
            if not (self._is_known(0, at) and self._is_known(other, at)):
                continue
            first, own = self._deeds[0][at], self._deeds[other][at]
            for deed in sorted(own - first):
                yield other, f"it {deed} after step {step}, and stage 0 did not"
            for deed in sorted(first - own):
                yield other, f"stage 0 {deed} after step {step}, and it did not"

    def _is_known(self, stage: int, at: int) -> bool:
        """Whether all is known that a stage did after this step: it has gone on, or ended."""
        deeds = self._deeds[stage][at : at + 2]
        return len(deeds) == 2 or (len(deeds) == 1 and _ENDED in deeds[0])


def blame(heard: list[Evidence]) -> Suspect:
    """The stage that really failed first, with the evidence.

    Whoever was accused by a neighbour and has said nothing is lost; one that has complained too was
    a victim, and its exit proves nothing. Who sent what the contract forbids is convicted by who
    got it, whatever it says itself.
    """
    complaints = {e.stage: e.message for e in heard if isinstance(e, Said)}
    victims = [e for e in heard if isinstance(e, Exited) and e.stage in complaints]
    suspects = [_suspect(event) for event in heard if event not in victims]
    for stage, complaint in complaints.items():
        assert isinstance(complaint, Failed), "of what stages say, only that is evidence"
        witness = f"stage {stage} says: {complaint.error}"
        lost = [Lost(s, witness) for s in complaint.accuses if s not in complaints]
        broke = [Lost(s, witness, in_breach=True) for s in complaint.convicts]
        suspects += map(_suspect, [*lost, *broke])
    return min(suspects, key=lambda suspect: suspect.doubt)


def first_not_finite(reports: Sequence[Step]) -> str:
    """Where in a step non-finite values first appeared, by the reports of all stages in order.

    They spread upward with the activations, then downward with the gradients, and at last with the
    tallies. A stage that sends them and does not say so is named by the stage that received them.
    """
    stages = range(len(reports))
    up = [(stage, place) for stage in stages for place in (INPUT, FORWARD)]
    down = [(stage, place) for stage in reversed(stages) for place in (GRADIENT, BACKWARD)]
    for stage, place in [*up, *down, *((stage, NORMS) for stage in reversed(stages))]:
        where = {
            INPUT: f"the activations that stage {stage - 1} sent",
            FORWARD: "its own forward pass",
            GRADIENT: f"the gradient that stage {stage + 1} sent",
            BACKWARD: "its own backward pass",
            NORMS: f"the gradient norms that stage {stage + 1} sent",
        }
        if reports[stage].not_finite == place:
            return f"non-finite values first appeared in stage {stage}, in {where[place]}"
    return ""


def _suspect(event: Evidence) -> Suspect:
    match event:
        case Lost(stage, error, in_breach=True):
            return Suspect(0, stage, "broke the contract", error, known=True)
        case Lost(stage, error):
            return Suspect(3, stage, "was lost", error)
        case Exited(stage, code):
            # On another machine the number is what a peer says: it may have no name here.
            names = {one.value: one.name for one in signal.Signals}
            killer = names.get(-code, f"signal {-code}")
            reason = f"killed by {killer}" if code < 0 else f"exit code {code}"
            return Suspect(1 if code else 6, stage, "died", reason)
        case Said(stage, Failed() as said):
            by_itself = said.kind not in ("WireError", "BreachError")
            doubt = 2 if by_itself else 5 if said.accuses else 4
            return Suspect(doubt, stage, "failed", said.error, said.known)
    raise AssertionError(f"{event} is no evidence")
