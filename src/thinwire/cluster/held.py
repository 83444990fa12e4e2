"""A stage as a rank holds it: its layers, its ends of two cuts, its update and its state."""

from pathlib import Path

from thinwire.cluster.carry import Crossing
from thinwire.cluster.chunk import Chunk, ThinStage
from thinwire.cluster.world import World
from thinwire.codec import Leg
from thinwire.engine.build import StageBuilder, autocast_for
from thinwire.engine.cut import CutEnd
from thinwire.engine.feed import Feed
from thinwire.engine.reports import Meters
from thinwire.engine.state import StageState
from thinwire.engine.step_end import StageUpdate
from thinwire.engine.trace import Sightings
from thinwire.engine.worker import scratch_folder
from thinwire.errors import ConfigError


class Held:
    """A stage of this rank with all that belongs to it."""

    def __init__(self, index: int, builder: StageBuilder, feed: Feed, world: World, folder: Path):
        settings = builder.settings
        self.index = index
        self.stage = builder.build(index)
        self.update = StageUpdate.build(builder, self.stage, index)
        self.sightings = Sightings()
        scratch = scratch_folder(folder) / f"stage-{index}"

        def crossing(cut: int) -> Crossing | None:
            if not 0 <= cut < settings.pipeline.stages - 1:
                return None
            spec, is_lower = builder.wire_spec(cut), cut == index
            end = CutEnd.build(settings, cut, is_lower, spec, feed, scratch)
            if world.grid.replicas > 1:
                _refuse_memory(end)
            return Crossing(end, world.carriers, self.sightings)

        self.below, self.above = crossing(index - 1), crossing(index)
        self.state = StageState(settings, self.stage, self.update, self.ends())
        self.chunk = Chunk(
            self.stage,
            feed,
            self.below,
            self.above,
            settings.pipeline.microbatches,
            autocast_for(settings.run.precision, world.device),
        )
        self.pipelined = ThinStage(
            self.chunk,
            index,
            settings.pipeline.stages,
            self.below,
            self.above,
            world.carriers,
            world.pipeline,
        )

    def crossings(self) -> list[Crossing]:
        """Its ends of the cuts on either side."""
        return [crossing for crossing in (self.below, self.above) if crossing is not None]

    def ends(self) -> list[CutEnd]:
        """What these remember."""
        return [crossing.end for crossing in self.crossings()]

    def meters(self) -> Meters:
        """What this stage has sent over each of its cuts, as a meter of frames would count it."""
        found: Meters = {}
        for crossing in self.crossings():
            leg = Leg.FORWARD if crossing is self.above else Leg.BACKWARD
            size = crossing.bytes_sent(leg)
            sent = {
                kind: {"frames": count, "header_bytes": 0, "payload_bytes": count * size}
                for kind, count in crossing.sent.items()
            }
            found[f"cut-{crossing.end.cut}"] = {"sent": sent, "received": {}}  # type: ignore[typeddict-item]
        return found


def _refuse_memory(end: CutEnd) -> None:
    """A checkpoint has room for the memory of one pipeline."""
    remembering = [codec.name for codec in end.codecs.values() if codec.remembers]
    if remembering:
        raise ConfigError(
            f"{remembering[0]} remembers what crossed, and does not work with replicas: each would "
            "remember its own microbatches. Choose a codec without memory, or start one replica"
        )
