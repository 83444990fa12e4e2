"""The events that the coordinator gets, and the commands that it gives."""

from dataclasses import dataclass

from thinwire.engine.reports import Audited, Evaluation, ShardWritten, Step
from thinwire.run.protocol import Finished, LinkUp, OfStage, Ready, ToStage


class Event:
    """What the coordinator is told."""


@dataclass(frozen=True)
class Said(Event):
    """A stage has said something."""

    stage: int
    message: OfStage


@dataclass(frozen=True)
class Exited(Event):
    """The process of a stage has ended."""

    stage: int
    code: int


@dataclass(frozen=True)
class Lost(Event):
    """The control stream of a stage is broken; in breach: by what the stage has sent."""

    stage: int
    error: str
    in_breach: bool = False


@dataclass(frozen=True)
class Stopped(Event):
    """The process of a stage on this machine is stopped, as SIGSTOP does; it may stay so."""

    stage: int


@dataclass(frozen=True)
class Given(Event):
    """Another process begins to hold these stages, which were lost: it is waited for from now."""

    stages: list[int]


@dataclass(frozen=True)
class Away(Event):
    """The control stream of a stage on another machine is down; it may come back."""

    stage: int
    reason: str


@dataclass(frozen=True)
class Back(Event):
    """The control stream of a stage is back, after so many seconds."""

    stage: int
    seconds: float


@dataclass(frozen=True)
class PartArrived(Event):
    """The part of a checkpoint that a stage has reported is on this machine, and was opened."""

    stage: int
    step: int


@dataclass(frozen=True)
class PartLost(Event):
    """The part of a checkpoint that a stage has reported will not come."""

    stage: int
    step: int
    error: str


@dataclass(frozen=True)
class PartRefused(Event):
    """The part of a checkpoint that a stage has sent is not its state: the stage is at fault."""

    stage: int
    step: int
    error: str


@dataclass(frozen=True)
class FollowerSaid(Event):
    """The process that follows a stage has said something."""

    stage: int
    message: OfStage


@dataclass(frozen=True)
class FollowerLost(Event):
    """The process that follows these stages is gone."""

    stages: list[int]


@dataclass(frozen=True)
class Completed(Event):
    """The checkpoint of a step is complete, on this machine."""

    step: int


@dataclass(frozen=True)
class MoveAsked(Event):
    """Whoever follows these stages is to hold them, though nobody was lost: once it keeps up."""

    stages: list[int]
    reason: str


@dataclass(frozen=True)
class StopAsked(Event):
    """The user asks the run to end, or a peer that leaves it (`who`)."""

    who: str = ""


@dataclass(frozen=True)
class Tick(Event):
    """Time passes, and nothing else happened."""


class Command:
    """What the coordinator wants done."""


@dataclass(frozen=True)
class Tell(Command):
    """Send a message to a stage."""

    stage: int
    message: ToStage


@dataclass(frozen=True)
class Say(Command):
    """Tell the user; what is `for_us` alone is not for the peers of a hosted run."""

    text: str
    for_us: bool = False


@dataclass(frozen=True)
class Starting(Command):
    """Show how far the start is: so many stages have come to this point."""

    stages: int
    what: str


@dataclass(frozen=True)
class Begin(Command):
    """All stages have begun to train: what they are, and what computes them."""

    stages: list[Ready]
    versions: dict[str, str]


@dataclass(frozen=True)
class Record(Command):
    """Keep what a stage reports."""

    stage: int
    report: Step | Evaluation | LinkUp | Finished


@dataclass(frozen=True)
class Exploded(Command):
    """The loss is far above its own past: what is saved from now on proves nothing."""

    text: str


@dataclass(frozen=True)
class Recovered(Command):
    """It is not any more."""

    text: str


@dataclass(frozen=True)
class Commit(Command):
    """All stages have written their parts of a checkpoint, and they agree: complete it."""

    step: int
    parts: list[ShardWritten]


@dataclass(frozen=True)
class Discard(Command):
    """A checkpoint cannot be completed: remove what was written of it.

    With an error the run goes on without it.
    """

    step: int
    error: str = ""


@dataclass(frozen=True)
class Replace(Command):
    """Have others hold these stages, which are lost: from the last complete checkpoint on."""

    stages: list[int]


class OfFollower(Command):
    """What it wants of a process that follows stages."""


@dataclass(frozen=True)
class TellFollower(OfFollower):
    """Send a message to the process that follows a stage."""

    stage: int
    message: ToStage


@dataclass(frozen=True)
class Promote(OfFollower):
    """The process that follows these stages holds them from now on."""

    stages: list[int]


@dataclass(frozen=True)
class DropFollower(OfFollower):
    """The process that follows these stages can do so no more: let it go."""

    stages: list[int]


@dataclass(frozen=True)
class Doubt(OfFollower):
    """What a stage sent is not what the process that follows it computes; with `replaces`, the
    machine that holds it gets no stage any more.
    """

    stage: int
    found: Audited
    replaces: bool


@dataclass(frozen=True)
class Suspect:
    """A stage that may be the cause of a failure, and how unsure the evidence leaves us of that.

    Where its error is not `known`, only its log or traceback explains it.
    """

    doubt: int
    stage: int
    deed: str
    reason: str
    known: bool = False
    trace: str = ""


@dataclass(frozen=True)
class End(Command):
    """The run is over: in good order, or with this error."""

    error: BaseException | None = None
    culprit: Suspect | None = None
