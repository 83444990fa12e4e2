"""What coordinator and peers say to each other: frozen dataclasses, checked on arrival.

A peer that holds a certificate may still send nonsense: an older release, a defect, ill will. So
nothing of a message is used before every field is there and of its kind. What is wrong is the
sender's error, a WireError that names the field, and text from a peer loses its control characters.

In between, within a process, a message is a plain dictionary with its `type`.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, ClassVar, get_type_hints

from thinwire.engine import reports
from thinwire.engine.reports import Report
from thinwire.errors import WireError, printable
from thinwire.run.compact import compact_step, deflate, expand_step, inflate

Message = dict[str, Any]
Check = Callable[[Any], Any]
"""The value as it may be used; ValueError, with what it should have been, if it may not."""

MAX_MESSAGE = 16 << 20
_LONGEST = 1 << 16  # characters of a text, entries of a list or a table
_LARGEST = 1 << 63


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
        raise ValueError("an integer, 0 or more")
    return value


def _number(value: Any) -> float:
    """Any float: a loss or a norm may well be NaN or infinite, and that is news to pass on."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a number")
    return value if abs(value) < _LARGEST else float(value)


def _finite(value: Any) -> float:
    if not math.isfinite(_number(value)):
        raise ValueError("a finite number")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _exact(value: Any) -> str:
    """Text that is used, not shown, such as a path: it stays as it is."""
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise ValueError(f"text of at most {_LONGEST} characters")
    return value


def _text(value: Any) -> str:
    return printable(_exact(value))


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("an object")
    return value


def _table(check: Check) -> Check:
    def table(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > _LONGEST:
            raise ValueError("an object")
        return {_text(key): check(entry) for key, entry in value.items()}

    return table


def _many(check: Check) -> Check:
    def many(value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) > _LONGEST:
            raise ValueError("a list")
        return [check(entry) for entry in value]

    return many


def _or_none(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _span(value: Any) -> tuple[str, str, float, float]:
    if not isinstance(value, list | tuple) or len(value) != 4:
        raise ValueError("spans of lane, label, start and end")
    lane, label, start, end = value
    return _text(lane), _text(label), _finite(start), _finite(end)


def _record(**checks: Check) -> Check:
    """An object of exactly these fields."""

    def record(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or value.keys() != checks.keys():
            raise ValueError(f"an object of {', '.join(checks)}")
        return {name: check(value[name]) for name, check in checks.items()}

    return record


# As Shard of checkpoint.py, Runner.costs and Meter.snapshot have them.
_shard = _record(file=_text, sha256=_text, bytes=_count, tensors=_many(_exact))
_costs = _record(forward=_finite, backward=_finite, update=_finite)
_frames = _table(_record(frames=_count, header_bytes=_count, payload_bytes=_count))
_meters = _table(_record(sent=_frames, received=_frames))


@dataclass(frozen=True)
class Hello:
    """A peer has dialed the coordinator."""

    type: ClassVar = "hello"
    stage: Annotated[int, _count]
    versions: Annotated[dict[str, str], _table(_text)]


@dataclass(frozen=True)
class Assign:
    """The coordinator says what a stage is to be."""

    type: ClassVar = "assign"
    settings: Annotated[dict[str, Any], _object]
    corpus: Annotated[str, _exact]
    run_folder: Annotated[str, _exact]
    resume: Annotated[str, _exact]


@dataclass(frozen=True)
class Ready:
    """A stage is built, and listens at this address if there is a stage above it."""

    type: ClassVar = "ready"
    address: Annotated[str, _text]
    layers: Annotated[str, _text]
    device: Annotated[str, _text]


@dataclass(frozen=True)
class Connect:
    """The coordinator says where the stage below listens."""

    type: ClassVar = "connect"
    below: Annotated[str, _exact]


@dataclass(frozen=True)
class Linked:
    """A stage has its links, and both ends agree on their contract."""

    type: ClassVar = "linked"


@dataclass(frozen=True)
class Start:
    """All stages are linked: train."""

    type: ClassVar = "start"


@dataclass(frozen=True)
class Stop:
    """Stop after this step, with a checkpoint."""

    type: ClassVar = "stop"


@dataclass(frozen=True)
class Pulse:
    """What a stage is doing, and how many pieces of work it has begun: sent now and then."""

    type: ClassVar = "pulse"
    begun: Annotated[int, _count]
    doing: Annotated[str, _text]


@dataclass(frozen=True)
class Step:
    """One step of one stage; the loss is known on the last stage alone."""

    type: ClassVar = "step"
    step: Annotated[int, _count]
    loss: Annotated[float | None, _or_none(_number)]
    lr: Annotated[float, _number]
    grad_norm: Annotated[float, _number]
    committed: Annotated[bool, _flag]
    start: Annotated[float, _finite]
    end: Annotated[float, _finite]
    wait: Annotated[float, _finite]
    costs: Annotated[dict[str, float], _costs]
    spans: Annotated[list[tuple[str, str, float, float]], _many(_span)]
    measures: Annotated[dict[str, float], _table(_number)]
    meters: Annotated[dict[str, Any], _meters]
    dropped: Annotated[int, _count]


@dataclass(frozen=True)
class Evaluation:
    """A validation, scored by the last stage."""

    type: ClassVar = "evaluation"
    step: Annotated[int, _count]
    loss: Annotated[float, _number]
    accuracy: Annotated[float | None, _or_none(_number)]
    seconds: Annotated[float, _finite]


@dataclass(frozen=True)
class ShardWritten:
    """A stage's part of a checkpoint is on disk."""

    type: ClassVar = "shard"
    step: Annotated[int, _count]
    versions: Annotated[dict[str, int], _record(weight_version=_count, basis_version=_count)]
    shard: Annotated[dict[str, Any], _shard]
    agreements: Annotated[dict[str, dict[str, str]], _table(_table(_text))]


@dataclass(frozen=True)
class ShardFailed:
    """A stage could not write its part of a checkpoint."""

    type: ClassVar = "shard_failed"
    step: Annotated[int, _count]
    error: Annotated[str, _text]


@dataclass(frozen=True)
class Finished:
    """A stage is done; what each of its links has moved, to the goodbye."""

    type: ClassVar = "finished"
    meters: Annotated[dict[str, Any], _meters]


@dataclass(frozen=True)
class Failed:
    """A stage cannot go on; it accuses neighbours it lost, and convicts who broke a contract."""

    type: ClassVar = "failed"
    kind: Annotated[str, _text]
    known: Annotated[bool, _flag]
    error: Annotated[str, _text]
    trace: Annotated[str, _text]
    accuses: Annotated[list[int], _many(_count)]
    convicts: Annotated[list[int], _many(_count)]


_FROM_PEERS = (
    Hello, Ready, Linked, Pulse, Step, Evaluation, ShardWritten, ShardFailed, Finished, Failed,
)  # fmt: skip
_FROM_COORDINATOR = (Assign, Connect, Start, Stop)
_KINDS: dict[str, type[Any]] = {kind.type: kind for kind in (*_FROM_PEERS, *_FROM_COORDINATOR)}
# The checks of each message's fields, as their annotations have them.
_CHECKS: dict[type[Any], dict[str, Check]] = {
    kind: {
        part.name: get_type_hints(kind, include_extras=True)[part.name].__metadata__[0]
        for part in fields(kind)
    }
    for kind in _KINDS.values()
}


def plain(report: Report) -> Message:
    """What a worker reports, as a message."""
    name = {reports.ShardWritten: "shard", reports.ShardFailed: "shard_failed"}
    return {"type": name.get(type(report), type(report).__name__.lower()), **asdict(report)}


def pack(message: Message) -> bytes:
    """A message as it travels; WireError if it is none, so that a defect shows at its sender."""
    checked = _checked(message)
    return deflate(compact_step(checked) if checked["type"] == Step.type else checked)


def unpack(payload: bytes) -> Message:
    """The message of a payload, every field checked; WireError names what is wrong with it."""
    try:
        message = inflate(payload, MAX_MESSAGE)
    except ValueError as error:
        raise WireError(f"a control message cannot be read: {printable(str(error), 200)}") from None
    if isinstance(message, dict) and message.get("type") == Step.type:
        try:
            message = expand_step(message)
        except ValueError as error:
            raise WireError(f"a 'step' message has {error}") from None
    return _checked(message)


def _checked(message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise WireError("a control message must be an object with a type")
    kind = _KINDS.get(message["type"])
    if kind is None:
        raise WireError(f"a control message of unknown type: {_quoted(message['type'])}")
    wanted = _CHECKS[kind]
    for name in message.keys() - wanted.keys() - {"type"}:
        raise WireError(f"a {kind.type!r} message has an unknown field: {_quoted(name)}")
    values = {}
    for name, check in wanted.items():
        if name not in message:
            raise WireError(f"a {kind.type!r} message has no field {name!r}")
        try:
            values[name] = check(message[name])
        except (ValueError, OverflowError) as error:
            raise WireError(
                f"a {kind.type!r} message has {name} = {_quoted(message[name])}, which must be "
                f"{error}"
            ) from None
    return {"type": kind.type, **vars(kind(**values))}


def _quoted(value: Any) -> str:
    return printable(repr(value), 100)


class PeerConduct:
    """What one peer may say in its place, beyond the form of each message.

    `check` is called with every message of that peer, in order, and raises WireError at the first
    that this stage cannot mean: it would be filed under another stage, or fit into no step.
    """

    def __init__(self, stage: int, stages: int):
        self._stage = stage
        self._others = set(range(stages)) - {stage}
        self._is_last = stage == stages - 1
        cuts = {stage - 1, stage} & set(range(stages - 1))
        self._links = {f"boundary-{cut}" for cut in cuts}
        self._step: int | None = None
        self._once: dict[str, int] = {}  # for what comes once a step at most: the latest step

    def check(self, message: Message) -> None:
        """Refuse what does not fit this stage."""
        kind = message["type"]
        if _KINDS[kind] not in _FROM_PEERS:
            self._refuse(kind, "which only a coordinator sends")
        if kind == "hello" and message["stage"] != self._stage:
            self._refuse(kind, f"as stage {message['stage']}")
        if kind in ("step", "finished") and message["meters"].keys() != self._links:
            self._refuse(kind, f"with meters of {_listed(message['meters'])}")
        if kind == "step":
            self._check_step(message)
        if kind == "evaluation" and not self._is_last:
            self._refuse(kind, "which only the last stage can score")
        if kind == "shard" and message["shard"]["file"] != f"stage-{self._stage}.safetensors":
            self._refuse(kind, f"of the file {message['shard']['file']!r}")
        if kind in ("evaluation", "shard", "shard_failed"):
            self._check_order("shard" if kind == "shard_failed" else kind, message["step"])
        if kind == "failed" and not {*message["accuses"], *message["convicts"]} <= self._others:
            self._refuse(kind, "that blames a stage which is not there")

    def _check_step(self, message: Message) -> None:
        if self._step is not None and message["step"] != self._step + 1:
            self._refuse("step", f"{message['step']} after step {self._step}")
        self._step = message["step"]
        if (message["loss"] is None) == self._is_last:
            self._refuse("step", "with a loss" if message["loss"] else "without its loss")

    def _check_order(self, kind: str, step: int) -> None:
        """Results of a step come after it, once: else they could be piled up without end."""
        if self._step is not None and step != self._step + 1:
            self._refuse(kind, f"of {step} steps after {self._step + 1}")
        if step <= self._once.get(kind, -1):
            self._refuse(kind, f"of step {step} twice")
        self._once[kind] = step

    def _refuse(self, kind: str, what: str) -> None:
        raise WireError(f"stage {self._stage} sent a {kind!r} message {what}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "no link"
