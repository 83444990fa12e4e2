"""Plays a schedule step after step, to say how long a step takes and why.

Each stage is a host that computes one action at a time and has one uplink and one downlink on which
messages queue; sending never holds up computing.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from thinwire.errors import ConfigError
from thinwire.occupancy import Occupancy
from thinwire.schedule.build import Action, Kind, Schedule, build

CONTROL_BYTES = 64  # one tally or verdict: a frame header and a few numbers
TALLY, VERDICT = "tally", "verdict"
ROW_GRADIENTS, ROW_CHANGES = "row gradients", "rows"  # and of a shared embedding
ROW_FRAME_BYTES = 1 << 18  # of rows that travel together: a stage hands on what it has so far


@dataclass(frozen=True)
class Costs:
    """Seconds per action of each stage; bytes over each cut, per microbatch (rows: per step)."""

    forward: list[float]
    backward: list[float]
    update: list[float]
    forward_bytes: list[int]
    backward_bytes: list[int]
    row_bytes: list[int] = field(default_factory=list)  # none = no embedding is shared

    def of(self, stage: int, action: Action) -> float:
        """Seconds that this action of a stage takes on a core of its own."""
        times = {Kind.F: self.forward, Kind.B: self.backward, Kind.U: self.update}
        return times[action.kind][stage]

    def each_step(self, cut: int) -> int:
        """Bytes of rows that cross a cut once a step, each way."""
        return self.row_bytes[cut] if self.row_bytes else 0


@dataclass(frozen=True)
class Links:
    """Of each stage's host the rates in 10^6 bits per second, 0 = unlimited, and one-way delays
    over the cuts.
    """

    mbps_up: list[float]
    mbps_down: list[float]
    latency_s: list[float]

    @classmethod
    def alike(
        cls, stages: int, mbps_up: float = 0.0, mbps_down: float = 0.0, latency_s: float = 0.0
    ) -> "Links":
        """The same for so many stages, each on a host of its own."""
        return cls([mbps_up] * stages, [mbps_down] * stages, [latency_s] * (stages - 1))


@dataclass(frozen=True)
class Span:
    """What a stage's lane ("compute", "send" or "wait") did from start to end, in seconds."""

    stage: int
    lane: str
    label: str
    start: float
    end: float


class CauseChain(NamedTuple):
    """What stands one after the other in the chain of causes that ends here, in seconds."""

    compute: float = 0.0
    shared: float = 0.0  # what actions took longer because they shared cores
    latency: float = 0.0
    links: float = 0.0  # queues and the bytes themselves

    def then(self, **seconds: float) -> "CauseChain":
        """The same chain with more behind it."""
        return self._replace(**{name: getattr(self, name) + s for name, s in seconds.items()})


_Turn = tuple[int, Action | str]  # of a step: an action to compute, or a message to wait for


@dataclass
class _Host:
    turns: Iterator[_Turn]
    uplink: Occupancy
    downlink: Occupancy
    turn: _Turn | None = None  # what it computes or waits for; None: it is done
    is_computing: bool = False
    since: float = 0.0  # when it began to compute, or else to wait
    # What ended its last turn, or led to the one that it computes.
    chain: CauseChain = field(default_factory=CauseChain)
    # By step and label, what led to messages that have come.
    inbox: dict[_Turn, CauseChain] = field(default_factory=dict)


class _Cores:
    """Running actions, all at one speed, by a work clock that is re-based when that changes."""

    def __init__(self, cores: float) -> None:
        self.cores = cores
        self.ends: dict[int, float] = {}  # stage -> reading of the work clock
        self.speed = 1.0
        self.base_time = 0.0
        self.base_work = 0.0

    def start(self, stage: int, work: float, now: float) -> None:
        self.ends[stage] = self._reading(now) + work
        self._set_speed(now)

    def stop(self, stage: int, now: float) -> None:
        del self.ends[stage]
        self._set_speed(now)

    def next_end(self) -> tuple[float, int]:
        """Time and stage of the next action to end; the time is infinite when none runs."""
        if not self.ends:
            return math.inf, -1
        reading, stage = min(zip(self.ends.values(), self.ends, strict=True))
        return self.base_time + (reading - self.base_work) / self.speed, stage

    def _reading(self, now: float) -> float:
        return self.base_work + (now - self.base_time) * self.speed

    def _set_speed(self, now: float) -> None:
        speed = min(1.0, self.cores / max(1, len(self.ends)))
        if speed != self.speed:
            self.base_work, self.base_time = self._reading(now), now
            self.speed = speed


class Play:
    """The event loop: compute that ends, first bytes that reach a downlink, deliveries."""

    def __init__(
        self, schedule: Schedule, costs: Costs, links: Links, steps: int, seen: int, cores: float
    ) -> None:
        self.spans: list[Span] = []
        self.step_ends: list[float] = []
        self.chains: list[CauseChain] = []
        self.hosts = []
        for stage in range(schedule.stages):
            up, down = links.mbps_up[stage], links.mbps_down[stage]
            turns = self._turns(stage, schedule, steps)
            self.hosts.append(_Host(turns, Occupancy(up), Occupancy(down)))
        self._costs, self._latency, self._seen = costs, links.latency_s, seen
        self._cores = _Cores(cores)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0  # breaks ties in time by order of scheduling

    def run(self) -> None:
        """Play until no stage has anything left to do."""
        for stage, host in enumerate(self.hosts):
            host.turn = next(host.turns)
            self._advance(stage)
        while True:
            ends, stage = self._cores.next_end()
            if self._events and self._events[0][0] <= ends:
                self._now, _, happen = heapq.heappop(self._events)
                happen()
            elif stage >= 0:
                self._now = max(self._now, ends)  # rounding must not turn time back
                self._finish(stage)
            else:
                return

    def _turns(self, stage: int, schedule: Schedule, steps: int) -> Iterator[_Turn]:
        """What a stage does in so many steps: its turns, and in between what it sends."""
        below, above = stage - 1, stage + 1
        for step, action in schedule.stream(stage, 0, steps):
            if action.kind is Kind.U:
                if stage > 0:
                    yield step, VERDICT
                    self._send(stage, step, above, VERDICT, CONTROL_BYTES)
                yield step, action
                yield from self._rows(stage, step, below, above, ROW_CHANGES)
                if stage == 0:
                    self.step_ends.append(self._now)
                    self.chains.append(self.hosts[0].chain)
                continue
            is_forward, sizes = action.kind is Kind.F, self._costs.backward_bytes
            source, target = (below, above) if is_forward else (above, below)
            if is_forward:
                sizes = self._costs.forward_bytes
            if self._is_stage(source):
                yield step, action.label
            yield step, action
            if self._is_stage(target):
                self._send(stage, step, target, action.label, sizes[min(stage, target)])
            if not is_forward and action.microbatch == schedule.microbatches - 1:
                yield from self._rows(stage, step, above, below, ROW_GRADIENTS)
                if self._is_stage(above):
                    yield step, TALLY
                answer, label = (below, TALLY) if stage > 0 else (above, VERDICT)
                self._send(stage, step, answer, label, CONTROL_BYTES)

    def _rows(self, stage: int, step: int, source: int, target: int, label: str) -> Iterator[_Turn]:
        """Rows of a shared embedding, frame by frame: from the stage `source` on to `target`."""
        size = self._costs.each_step(min(stage, target if self._is_stage(target) else source))
        for frame, start in enumerate(range(0, size, ROW_FRAME_BYTES)):
            if self._is_stage(source):
                yield step, f"{label} {frame}"
            part = min(ROW_FRAME_BYTES, size - start)
            self._send(stage, step, target, f"{label} {frame}", part)

    def _is_stage(self, number: int) -> bool:
        return 0 <= number < len(self.hosts)

    def _advance(self, stage: int) -> None:
        """Do the stage's next turns, as far as it is idle and what they need is there."""
        host = self.hosts[stage]
        while not host.is_computing and host.turn is not None:
            step, what = host.turn
            if isinstance(what, Action):
                if self._now > host.since:
                    self._record(step, Span(stage, "wait", what.label, host.since, self._now))
                host.is_computing, host.since = True, self._now
                self._cores.start(stage, self._costs.of(stage, what), self._now)
            elif host.turn in host.inbox:
                host.chain = max(host.chain, host.inbox[host.turn], key=sum)
                host.turn = next(host.turns, None)
            else:
                return

    def _finish(self, stage: int) -> None:
        host = self.hosts[stage]
        assert host.turn is not None and isinstance(host.turn[1], Action)
        step, action = host.turn[0], host.turn[1]
        self._cores.stop(stage, self._now)
        self._record(step, Span(stage, "compute", action.label, host.since, self._now))
        work = self._costs.of(stage, action)
        host.chain = host.chain.then(compute=work, shared=self._now - host.since - work)
        host.is_computing, host.since = False, self._now
        host.turn = next(host.turns, None)
        self._advance(stage)

    def _send(self, source: int, step: int, target: int, label: str, size: int) -> None:
        """Queue on the uplink; the first byte reaches the other end one latency after its start."""
        if not self._is_stage(target):
            return
        host, other = self.hosts[source], self.hosts[target]
        start, end = host.uplink.carry(size, self._now, self._now)
        shown = f"{label}>" if target > source else f"<{label}"
        self._record(step, Span(source, "send", shown, start, end))
        latency = self._latency[min(source, target)]
        chain = host.chain.then(latency=latency, links=-latency - self._now)  # its end is added

        def reach_downlink() -> None:
            _, passed = other.downlink.carry(size, self._now, end + latency)
            self._at(passed, partial(deliver, chain.then(links=passed)))

        def deliver(whole: CauseChain) -> None:
            other.inbox[step, label] = whole
            self._advance(target)

        self._at(start + latency, reach_downlink)

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, self._scheduled, happen))
        self._scheduled += 1

    def _record(self, step: int, span: Span) -> None:
        if step == self._seen:
            self.spans.append(span)


def _check(what: str, lists: Costs | Links, stages: int) -> None:
    """Refuse lists of the wrong length and numbers that are no amount."""
    for name, values in vars(lists).items():
        wanted = stages - 1 if name == "latency_s" or name.endswith("bytes") else stages
        lengths = (wanted, 0) if name == "row_bytes" else (wanted,)
        if len(values) not in lengths or not all(0 <= value < math.inf for value in values):
            raise ConfigError(f"{what}.{name} = {values}: {wanted} numbers are needed, 0 or more")


BOUND_SHARE = 0.85  # a resource busy for this share of the step is called its limit
SHARED = "compute shared by all stages"
OVERLAPPING = 4  # steps of which the mean is taken with delayed updates
MANY_MICROBATCHES = 64  # with more than these a table of windows tries fewer


@dataclass(frozen=True)
class Simulation:
    """One simulated step. Spans count from its start on stage 0. `compute_seconds` is work, which
    takes longer where cores are shared; `chain` is the longest chain of causes through the step.
    """

    schedule: Schedule
    step_seconds: float
    spans: list[Span]
    compute_seconds: list[float]
    uplink_utilisation: list[float]
    downlink_utilisation: list[float]
    chain: dict[str, float]
    cores: float | None = None

    @property
    def bubble_fraction(self) -> float:
        """Share of the stages' time within the step in which they do not compute."""
        busy = sum(span.end - span.start for span in self.spans if span.lane == "compute")
        return 1.0 - _ratio(busy, self.schedule.stages * self.step_seconds)

    @property
    def bound(self) -> str:
        """What limits the step: the busiest resource, or else what most of its chain is."""
        name, share = self._busiest()
        if share >= BOUND_SHARE:
            return name
        parts = dict(self.chain)
        parts[SHARED if self._is_shared else "compute"] = parts.pop("compute") + parts.pop("shared")
        return max(parts, key=lambda name: parts[name])

    @property
    def _is_shared(self) -> bool:
        return self.cores is not None and self.cores < self.schedule.stages

    def _busiest(self) -> tuple[str, float]:
        """The resource that is busy for the largest share of the step."""
        shares = {
            "compute": [_ratio(seconds, self.step_seconds) for seconds in self.compute_seconds],
            "uplink": self.uplink_utilisation,
            "downlink": self.downlink_utilisation,
        }
        busy = {f"{kind} of stage {s}": x for kind in shares for s, x in enumerate(shares[kind])}
        if self._is_shared:
            busy[SHARED] = sum(shares["compute"]) / (self.cores or 1)
        return max(busy.items(), key=lambda item: item[1])

    def describe(self) -> str:
        """A few lines for a person: the step, its limit, and one line per stage."""
        schedule = self.schedule
        limit = f"limited by: {self.bound}"
        if self._busiest()[1] < BOUND_SHARE:
            limit += f" (no stage and no link is busy for {BOUND_SHARE:.0%} of the step)"
        names = {"shared": "sharing the machine"}
        chain = [
            f"{names.get(name, name)} {seconds:.3g} s"
            for name, seconds in self.chain.items()
            if seconds > 0.005 * self.step_seconds
        ]
        busy = zip(self.uplink_utilisation, self.downlink_utilisation, strict=True)
        stages = zip(self.compute_seconds, busy, schedule.held, strict=True)
        lines = [
            f"{schedule.name}, {schedule.stages} stages, {schedule.microbatches} microbatches, "
            f"window {schedule.window}: {self.step_seconds:.3f} s per step",
            limit,
            f"longest chain: {', '.join(chain)}",
            f"bubble: {self.bubble_fraction:.0%} of the stages' time is not compute",
            "stage  compute (s)  uplink busy  downlink busy  microbatches held",
            *(
                f"{stage:5}  {seconds:11.3f}  {up:11.0%}  {down:13.0%}  {held:17}"
                for stage, (seconds, (up, down), held) in enumerate(stages)
            ),
        ]
        return "\n".join(lines)


def simulate(
    schedule: Schedule,
    costs: Costs,
    links: Links | None = None,
    steps: int = 3,
    cores: float | None = None,
) -> Simulation:
    """Play `steps` steps and report on the last, for which two are enough; with delayed updates on
    the mean of some amid others. `cores`: how many stages of one machine compute at full speed.
    """
    links = links or Links.alike(schedule.stages)
    _check("costs", costs, schedule.stages)
    _check("links", links, schedule.stages)
    seen, over = steps - 1, 1
    if schedule.delay:
        seen, over = steps + OVERLAPPING, OVERLAPPING
        steps = seen + 3  # of which the last ones are drained
    play = Play(schedule, costs, links, steps, seen, cores or schedule.stages)
    play.run()

    start, seconds = play.step_ends[seen - 1], _per_step(play.step_ends, seen, over)
    chain = [_per_step(readings, seen, over) for readings in zip(*play.chains, strict=True)]
    return Simulation(
        schedule=schedule,
        step_seconds=seconds,
        spans=[Span(s.stage, s.lane, s.label, s.start - start, s.end - start) for s in play.spans],
        compute_seconds=[
            sum(costs.of(stage, action) for action in schedule.row(stage))
            for stage in range(schedule.stages)
        ],
        uplink_utilisation=[_ratio(host.uplink.busy, steps * seconds) for host in play.hosts],
        downlink_utilisation=[_ratio(host.downlink.busy, steps * seconds) for host in play.hosts],
        chain=CauseChain(*chain)._asdict(),
        cores=cores,
    )


def _per_step(readings: Sequence[float], last: int, over: int) -> float:
    """How much was added in each step of some, up to the last."""
    return (readings[last] - readings[last - over]) / over


def window_table(
    stages: int,
    microbatches: int,
    costs: Costs,
    links: Links | None = None,
    cores: float | None = None,
    delay: int = 0,
) -> list[tuple[int, float, list[int]]]:
    """(window, seconds per step, microbatches held by each stage) for 1f1b."""
    many = microbatches > MANY_MICROBATCHES
    windows, window = {1, max(1, stages // 2), microbatches}, stages
    while window < microbatches:
        windows.add(window)
        window += window if many else max(1, window // 2)
    table: list[tuple[int, float, list[int]]] = []
    for window in sorted(windows) if stages > 1 else [1]:  # a single stage has one window only
        schedule = build("1f1b", stages, microbatches, window, delay)
        played = simulate(schedule, costs, links, 2, cores)
        table.append((window, played.step_seconds, list(schedule.held)))
        if many and len(table) > 1 and played.step_seconds > 0.999 * table[-2][1]:
            break
    return table


def cells(schedule: Schedule) -> list[list[str]]:
    """What each stage does in each slot of time, when all actions take one and messages none."""
    ones, none = [1.0] * schedule.stages, [0] * (schedule.stages - 1)
    played = simulate(replace(schedule, delay=0), Costs(ones, ones, ones, none, none), steps=2)
    found = [["."] * round(played.step_seconds) for _ in ones]
    for span in played.spans:
        if span.lane == "compute":
            found[span.stage][round(span.start)] = f"{span.stage}{span.label}"
    return found


def grid(schedule: Schedule, most: int = 0, ends: int = 0) -> str:
    """Draw `cells`, a row per stage; of more columns than `most` only so many at both `ends`."""
    rows = cells(schedule)
    rows = [[str(slot) for slot in range(len(rows[0]))], *rows]
    left_out = len(rows[0]) - 2 * ends if 0 < most < len(rows[0]) else 0
    if left_out:
        rows = [[*row[:ends], "...", *row[-ends:]] for row in rows]
    names = ["slot", *(f"stage {stage}" for stage in range(schedule.stages))]
    title, width = len(names[-1]), 2 + len(f"{schedule.stages - 1}F{schedule.microbatches - 1}")
    lines = [
        f"{name:<{title}}  {''.join(f'{cell:<{width}}' for cell in row)}".rstrip()
        for name, row in zip(names, rows, strict=True)
    ]
    if left_out:
        lines.append(f"({left_out:,} slots are left out here; --json has them all)")
    return "\n".join(lines)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
