"""Plays a schedule with given compute times and links, to say how long a step takes and why."""

from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.schedule.action import Schedule
from thinwire.schedule.build import FORWARD_ONLY, build, in_flight, validate
from thinwire.schedule.play import Costs, Links, Network, Play, Span

BOUND_SHARE = 0.85  # a resource busy for this share of the step is called its limit
WAITING = "latency/bubble"  # the limit of a step in which no resource is that busy
MANY_MICROBATCHES = 64  # with more than these a table of windows tries fewer


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
    network: Network | Links | None = None,
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
    links = (network or Network()).links(schedule.stages)
    play = Play(schedule, costs, links, steps, cores)
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
    network: Network | Links | None = None,
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


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
