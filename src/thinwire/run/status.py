"""How a run over several machines stands: noted as it goes on, told to all peers, shown on request.

The host notes what stages say (`Standing`), shows it on its own screen and in a few numbers on
those of its peers (`SharedDisplay`). Whoever asks gets a `StatusReport`, as data or as tables.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from thinwire.engine.reports import Step
from thinwire.errors import WireError, printable
from thinwire.report import Display, EvaluationRecord, StepRecord
from thinwire.report.human import ABSENT, duration, human_bytes, human_flops, loss_text
from thinwire.report.table import plain_table
from thinwire.run.machine import Machine
from thinwire.run.protocol import (
    LinkDown,
    Linked,
    LinkUp,
    News,
    OfStage,
    Pulse,
    ScoreNews,
    StepNews,
    ToPeer,
)

STEP_NEWS_SECONDS = 1.0  # between two steps that peers are told of: their downlinks have other work


class PeerStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One peer as the host sees it. Times are seconds since 1970, 0 for unknown."""

    name: str
    state: str  # what it does, "waiting for a seat", "away", "kicked"
    stage: int | None = None
    blocks: str = ""  # "0..5"
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


class StatusReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a run stands at a moment. A member knows less of it than the host does."""

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


def status_from_plain(values: dict[str, Any]) -> StatusReport:
    """A report that another process gave; WireError if this version does not know its form."""
    try:
        return msgspec.convert(values, StatusReport)
    except msgspec.ValidationError as error:
        raise WireError(
            f"the run gave its status in a form that this version does not know ({error}): use the "
            "version that it was started with"
        ) from None


def blocks_text(blocks: range) -> str:
    """The blocks of a stage, as a report has them."""
    return f"{blocks.start}..{blocks.stop - 1}"


@dataclass
class _Stage:
    """What the host last heard of a stage."""

    heard: float = 0.0
    doing: str = ""


@dataclass
class _Cut:
    """The link over a cut."""

    way: str = ""
    down_since: float = 0.0
    reason: str = ""
    forward_bytes_per_s: float = 0.0
    backward_bytes_per_s: float = 0.0


@dataclass
class Standing:
    """Notes of one run; every method may be called on any thread."""

    run: str
    run_id: str
    role: str
    state: str = "starting"
    _step: StepRecord | StepNews | None = None  # as the host knows it, or as it tells its peers
    _waiting_for: str = ""
    _waiting_since: float = 0.0
    _stages: dict[int, _Stage] = field(default_factory=dict)
    _cuts: dict[int, _Cut] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _now: Callable[[], float] = time.time

    def forms(self) -> None:
        """The run is formed, or formed again: what was known of stages and links holds no more."""
        with self._lock:
            self.state, self._waiting_for = "forming", ""
            self._stages, self._cuts = {}, {}

    def waits(self, what: str) -> None:
        """The run waits; as long as it does, the beginning of the wait stays."""
        with self._lock:
            if not self._waiting_for:
                self._waiting_since = self._now()
            self._waiting_for, self.state = what, "waiting"

    def goes_on(self, state: str) -> None:
        """The wait is over."""
        with self._lock:
            self._waiting_for, self.state = "", state

    def stepped(self, step: StepRecord | StepNews) -> None:
        """A step was made; the host also knows what crossed each cut in it."""
        with self._lock:
            self._step, self._waiting_for, self.state = step, "", "training"
            for link in step.links if isinstance(step, StepRecord) and step.step_seconds else []:
                noted = self._cut(link.cut)
                noted.forward_bytes_per_s = link.forward_bytes / step.step_seconds
                noted.backward_bytes_per_s = link.backward_bytes / step.step_seconds

    def heard(self, stage: int, message: OfStage) -> None:
        """A stage has said something on its control stream."""
        with self._lock:
            noted = self._stages.setdefault(stage, _Stage())
            noted.heard = self._now()
            match message:
                case Pulse(_, doing):
                    noted.doing = doing
                case Step(step=step):  # a pulse is seconds old by now
                    noted.doing = f"has done step {step + 1}"
                case Linked(way) if stage > 0:
                    self._cut(stage - 1).way = way or "direct"
                case LinkDown(cut, reason):
                    self._cut(cut).down_since, self._cut(cut).reason = self._now(), reason
                case LinkUp(cut, way=way):
                    self._cut(cut).down_since = 0.0
                    self._cut(cut).way = way or self._cut(cut).way

    def last_word(self, stage: int) -> float:
        """When a stage was last heard, in seconds since 1970; 0 for never."""
        with self._lock:
            return self._stages.get(stage, _Stage()).heard

    def doing(self, stage: int) -> str:
        """What a stage says that it does."""
        with self._lock:
            return self._stages.get(stage, _Stage()).doing

    def report(
        self,
        epoch: int,
        seats: list[str],
        peers: list[PeerStatus],
        last_checkpoint: int | None = None,
    ) -> StatusReport:
        """How the run stands now, with these peers in these seats."""
        with self._lock:
            step, waiting_for, since = self._step, self._waiting_for, self._waiting_since
            cuts = range(len(seats) - 1)
            down = [cut for cut in cuts if self._cut(cut).down_since]
            if down and not waiting_for:
                cut = min(down, key=lambda cut: self._cut(cut).down_since)
                noted, ends = self._cut(cut), f"{seats[cut]} and {seats[cut + 1]}"
                waiting_for = f"the link between {ends}, which is down ({noted.reason})"
                since = noted.down_since
            return StatusReport(
                run=self.run,
                run_id=self.run_id,
                role=self.role,
                state=self.state,
                time=self._now(),
                epoch=epoch,
                step=step.step if step else 0,
                steps=step.steps if step else 0,
                loss=step.loss if step and math.isfinite(step.loss) else None,
                tokens_per_s=_finite(step.tokens_per_s) if step else 0.0,
                waiting_for=waiting_for,
                waiting_since=since if waiting_for else 0.0,
                last_checkpoint=last_checkpoint,
                peers=peers,
                links=[self._link(cut, seats) for cut in cuts],
            )

    def _cut(self, cut: int) -> _Cut:
        return self._cuts.setdefault(cut, _Cut())

    def _link(self, cut: int, seats: list[str]) -> LinkStatus:
        noted = self._cut(cut)
        return LinkStatus(
            cut,
            seats[cut],
            seats[cut + 1],
            "" if noted.down_since else noted.way,
            _finite(noted.forward_bytes_per_s),
            _finite(noted.backward_bytes_per_s),
        )


def _finite(number: float) -> float:
    return number if math.isfinite(number) else 0.0


class SharedDisplay(Display):
    """A display whose steps, scores and news reach everybody. Unlike others it may be called from
    several threads.
    """

    def __init__(self, shown: Display, tell_all: Callable[[ToPeer], None], standing: Standing):
        self._shown, self._tell_all = shown, tell_all
        self.standing = standing
        self._lock = threading.RLock()
        self._told_at = -STEP_NEWS_SECONDS

    def phase(self, tag: str, text: str) -> None:
        with self._lock:
            self._shown.phase(tag, text)

    def progress(self, tag: str, done: int, total: int, unit: str) -> None:
        with self._lock:
            self._shown.progress(tag, done, total, unit)

    def step(self, record: StepRecord) -> None:
        with self._lock:
            self._shown.step(record)
        self.standing.stepped(record)
        now = time.monotonic()
        if now - self._told_at >= STEP_NEWS_SECONDS or record.step >= record.steps:
            self._told_at = now
            numbers = {name: getattr(record, name) for name in StepNews.__annotations__}
            self._tell_all(StepNews(**numbers))

    def evaluation(self, record: EvaluationRecord) -> None:
        with self._lock:
            self._shown.evaluation(record)
        self._tell_all(ScoreNews(**vars(record)))

    def note(self, text: str) -> None:
        with self._lock:
            self._shown.note(text)
        self._tell_all(News(text))

    def announce(self, tag: str, text: str) -> None:
        """A phase that everybody sees."""
        self.phase(tag, text)
        self._tell_all(News(text))

    def close(self) -> None:
        with self._lock:
            self._shown.close()


def status_table(report: StatusReport) -> RenderableType:
    """The report for a person."""
    peers = sorted(report.peers, key=lambda p: (p.stage is None, p.stage or 0, p.name))
    heads: tuple[str, ...] = ("peer", "stage", "blocks", "state", ">last word")
    seats = [
        (
            f"{peer.name} (here)" if peer.is_this_machine else peer.name,
            "" if peer.stage is None else str(peer.stage),
            peer.blocks,
            peer.state,
            f"{duration(report.time - peer.last_word)} ago" if peer.last_word else "",
        )
        for peer in peers
    ]
    parts = [_facts(report), *_table("Peers", heads, seats)]
    heads = ("peer", "device", ">rate", ">free\nmemory", ">up / down\nMbit/s", ">round\ntrip",
             "has\na door")  # fmt: skip
    machines = [
        (
            peer.name,
            printable(has.device, 60),
            human_flops(has.tflops * 1e12) if has.tflops else "",
            human_bytes(has.memory_bytes) if has.memory_bytes else "",
            f"{has.mbps_up:,.0f} / {has.mbps_down:,.0f}" if has.mbps_up else "",
            f"{2 * has.latency_ms:,.0f} ms" if has.latency_ms else "",
            "yes" if has.reachable else "no",
        )
        for peer in peers
        if (has := peer.machine) is not None
    ]
    parts += _table("Machines, as they measured themselves", heads, machines)
    links = []
    for link in report.links:
        rates = (link.forward_bytes_per_s, link.backward_bytes_per_s)
        shown = (f"{human_bytes(rate)}/s" if rate else "" for rate in rates)
        ends = f"{link.below} - {link.above}"
        links.append((str(link.cut), ends, link.way or "not connected", *shown))
    parts += _table("Links", ("cut", "between", "way", ">forward", ">backward"), links)
    return Group(*parts, *(Text(f"note: {printable(note)}") for note in report.notes))


def _table(
    title: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]
) -> list[RenderableType]:
    """A table of what others say, as text: a terminal obeys nothing of it. None without rows."""
    table = plain_table(title)
    for head in heads:
        is_number = head.startswith(">")
        justify: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(head.lstrip(">"), justify=justify, no_wrap=is_number, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell) or ABSENT) for cell in row))
    return [table] if rows else []


def _facts(report: StatusReport) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    number = f" ({report.run_id})" if report.run_id else ""
    seen_from = {"host": "its host", "folder": "its folder"}.get(report.role, "this peer")
    rows = [("run", f"{report.run}{number}, seen from {seen_from}"), ("state", report.state)]
    if report.waiting_for:
        since = duration(report.time - report.waiting_since)
        rows.append(("waiting for", f"{report.waiting_for}, for {since}"))
    if report.steps:
        loss = loss_text(report.loss)
        rows.append(("step", f"{report.step:,} of {report.steps:,}, loss {loss}"))
    if report.tokens_per_s:
        rows.append(("speed", f"{report.tokens_per_s:,.0f} tokens/s"))
    if report.epoch:
        again = report.epoch - 1
        times = "" if again < 1 else f": the run was re-formed {again} time{'s' * (again > 1)}"
        rows.append(("epoch", f"{report.epoch}{times}"))
    if report.last_checkpoint is not None:
        rows.append(("checkpoint", f"step {report.last_checkpoint:,}"))
    for name, text in rows:
        grid.add_row(name, Text(printable(text)))
    return grid
