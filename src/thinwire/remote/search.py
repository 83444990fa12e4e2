"""The search for a split: which peer sits on which stage, and with how many blocks.

Orders of peers are tried one by one while they are few; for each the blocks are dealt out so that
the slowest stage is as fast as it can be. A rough estimate ranks them, and the simulator decides
among the best and improves on them.
"""

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from thinwire.occupancy import Occupancy
from thinwire.remote.figures import Order, StageFigures, links_of
from thinwire.schedule import Counts, deal

MOST_ORDERS = 720  # all orders of six peers
SIMULATED = 16  # placements that the simulator compares, at first and in each round
LEAST_GAIN = 0.005  # of a step: for less no block is moved, so that splits stay near the even one
ROUNDS = 30  # of improvement; it ends earlier where nothing gains
MEMORY_SHARE = 0.9  # of a peer's memory; the rest is for what is not counted, as torch's own


@dataclass(frozen=True)
class Placement:
    """Peers and blocks by stage, with a rough estimate of the step.

    `fullness` is the memory that the fullest stage needs, as a share of what its peer has for it.
    """

    order: Order
    counts: Counts
    fullness: float
    rough_seconds: float

    @property
    def fits(self) -> bool:
        """Whether every stage has the memory that it needs."""
        return self.fullness <= 1.0

    @property
    def rank(self) -> tuple[float, float]:
        """What fits comes first, then what is fast."""
        return max(1.0, self.fullness), self.rough_seconds


class Search:
    """Finds placements; `counts` fixes the blocks, and leaves only the order to be found."""

    def __init__(self, figures: StageFigures, counts: Counts | None = None):
        self.figures = figures
        self._counts = counts

    def best(self) -> Placement:
        """The fastest placement found that fits; where none fits, the one that lacks least."""
        ranked = sorted(self._placements(), key=lambda placement: placement.rank)
        fitting = [placement for placement in ranked if placement.fits]
        if not fitting:
            return ranked[0]
        best = self._fastest(fitting[0], fitting[1:])
        for _ in range(ROUNDS):
            better = self._fastest(best, list(self._neighbours(best)))
            if better is best:
                break
            best = better
        return best

    def _fastest(self, best: Placement, others: list[Placement]) -> Placement:
        """The fastest by the simulator of the first and the most promising others."""
        for other in heapq.nsmallest(SIMULATED, others, key=lambda placement: placement.rank):
            if other.fits and self._gains(other, self.seconds(best)):
                best = other
        return best

    def seconds(self, placement: Placement) -> float:
        """The step by the simulator."""
        return self.figures.simulation(placement.order, placement.counts).step_seconds

    def place(self, order: Order, counts: Counts | None = None) -> Placement:
        """The peers in this order with these blocks, or with the best that can be dealt out."""
        counts = counts or self._counts or self._dealt(order)
        fullness = max(
            self._fullness(order[stage], stage, blocks)
            for stage, blocks in enumerate(ranges(counts))
        )
        return Placement(order, counts, fullness, self._rough(order, counts))

    def _gains(self, placement: Placement, seconds: float) -> bool:
        """Whether it is clearly faster; one whose busiest part takes as long is not played."""
        limit = seconds * (1 - LEAST_GAIN)
        busiest = max(self._busy(placement.order, placement.counts))
        return busiest < limit and self.seconds(placement) < limit

    def _placements(self) -> list[Placement]:
        peers, stages = len(self.figures.peers), self.figures.stages
        listed = tuple(range(stages))
        if math.perm(peers, stages) <= MOST_ORDERS:
            orders = self._distinct(itertools.permutations(range(peers), stages))
            return [self.place(order) for order in orders]
        by_rate = sorted(range(peers), key=lambda peer: -self.figures.peers[peer].tflops)[:stages]
        starts = [listed, tuple(by_rate), tuple(reversed(by_rate))]
        return [self._descended(self.place(start)) for start in starts]

    def _descended(self, placement: Placement) -> Placement:
        """Exchange peers as long as the rough estimate gains: for more orders than can be tried."""
        for _ in range(ROUNDS):
            others = self._distinct(self._exchanges(placement.order))
            better = min(map(self.place, others), key=lambda other: other.rank)
            if better.rank >= placement.rank:
                break
            placement = better
        return placement

    def _distinct(self, orders: Iterator[Order]) -> list[Order]:
        """Orders that differ in more than the names of equal peers; the first of each kind."""
        kinds = [str((p.tflops, p.memory_gb, p.mbps_up, p.mbps_down, p.latency_ms, p.reachable))
                 for p in self.figures.peers]  # fmt: skip
        found: dict[tuple[str, ...], Order] = {}
        for order in orders:
            found.setdefault(tuple(kinds[peer] for peer in order), order)
        return list(found.values())

    def _exchanges(self, order: Order) -> Iterator[Order]:
        """Two stages exchange their peers, or one takes a peer that has no stage."""
        spare = [peer for peer in range(len(self.figures.peers)) if peer not in order]
        for one, other in itertools.combinations(range(len(order)), 2):
            changed = list(order)
            changed[one], changed[other] = order[other], order[one]
            yield tuple(changed)
        for stage, peer in itertools.product(range(len(order)), spare):
            yield (*order[:stage], peer, *order[stage + 1 :])

    def _neighbours(self, placement: Placement) -> Iterator[Placement]:
        """One block moved to another stage; or peers exchanged, with blocks as they are or new."""
        order, counts = placement.order, placement.counts
        if self._counts is None:
            for source, target in itertools.permutations(range(len(counts)), 2):
                moved = list(counts)
                moved[source] -= 1
                moved[target] += 1
                least = self.figures.least_on_last if source == len(counts) - 1 else 1
                if moved[source] >= least:
                    yield self.place(order, tuple(moved))
        for changed in self._distinct(self._exchanges(order)):
            yield self.place(changed, counts)
            if self._counts is None:
                yield self.place(changed)

    def _dealt(self, order: Order) -> Counts:
        """Blocks so that the slowest stage is fastest; where none fit, so that they lack least."""
        rates = [self.figures.peers[peer].flops_per_s for peer in order]

        def seconds(stage: int, blocks: range) -> float:
            fits = self._fullness(order[stage], stage, blocks) <= 1.0
            return self.figures.work(blocks) / rates[stage] if fits else math.inf

        def fullness(stage: int, blocks: range) -> float:
            return self._fullness(order[stage], stage, blocks)

        figures = self.figures
        sizes = figures.layers, figures.stages, figures.least_on_last
        worst, counts = deal(*sizes, seconds)
        return counts if math.isfinite(worst) else deal(*sizes, fullness)[1]

    def _fullness(self, peer: int, stage: int, blocks: range) -> float:
        has = MEMORY_SHARE * self.figures.peers[peer].memory_bytes
        return self.figures.memory(stage, blocks) / has

    def _busy(self, order: Order, counts: Counts) -> list[float]:
        """Seconds of a step for which each stage and link is busy: no step is shorter than one."""
        costs = self.figures.costs(order, counts)
        links = links_of([self.figures.peers[peer] for peer in order])
        microbatches, top = self.figures.schedule.microbatches, len(order) - 1
        busy = []
        for stage in range(len(order)):
            up = costs.forward_bytes[stage] if stage < top else 0
            up += costs.backward_bytes[stage - 1] if stage else 0
            down = costs.backward_bytes[stage] if stage < top else 0
            down += costs.forward_bytes[stage - 1] if stage else 0
            busy += [
                costs.forward[stage] + costs.backward[stage],
                Occupancy(links.mbps_up[stage]).seconds(up),
                Occupancy(links.mbps_down[stage]).seconds(down),
            ]
        return [microbatches * seconds for seconds in busy]

    def _rough(self, order: Order, counts: Counts) -> float:
        """A step is its busiest part and the way of one microbatch; or round trips, by window."""
        busy = self._busy(order, counts)
        links = links_of([self.figures.peers[peer] for peer in order])
        schedule = self.figures.schedule
        one = sum(busy) / schedule.microbatches + 2 * sum(links.latency_s)
        return max(max(busy) + one, one * schedule.microbatches / schedule.window)


def ranges(counts: Counts) -> list[range]:
    """The blocks of each stage."""
    stops = list(itertools.accumulate(counts))
    return [range(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]
