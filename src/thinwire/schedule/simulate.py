"""Plays a schedule with given compute times and links, to say how long a step takes and why.

Time is continuous and events run in order of time. Each stage is a host that computes one
action at a time and has one uplink and one downlink; sending never holds up computing.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from thinwire.errors import ConfigError
from thinwire.occupancy import Occupancy
from thinwire.schedule.action import Action, Kind, Schedule
from thinwire.schedule.build import FORWARD_ONLY, build, in_flight, validate

CONTROL_BYTES = 64  # one tally or verdict: a frame header and a few numbers
BASIS_GRADIENT, NEW_BASIS = "basis gradient", "basis"  # messages of a learned basis
BOUND_SHARE = 0.85  # a resource busy for this share of the step is called its limit
WAITING = "latency/bubble"  # the limit of a step in which no resource is that busy
MANY_MICROBATCHES = 64  # with more than these a table of windows tries fewer


@dataclass(frozen=True)
class Costs:
    """Seconds per action of each stage, and bytes per microbatch over each boundary.

    Boundary b lies between stage b and stage b + 1, so there is one fewer than stages. A learned
    basis also crosses once a step: its gradient down, and after the update the basis up.
    """

    forward: list[float]
    backward: list[float]
    update: list[float]
    forward_bytes: list[int]
    backward_bytes: list[int]
    basis_bytes: list[int] = field(default_factory=list)  # none = no cut learns its basis

    def check(self, stages: int) -> None:
        """Refuse lists of the wrong length and numbers that are no amount."""
        for name, values in vars(self).items():
            wanted = stages - 1 if name.endswith("bytes") else stages
            if len(values) != wanted and (values or name != "basis_bytes"):
                raise ConfigError(
                    f"costs.{name} has {len(values)} numbers, {stages} stages need {wanted}"
                )
            for value in values:
                _check_amount(f"costs.{name}", value)

    def of(self, action: Action) -> float:
        """Seconds that this action takes on a core of its own."""
        times = {Kind.F: self.forward, Kind.B: self.backward, Kind.U: self.update}
        return times[action.kind][action.stage]

    def basis_below(self, stage: int) -> int:
        """Bytes of the learned basis of the boundary below a stage; 0 where there is none."""
        return self.basis_bytes[stage - 1] if self.basis_bytes and stage > 0 else 0


@dataclass(frozen=True)
class Network:
    """The links of every host: rates in 10^6 bits per second, 0 = unlimited; one-way delay."""

    mbps_up: float = 0.0
    mbps_down: float = 0.0
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _check_amount(f"network.{name}", value)


@dataclass(frozen=True)
class Span:
    """What a stage's lane ("compute", "send" or "wait") did from start to end, in seconds."""

    stage: int
    lane: str
    label: str
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The last simulated step; by then each step repeats the one before.

    Span times count from the step's start on stage 0. Another stage may begin its step a
    little before (negative times) or after. `compute_seconds` is work: with shared cores
    an action may take longer than its work.
    """

    schedule: Schedule
    step_seconds: float
    spans: list[Span]
    compute_seconds: list[float]
    uplink_utilisation: list[float]
    downlink_utilisation: list[float]
    in_flight: list[int]
    cores: int | None = None

    @property
    def bubble_fraction(self) -> float:
        """Share of the stages' time within the step in which they do not compute.

        An action that shares its cores computes for as long as it takes.
        """
        busy = sum(span.end - span.start for span in self.spans if span.lane == "compute")
        return 1.0 - _ratio(busy, self.schedule.stages * self.step_seconds)

    @property
    def bound(self) -> str:
        """What limits the step: the busiest resource, or WAITING when none is busy."""
        step, cores = self.step_seconds, self.cores
        busy = {
            f"compute of stage {stage}": _ratio(seconds, step)
            for stage, seconds in enumerate(self.compute_seconds)
        }
        if cores is not None and cores < self.schedule.stages:
            busy[f"{cores} shared cores"] = _ratio(sum(self.compute_seconds), cores * step)
        for stage, share in enumerate(self.uplink_utilisation):
            busy[f"uplink of stage {stage}"] = share
        for stage, share in enumerate(self.downlink_utilisation):
            busy[f"downlink of stage {stage}"] = share
        name = max(busy, key=lambda name: busy[name])
        return name if busy[name] >= BOUND_SHARE else WAITING

    def describe(self) -> str:
        """A few lines for a person: the step, its limit, and one line per stage."""
        schedule, bound = self.schedule, self.bound
        limit = f"limited by: {bound}"
        if bound == WAITING:
            limit += f" (no stage and no link is busy for {BOUND_SHARE:.0%} of the step)"
        lines = [
            f"{schedule.name}, {schedule.stages} stages, {schedule.microbatches} microbatches, "
            f"window {schedule.window}: {self.step_seconds:.3f} s per step",
            limit,
            f"bubble: {self.bubble_fraction:.0%} of the stages' time is not compute",
            "stage  compute (s)  uplink busy  downlink busy  microbatches held",
        ]
        for stage in range(schedule.stages):
            lines.append(
                f"{stage:5}  {self.compute_seconds[stage]:11.3f}"
                f"  {self.uplink_utilisation[stage]:11.0%}"
                f"  {self.downlink_utilisation[stage]:13.0%}  {self.in_flight[stage]:17}"
            )
        return "\n".join(lines)


def simulate(
    schedule: Schedule,
    costs: Costs,
    network: Network | None = None,
    steps: int = 3,
    cores: int | None = None,
) -> Simulation:
    """Play `steps` steps of a training schedule and report on the last.

    With `cores`, the stages share one machine: n running actions each go at the speed
    min(1, cores / n). Two steps reach the steady state, because when stage 0 sends its
    verdict every stage is idle and every link empty; the default leaves one to spare.
    """
    validate(schedule)
    if schedule.name == FORWARD_ONLY:
        raise ConfigError("only training schedules can be simulated, this one has no update")
    if steps < 2:
        raise ConfigError(f"steps = {steps}: a steady step needs one before it, use 2 or more")
    if cores is not None and cores < 1:
        raise ConfigError(f"cores = {cores}: must be 1 or more, or None for a core per stage")
    costs.check(schedule.stages)
    play = _Play(schedule, costs, network or Network(), steps, cores)
    play.run()

    start, end = play.step_ends[-2:]
    seconds = end - start
    return Simulation(
        schedule=schedule,
        step_seconds=seconds,
        spans=[Span(s.stage, s.lane, s.label, s.start - start, s.end - start) for s in play.spans],
        compute_seconds=[sum(map(costs.of, row)) for row in schedule.rows],
        uplink_utilisation=[_ratio(host.uplink.busy, steps * seconds) for host in play.hosts],
        downlink_utilisation=[_ratio(host.downlink.busy, steps * seconds) for host in play.hosts],
        in_flight=in_flight(schedule),
        cores=cores,
    )


def window_table(
    stages: int,
    microbatches: int,
    costs: Costs,
    network: Network | None = None,
    cores: int | None = None,
) -> list[tuple[int, float, list[int]]]:
    """(window, seconds per step, microbatches held by each stage) for 1f1b.

    The windows are 1, half the stages, the stages (classic 1f1b), then half as many again
    each time up to all microbatches: fine where memory is tight, coarse where it is not.
    Many microbatches take long to play: windows double, and end where more gain nothing.
    """
    many = microbatches > MANY_MICROBATCHES
    windows, window = {1, max(1, stages // 2), microbatches}, stages
    while window < microbatches:
        windows.add(window)
        window += window if many else max(1, window // 2)
    table: list[tuple[int, float, list[int]]] = []
    for window in sorted(windows) if stages > 1 else [1]:  # a single stage has one window only
        played = simulate(build("1f1b", stages, microbatches, window), costs, network, 2, cores)
        table.append((window, played.step_seconds, played.in_flight))
        if many and len(table) > 1 and played.step_seconds > 0.999 * table[-2][1]:
            break
    return table


@dataclass
class _Host:
    """Where one stage stands."""

    backwards_left: int
    uplink: Occupancy
    downlink: Occupancy
    step: int = 0
    position: int = 0
    running: Action | None = None
    since: float = 0.0  # when it began to run, or else to wait
    inbox: set[tuple[int, str]] = field(default_factory=set)


@dataclass(frozen=True)
class _Message:
    target: int
    step: int
    label: str  # of the sender's action, or tally, or verdict
    size: int
    arrival: float  # of its last byte


class _Cores:
    """Running actions, all at one common speed.

    A work clock goes at that speed, so an action ends when the clock has moved on by its
    work, whoever comes and goes meanwhile. The clock is re-based only when the speed
    changes: at full speed it reads the time exactly and no rounding piles up.
    """

    def __init__(self, cores: int) -> None:
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


class _Play:
    """The event loop: compute that ends, first bytes that reach a downlink, deliveries."""

    def __init__(
        self, schedule: Schedule, costs: Costs, network: Network, steps: int, cores: int | None
    ) -> None:
        self.schedule, self.costs, self.network, self.steps = schedule, costs, network, steps
        self.top = schedule.stages - 1
        self.hosts = [
            _Host(schedule.microbatches, Occupancy(network.mbps_up), Occupancy(network.mbps_down))
            for _ in schedule.rows
        ]
        self.cores = _Cores(cores or schedule.stages)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[_Message], None], _Message]] = []
        self.scheduled = 0  # breaks ties in time by order of scheduling
        self.spans: list[Span] = []  # of the last step
        self.step_ends: list[float] = []

    def run(self) -> None:
        for stage in range(self.schedule.stages):
            self.advance(stage)
        while True:
            ends, stage = self.cores.next_end()
            if self.events and self.events[0][0] <= ends:
                self.now, _, handle, message = heapq.heappop(self.events)
                handle(message)
            elif stage >= 0:
                self.now = max(self.now, ends)  # rounding must not turn time back
                self.finish(stage)
            else:
                return

    def advance(self, stage: int) -> None:
        """Start the stage's next action if it is idle and the input is there."""
        host = self.hosts[stage]
        if host.running is not None or host.step == self.steps:
            return
        action = self.schedule.rows[stage][host.position]
        needed = self.message_for(action)
        if needed is not None and (host.step, needed) not in host.inbox:
            return
        if host.position == 0 and host.step > 0 and self.costs.basis_below(stage):
            new_basis = (host.step - 1, NEW_BASIS)
            if new_basis not in host.inbox:
                return
        if self.now > host.since:
            self.record(stage, "wait", action.label, host.since, self.now)
        host.running, host.since = action, self.now
        self.cores.start(stage, self.costs.of(action), self.now)

    def message_for(self, action: Action) -> str | None:
        """The label of the message an action waits for: what brings it `Schedule.needs`."""
        if action.kind is Kind.U:
            return None if self.top == 0 else "verdict" if action.stage > 0 else "tally"
        source = 0 if action.kind is Kind.F else self.top
        return None if action.stage == source else action.label

    def finish(self, stage: int) -> None:
        host = self.hosts[stage]
        action = host.running
        assert action is not None
        self.cores.stop(stage, self.now)
        self.record(stage, "compute", action.label, host.since, self.now)
        host.running, host.since = None, self.now
        host.position += 1
        if action.kind is Kind.F and stage < self.top:
            self.send(stage, stage + 1, action.label, self.costs.forward_bytes[stage])
        elif action.kind is Kind.B:
            if stage > 0:
                self.send(stage, stage - 1, action.label, self.costs.backward_bytes[stage - 1])
            host.backwards_left -= 1
            if not host.backwards_left and (size := self.costs.basis_below(stage)):
                self.send(stage, stage - 1, BASIS_GRADIENT, size)
            self.close(stage)
        elif action.kind is Kind.U:
            if stage == 0:
                self.step_ends.append(self.now)
            if stage < self.top and (size := self.costs.basis_below(stage + 1)):
                self.send(stage, stage + 1, NEW_BASIS, size)
            host.step, host.position = host.step + 1, 0
            host.backwards_left = self.schedule.microbatches
        self.advance(stage)

    def close(self, stage: int) -> None:
        """After the last backward, with the tally from above: pass it on, or give the verdict."""
        host = self.hosts[stage]
        due = {"tally"} if stage < self.top else set()
        if stage < self.top and self.costs.basis_below(stage + 1):
            due.add(BASIS_GRADIENT)
        if host.backwards_left or any((host.step, label) not in host.inbox for label in due):
            return
        if stage > 0:
            self.send(stage, stage - 1, "tally", CONTROL_BYTES)
        elif self.top > 0:
            self.send(stage, stage + 1, "verdict", CONTROL_BYTES)

    def send(self, source: int, target: int, label: str, size: int) -> None:
        """Queue on the uplink; the first byte reaches the other end one latency after its start."""
        host = self.hosts[source]
        start, end = host.uplink.carry(size, self.now, self.now)
        shown = f"{label}>" if target > source else f"<{label}"
        self.record(source, "send", shown, start, end)
        message = _Message(target, host.step, label, size, end + self.network.latency_s)
        self.at(start + self.network.latency_s, self.reach_downlink, message)

    def reach_downlink(self, message: _Message) -> None:
        downlink = self.hosts[message.target].downlink
        _, passed = downlink.carry(message.size, self.now, message.arrival)
        self.at(passed, self.deliver, message)

    def deliver(self, message: _Message) -> None:
        stage = message.target
        self.hosts[stage].inbox.add((message.step, message.label))
        if message.label in ("tally", BASIS_GRADIENT):
            self.close(stage)
        elif message.label == "verdict" and stage < self.top:
            self.send(stage, stage + 1, "verdict", CONTROL_BYTES)
        self.advance(stage)

    def at(self, time: float, handle: Callable[[_Message], None], message: _Message) -> None:
        heapq.heappush(self.events, (time, self.scheduled, handle, message))
        self.scheduled += 1

    def record(self, stage: int, lane: str, label: str, start: float, end: float) -> None:
        if self.hosts[stage].step == self.steps - 1:
            self.spans.append(Span(stage, lane, label, start, end))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _check_amount(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name} = {value}: must be 0 or more, and finite")
