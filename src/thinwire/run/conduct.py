"""What one peer may say in its place, and what all do together, beyond the form of each message."""

from collections.abc import Iterator
from typing import NoReturn

from thinwire.engine.reports import Evaluation, Meters, Report, ShardFailed, ShardWritten, Step
from thinwire.engine.trace import GRADIENT, INPUT, NORMS, PLACES
from thinwire.engine.worker import PATIENCE
from thinwire.errors import WireError, printable
from thinwire.run.protocol import Failed, Finished, LinkDown, LinkUp, OfStage
from thinwire.settings import Settings
from thinwire.settings.crossing import checkpoint_steps

# What a report may hold, for reports of fast stages wait until those of slow ones are there
MOST_MICROBATCHES = 1 << 12
SPANS, OTHER_SPANS = 10, 64  # for each microbatch, and beside them
LONGEST_LABEL = 24
MOST_MEASURES = 32


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
        self._is_down = False  # the link to the stage below
        self._most_spans = SPANS * microbatches + OTHER_SPANS
        self._latest: dict[type, int] = {}  # the step of the last report of each kind

    def check(self, message: OfStage) -> None:
        """WireError for a message, of all in order, that is of another stage, or of no step."""
        name = type(message).__name__
        match message:
            case Step():
                self._check_meters(name, message.meters)
                self._check_step(message)
            case Evaluation(step=step):
                if not self._is_last:
                    self._refuse(name, "that only the last stage may send")
                self._check_order(Evaluation, step)
            case ShardWritten(step=step, shard=shard):
                if shard.file != f"stage-{self._stage}.safetensors":
                    self._refuse(name, f"of the file {shard.file!r}")
                self._check_order(ShardWritten, step)
            case ShardFailed(step=step):
                self._check_order(ShardWritten, step)
            case LinkDown(cut=cut) | LinkUp(cut=cut) if cut != self._stage - 1:
                self._refuse(name, f"of cut {cut}")
            case LinkDown() | LinkUp():
                if self._is_down != isinstance(message, LinkUp):
                    self._refuse(name, "twice")
                self._is_down = not self._is_down
            case Finished(meters=meters):
                self._check_meters(name, meters)
            case Failed() if not {*message.accuses, *message.convicts} <= self._others:
                self._refuse(name, "that blames an unknown stage")

    def has_reported(self, report: Report) -> bool:
        """Whether it has reported this step before, or a later one, in a report of this kind."""
        kind = ShardWritten if isinstance(report, ShardFailed) else type(report)
        return report.step <= self._latest.get(kind, -1)

    def begin_anew(self) -> None:
        """Another process is this stage: it goes on where the lost one was."""
        self._is_down = False

    def _check_meters(self, name: str, meters: Meters) -> None:
        if meters.keys() != self._links:
            self._refuse(name, f"with meters of {', '.join(sorted(meters)) or 'no link'}")

    def _check_step(self, report: Step) -> None:
        place, labels = printable(report.not_finite, 40), (label for _, label, *_ in report.spans)
        last = self._latest.get(Step)
        wrong = {
            f"{report.step} after step {last}": last not in (None, report.step - 1),
            "without its loss": self._is_last and report.loss is None,
            "with a loss": not self._is_last and report.loss is not None,
            f"with non-finite values in {place!r}": report.not_finite not in self._places,
            f"with {len(report.spans)} spans of time": len(report.spans) > self._most_spans,
            f"with {len(report.measures)} measures": len(report.measures) > MOST_MEASURES,
            "with a span of time whose name has no end": any(
                len(label) > LONGEST_LABEL for label in labels
            ),
        }
        for what in (what for what, is_so in wrong.items() if is_so):
            self._refuse("Step", what)
        self._latest[Step] = report.step

    def _check_order(self, kind: type, step: int) -> None:
        """Results of a step come after it, once: otherwise they could pile up without limit."""
        last = self._latest.get(Step)
        if last is not None and step != last + 1:
            self._refuse(kind.__name__, f"of step {step} after step {last + 1}")
        if step <= self._latest.get(kind, -1):
            self._refuse(kind.__name__, f"of step {step} twice")
        self._latest[kind] = step

    def _refuse(self, name: str, what: str) -> NoReturn:
        raise WireError(f"stage {self._stage} sent a {name} message {what}")


class Course:
    """Verifies what stages do after each step: save, end, both or neither.

    No step waits for the coordinator: the first stage decides, and its verdict tells the others.
    But what is due follows from the settings and from what the coordinator asked. So the first
    stage must do that, and the others what the first does: what they all do is its deed.
    """

    def __init__(self, settings: Settings, first_step: int, stages: int):
        self._settings, self._first = settings, first_step
        self._saves_after = checkpoint_steps(settings)
        self._done = [first_step] * stages
        self._decided = [first_step - 1] * stages  # until where it is known what they did
        self._deeds: list[set[tuple[int, str]]] = [set() for _ in range(stages)]
        self._settled = first_step - 1  # what all did until here has been compared
        self._is_committed, self._misses = False, 0  # as the first stage says
        self._gives_up = False

    def faults(self, stage: int, report: OfStage, stop_asked: bool) -> list[tuple[int, str]]:
        """Stages that a report shows to be at fault, with what each did."""
        return [*self._own_faults(stage, report, stop_asked), *self._differences(stage)]

    def _own_faults(
        self, stage: int, report: OfStage, stop_asked: bool
    ) -> Iterator[tuple[int, str]]:
        done, steps = self._done[stage], self._settings.train.steps
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
                self._decided[stage], self._done[stage] = done, step + 1
            case ShardWritten(step=step) | ShardFailed(step=step):
                is_due = self._saves_after(done) or is_stop_due
                if step != done or step == self._first:
                    yield stage, f"it saved a checkpoint of step {step} after step {done}"
                elif stage == 0 and not (is_due and self._is_committed):
                    yield 0, f"it had a checkpoint saved after step {done}, where none is due"
                self._deeds[stage].add((step, "saved a checkpoint"))
            case Finished() if done <= self._settled:
                pass  # all had ended here; then it was lost, and another ends in its place
            case Finished():
                if stage == 0:
                    if done < steps and not is_stop_due:
                        of = f"step {done} of {steps}"
                        yield 0, f"it ended the run after {of}, and nobody had asked it to stop"
                    is_due = self._saves_after(done) or done < steps
                    yield from self._omission(is_due)
                self._decided[stage] = done
                self._deeds[stage].add((done, "ended"))

    def _omission(self, is_due: bool) -> Iterator[tuple[int, str]]:
        """The first stage goes on: the checkpoint of its last step is due, and was not saved."""
        done = self._done[0]
        is_saved = (done, "saved a checkpoint") in self._deeds[0]
        if is_due and self._is_committed and not is_saved:
            yield 0, f"it had no checkpoint saved after step {done}, where one is due"

    def _differences(self, stage: int) -> Iterator[tuple[int, str]]:
        """What other stages did, and the first did not; or the first, and they did not."""
        for other in [stage] if stage else range(1, len(self._done)):
            known = min(self._decided[0], self._decided[other])
            for step, deed in sorted(self._deeds[0] ^ self._deeds[other]):
                if step <= known and (step, deed) in self._deeds[other]:
                    yield other, f"it {deed} after step {step}, and stage 0 did not"
                elif step <= known:
                    yield other, f"stage 0 {deed} after step {step}, and it did not"
        self._settled = min(self._decided)
        for deeds in self._deeds:
            deeds -= {(step, deed) for step, deed in deeds if step <= self._settled}
