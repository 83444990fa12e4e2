"""How a run over several machines stands: noted as it goes on, told to all peers, shown on request.

The host notes what stages say (`Standing`), shows it on its own screen and in a few numbers on
those of its peers (`SharedDisplay`), and answers who asks on its machine (`HostConsole`).
"""

import dataclasses
import itertools
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from thinwire.engine.reports import Audited, Step
from thinwire.errors import ConfigError, printable
from thinwire.report import Display, EvaluationRecord, StepRecord
from thinwire.report.human import ABSENT, duration, human_bytes, human_flops, loss_text
from thinwire.report.table import fact_grid, plain_table
from thinwire.run import protocol as msg
from thinwire.run.admission import AuthorityBook, Invite
from thinwire.run.alive import Handler
from thinwire.run.checkpoints import last_checkpoint
from thinwire.run.formation import Formation
from thinwire.run.members import Member, Members, one_line
from thinwire.run.record import read_progress
from thinwire.settings import Settings

STEP_NEWS_SECONDS = 1.0  # between two steps that peers are told of: their downlinks have other work
RUN_NEWS_SECONDS, PROGRESS_NEWS_SECONDS = 10.0, 60.0  # between two words on all that a page shows
MOST_WORDS = 200  # characters of what a peer says of itself, as others are told it
TRY_SECONDS = 10.0  # for peers to look from outside
UNREACHED = "cannot be reached"  # the state of a peer whose connection is lost and may come back


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


@dataclass
class _Cut:
    """What is known of the link over a cut."""

    way: str = ""
    down_since: float = 0.0
    reason: str = ""
    rates: tuple[float, float] = (0.0, 0.0)  # forward and backward
    trips: dict[str, float] = field(default_factory=dict)  # from its two ends


@dataclass
class Standing:
    """Notes of a host on its run; every method may be called on any thread."""

    run: str
    run_id: str
    standbys: dict[tuple[int, ...], str] = field(default_factory=dict)  # by what they follow
    last_step: StepRecord | None = None
    audits: dict[str, Audited] = field(default_factory=dict)  # what members that stand by found
    _state: str = "starting"  # while it waits for nothing
    _waiting_for: str = ""
    _waiting_since: float = 0.0
    _stages: dict[int, tuple[float, str]] = field(default_factory=dict)  # heard when, doing what
    _cuts: defaultdict[int, _Cut] = field(default_factory=lambda: defaultdict(_Cut))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _now: Callable[[], float] = time.time

    def forms(self) -> None:
        """The run is formed, or formed again: what was known of stages and links holds no more."""
        with self._lock:
            self._state, self._waiting_for = "forming", ""
            self._stages, self.standbys = {}, {}
            self._cuts.clear()

    def waits(self, what: str) -> None:
        """The run waits; as long as it does, the beginning of the wait stays."""
        with self._lock:
            if not self._waiting_for:
                self._waiting_since = self._now()
            self._waiting_for = what

    def stepped(self, step: StepRecord) -> None:
        """A step was made."""
        with self._lock:
            self.last_step, self._waiting_for, self._state = step, "", "training"
            for link in step.links if step.step_seconds else []:
                moved = link.forward_bytes, link.backward_bytes
                forward, backward = (_finite(size / step.step_seconds) for size in moved)
                self._cuts[link.cut].rates = forward, backward

    def heard(self, stage: int, message: msg.OfStage) -> None:
        """A stage has said something on its control stream."""
        with self._lock:
            now, (_, doing) = self._now(), self._stages.get(stage, (0.0, ""))
            match message:
                case msg.Pulse(_, doing, below, above):
                    self._cuts[stage - 1].trips["above"] = below
                    self._cuts[stage].trips["below"] = above
                case Step(step=step):  # a pulse is seconds old by now
                    doing = f"has done step {step + 1}"
                case msg.Linked(way) if stage > 0:
                    self._cuts[stage - 1].way = way or "direct"
                case msg.LinkDown(cut, reason):
                    self._cuts[cut].down_since, self._cuts[cut].reason = now, reason
                case msg.LinkUp(cut, way=way):
                    self._cuts[cut].down_since = 0.0
                    self._cuts[cut].way = way or self._cuts[cut].way
            self._stages[stage] = now, doing

    def word_of(self, stage: int) -> tuple[float, str]:
        """When a stage was last heard, in seconds since 1970 (0: never), and what it does."""
        with self._lock:
            return self._stages.get(stage, (0.0, ""))

    def report(self, epoch: int, seats: list[str]) -> msg.StatusReport:
        """How the run stands now with these members in its seats, about which it says nothing."""
        with self._lock:
            waiting_for, since = self._waiting_for, self._waiting_since
            links, down = [], list[tuple[float, str]]()
            for cut, (below, above) in enumerate(itertools.pairwise(seats)):
                noted = self._cuts[cut]
                if noted.down_since:
                    why = f"the link between {below} and {above}, which is down ({noted.reason})"
                    down.append((noted.down_since, why))
                way = "" if noted.down_since else noted.way
                # Both ends meet at a door: the way is that of one to there and of the other.
                trip = round(_finite(1e3 * sum(noted.trips.values())), 3)
                links.append(msg.LinkStatus(cut, below, above, way, *noted.rates, trip))
            if down and not waiting_for:
                since, waiting_for = min(down)
            state = "waiting" if self._waiting_for else self._state
            which = self.run, self.run_id, "host", state, self._now(), epoch
            report = msg.StatusReport(*which, waiting_for=waiting_for, links=links)
            since = since if waiting_for else 0.0
            return msgspec.structs.replace(report, waiting_since=since).after(self.last_step)


def _finite(number: float) -> float:
    return number if math.isfinite(number) else 0.0


class SharedDisplay(Display):
    """A display for several threads whose steps, scores and news reach everybody."""

    def __init__(self, shown: Display, tell_all: Callable[[msg.ToPeer], None], standing: Standing):
        self._shown, self._tell_all = shown, tell_all
        shown.share = self._share
        self.standing = standing
        self._lock = threading.RLock()
        self._told_at = -STEP_NEWS_SECONDS

    def phase(self, tag: str, text: str) -> None:
        self._show(self._shown.phase, tag, text)
        if tag == "save":  # paths are the host's own
            self._share(tag, text.partition(" in ")[0])

    def progress(self, tag: str, done: int, total: int, unit: str) -> None:
        self._show(self._shown.progress, tag, done, total, unit)

    def step(self, record: StepRecord) -> None:
        self._show(self._shown.step, record)
        self.standing.stepped(record)
        now = time.monotonic()
        if now - self._told_at >= STEP_NEWS_SECONDS or record.step >= record.steps:
            self._told_at = now
            self._tell_all(dataclasses.replace(record, stages=[], links=[], measures={}))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._show(self._shown.evaluation, record)
        self._tell_all(record)

    def note(self, text: str) -> None:
        self._show(self._shown.note, text)
        self._tell_all(msg.News(text))

    def announce(self, tag: str, text: str) -> None:
        """A phase that everybody sees."""
        self.phase(tag, text)
        self._tell_all(msg.News(text))

    def _share(self, tag: str, text: str) -> None:
        self._tell_all(msg.News(text, tag))

    def _show(self, show: Callable[..., None], *values: Any) -> None:
        with self._lock:
            show(*values)


@dataclass
class HostConsole:
    """The answers of a host."""

    standing: Standing
    members: Members
    book: AuthorityBook
    formation: Callable[[], Formation]  # that holds at the moment, and the settings that do
    settings: Callable[[], Settings]
    invite: Callable[[int], Invite]  # makes another, for so many machines
    addresses: tuple[str, ...] = ()  # that such an invite names

    def handlers(self) -> dict[str, Handler]:
        """For a `ControlSocket`."""
        asked = {"kick": self._kick, "invite": self._make_invite, "outside": self._outside}
        return {"status": lambda request: self._report(), **asked}

    def tell_members(self, is_over: Callable[[float], bool]) -> None:
        """Have members know what the host's page shows, again and again until it `is_over`."""
        due = 0.0  # when they are told how the run works
        while not is_over(RUN_NEWS_SECONDS):
            is_due = time.monotonic() >= due
            progress = read_progress(self.settings().run.folder) if is_due else None
            due = time.monotonic() + PROGRESS_NEWS_SECONDS if progress else due
            self.tell_now(progress)

    def tell_now(self, progress: msg.RunProgress | None = None) -> None:
        """Tell members how the run stands; what is too large for a message they do without."""
        report = self._report(for_members=True)
        self.members.tell_all(msg.RunNews(report, self.standing.last_step, progress))

    def _report(self, for_members: bool = False) -> msg.StatusReport:
        """How the run stands. Words that peers chose may name addresses: members are not told."""
        formation, settings, cut = self.formation(), self.settings(), msgspec.structs.replace
        peers = [self._peer(member, formation, settings) for member in self.members.all()]
        report = self.standing.report(formation.epoch, formation.seats)
        waiting_for = report.waiting_for
        if for_members:
            peers = [cut(peer, state=peer.state.partition(": ")[0][:MOST_WORDS]) for peer in peers]
            waiting_for = waiting_for.partition(" (")[0][:MOST_WORDS]
        else:
            peers += [msg.PeerStatus(p.name, "kicked") for p in self.book.peers() if p.kicked]
        last = last_checkpoint(settings.run.folder)
        return cut(report, waiting_for=waiting_for, last_checkpoint=last, peers=peers)

    def _peer(self, member: Member, formation: Formation, settings: Settings) -> msg.PeerStatus:
        heard = time.time() - (time.monotonic() - member.heard)
        state = f"gets no stage: {member.why_unfit}" if member.why_unfit else "waiting for a stage"
        follows = [*self.standing.standbys.items()]
        if followed := [stage for group, name in follows if name == member.name for stage in group]:
            state = f"stands by for stage {', '.join(map(str, sorted(followed)))}"
            if found := self.standing.audits.get(member.name):
                state += f"; {audit_text(found)}"
        stages, machine = formation.held_by(member.name), None
        if stages:
            words, doing = zip(*map(self.standing.word_of, stages), strict=True)
            doings = dict.fromkeys(what or "starting" for what in doing)
            heard, state = max(heard, *words), "; ".join(doings)
        if member.hello is not None:
            machine, name = member.hello.machine, member.name
            device, is_open = one_line(machine.device, 60), member.is_reachable
            machine = dataclasses.replace(machine, name=name, device=device, reachable=is_open)
        state = "away" if machine is None else UNREACHED if member.is_down else state
        blocks = blocks_text(settings, stages)
        return msg.PeerStatus(member.name, state, stages, blocks, heard, machine=machine)

    def _kick(self, request: dict[str, Any]) -> dict[str, Any]:
        name = str(request.get("peer"))
        seats, others = self.formation().seats, self.members.kick(name)
        also = others if request.get("by_invite") is True else []
        for other in also:
            self.members.kick(other)
        kicked = [name, *also]
        who = f"{', '.join(kicked)} {'was' if len(kicked) == 1 else 'were'} removed from the run"
        others_too = "nor is anybody new by the same invite; `thinwire invite` makes another"
        text = f"{who} and not let in again, {others_too}"
        for stage in (stage for stage, name in enumerate(seats) if name in kicked):
            text += f"; stage {stage} gets another peer"
        if others and not also:
            text += f"\nby the same invite came, and stay: {', '.join(others)}"
            text += f"; `thinwire kick {name} --by-invite` removes them too"
        return {"text": text}

    def _outside(self, request: dict[str, Any]) -> dict[str, Any]:
        """By which of its addresses peers on other machines reach this host."""
        peers = {}
        for member in self.members.try_door(TRY_SECONDS):
            if member.tried and not member.origin.startswith(("127.", "::1")):
                said = member.tried.answers
                known = (one for one in self.addresses if one in said)
                peers[member.name] = {address: one_line(said[address]) for address in known}
        return {"run": self.settings().run.name, "addresses": [*self.addresses], "peers": peers}

    def _make_invite(self, request: dict[str, Any]) -> dict[str, Any]:
        machines = request.get("machines", 1)
        if not isinstance(machines, int) or machines < 1:
            raise ConfigError("an invite is for one machine or more")
        return {"text": f"thinwire join {self.invite(machines)}"}


def blocks_text(settings: Settings, stages: list[int]) -> str:
    """The blocks of stages: "0..5", and of stages that are no neighbours "0..5, 9..11"."""
    split, parts = settings.split(), list[range]()
    for blocks in (split[stage] for stage in stages if stage < len(split)):
        is_next = parts and parts[-1].stop == blocks.start
        start = parts.pop().start if is_next else blocks.start
        parts.append(range(start, blocks.stop))
    return ", ".join(f"{blocks.start}..{blocks.stop - 1}" for blocks in parts)


def status_table(report: msg.StatusReport) -> RenderableType:
    """The report for a person."""
    peers = sorted(report.peers, key=lambda p: (not p.stages, p.stages, p.name))
    seats, machines = [], []
    for peer in peers:
        name, stages = peer.name, ", ".join(map(str, peer.stages))
        here = f"{name} (here)" if peer.is_this_machine else name
        heard = f"{duration(report.time - peer.last_word)} ago" if peer.last_word else ""
        seats.append((here, stages, peer.blocks, peer.state, heard))
        if (has := peer.machine) is not None:
            rate = human_flops(has.tflops * 1e12) if has.tflops else ""
            memory = human_bytes(has.memory_bytes) if has.memory_bytes else ""
            speeds = f"{has.mbps_up:,.0f} / {has.mbps_down:,.0f}" if has.mbps_up else ""
            trip = f"{2 * has.latency_ms:,.0f} ms" if has.latency_ms else ""
            found = rate, memory, speeds, trip, "yes" if has.reachable else "no"
            machines.append((name, printable(has.device, 60), *found))
    columns = ["peer", "stages", "blocks", "state"]
    parts = [_facts(report), *_table("Peers", columns, ["last word"], seats)]
    numbers = ["rate", "free\nmemory", "up / down\nMbit/s", "round\ntrip", "has\na door"]
    parts += _table("Machines, as they measured themselves", ["peer", "device"], numbers, machines)
    links = []
    for link in report.links:
        rates = (link.forward_bytes_per_s, link.backward_bytes_per_s)
        shown = (f"{human_bytes(rate)}/s" if rate else "" for rate in rates)
        trip = f"{link.round_trip_ms:,.3g} ms" if link.round_trip_ms else ""
        ends = f"{link.below} - {link.above}"
        links.append((str(link.cut), ends, link.way or "not connected", *shown, trip))
    numbers = ["forward", "backward", "round\ntrip"]
    parts += _table("Links", ["cut", "between", "way"], numbers, links)
    return Group(*parts, *(Text(f"note: {printable(note)}") for note in report.notes))


def _table(
    title: str, columns: Sequence[str], numbers: Sequence[str], rows: Sequence[tuple[str, ...]]
) -> list[RenderableType]:
    """A table of what others say, as text: a terminal obeys nothing of it. None without rows."""
    table = plain_table(title, *columns, numbers=numbers)
    for row in rows:
        table.add_row(*(Text(printable(cell) or ABSENT) for cell in row))
    return [table] if rows else []


def _facts(report: msg.StatusReport) -> RenderableType:
    number = f" ({report.run_id})" if report.run_id else ""
    seen_from = {"host": "its host", "folder": "its folder"}.get(report.role, "this peer")
    since, again = duration(report.time - report.waiting_since), report.epoch - 1
    times = f": the run was re-formed {again} time{'s' * (again > 1)}" if again > 0 else ""
    step, saved = f"{report.step:,} of {report.steps:,}", report.last_checkpoint
    facts = {
        "run": f"{report.run}{number}, seen from {seen_from}",
        "state": report.state,
        "waiting for": f"{report.waiting_for}, for {since}" if report.waiting_for else "",
        "step": f"{step}, loss {loss_text(report.loss)}" if report.steps else "",
        "speed": f"{report.tokens_per_s:,.0f} tokens/s" if report.tokens_per_s else "",
        "epoch": f"{report.epoch}{times}" if report.epoch else "",
        "checkpoint": "" if saved is None else f"step {saved:,}",
    }
    return fact_grid((name, Text(printable(text))) for name, text in facts.items() if text)
