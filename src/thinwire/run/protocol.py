"""The protocol of a run: every message between the coordinator and its peers, and how it travels.

A peer, a machine or a process on the coordinator's own, has one stream to the coordinator. A
message is about the peer itself or about one of its stages, in one generation of the placement:

    peer                         coordinator
    Hello                 ->                       who it is, what it can do
                          <-     Hold              these stages (a process: Assignment)
    Pulse, Ready          ->                       builds them; each is ready
                          <-     Connect           where its neighbours are
    Linked                ->
                          <-     Start
    Step, Evaluation,
    ShardWritten, ...     ->     (Stop, Saved)     training; a step never waits for this stream
                          <-     Await, Connect    a neighbour is lost, another takes its place;
                                                   a process follows a stage, and takes its place
    Audited               ->                       ... and compares what both compute
    Finished or Failed    ->
                          <-     Leave             all stages have finished
    Ended                 ->                       the process of the stages has ended
                          <-     Release, Dismiss

Nothing is used before its types are checked; what a peer says is at most 1 MiB, without control
characters. Messages with secrets are dataclasses, which leave these out of what they print.
"""

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from thinwire.engine.reports import Audited, Meters, Report, Step
from thinwire.errors import WireError, printable
from thinwire.report import EvaluationRecord, StepRecord, Timeline
from thinwire.report.metrics import Row
from thinwire.run.machine import Machine
from thinwire.schedule import Costs, Links
from thinwire.typed import Finite, learn_types
from thinwire.wire import Identity, Route
from thinwire.wire.frame import counted

MOST_SAID = 1 << 20  # bytes of the largest message, not deflated
MAX_MESSAGE = 16 << 20  # ... of any stream to a coordinator: also one of token ids
OF_NO_STEP = -1
_SIGNALLED = 256  # added to the number of the signal that ended a process


# How a run stands: told to whoever asks on a machine, and to members


class PeerStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One peer as the host sees it. Times are seconds since 1970, 0 for unknown."""

    name: str
    state: str  # what it does, "waiting for a seat", UNREACHED, "away", "kicked"
    stages: list[int] = []
    blocks: str = ""  # "0..5", and of stages that are no neighbours "0..5, 9..11"
    last_word: float = 0.0  # when it was last heard
    is_this_machine: bool = False
    machine: Machine | None = None  # None while it is away


class LinkStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The link over one cut: which way it takes, and its bytes per second each way."""

    cut: int
    below: str
    above: str
    way: str = ""  # "direct", "relayed", "" = not connected
    forward_bytes_per_s: float = 0.0
    backward_bytes_per_s: float = 0.0
    round_trip_ms: float = 0.0  # 0: not known


class StatusReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a run stands at a moment, as its host sees it; members are told most of it."""

    run: str
    run_id: str
    role: str  # "host", "member", or "folder": by what a run on this machine alone has written
    state: str  # "training", "waiting", "forming", "ending"
    time: float  # of this report, seconds since 1970
    epoch: int = 0
    step: int = 0
    steps: int = 0
    loss: float | None = None
    tokens_per_s: float = 0.0
    waiting_for: str = ""  # in words: "a peer for stage 2"
    waiting_since: float = 0.0
    last_checkpoint: int | None = None  # the step of the newest complete one
    peers: list[PeerStatus] = []
    links: list[LinkStatus] = []
    notes: list[str] = []

    def to_plain(self) -> dict[str, Any]:
        """As it crosses the socket, and as `--json` shows it."""
        return dict(msgspec.to_builtins(self))

    def after(self, step: StepRecord | Row | None) -> "StatusReport":
        """The same with the figures of the last step; JSON has none that are not finite."""
        if step is None:
            return self
        figures = step.loss, step.tokens_per_s
        loss, rate = (None if x is None or not math.isfinite(x) else x for x in figures)
        return msgspec.structs.replace(
            self, step=step.step, steps=step.steps, loss=loss, tokens_per_s=rate or 0.0
        )

    def arrived(self, now: float) -> "StatusReport":
        """The same by the clock of the machine where it arrives now: clocks of others differ."""
        shift, changed = now - self.time, msgspec.structs.replace
        peers = [changed(peer, last_word=peer.last_word + shift) for peer in self.peers]
        return changed(self, time=now, waiting_since=self.waiting_since + shift, peers=peers)


@dataclass(frozen=True)
class RunProgress:
    """How a run works: where its time goes, what crosses the cuts, what actions cost, its links."""

    step_seconds_median: float
    timeline: Timeline
    time_shares: list[dict[str, Any]]
    cuts: list[dict[str, Any]]
    measured_costs: Costs
    links: Links


# What a peer says of itself


class Hello(msgspec.Struct, frozen=True):
    """A machine is there: what it is and what it can do. The first message of its stream.

    Its own processes find its door at `door`, others perhaps at `outside`; both may be empty. Every
    process that joins draws another `process`, and `place` says to people where that is.
    """

    versions: dict[str, str]
    machine: Machine
    door: str
    outside: str
    process: str = ""
    place: str = ""


class Alive(msgspec.Struct, frozen=True):
    """A peer's answer to AskAlive."""


class Leaving(msgspec.Struct, frozen=True):
    """A peer wants to leave after this step."""


class Tried(msgspec.Struct, frozen=True):
    """Which addresses of its invite a peer reaches: why not, or an empty text, by address."""

    answers: dict[str, str]


class Declined(msgspec.Struct, frozen=True):
    """A peer cannot hold the stages that it was given."""

    reason: str
    stages: list[int] = []


# What a peer says of a stage


class Pulse(msgspec.Struct, frozen=True):
    """What a stage is doing, and how many pieces of work it has begun: sent now and then."""

    begun: int
    doing: str
    trip_below: Finite = 0.0  # seconds to a neighbour and back; 0: not known
    trip_above: Finite = 0.0


class Ready(msgspec.Struct, frozen=True):
    """A stage is built, and listens at this address if there is a stage above it elsewhere."""

    address: str
    layers: str
    device: str
    versions: dict[str, str] = {}


class Linked(msgspec.Struct, frozen=True):
    """A stage has its links, and both ends agree on their contract.

    Between machines, `way` is the kind of way to the stage below. A stage in a lost one's place
    says which decision of the first stage its neighbours know, and whether it ends the run; one
    that follows, and is fed by another process than before, by which streams (as of Connect).
    """

    way: str = ""
    decided: int = 0
    stops: bool = False
    follower: int = 0


class LinkDown(msgspec.Struct, frozen=True):
    """The connection over a cut is lost; the stage above the cut, which dials, says so."""

    cut: int
    reason: str


class LinkUp(msgspec.Struct, frozen=True):
    """There is another connection over a cut, after so many seconds; `way` as in Linked."""

    cut: int
    seconds: Finite
    way: str = ""


class LogLost(msgspec.Struct, frozen=True):
    """A stage has no room to keep what it sends: whoever needs it cannot be replaced for now."""

    reason: str


class Follows(msgspec.Struct, frozen=True):
    """A process that follows a stage has come to this step, after which the stage saves."""

    step: int


@dataclass(frozen=True)
class Finished:
    """A stage is done; what each of its links has moved, to the goodbye."""

    meters: Meters
    fed_bytes: int = 0  # to those who follow its neighbours
    decided: int = 0  # the last decision of the first stage that it knows, as of Linked
    stops: bool = False


class Failed(msgspec.Struct, frozen=True):
    """A stage cannot go on; it accuses neighbours it lost, and convicts who broke a contract."""

    kind: str
    known: bool
    error: str
    accuses: list[int]
    convicts: list[int]


class Ended(msgspec.Struct, frozen=True):
    """The process of a stage on another machine has ended."""

    code: int  # of the exit, 256 and more for signals: a count is not negative
    words: str

    @classmethod
    def by(cls, returncode: int, words: str) -> "Ended":
        """The end of a process by what `subprocess` says of it."""
        return cls(_SIGNALLED - returncode if returncode < 0 else returncode, words)

    @property
    def returncode(self) -> int:
        """What `subprocess` would say of it."""
        return _SIGNALLED - self.code if self.code > _SIGNALLED else self.code


# What the coordinator tells a peer


class AskAlive(msgspec.Struct, frozen=True):
    """A peer is to answer at once: another process shows its key."""


@dataclass(frozen=True)
class Hold:
    """A machine is to hold stages: data alone, for paths and devices are its own.

    `corpus`: the fingerprint of the data; `resumes`: whether there is a checkpoint to fetch;
    `links`: the token by which the peers of this generation meet at each other's doors. In the
    place of a lost machine: where the generation `began`, and how often stages were given `again`.
    One that `follows` stands by: it computes what the holder of these stages computes.
    """

    stages: list[int]
    settings: dict[str, Any]
    resumes: bool
    corpus: str
    links: str = field(default="", repr=False)
    began: int = OF_NO_STEP
    again: int = 0
    follows: bool = False


@dataclass(frozen=True)
class Assignment:
    """What the process of stages is to be: said by whoever started it, on the same machine.

    Without a corpus, token ids come from the coordinator, by the routes in `host`. Streams bear the
    number of the generation, on other machines counted from 1.
    """

    stages: list[int]
    identity: Identity  # of whoever holds them, with its private key
    settings: dict[str, Any]
    corpus: str
    run_folder: str
    resume: str = ""
    began: int = OF_NO_STEP  # where the run began, for stages that take the place of lost ones
    generation: int = 0
    again: int = 0
    follows: bool = False
    service: str = ""  # the name of the host's streams at its doors
    host: list[Route] = field(default_factory=list, repr=False)


class Release(msgspec.Struct, frozen=True):
    """The generation is over, or others hold these stages now: end their processes."""

    reason: str
    stages: list[int] = []  # empty: all of the generation


class News(msgspec.Struct, frozen=True):
    """Something that everybody in the run should see; `kind` is the tag that it has there."""

    text: str
    kind: str = "host"


class RunNews(msgspec.Struct, frozen=True):
    """What the host's page shows beside, for those of members: no invite, and no addresses."""

    report: StatusReport
    step: StepRecord | None = None  # the last
    progress: RunProgress | None = None  # seldom, for it is large


class TryDoor(msgspec.Struct, frozen=True):
    """A peer is to try the addresses of the host that its own invite names, and no others."""


class Dismiss(msgspec.Struct, frozen=True):
    """A peer is to leave: the run is over, in order or not, or the peer is not wanted."""

    reason: str
    why: Literal["over", "failed", "refused"]


# What the coordinator tells a stage


@dataclass(frozen=True)
class Connect:
    """Where the stage below listens, and by which keys (`seats`) the stages are known.

    Between machines a stage below is reached by the first of the routes in `reach` that works, and
    a stage waits at the doors in `wait` for the one above it. Doors know the run as `run`, and
    `word` ends the names of its links there: who is not told it, such as a peer that was removed,
    cannot wait in another's place. `links`: how often the link over each cut was opened anew.

    It is about all cuts of a stage that is built or takes another's place; or about one `cut` with
    another process at its other end; or about the streams that feed a `follower`.
    """

    below: str
    links: list[int]
    cut: int | None = None
    follower: int = 0
    seats: list[str] = field(default_factory=list)
    run: str = ""
    word: str = field(default="", repr=False)
    reach: list[Route] = field(default_factory=list)
    wait: list[Route] = field(default_factory=list)


class Start(msgspec.Struct, frozen=True):
    """All stages are linked: train; in the place of a lost stage, with the last decision known."""

    decided: int = 0
    stops: bool = False
    is_alike: bool = False  # for one that follows: its machine computes the stage's bits


class Await(msgspec.Struct, frozen=True):
    """The stage at the other end of a cut is lost, and another process will take its place."""

    cut: int


class Saved(msgspec.Struct, frozen=True):
    """A checkpoint of this step is complete: what was sent before is needed no more."""

    step: int


class Leave(msgspec.Struct, frozen=True):
    """All stages have finished: the process may end."""


class Stop(msgspec.Struct, frozen=True):
    """Stop after this step, with a checkpoint."""


OfPeer = Hello | Alive | Leaving | Tried | Declined
OfLinks = Linked | LinkDown | LinkUp | LogLost
OfStage = Pulse | Ready | OfLinks | Audited | Follows | Report | Finished | Failed | Ended
# A step as all peers are told of it lacks what is of single stages and cuts.
ForAll = News | StepRecord | EvaluationRecord | RunNews
ToPeer = AskAlive | Hold | Assignment | Release | ForAll | TryDoor | Dismiss
ToStage = Connect | Start | Await | Saved | Stop | Leave

OF_NO_STAGE = -1


def last_decision(known: Iterable[tuple[int, bool]]) -> tuple[int, bool]:
    """The last of what several know of the first stage's decisions; a word to stop is the last."""
    return max(known, key=lambda one: (one[1], one[0]), default=(0, False))


def other_end(cut: int, stage: int) -> int:
    """The stage at the other end of a cut."""
    return cut if cut < stage else cut + 1


class Envelope(NamedTuple):
    """A message, and what it is about: a stage, or the peer itself (OF_NO_STAGE)."""

    message: Any
    stage: int = OF_NO_STAGE
    generation: int = 0
    again: int = 0  # from a peer, as of its Hold: it may get the same stage twice


Kinds = dict[str, type]  # of messages, by name
FROM_PEER: Kinds = {kind.__name__: kind for kind in get_args(OfPeer | OfStage)}
FROM_COORDINATOR: Kinds = {kind.__name__: kind for kind in get_args(ToPeer | ToStage)}
learn_types(*FROM_PEER.values(), *FROM_COORDINATOR.values())


def pack(envelope: Envelope) -> bytes:
    """A message as it travels; WireError if it is too large."""
    message, *about = envelope
    body = _compact(message) if isinstance(message, Step) else message
    said = msgspec.msgpack.encode([type(message).__name__, *about, body])
    if len(said) > MOST_SAID:
        what = f"a {type(message).__name__} message has {len(said)} bytes"
        raise WireError(f"{what}, at most {MOST_SAID} are allowed")
    return zlib.compress(said, 6)


def unpack(payload: bytes, kinds: Kinds) -> Envelope:
    """The message of a payload, checked; WireError names what is wrong with it."""
    name = "control"
    try:
        reader = zlib.decompressobj()
        said = reader.decompress(payload, MOST_SAID)
        if not reader.eof:
            raise ValueError(f"it is cut off, or longer than {MOST_SAID} bytes")
        name, *about, body = msgspec.msgpack.decode(said, type=tuple[str, int, int, int, Any])
        kind = kinds.get(name)
        if kind is None:
            raise ValueError("is not for this end")
        if kind is Step:
            body = _expand(body)
        if kinds is FROM_PEER:
            body = _clean(body)
        return Envelope(msgspec.convert(body, kind), *about)
    except (ValueError, RecursionError, zlib.error) as error:  # what msgspec raises is a ValueError
        reason = printable(str(error), 200)
        raise WireError(f"a {printable(name, 40)} message cannot be used: {reason}") from None


def _clean(value: Any) -> Any:
    """Plain data of a peer, fit for a screen; a count is no negative number."""
    match value:
        case str():
            return printable(value)
        case bool():
            return value
        case int() if value < 0:
            raise ValueError("a count is below 0")
        case list() | tuple():
            return [_clean(entry) for entry in value]
        case dict():
            if not all(isinstance(key, str) for key in value):
                raise ValueError("a table has keys that are no text")
            return {printable(key): _clean(entry) for key, entry in value.items()}
    return value


# A step's report is mostly times. On the wire they are whole microseconds, each span counted from
# the end of the one before it, and of the meters only what was sent: an eighth of the bytes.
_LANES = {"c": "compute", "w": "wait", "s": "send"}
_LETTERS = {lane: letter for letter, lane in _LANES.items()}
_MICRO = 1e-6


def _compact(report: Step) -> dict[str, Any]:
    """A step's report as it travels; sends overlap computing, so they count for themselves."""
    names, gaps, durations = [], [], []
    ends = {True: 0, False: 0}
    for lane, label, start, end in report.spans:
        first, last = (round((time - report.start) / _MICRO) for time in (start, end))
        names.append(_LETTERS[lane] + label)
        gaps.append(first - ends[lane == "send"])
        durations.append(last - first)
        ends[lane == "send"] = last
    meters = {
        link: [[k, c["frames"], c["payload_bytes"]] for k, c in m["sent"].items() if k != "total"]
        for link, m in report.meters.items()
    }
    return {**vars(report), "spans": [" ".join(names), gaps, durations], "meters": meters}


def _expand(small: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `_compact`; ValueError for what it cannot have made."""
    try:
        report = dict(small)
        (names, gaps, durations), origin = report["spans"], float(report["start"])
        ends, spans = {True: 0, False: 0}, []
        for name, gap, duration in zip(names.split(), gaps, durations, strict=True):
            lane = _LANES[name[0]]
            first = ends[lane == "send"] + int(gap)
            last = ends[lane == "send"] = first + int(duration)
            spans.append((lane, name[1:], origin + first * _MICRO, origin + last * _MICRO))
        report["spans"] = spans
        report["meters"] = {
            link: {"sent": counted({kind: (n, size) for kind, n, size in kinds}), "received": {}}
            for link, kinds in report["meters"].items()
        }
    except (TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(f"its times or meters cannot be read ({type(error).__name__})") from None
    return report


# What streams beside that of a peer are called


def stream_name(what: str, whose: int | str, generation: int = 0, again: int = 0) -> str:
    """A stream of a stage or a cut: `cut`, `tokens`, `state`, and how often it was opened anew; or
    of a peer: `peer`, between it and the coordinator, and `store`, for its shards.
    """
    name = f"{what}-{whose}@{generation}" if generation else f"{what}-{whose}"
    return f"{name}.{again}" if again else name


LEAST_OUTAGE_S = 10.0  # for which a stream to the host may be lost, also where links may not
SETTINGS = "settings"  # by which a member asks the host for those of the run
