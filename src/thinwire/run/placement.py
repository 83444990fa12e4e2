"""Which peer holds which blocks of a run: chosen by what the machines measured, and explained.

A search begins with orders of the peers, and blocks dealt out so that the slowest stage is fastest.
It goes on as long as moving a block, or exchanging two peers, makes the simulated step shorter.
"""

import contextlib
import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from thinwire.engine.build import StageBuilder, Weights
from thinwire.errors import ConfigError
from thinwire.model import architecture
from thinwire.occupancy import Occupancy
from thinwire.plan import WORTH, block_memory, block_seconds, estimate_costs, with_split
from thinwire.report.human import duration, human_bytes
from thinwire.run.machine import Machine
from thinwire.schedule import OPEN, Costs, Counts, Links, Simulation, deal, simulate
from thinwire.settings import Settings
from thinwire.settings.crossing import size_kind, size_word

ALIKE = 1.25  # rates within this factor count as equal: measured twice, one machine differs so much
MOST_ORDERS = 720  # that are looked at: all of six peers
SIMULATED = 16  # placements that the simulator compares in a round
LEAST_GAIN = 0.005  # of a step: for less no block is moved, so that splits stay near the even one
MEMORY_SHARE = 0.9  # of a peer's memory; the rest is for what is not counted, as torch's own

Seating = tuple[int, ...]  # the numbers of the peers, by stage


@dataclass(frozen=True)
class Placement:
    """Peers and blocks by stage, with a rough estimate of the step."""

    order: Seating
    counts: Counts
    fullness: float  # memory that the fullest stage needs, of what its peer has for it
    rough_seconds: float

    @property
    def fits(self) -> bool:
        """Whether every stage has the memory that it needs."""
        return self.fullness <= 1.0


class StageFigures:
    """Work, memory and links of every possible stage of a run; layers are built once, without
    memory, and added up, for a search looks at thousands.
    """

    def __init__(self, settings: Settings, peers: list[Machine]):
        self.settings, self.peers = settings, peers
        self.layers, self.stages = settings.model.layers, settings.pipeline.stages
        self.rates = [peer.flops_per_s(settings.run.precision) for peer in peers]
        self.schedule = settings.schedule()
        # Blocks that the last stage must have: those that no subspace constrains stay there.
        self.least_on_last = max(1, settings.boundary.free_layers)
        self._family = architecture(settings.model)
        self._layers: dict[str, Weights] = {}  # parameters of each layer by its name
        self._ends: list[Weights] = []  # and of each stage's ends of the cuts
        builder = StageBuilder(settings, torch.device("meta"))
        for index in range(self.stages):
            stage = builder.build(index)
            for name, layer in zip(stage.names, stage.layers, strict=True):
                self._layers[name] = Weights.of(layer.parameters())
            own = [end for end in (stage.incoming, stage.outgoing) if end is not None]
            self._ends.append(Weights.of(p for end in own for p in end.parameters()))
        self.work = cache(self._work)
        self.memory = cache(self._memory)
        self._sizes = cache(lambda counts: estimate_costs(with_split(settings, counts), 1.0))
        self.simulation: Callable[[Seating, Counts], Simulation] = cache(self._simulation)

    def weights(self, stage: int, blocks: range) -> Weights:
        """Parameters of the stage with these blocks, those of its ends of the cuts included."""
        plans = self._family.stage_layers(blocks)
        return sum((self._layers[plan.name] for plan in plans), self._ends[stage])

    def _work(self, blocks: range) -> float:
        """Floating-point operations of these blocks in a step."""
        return self.settings.pipeline.microbatches * sum(block_seconds(self.settings, blocks, 1.0))

    def _memory(self, stage: int, blocks: range) -> int:
        weights = self.weights(stage, blocks)
        return block_memory(self.settings, blocks, weights, self.schedule.held[stage])

    def fullness(self, peer: int, stage: int, blocks: range) -> float:
        """Memory that the stage with these blocks needs, as a share of what a peer has for it."""
        has = max(1, self.peers[peer].memory_bytes)
        return self.memory(stage, blocks) / (MEMORY_SHARE * has)

    def costs(self, order: Seating, counts: Counts) -> Costs:
        """Seconds and bytes of a step with these peers and blocks on the stages."""
        sizes, rates = self._sizes(counts), [self.rates[peer] for peer in order]
        both = sizes.forward, sizes.backward
        forward, backward = ([*map(operator.truediv, work, rates)] for work in both)
        update = [
            self.peers[peer].update_seconds(self.weights(stage, blocks).trained)
            for stage, (peer, blocks) in enumerate(zip(order, ranges(counts), strict=True))
        ]
        return dataclasses.replace(sizes, forward=forward, backward=backward, update=update)

    def _simulation(self, order: Seating, counts: Counts) -> Simulation:
        costs, links = self.costs(order, counts), links_of([self.peers[peer] for peer in order])
        return simulate(self.schedule, costs, links, steps=2)


def is_relayed(below: Machine, above: Machine) -> bool:
    """Whether a link needs a relay: a direct one needs an end that others can connect to."""
    return not (below.reachable or above.reachable)


def links_of(peers: list[Machine]) -> Links:
    """The links of a pipeline of these peers: the delay of a relayed one is that of both ends to
    the host, of a direct one the longer.
    """
    delays = []
    for below, above in itertools.pairwise(peers):
        both = below.latency_ms, above.latency_ms
        delays.append((sum(both) if is_relayed(below, above) else max(both)) / 1e3)
    return Links([peer.mbps_up for peer in peers], [peer.mbps_down for peer in peers], delays)


def ranges(counts: Counts) -> list[range]:
    """The blocks of each stage."""
    stops = list(itertools.accumulate(counts))
    return [range(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


def orders_of(rates: list[float], places: int) -> list[Seating]:
    """All orders of few peers; of many as they are listed, and the fastest first or last."""
    if math.perm(len(rates), places) <= MOST_ORDERS:
        return [*itertools.permutations(range(len(rates)), places)]
    by_rate = sorted(range(len(rates)), key=lambda peer: -rates[peer])[:places]
    return [tuple(range(places)), tuple(by_rate), tuple(reversed(by_rate))]


class Search:
    """Finds placements; `counts` fixes the blocks, and leaves only the order to be found."""

    def __init__(self, figures: StageFigures, counts: Counts | None = None):
        self.figures = figures
        self._counts = counts

    def best(self) -> Placement:
        """The fastest placement found that fits; where none fits, the one that lacks least."""
        listed, *others = map(self.place, orders_of(self.figures.rates, self.figures.stages))
        best = self._fastest(listed, others)
        while (better := self._fastest(best, self._neighbours(best))) is not best:
            best = better
        return best

    def seconds(self, placement: Placement) -> float:
        """The step by the simulator."""
        return self.figures.simulation(placement.order, placement.counts).step_seconds

    def place(self, order: Seating, counts: Counts | None = None) -> Placement:
        """The peers in this order with these blocks, or with the best that can be dealt out."""
        counts = counts or self._counts or self._dealt(order)
        fullness = max(map(self.figures.fullness, order, itertools.count(), ranges(counts)))
        return Placement(order, counts, fullness, self._rough(order, counts))

    def _fastest(self, best: Placement, others: Iterable[Placement]) -> Placement:
        """Of the most promising others one that simulates clearly faster, or lacks less memory."""
        by_promise = sorted(others, key=lambda one: (max(1.0, one.fullness), one.rough_seconds))
        for other in by_promise[:SIMULATED]:
            if not best.fits:
                lacks_less = other.fullness < best.fullness * (1 - LEAST_GAIN)
                best = other if other.fits or lacks_less else best
                continue
            if other.fits and self.seconds(other) < self.seconds(best) * (1 - LEAST_GAIN):
                best = other
        return best

    def _neighbours(self, placement: Placement) -> Iterator[Placement]:
        """One block moved, or peers exchanged with each other or with some that have no stage;
        where memory lacks, of the stage that lacks most.
        """
        order, counts, stages = placement.order, placement.counts, range(len(placement.counts))
        if not placement.fits:
            full = [*map(self.figures.fullness, order, stages, ranges(counts))]
            stages = range(full.index(max(full)), full.index(max(full)) + 1)
        if self._counts is None:
            for source, target in itertools.product(stages, range(len(counts))):
                moved = list(counts)
                moved[source] -= 1
                moved[target] += 1
                least = self.figures.least_on_last if source == len(counts) - 1 else 1
                if moved[source] >= least and source != target:
                    yield self.place(order, tuple(moved))
        everyone = [*order, *(p for p in range(len(self.figures.peers)) if p not in order)]
        for one, other in itertools.combinations(range(len(everyone)), 2):
            seated = everyone.copy()
            seated[one], seated[other] = everyone[other], everyone[one]
            if all(seated[stage] == order[stage] for stage in stages):
                continue
            changed = tuple(seated[: len(order)])
            yield self.place(changed, counts)
            if self._counts is None:
                yield self.place(changed)

    def _dealt(self, order: Seating) -> Counts:
        """Blocks so that the slowest stage is fastest; where none fit, those of the settings."""
        figures = self.figures

        def seconds(stage: int, blocks: range) -> float:
            if figures.fullness(order[stage], stage, blocks) > 1.0:
                return math.inf
            return figures.work(blocks) / figures.rates[order[stage]]

        worst, counts = deal(figures.layers, figures.stages, figures.least_on_last, seconds)
        own = tuple(len(blocks) for blocks in figures.settings.split())
        return counts if math.isfinite(worst) else own

    def _rough(self, order: Seating, counts: Counts) -> float:
        """Seconds of a step by its busiest part and one microbatch's way; or by round trips."""
        costs = self.figures.costs(order, counts)
        links = links_of([self.figures.peers[peer] for peer in order])
        below, above = [0, *costs.forward_bytes], [*costs.forward_bytes, 0]  # activations
        back_below, back_above = [0, *costs.backward_bytes], [*costs.backward_bytes, 0]
        busy = []
        for stage in range(len(order)):
            up, down = above[stage] + back_below[stage], back_above[stage] + below[stage]
            busy += [
                costs.forward[stage] + costs.backward[stage],
                Occupancy(links.mbps_up[stage]).seconds(up),
                Occupancy(links.mbps_down[stage]).seconds(down),
            ]
        schedule, one = self.figures.schedule, sum(busy) + 2 * sum(links.latency_s)
        trips = schedule.microbatches / schedule.window
        return max(schedule.microbatches * max(busy) + one, one * trips)


@dataclass(frozen=True)
class ChosenSplit:
    """Who sits where with how many blocks, why, and what it costs; all lists are by stage."""

    settings: Settings  # with pipeline.split as chosen
    peers: list[Machine]
    spare: list[Machine]  # without a stage
    counts: list[int]  # of blocks
    parameters: list[int]
    memory_bytes: list[int]
    simulation: Simulation
    why: str


def choose_split(settings: Settings, peers: list[Machine]) -> ChosenSplit:
    """The fastest split of a run over these peers that fits into their memory; else a ConfigError
    says what lacks and would help.

    Peers of about one rate get the split that the run has on one machine, so that they train to the
    same weights; so do all where `pipeline.split` is set. A window that is left open is the
    smallest of a few that is about as fast as any.
    """
    stages = settings.pipeline.stages
    if len(peers) < stages:
        raise ConfigError(
            f"pipeline.stages = {stages}, but there {'is' if len(peers) == 1 else 'are'} only "
            f"{len(peers)} peer{'s' if len(peers) != 1 else ''}: every stage needs one. Add "
            f"{stages - len(peers)}, or set pipeline.stages = {len(peers)}"
        )
    if settings.pipeline.window == OPEN and (windows := _windows(settings)):
        found = [choose_split(windows[0], peers)]
        # The run's own split decides its weights: it is not left for a wider window.
        is_own = found[0].settings.split() == settings.split()
        for wider in windows[1:]:
            with contextlib.suppress(ConfigError):  # its memory is not there
                found.append(choose_split(wider, peers))
        found = [split for split in found if not is_own or split.counts == found[0].counts]
        limit = min(split.simulation.step_seconds for split in found) * (1 + WORTH)
        return next(split for split in found if split.simulation.step_seconds <= limit)
    figures = StageFigures(settings, peers)
    search, own = Search(figures), tuple(len(blocks) for blocks in settings.split())
    as_listed = search.place(tuple(range(stages)), own)
    of_own = Search(figures, own).best()
    is_fixed = bool(settings.pipeline.split)
    is_alike = max(figures.rates) / min(figures.rates) <= ALIKE
    candidates = [as_listed, of_own]
    if not is_fixed and not (is_alike and of_own.fits):
        candidates.append(search.best())
    fitting = [placement for placement in candidates if placement.fits]
    if not fitting:
        raise ConfigError(_lack(figures, candidates[-1]))
    limit = min(map(search.seconds, fitting)) * (1 + WORTH)
    chosen = next(placement for placement in fitting if search.seconds(placement) <= limit)
    held, seated = [*enumerate(ranges(chosen.counts))], [peers[peer] for peer in chosen.order]
    return ChosenSplit(
        settings=with_split(settings, chosen.counts),
        peers=seated,
        spare=[peer for index, peer in enumerate(peers) if index not in chosen.order],
        counts=list(chosen.counts),
        parameters=[figures.weights(*stage).count for stage in held],
        memory_bytes=[figures.memory(*stage) for stage in held],
        simulation=figures.simulation(chosen.order, chosen.counts),
        why=_why(figures, chosen, as_listed),
    )


def share_stages(settings: Settings, peers: list[Machine]) -> list[Machine]:
    """The peer of each stage where there are fewer peers: neighbouring ones, so that the busiest
    has least to do. ConfigError if memory does not allow it.
    """
    figures = StageFigures(settings, peers)
    parts = ranges(tuple(len(blocks) for blocks in settings.split()))
    orders = orders_of(figures.rates, len(peers))

    def cost(order: Seating, place: int, stages: range) -> float:
        """Seconds of these stages on the peer at this place; none are enough without the memory."""
        peer = order[place]
        if sum(figures.fullness(peer, stage, parts[stage]) for stage in stages) > 1:
            return math.inf
        return sum(figures.work(parts[stage]) for stage in stages) / figures.rates[peer]

    dealt = [(*deal(len(parts), len(peers), 1, partial(cost, order)), order) for order in orders]
    busiest, counts, chosen = min(dealt, key=lambda one: one[0])
    if not math.isfinite(busiest):
        raise ConfigError(
            f"the {len(peers)} peers that are here do not have the memory for all {len(parts)} "
            "stages: wait for another, or make the model smaller"
        )
    return [peers[peer] for peer, count in zip(chosen, counts, strict=True) for _ in range(count)]


def _windows(settings: Settings) -> list[Settings]:
    """With each window that is tried, the smallest first; none where there is nothing to choose."""
    pipeline = settings.pipeline
    if pipeline.schedule != "1f1b" or pipeline.stages == 1:
        return []
    windows = sorted({min(n * pipeline.stages, pipeline.microbatches) for n in (1, 2, 4)})
    changed = [dataclasses.replace(pipeline, window=window) for window in windows]
    return [dataclasses.replace(settings, pipeline=one) for one in changed]


def _why(figures: StageFigures, chosen: Placement, as_listed: Placement) -> str:
    names = [figures.peers[peer].name for peer in chosen.order]
    rates = [figures.rates[peer] for peer in chosen.order]
    is_listed = chosen.order == as_listed.order
    order = "in the listed order" if is_listed else "in the order that gives the shortest step"
    if figures.settings.pipeline.split:
        return f"pipeline.split is set and kept, with the peers {order}."
    is_alike = max(rates) / min(rates) <= ALIKE
    if chosen.counts == as_listed.counts:
        reason = "the peers compute about equally fast" if is_alike else "no other gains enough"
        return f"The even split is kept because {reason}, with the peers {order}."
    if is_alike:
        return "Uneven because the memory of the peers allows no even split."
    slow, fast = rates.index(min(rates)), rates.index(max(rates))
    return (
        f"Uneven because {names[slow]} computes {rates[fast] / rates[slow]:.1f} times slower than "
        f"{names[fast]} and gets {_blocks(chosen.counts[slow])}, not {chosen.counts[fast]}; the "
        "last stage also computes the head."
    )


def _blocks(count: int) -> str:
    return f"{count} block{'s' if count != 1 else ''}"


def _lack(figures: StageFigures, placement: Placement) -> str:
    """Which stage lacks how much memory, and what would help."""
    lacking = []
    for stage, blocks in enumerate(ranges(placement.counts)):
        peer = figures.peers[placement.order[stage]]
        needs, usable = figures.memory(stage, blocks), MEMORY_SHARE * peer.memory_bytes
        if needs > usable:
            lacking.append((needs - usable, stage, peer, len(blocks), needs))
    lacks, stage, peer, count, needs = max(lacking, key=lambda row: row[0])
    in_all = sum(row[0] for row in lacking) / MEMORY_SHARE
    names = ", ".join(row[2].name for row in lacking)
    fixed = figures.settings.pipeline.split
    what = f"pipeline.split = {fixed} does not fit" if fixed else "no split fits"
    return (
        f"{what} into the memory of these peers. At best, stage {stage} with {_blocks(count)} "
        f"needs {human_bytes(needs)} and {peer.name} has {human_bytes(peer.memory_bytes)}, of "
        f"which {1 - MEMORY_SHARE:.0%} is kept free: it lacks {human_bytes(lacks)}. "
        f"What would help: {human_bytes(in_all)} more memory on {names}; more peers and a larger "
        "pipeline.stages; pipeline.recompute = true; more pipeline.microbatches; a smaller model"
    )


def split_to_plain(split: ChosenSplit) -> dict[str, Any]:
    """The split for a program."""
    simulation, settings = split.simulation, split.settings
    costs, microbatches = estimate_costs(settings, 1.0), settings.pipeline.microbatches
    return {
        "step_seconds": simulation.step_seconds,
        "tokens_per_s": settings.tokens_per_step / simulation.step_seconds,
        "bound": simulation.bound,
        "split": split.counts,
        "stages": [
            {
                "stage": stage,
                "peer": peer.name,
                "first_block": blocks.start,
                "blocks": len(blocks),
                "parameters": split.parameters[stage],
                "memory_bytes": split.memory_bytes[stage],
                "peer_memory_bytes": peer.memory_bytes,
                "compute_seconds": simulation.compute_seconds[stage],
                "uplink_utilisation": simulation.uplink_utilisation[stage],
                "downlink_utilisation": simulation.downlink_utilisation[stage],
            }
            for stage, (peer, blocks) in enumerate(zip(split.peers, settings.split(), strict=True))
        ],
        "links": [
            {
                "cut": cut,
                "below": below.name,
                "above": above.name,
                "forward_bytes_per_step": costs.forward_bytes[cut] * microbatches
                + costs.each_step(cut),
                "backward_bytes_per_step": costs.backward_bytes[cut] * microbatches
                + costs.each_step(cut),
                "bytes_are": size_kind(settings, cut),
                "relayed": is_relayed(below, above),
            }
            for cut, (below, above) in enumerate(itertools.pairwise(split.peers))
        ],
        "spare": [peer.name for peer in split.spare],
        "why": split.why,
        "config_hash": settings.hash,
    }


def split_text(split: ChosenSplit) -> str:
    """Who sits where, what each link carries, and how long a step takes; for a person."""
    plain, settings = split_to_plain(split), split.settings
    seconds, steps = split.simulation.step_seconds, settings.train.steps
    width = max(4, *(len(peer.name) for peer in split.peers))
    lines = [
        "An estimate: nothing is trained. The step is simulated from the peers' figures and the "
        "sizes of frames.",
        "",
        f"model: {sum(split.parameters):,} parameters, {architecture(settings.model).describe()}",
        f"step: {settings.train.batch:,} sequences in {settings.pipeline.microbatches} "
        "microbatches",
        "",
        f"stage  {'peer':<{width}}  {'blocks':<14}  compute (s)  uplink busy  downlink busy  "
        "memory needed / there",
    ]
    for row in plain["stages"]:
        blocks = f"{row['blocks']}: {row['first_block']}..{row['first_block'] + row['blocks'] - 1}"
        lines.append(
            f"{row['stage']:5}  {row['peer']:<{width}}  {blocks:<14}"
            f"  {row['compute_seconds']:11.3f}  {row['uplink_utilisation']:11.0%}"
            f"  {row['downlink_utilisation']:13.0%}  {human_bytes(row['memory_bytes'])} / "
            f"{human_bytes(row['peer_memory_bytes'])}"
        )
    if split.spare:
        lines.append(f"without a stage: {', '.join(plain['spare'])}")
    lines.append("")
    for link in plain["links"]:
        forward, backward = link["forward_bytes_per_step"], link["backward_bytes_per_step"]
        word = size_word(settings, link["cut"])
        way = "relayed: neither can be reached" if link["relayed"] else "direct"
        lines.append(
            f"cut {link['cut']}, {link['below']} - {link['above']} ({way}), per step: "
            f"{word}{human_bytes(forward)} forward, {human_bytes(backward)} backward"
        )
    if any(link["relayed"] for link in plain["links"]):
        lines.append("the rate of the relay, or of the host without one, is not in the estimate")
    lines += [f"limited by: {plain['bound']}", "", f"why: {split.why}"]
    lines.append(
        f"estimate: {seconds:.3f} s per step, {plain['tokens_per_s']:,.0f} tokens/s, "
        f"{duration(seconds * steps)} for {steps:,} steps, not counting start, validations and "
        "checkpoints"
    )
    return "\n".join(lines)
