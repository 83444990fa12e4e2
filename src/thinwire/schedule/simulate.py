"""Plays a schedule with given compute times and links, to say how long a step takes and why."""

from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.schedule.action import Schedule
from thinwire.schedule.build import FORWARD_ONLY, build, in_flight, validate
from thinwire.schedule.play import Chain, Costs, Links, Network, Play, Span

BOUND_SHARE = 0.85  # a resource busy for this share of the step is called its limit
SHARED = "compute shared by all stages"
MANY_MICROBATCHES = 64  # with more than these a table of windows tries fewer


@dataclass(frozen=True)
class Simulation:
    """The last simulated step; by then each step repeats the one before.

    Span times count from the step's start on stage 0. Another stage may begin its step a
    little before (negative times) or after. `compute_seconds` is work: with shared cores
    an action may take longer than its work. `chain` says what stands one after the other in the
    longest chain of causes through the step; its parts add up to it.
    """

    schedule: Schedule
    step_seconds: float
    spans: list[Span]
    compute_seconds: list[float]
    uplink_utilisation: list[float]
    downlink_utilisation: list[float]
    in_flight: list[int]
    chain: dict[str, float]
    cores: float | None = None

    @property
    def bubble_fraction(self) -> float:
        """Share of the stages' time within the step in which they do not compute.

        An action that shares its cores computes for as long as it takes.
        """
        busy = sum(span.end - span.start for span in self.spans if span.lane == "compute")
        return 1.0 - _ratio(busy, self.schedule.stages * self.step_seconds)

    @property
    def bound(self) -> str:
        """What limits the step: the busiest resource, or where none is busy what most of its
        longest chain is.
        """
        name, share = self._busiest()
        if share >= BOUND_SHARE:
            return name
        chain = self.chain
        parts = {
            SHARED if self._is_shared else "compute": chain["compute"] + chain["shared"],
            "latency": chain["latency"],
            "links": chain["links"],
        }
        return max(parts, key=lambda name: parts[name])

    @property
    def _is_shared(self) -> bool:
        return self.cores is not None and self.cores < self.schedule.stages

    def _busiest(self) -> tuple[str, float]:
        """The resource that is busy for the largest share of the step."""
        step = self.step_seconds
        busy = {
            f"compute of stage {stage}": _ratio(seconds, step)
            for stage, seconds in enumerate(self.compute_seconds)
        }
        if self._is_shared:
            busy[SHARED] = _ratio(sum(self.compute_seconds), (self.cores or 1) * step)
        for stage, share in enumerate(self.uplink_utilisation):
            busy[f"uplink of stage {stage}"] = share
        for stage, share in enumerate(self.downlink_utilisation):
            busy[f"downlink of stage {stage}"] = share
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
        lines = [
            f"{schedule.name}, {schedule.stages} stages, {schedule.microbatches} microbatches, "
            f"window {schedule.window}: {self.step_seconds:.3f} s per step",
            limit,
            f"longest chain: {', '.join(chain)}",
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
    cores: float | None = None,
) -> Simulation:
    """Play `steps` steps of a training schedule and report on the last.

    With `cores`, the stages share one machine on which so many compute at full speed at once:
    n running actions each go at the speed min(1, cores / n). Two steps reach the steady state,
    because when stage 0 sends its verdict every stage is idle and every link empty; the default
    leaves one to spare.
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
        chain={
            name: now - before
            for name, before, now in zip(Chain._fields, *play.chains[-2:], strict=True)
        },
        cores=cores,
    )


def window_table(
    stages: int,
    microbatches: int,
    costs: Costs,
    network: Network | Links | None = None,
    cores: float | None = None,
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
