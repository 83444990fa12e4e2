"""What the coordinator and the stages of a run say to each other (vocabulary.py checks it)."""

from dataclasses import dataclass, field
from typing import Any

from thinwire.engine.reports import Evaluation, Meters, Report, ShardFailed, ShardWritten, Step
from thinwire.run.compact import compact_step, expand_step
from thinwire.run.vocabulary import Vocabulary
from thinwire.typed import Exact, Finite


@dataclass(frozen=True)
class Hello:
    """A peer has dialed the coordinator."""

    stage: int
    versions: dict[str, str]


@dataclass(frozen=True)
class Assign:
    """The coordinator says what a stage is to be."""

    settings: dict[str, Any]
    corpus: Exact
    run_folder: Exact
    resume: Exact


@dataclass(frozen=True)
class Ready:
    """A stage is built, and listens at this address if there is a stage above it.

    `key` is the fingerprint of the key by which its neighbours know it.
    """

    address: str
    layers: str
    device: str
    key: Exact = ""


@dataclass(frozen=True)
class Way:
    """A door at which two neighbours can meet: of one of them (direct), or of another (relayed)."""

    address: Exact
    kind: Exact
    token: Exact = field(repr=False)


@dataclass(frozen=True)
class Connect:
    """The coordinator says where the stage below listens, and who holds which stage.

    `seats` are the fingerprints of the keys of all stages. On other machines a stage below is
    reached by one of the ways in `reach`, the first that works, and a stage waits at the doors in
    `wait` for the one above it. `run` is by what doors know the run, and `word` ends
    the names of its links there: who is not told it, such as a peer that was removed from the run,
    cannot wait in another's place.
    """

    below: Exact
    seats: list[Exact] = field(default_factory=list)
    run: Exact = ""
    word: Exact = field(default="", repr=False)
    reach: list[Way] = field(default_factory=list)
    wait: list[Way] = field(default_factory=list)


@dataclass(frozen=True)
class Linked:
    """A stage has its links, and both ends agree on their contract.

    On other machines, `way` is the kind of way to the stage below.
    """

    way: str = ""


@dataclass(frozen=True)
class Start:
    """All stages are linked: train."""


@dataclass(frozen=True)
class Stop:
    """Stop after this step, with a checkpoint."""


@dataclass(frozen=True)
class Pulse:
    """What a stage is doing, and how many pieces of work it has begun: sent now and then."""

    begun: int
    doing: str


@dataclass(frozen=True)
class LinkDown:
    """The connection over a cut is lost; the stage above the cut, which dials, says so."""

    cut: int
    reason: str


@dataclass(frozen=True)
class LinkUp:
    """There is another connection over a cut, after so many seconds; `way` as in Linked."""

    cut: int
    seconds: Finite
    way: str = ""


@dataclass(frozen=True)
class Finished:
    """A stage is done; what each of its links has moved, to the goodbye."""

    meters: Meters


@dataclass(frozen=True)
class Failed:
    """A stage cannot go on; it accuses neighbours it lost, and convicts who broke a contract."""

    kind: str
    known: bool
    error: str
    trace: str
    accuses: list[int]
    convicts: list[int]


FromPeer = Hello | Ready | Linked | Pulse | LinkDown | LinkUp | Report | Finished | Failed
FromCoordinator = Assign | Connect | Start | Stop
Message = FromPeer | FromCoordinator

_USUAL_BYTES = 1 << 16
_LARGE = {
    "assign": 1 << 18,  # all settings
    "connect": 1 << 18,  # keys of all stages
    "failed": 1 << 18,  # a traceback
    "step": 1 << 20,  # some hundred bytes for each microbatch
    "shard": 1 << 20,  # the names of all tensors of a stage
}

CONTROL = Vocabulary(
    {
        "hello": Hello,
        "assign": Assign,
        "ready": Ready,
        "connect": Connect,
        "linked": Linked,
        "start": Start,
        "stop": Stop,
        "pulse": Pulse,
        "link_down": LinkDown,
        "link_up": LinkUp,
        "step": Step,
        "evaluation": Evaluation,
        "shard": ShardWritten,
        "shard_failed": ShardFailed,
        "finished": Finished,
        "failed": Failed,
    },
    small={"step": (compact_step, expand_step)},
    most=lambda name: _LARGE.get(name, _USUAL_BYTES),
)
name_of, pack, unpack = CONTROL.name_of, CONTROL.pack, CONTROL.unpack
