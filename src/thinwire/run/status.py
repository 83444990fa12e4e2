"""How a run over several machines stands: noted as it goes on, told to all peers, shown on request.

The host notes what stages say (`Standing`), shows it on its own screen and in a few numbers on
those of its peers (`SharedDisplay`). Whoever asks on the machine of a host or of a peer (alive.py)
gets a `StatusReport`, as data or as tables. A host also answers to kick, to invite, and whether
others reach it (`HostConsole`); a peer also to leave.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from thinwire.engine.checkpoint import list_checkpoints, step_of
from thinwire.engine.reports import Audited, Step
from thinwire.errors import ConfigError, WireError, printable
from thinwire.report import Display, EvaluationRecord, StepRecord
from thinwire.report.human import ABSENT, duration, human_bytes, human_flops, loss_text
from thinwire.report.table import plain_table
from thinwire.run.admission import AuthorityBook, Invite
from thinwire.run.formation import Formation
from thinwire.run.machine import Machine
from thinwire.run.members import Member, Members, one_line
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
from thinwire.settings import Settings

if TYPE_CHECKING:
    from thinwire.run.join import JoinedPeer

STEP_NEWS_SECONDS = 1.0  # between two steps that peers are told of: their downlinks have other work
TRY_SECONDS = 10.0  # for peers to look from outside
UNREACHED = "cannot be reached"  # the state of a peer whose connection is lost and may come back

Handler = Callable[[dict[str, Any]], dict[str, Any]]
"""Answers one kind of request; a ThinwireError becomes an answer that says why not."""


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

    def after(self, step: StepRecord | StepNews | None) -> "StatusReport":
        """The same with the figures of the last step; JSON has none that are not finite."""
        if step is None:
            return self
        loss = step.loss if math.isfinite(step.loss) else None
        rate = _finite(step.tokens_per_s)
        return msgspec.structs.replace(
            self, step=step.step, steps=step.steps, loss=loss, tokens_per_s=rate
        )


def audit_text(found: Audited) -> str:
    """How an audit stands, for a person."""
    if found.tensor:
        return f"found another {found.tensor} at step {found.step}"
    close = f"none differs by more than {found.difference:.1e}" if found.difference else "all equal"
    return f"compared {found.compared:,} of its tensors up to step {found.step}, {close}"


def doubt_text(stage: int, holder: str, standby: str, found: Audited) -> str:
    """That what a stage sent is not what its stand-by computes, for a person."""
    size = f"differs by {found.difference:.2%}" if found.difference else "has other bits"
    allowed = f"up to {found.tolerance:.1e} is rounding" if found.tolerance else "none is expected"
    return (
        f"{holder} sent something else for stage {stage} than {standby}, which stands by for it, "
        f"computes: the {found.tensor} of step {found.step}, microbatch {found.microbatch}, {size} "
        f"({allowed}). One of the two computes wrongly"
    )


def status_from_plain(values: dict[str, Any]) -> StatusReport:
    """A report that another process gave; WireError if this version does not know its form."""
    try:
        return msgspec.convert(values, StatusReport)
    except msgspec.ValidationError as error:
        raise WireError(
            f"the run gave its status in a form that this version does not know ({error}): use the "
            "version that it was started with"
        ) from None


@dataclass
class _Cut:
    """What is known of the link over a cut."""

    way: str = ""
    down_since: float = 0.0
    reason: str = ""
    rates: tuple[float, float] = (0.0, 0.0)  # forward and backward


@dataclass
class Standing:
    """Notes of a host on its run; every method may be called on any thread."""

    run: str
    run_id: str
    standbys: dict[str, list[int]] = field(default_factory=dict)  # the stages that members follow
    audits: dict[str, Audited] = field(default_factory=dict)  # what members that stand by found
    _state: str = "starting"
    _step: StepRecord | None = None
    _waiting_for: str = ""
    _waiting_since: float = 0.0
    _stages: dict[int, tuple[float, str]] = field(default_factory=dict)  # heard when, doing what
    _cuts: dict[int, _Cut] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _now: Callable[[], float] = time.time

    def forms(self) -> None:
        """The run is formed, or formed again: what was known of stages and links holds no more."""
        with self._lock:
            self._state, self._waiting_for = "forming", ""
            self._stages, self._cuts, self.standbys = {}, {}, {}

    def waits(self, what: str) -> None:
        """The run waits; as long as it does, the beginning of the wait stays."""
        with self._lock:
            if not self._waiting_for:
                self._waiting_since = self._now()
            self._waiting_for, self._state = what, "waiting"

    def stepped(self, step: StepRecord) -> None:
        """A step was made."""
        with self._lock:
            self._step, self._waiting_for, self._state = step, "", "training"
            for link in step.links if step.step_seconds else []:
                moved = link.forward_bytes, link.backward_bytes
                forward, backward = (_finite(size / step.step_seconds) for size in moved)
                self._cut(link.cut).rates = forward, backward

    def heard(self, stage: int, message: OfStage) -> None:
        """A stage has said something on its control stream."""
        with self._lock:
            now, (_, doing) = self._now(), self._stages.get(stage, (0.0, ""))
            match message:
                case Pulse(_, doing):
                    pass
                case Step(step=step):  # a pulse is seconds old by now
                    doing = f"has done step {step + 1}"
                case Linked(way) if stage > 0:
                    self._cut(stage - 1).way = way or "direct"
                case LinkDown(cut, reason):
                    self._cut(cut).down_since, self._cut(cut).reason = now, reason
                case LinkUp(cut, way=way):
                    self._cut(cut).down_since = 0.0
                    self._cut(cut).way = way or self._cut(cut).way
            self._stages[stage] = now, doing

    def word_of(self, stage: int) -> tuple[float, str]:
        """When a stage was last heard, in seconds since 1970 (0: never), and what it does."""
        with self._lock:
            return self._stages.get(stage, (0.0, ""))

    def report(
        self,
        epoch: int,
        seats: list[str],
        peers: list[PeerStatus],
        last_checkpoint: int | None = None,
    ) -> StatusReport:
        """How the run stands now, with these peers in these seats."""
        with self._lock:
            waiting_for, since = self._waiting_for, self._waiting_since
            cuts = [(cut, self._cut(cut)) for cut in range(len(seats) - 1)]
            down = [(noted.down_since, cut) for cut, noted in cuts if noted.down_since]
            if down and not waiting_for:
                since, cut = min(down)
                ends = f"{seats[cut]} and {seats[cut + 1]}"
                reason = self._cut(cut).reason
                waiting_for = f"the link between {ends}, which is down ({reason})"
            links = [
                LinkStatus(
                    cut,
                    seats[cut],
                    seats[cut + 1],
                    "" if noted.down_since else noted.way,
                    *noted.rates,
                )
                for cut, noted in cuts
            ]
            return StatusReport(
                run=self.run,
                run_id=self.run_id,
                role="host",
                state=self._state,
                time=self._now(),
                epoch=epoch,
                waiting_for=waiting_for,
                waiting_since=since if waiting_for else 0.0,
                last_checkpoint=last_checkpoint,
                peers=peers,
                links=links,
            ).after(self._step)

    def _cut(self, cut: int) -> _Cut:
        return self._cuts.setdefault(cut, _Cut())


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
        self._show(self._shown.phase, tag, text)

    def progress(self, tag: str, done: int, total: int, unit: str) -> None:
        self._show(self._shown.progress, tag, done, total, unit)

    def step(self, record: StepRecord) -> None:
        self._show(self._shown.step, record)
        self.standing.stepped(record)
        now = time.monotonic()
        if now - self._told_at >= STEP_NEWS_SECONDS or record.step >= record.steps:
            self._told_at = now
            numbers = {name: getattr(record, name) for name in StepNews.__annotations__}
            self._tell_all(StepNews(**numbers))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._show(self._shown.evaluation, record)
        self._tell_all(ScoreNews(**vars(record)))

    def note(self, text: str) -> None:
        self._show(self._shown.note, text)
        self._tell_all(News(text))

    def announce(self, tag: str, text: str) -> None:
        """A phase that everybody sees."""
        self.phase(tag, text)
        self._tell_all(News(text))

    def close(self) -> None:
        self._show(self._shown.close)

    def _show(self, show: Callable[..., None], *values: Any) -> None:
        with self._lock:
            show(*values)


class HostConsole:
    """The answers of a host. `formation` and `settings` give what holds at the moment, and
    `invite` makes another invite, for so many machines, which names `addresses`.
    """

    def __init__(
        self,
        standing: Standing,
        members: Members,
        book: AuthorityBook,
        formation: Callable[[], Formation],
        settings: Callable[[], Settings],
        invite: Callable[[int], Invite],
        addresses: tuple[str, ...] = (),
    ):
        self._standing, self._members, self._book = standing, members, book
        self._formation, self._settings, self._invite = formation, settings, invite
        self._addresses = addresses

    def handlers(self) -> dict[str, Handler]:
        """For a `ControlSocket`."""
        return {
            "status": self._status,
            "kick": self._kick,
            "invite": self._make_invite,
            "outside": self._outside,
        }

    def _status(self, request: dict[str, Any]) -> dict[str, Any]:
        formation, settings = self._formation(), self._settings()
        peers = [self._peer(member, formation, settings) for member in self._members.all()]
        peers += [PeerStatus(p.name, "kicked") for p in self._book.peers() if p.kicked]
        last = max(map(step_of, list_checkpoints(settings.run.folder)), default=None)
        return self._standing.report(formation.epoch, formation.seats, peers, last).to_plain()

    def _peer(self, member: Member, formation: Formation, settings: Settings) -> PeerStatus:
        heard = time.time() - (time.monotonic() - member.heard)
        state = f"gets no stage: {member.why_unfit}" if member.is_unfit else "waiting for a stage"
        if followed := self._standing.standbys.get(member.name):
            state = f"stands by for stage {', '.join(map(str, followed))}"
            if found := self._standing.audits.get(member.name):
                state += f"; {audit_text(found)}"
        stages, machine = formation.held_by(member.name), None
        if stages:
            words, doing = zip(*map(self._standing.word_of, stages), strict=True)
            doings = dict.fromkeys(what or "starting" for what in doing)
            heard, state = max(heard, *words), "; ".join(doings)
        if member.hello is not None:
            has = member.hello.machine
            machine = dataclasses.replace(
                has,
                name=member.name,
                device=one_line(has.device, 60),
                reachable=member.is_reachable,
            )
        return PeerStatus(
            name=member.name,
            state="away" if machine is None else UNREACHED if member.is_down else state,
            stages=stages,
            blocks=_blocks(settings, stages),
            last_word=heard,
            machine=machine,
        )

    def _kick(self, request: dict[str, Any]) -> dict[str, Any]:
        name = request.get("peer")
        if not isinstance(name, str):
            raise ConfigError("say which peer to kick")
        seats, kicked = self._formation().seats, [name]
        others = self._members.kick(name)
        if request.get("by_invite") is True:
            for other in others:
                self._members.kick(other)
            kicked, others = [name, *others], []
        text = (
            f"{', '.join(kicked)} {'was' if len(kicked) == 1 else 'were'} removed from the run and "
            "not let in again, nor is anybody new by the same invite; `thinwire invite` makes "
            "another"
        )
        for stage in (stage for stage, name in enumerate(seats) if name in kicked):
            text += f"; stage {stage} gets another peer"
        if others:
            text += (
                f"\nby the same invite came, and stay: {', '.join(others)}; `thinwire kick {name} "
                "--by-invite` removes them too"
            )
        return {"text": text}

    def _outside(self, request: dict[str, Any]) -> dict[str, Any]:
        """By which of its addresses peers on other machines reach this host."""
        peers = {
            member.name: {
                address: one_line(member.tried.answers[address])
                for address in self._addresses
                if address in member.tried.answers
            }
            for member in self._members.try_door(TRY_SECONDS)
            if member.tried and not member.origin.startswith(("127.", "::1"))
        }
        run = self._settings().run.name
        return {"run": run, "addresses": list(self._addresses), "peers": peers}

    def _make_invite(self, request: dict[str, Any]) -> dict[str, Any]:
        machines = request.get("machines", 1)
        if not isinstance(machines, int) or machines < 1:
            raise ConfigError("an invite is for one machine or more")
        return {"text": f"thinwire join {self._invite(machines)}"}


def _blocks(settings: Settings, stages: list[int]) -> str:
    """The blocks of stages, as a report has them."""
    split, parts = settings.split(), list[list[int]]()
    for stage in (stage for stage in stages if stage < len(split)):
        if parts and parts[-1][1] == split[stage].start:
            parts[-1][1] = split[stage].stop
        else:
            parts.append([split[stage].start, split[stage].stop])
    return ", ".join(f"{start}..{stop - 1}" for start, stop in parts)


def member_handlers(member: "JoinedPeer", invite: Invite) -> dict[str, Handler]:
    """The answers of a joined peer, for a `ControlSocket`."""

    def leave(request: dict[str, Any]) -> dict[str, Any]:
        member.leave()
        return {"text": "this peer leaves the run after this step, with a checkpoint"}

    return {"status": lambda request: _member_status(member, invite).to_plain(), "leave": leave}


def _member_status(member: "JoinedPeer", invite: Invite) -> StatusReport:
    """A peer knows itself, its stage, and what the host tells everybody."""
    held, away, news, now = member.held, member.away_for, member.news, time.time()
    state, waiting_for, since = "training" if news else "starting", "", 0.0
    if held is not None and not held.is_running:
        state = "preparing its stage"
    if away is not None:
        state, waiting_for, since = "waiting", "the host, which cannot be reached", now - away
    elif held is None:
        state, waiting_for, since = "waiting", "a stage", member.seatless_since
    doing = "waiting for a stage"
    if held is not None:
        doing = "training" if held.is_running else "prepares its stage"
        doing = "stands by" if held.hold.follows else doing
    name, stages = member.identity.name, member.stages
    itself = PeerStatus(
        name=name,
        state=doing,
        stages=stages,
        blocks=_blocks(held.settings, stages) if held else "",
        is_this_machine=True,
        machine=dataclasses.replace(member.machine, name=name, reachable=member.is_open),
    )
    return StatusReport(
        run=invite.run_name,
        run_id=invite.run_id,
        role="member",
        state=state,
        time=now,
        epoch=held.generation if held else 0,
        waiting_for=waiting_for,
        waiting_since=since,
        peers=[itself],
    ).after(news)


def status_table(report: StatusReport) -> RenderableType:
    """The report for a person."""
    peers = sorted(report.peers, key=lambda p: (not p.stages, p.stages, p.name))
    heads: tuple[str, ...] = ("peer", "stages", "blocks", "state", ">last word")
    seats = [
        (
            f"{peer.name} (here)" if peer.is_this_machine else peer.name,
            ", ".join(map(str, peer.stages)),
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
