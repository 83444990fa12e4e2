"""What a host and the peers that joined it say to each other, beside the control streams of stages.

All of it is repeatable: a stream that broke is opened anew, and whoever arrives again is told again
what holds. So nothing needs to be numbered or acknowledged.
"""

from dataclasses import dataclass, field
from typing import Any

from thinwire.run.machine import Machine
from thinwire.run.vocabulary import Vocabulary
from thinwire.typed import Exact


@dataclass(frozen=True)
class Arrive:
    """A peer is there: what it is, what it can do, and what it is doing for this run.

    `door` is the address at which its own processes find its door, and `outside` the one that
    others may reach it by; both are empty where it has none. `process` is drawn anew by every
    process that joins, and `place` says to people where that is.
    """

    versions: dict[str, str]
    machine: Machine
    door: Exact
    outside: Exact
    epoch: int  # of the seat that it has, 0 for none
    stage: int
    is_running: bool  # the process of that seat
    process: Exact = ""
    place: str = ""


@dataclass(frozen=True)
class Doing:
    """What a peer does before its stage can start, for whoever waits."""

    epoch: int
    text: str


@dataclass(frozen=True)
class Prepared:
    """A peer has all that its stage needs, the corpus perhaps excepted."""

    epoch: int
    has_corpus: bool


@dataclass(frozen=True)
class Declined:
    """A peer cannot take the seat."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class Ended:
    """The process of a peer's stage has ended."""

    epoch: int
    code: int  # of the exit, 256 and more for signals
    words: str


@dataclass(frozen=True)
class Alive:
    """A peer's answer to AskAlive."""


@dataclass(frozen=True)
class Leaving:
    """A peer wants to leave after this step."""


@dataclass(frozen=True)
class Tried:
    """Which addresses of its invite a peer reaches: why not, or an empty text, by address."""

    answers: dict[str, str]


@dataclass(frozen=True)
class TakeSeat:
    """A peer is to hold a stage: data alone, for paths and devices are its own.

    `corpus` is the fingerprint of the data; `resumes` says whether there is a checkpoint to fetch.
    `links` is the token by which the peers of this epoch meet at each other's doors.
    """

    epoch: int
    stage: int
    settings: dict[str, Any]
    resumes: bool
    corpus: Exact
    links: Exact = field(default="", repr=False)


@dataclass(frozen=True)
class AskAlive:
    """A peer is to answer at once: another process shows its key."""


@dataclass(frozen=True)
class Launch:
    """All peers are prepared: start the process of the stage."""

    epoch: int


@dataclass(frozen=True)
class Vacate:
    """The epoch is over: end the process of the stage, and wait for another seat."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class News:
    """Something that everybody in the run should see."""

    text: str


@dataclass(frozen=True)
class StepNews:
    """A step of the run, as everybody sees it."""

    step: int
    steps: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    step_seconds: float
    eta_seconds: float


@dataclass(frozen=True)
class ScoreNews:
    """A validation of the run."""

    step: int
    loss: float
    bits_per_byte: float | None


@dataclass(frozen=True)
class TryDoor:
    """A peer is to try the addresses of the host that its own invite names, and no others."""


@dataclass(frozen=True)
class Dismiss:
    """A peer is to leave: the run is over, or it is not wanted."""

    reason: str
    in_order: bool


FromMember = Arrive | Alive | Doing | Prepared | Declined | Ended | Leaving | Tried
FromHost = AskAlive | TakeSeat | Launch | Vacate | News | StepNews | ScoreNews | TryDoor | Dismiss

LOBBY = Vocabulary(
    {
        "arrive": Arrive,
        "alive": Alive,
        "doing": Doing,
        "prepared": Prepared,
        "declined": Declined,
        "ended": Ended,
        "leaving": Leaving,
        "tried": Tried,
        "ask_alive": AskAlive,
        "take_seat": TakeSeat,
        "launch": Launch,
        "vacate": Vacate,
        "news": News,
        "step_news": StepNews,
        "score_news": ScoreNews,
        "try_door": TryDoor,
        "dismiss": Dismiss,
    }
)
SIGNALLED = 256  # added to the number of the signal that ended a process


def lobby_name(peer: str) -> str:
    """What the stream between a host and one peer is called."""
    return f"lobby-{peer}"


def store_name(peer: str) -> str:
    """What the stream is called by which the host fetches a peer's shards."""
    return f"store-{peer}"


def seat_name(stage: int, epoch: int) -> str:
    """What the stream is called by which a peer fetches what its stage needs."""
    return f"seat-{stage}@{epoch}"


def code_of(returncode: int) -> int:
    """The exit code of a process as it travels: no message has negative numbers."""
    return SIGNALLED - returncode if returncode < 0 else returncode


def returncode_of(code: int) -> int:
    """The inverse of `code_of`."""
    return SIGNALLED - code if code > SIGNALLED else code
