"""What any stage of a run would cost, whichever blocks it held: the planner's figures, looked up.

The planner counts parameters by building a stage without memory. A search looks at thousands of
stages, so the layers are built once here and added up.
"""

import dataclasses
import itertools
from collections.abc import Callable
from functools import cache

import torch

from thinwire.engine.build import StageBuilder, Weights
from thinwire.model import architecture
from thinwire.plan import block_memory, block_seconds, estimate_costs, with_split
from thinwire.remote.peerfile import PeerFigures
from thinwire.schedule import Costs, Counts, Links, Simulation, in_flight, simulate
from thinwire.settings import Settings

Order = tuple[int, ...]
"""The numbers of the peers, by stage."""


class StageFigures:
    """Work, memory and links of every possible stage of a run, by the planner and the simulator."""

    def __init__(self, settings: Settings, peers: list[PeerFigures]):
        self.settings, self.peers = settings, peers
        self.layers, self.stages = settings.model.layers, settings.pipeline.stages
        self.schedule = settings.schedule()
        self.held = in_flight(self.schedule)
        self._family = architecture(settings.model)
        self._layers, self._ends = self._count_parameters()
        self.work = cache(self._work)
        self.memory = cache(self._memory)
        self._sizes = cache(lambda counts: estimate_costs(with_split(settings, counts), 1.0))
        self.simulation: Callable[[Order, Counts], Simulation] = cache(self._simulation)

    @property
    def least_on_last(self) -> int:
        """Blocks that the last stage must have: those that no subspace constrains stay there."""
        return max(1, self.settings.boundary.free_layers)

    def parameters(self, stage: int, blocks: range) -> int:
        """Parameters of the stage with these blocks, those of its ends of the cuts included."""
        return self._weights(stage, blocks).count

    def _weights(self, stage: int, blocks: range) -> Weights:
        plans = self._family.stage_layers(blocks)
        return sum((self._layers[plan.name] for plan in plans), self._ends[stage])

    def _work(self, blocks: range) -> float:
        """Floating-point operations of these blocks in a step."""
        return self.settings.pipeline.microbatches * sum(block_seconds(self.settings, blocks, 1.0))

    def _memory(self, stage: int, blocks: range) -> int:
        """Bytes that the stage with these blocks needs."""
        weights = self._weights(stage, blocks)
        return block_memory(self.settings, blocks, weights, self.held[stage])

    def costs(self, order: Order, counts: Counts) -> Costs:
        """Seconds and bytes of a step with these peers and blocks on the stages."""
        sizes = self._sizes(counts)
        rates = [self.peers[peer].flops_per_s for peer in order]

        def seconds(work: list[float]) -> list[float]:
            return [part / rate for part, rate in zip(work, rates, strict=True)]

        forward, backward = seconds(sizes.forward), seconds(sizes.backward)
        return dataclasses.replace(sizes, forward=forward, backward=backward)

    def _simulation(self, order: Order, counts: Counts) -> Simulation:
        costs, links = self.costs(order, counts), links_of([self.peers[peer] for peer in order])
        return simulate(self.schedule, costs, links, steps=2)

    def _count_parameters(self) -> tuple[dict[str, Weights], list[Weights]]:
        """Parameters of each layer by its name, and of each stage's ends of the cuts."""
        builder = StageBuilder(self.settings, torch.device("meta"))
        layers: dict[str, Weights] = {}
        ends = []
        for index in range(self.stages):
            stage = builder.build(index)
            for name, layer in zip(stage.names, stage.layers, strict=True):
                layers[name] = Weights.of(layer.parameters())
            own = [end for end in (stage.incoming, stage.outgoing) if end is not None]
            ends.append(Weights.of(p for end in own for p in end.parameters()))
        return layers, ends


def is_relayed(below: PeerFigures, above: PeerFigures) -> bool:
    """Whether a link needs a relay: a direct one needs an end that others can connect to."""
    return not (below.reachable or above.reachable)


def links_of(peers: list[PeerFigures]) -> Links:
    """The links of a pipeline of these peers, for the simulator.

    Delays are known to the host only. A relayed link has those of both ends, for it passes there;
    a direct one is taken to have the longer of the two.
    """
    delays = []
    for below, above in itertools.pairwise(peers):
        both = below.latency_ms, above.latency_ms
        delays.append((sum(both) if is_relayed(below, above) else max(both)) / 1e3)
    return Links([peer.mbps_up for peer in peers], [peer.mbps_down for peer in peers], delays)
