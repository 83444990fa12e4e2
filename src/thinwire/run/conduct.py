"""What one peer may say in its place, beyond the form of each message."""

from collections.abc import Iterable
from typing import NoReturn

from thinwire.engine.finite import GRADIENT, INPUT, NORMS, PLACES
from thinwire.engine.reports import Evaluation, Meters, ShardFailed, ShardWritten, Step
from thinwire.errors import WireError, printable
from thinwire.run.messages import Failed, Finished, FromPeer, Hello, LinkDown, LinkUp, name_of

# What a report may hold, for reports of fast stages wait until those of slow ones are there
MOST_MICROBATCHES = 1 << 12
SPANS, OTHER_SPANS = 10, 64  # for each microbatch, and beside them
LONGEST_LABEL = 24
MOST_MEASURES = 32


class PeerConduct:
    """The results of one stage so far, which decide what it may send next.

    `check` is called with every message of that peer, in order, and raises WireError at the first
    that does not fit: it belongs to another stage, or to no step.
    """

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
        self._step: int | None = None
        self._once: dict[str, int] = {}  # for what comes once a step at most: the latest step

    def check(self, message: FromPeer) -> None:
        """Refuse what does not fit this stage."""
        name = name_of(message)
        match message:
            case Hello(stage=stage) if stage != self._stage:
                self._refuse(name, f"as stage {stage}")
            case Step():
                self._check_meters(name, message.meters)
                self._check_step(message)
            case Evaluation(step=step):
                if not self._is_last:
                    self._refuse(name, "that only the last stage may send")
                self._check_order(name, step)
            case ShardWritten(step=step, shard=shard):
                if shard.file != f"stage-{self._stage}.safetensors":
                    self._refuse(name, f"of the file {shard.file!r}")
                self._check_order(name, step)
            case ShardFailed(step=step):
                self._check_order(name_of(ShardWritten), step)
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

    def _check_meters(self, name: str, meters: Meters) -> None:
        if meters.keys() != self._links:
            self._refuse(name, f"with meters of {_listed(meters)}")

    def _check_step(self, report: Step) -> None:
        if self._step is not None and report.step != self._step + 1:
            self._refuse("step", f"{report.step} after step {self._step}")
        self._step = report.step
        if (report.loss is None) == self._is_last:
            self._refuse("step", "without its loss" if self._is_last else "with a loss")
        if report.not_finite not in self._places:
            place = printable(report.not_finite, 40)
            self._refuse("step", f"with non-finite values in {place!r}")
        if len(report.spans) > self._most_spans:
            self._refuse("step", f"with {len(report.spans)} spans of time")
        if len(report.measures) > MOST_MEASURES:
            self._refuse("step", f"with {len(report.measures)} measures")
        if any(len(label) > LONGEST_LABEL for _, label, *_ in report.spans):
            self._refuse("step", "with a span of time whose name has no end")

    def _check_order(self, name: str, step: int) -> None:
        """Results of a step come after it, once: otherwise they could pile up without limit."""
        if self._step is not None and step != self._step + 1:
            self._refuse(name, f"of step {step} after step {self._step + 1}")
        if step <= self._once.get(name, -1):
            self._refuse(name, f"of step {step} twice")
        self._once[name] = step

    def _refuse(self, name: str, what: str) -> NoReturn:
        raise WireError(f"stage {self._stage} sent a {name!r} message {what}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "no link"
