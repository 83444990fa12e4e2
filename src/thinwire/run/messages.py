"""What coordinator and peers say to each other: frozen dataclasses, checked on arrival.

A peer that holds a certificate may still send nonsense: an older release, a defect, malice. So
no message is used before every field is checked. A wrong or missing field is the sender's error, a
WireError that names it.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from thinwire.engine.reports import Evaluation, Meters, Report, ShardFailed, ShardWritten, Step
from thinwire.errors import WireError, printable
from thinwire.run.compact import compact_step, deflate, expand_step, inflate
from thinwire.run.fields import checked, hints_of
from thinwire.typed import Exact, Finite

MAX_MESSAGE = 16 << 20


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
    """A stage is built, and listens at this address if there is a stage above it."""

    address: str
    layers: str
    device: str


@dataclass(frozen=True)
class Connect:
    """The coordinator says where the stage below listens, and who holds which stage.

    Without seats, each stage is held by the process that was started for it.
    """

    below: Exact
    seats: list[Exact] = field(default_factory=list)


@dataclass(frozen=True)
class Linked:
    """A stage has its links, and both ends agree on their contract."""


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
    """There is another connection over a cut, after so many seconds."""

    cut: int
    seconds: Finite


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

_KINDS: dict[str, type[Message]] = {
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
}
_NAMES: dict[type, str] = {kind: name for name, kind in _KINDS.items()}


def name_of(message: Message | type) -> str:
    """What a kind of message is called on the wire."""
    return _NAMES[message if isinstance(message, type) else type(message)]


def pack(message: Message) -> bytes:
    """A message as it travels; WireError if it is malformed, so a defect shows at its sender."""
    plain = asdict(_checked(name_of(message), asdict(message)))
    small = compact_step(plain) if isinstance(message, Step) else plain
    return deflate({"type": name_of(message), **small})


def unpack(payload: bytes) -> Message:
    """The message of a payload, every field checked; WireError names what is wrong with it."""
    try:
        message = inflate(payload, MAX_MESSAGE)
    except ValueError as error:
        raise WireError(f"a control message cannot be read: {printable(str(error), 200)}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise WireError("a control message must be an object with a type")
    name = message.pop("type")
    if name == name_of(Step):
        try:
            message = expand_step(message)
        except ValueError as error:
            raise WireError(f"a 'step' message has {error}") from None
    return _checked(name, message)


def _checked(name: str, values: dict[str, Any]) -> Message:
    kind: Any = _KINDS.get(name)
    if kind is None:
        raise WireError(f"a control message of unknown type: {_quoted(name)}")
    wanted = hints_of(kind)
    for key in values.keys() - wanted.keys():
        raise WireError(f"a {name!r} message has an unknown field: {_quoted(key)}")
    fields = {}
    for key, hint in wanted.items():
        if key not in values:
            raise WireError(f"a {name!r} message has no field {key!r}")
        try:
            fields[key] = checked(hint, values[key])
        except (ValueError, OverflowError) as error:
            raise WireError(
                f"a {name!r} message has {key} = {_quoted(values[key])}, which must be {error}"
            ) from None
    return kind(**fields)


def _quoted(value: Any) -> str:
    return printable(repr(value), 100)
