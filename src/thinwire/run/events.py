"""The events that the coordinator gets, and the commands that it gives."""

import msgspec

from thinwire.engine.reports import Evaluation, ShardWritten, Step
from thinwire.run.protocol import Finished, LinkUp, OfStage, Ready, ToStage


class Event(msgspec.Struct, frozen=True):
    """What the coordinator is told."""


class Said(Event, frozen=True):
    """A stage has said something; or the process that follows it."""

    stage: int
    message: OfStage
    follows: bool = False


class Exited(Event, frozen=True):
    """The process of a stage has ended."""

    stage: int
    code: int


class Lost(Event, frozen=True):
    """The control stream of a stage, or of a member, is over; in breach: by what it has sent."""

    stage: int
    error: str
    in_breach: bool = False


class Given(Event, frozen=True):
    """Another process begins to hold these stages, which were lost: it is waited for from now."""

    stages: list[int]


class Away(Event, frozen=True):
    """The control stream of a stage on another machine is down, or a member's; it may come back."""

    stage: int
    reason: str


class Back(Event, frozen=True):
    """It is back, after so many seconds."""

    stage: int
    seconds: float


class Travelled(Event, frozen=True):
    """A reported part of a checkpoint is here, and was opened; or with an error, will not come."""

    stage: int
    step: int
    error: str = ""
    at_fault: bool = False  # what came is not the state of the stage


class FollowerLost(Event, frozen=True):
    """The process that follows these stages is gone."""

    stages: list[int]


class Completed(Event, frozen=True):
    """The checkpoint of a step is complete, on this machine."""

    step: int


class MoveAsked(Event, frozen=True):
    """Whoever follows these stages is to hold them: if it keeps up, or at once in any case."""

    stages: list[int]
    reason: str
    at_once: bool = False


class StopAsked(Event, frozen=True):
    """The user asks the run to end; or it is to be formed again, and this is why."""

    why: str = ""


class Tick(Event, frozen=True):
    """Time passes, and nothing else happened."""


class Command(msgspec.Struct, frozen=True):
    """What the coordinator wants done."""


class Tell(Command, frozen=True):
    """Send a message to a stage; or to the process that follows it."""

    stage: int
    message: ToStage
    follows: bool = False


class Say(Command, frozen=True):
    """Tell the user; what is `for_us` alone is not for the peers of a hosted run."""

    text: str
    for_us: bool = False


class Starting(Command, frozen=True):
    """Show how far the start is: so many stages have come to this point."""

    stages: int
    what: str


class Begin(Command, frozen=True):
    """All stages have begun to train: what they are, and what computes them."""

    stages: list[Ready]


class Record(Command, frozen=True):
    """Keep what a stage reports."""

    stage: int
    report: Step | Evaluation | LinkUp | Finished


class Commit(Command, frozen=True):
    """All stages have written their parts of a checkpoint, and they agree: complete it."""

    step: int
    parts: list[ShardWritten]


class Discard(Command, frozen=True):
    """A checkpoint cannot be completed: remove it. With an error the run goes on without it."""

    step: int
    error: str = ""


class Replace(Command, frozen=True):
    """Have others hold lost stages: their follower, or another from the last checkpoint on."""

    stages: list[int]
    by_follower: bool = False


class DropFollower(Command, frozen=True):
    """The process that follows these stages can do so no more: let it go."""

    stages: list[int]


class Suspect(msgspec.Struct, frozen=True):
    """A stage that may be the cause of a failure."""

    doubt: int  # how unsure the evidence leaves us of that
    stage: int
    deed: str
    reason: str
    known: bool = False  # else only its log explains the error


class End(Command, frozen=True):
    """The run is over: in good order, or with this error."""

    error: BaseException | None = None
    culprit: Suspect | None = None
