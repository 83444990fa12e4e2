"""One rank at work: its stages, PyTorch's schedule over them, the end of a step with all other
ranks, validations, checkpoints.
"""

import itertools
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from thinwire.cluster.pipelining import Chunk, Crossing, ThinStage
from thinwire.cluster.world import World
from thinwire.codec import Leg
from thinwire.data import Corpus
from thinwire.engine.build import StageBuilder, autocast_for, prepare_torch, weights_rounded_once
from thinwire.engine.checkpoint import Checkpoint, partial_folder, write_shard
from thinwire.engine.cut import CutEnd
from thinwire.engine.feed import Feed
from thinwire.engine.keeper import Keeper
from thinwire.engine.reports import Evaluation, Meters, ShardFailed, ShardWritten, StageCosts, Step
from thinwire.engine.state import StageState
from thinwire.engine.step_end import StageUpdate, Verdict, global_norm
from thinwire.engine.trace import BACKWARD, FORWARD, Sightings
from thinwire.engine.worker import PATIENCE, scratch_folder
from thinwire.errors import CheckpointError, ConfigError
from thinwire.model import learning_rate
from thinwire.settings import Settings

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SEVERAL = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class HeldStage:
    """A stage as a rank holds it: its layers, its ends of two cuts, its update and its state."""

    def __init__(self, index: int, builder: StageBuilder, feed: Feed, world: World, folder: Path):
        settings, stages = builder.settings, builder.settings.pipeline.stages
        self.index = index
        self.stage = builder.build(index)
        self.update = StageUpdate.build(builder, self.stage, index)
        self.sightings = Sightings()
        scratch = scratch_folder(folder) / f"stage-{index}"

        def crossing(cut: int) -> Crossing | None:
            if not 0 <= cut < stages - 1:
                return None
            spec, is_lower = builder.wire_spec(cut), cut == index
            end = CutEnd.build(settings, cut, is_lower, spec, feed, scratch)
            remembering = [codec.name for codec in end.codecs.values() if codec.remembers]
            if world.grid.replicas > 1 and remembering:
                raise ConfigError(
                    f"{remembering[0]} remembers what crossed, and does not work with replicas: "
                    "each would remember its own microbatches. Choose a codec without memory, or "
                    "start one replica"
                )
            return Crossing(end, world.carriers, self.sightings)

        self.below, self.above = crossing(index - 1), crossing(index)
        self.crossings = [one for one in (self.below, self.above) if one is not None]
        self.ends = [one.end for one in self.crossings]
        self.state = StageState(settings, self.stage, self.update, self.ends)
        autocast = autocast_for(settings.run.precision, world.device)
        count = settings.pipeline.microbatches
        self.chunk = Chunk(self.stage, feed, self.below, self.above, count, autocast)
        place = self.below, self.above, world.carriers, world.pipeline
        self.pipelined = ThinStage(self.chunk, index, stages, *place)

    def meters(self) -> Meters:
        """What this stage has sent over each of its cuts, as a meter of frames would count it."""
        found: Meters = {}
        for crossing in self.crossings:
            size = crossing.bytes_sent(Leg.FORWARD if crossing is self.above else Leg.BACKWARD)
            sent = {
                kind: {"frames": count, "header_bytes": 0, "payload_bytes": count * size}
                for kind, count in crossing.sent.items()
            }
            found[f"cut-{crossing.end.cut}"] = {"sent": sent, "received": {}}  # type: ignore[typeddict-item]
        return found


class Trainer:
    """The stages of one rank, trained together with all other ranks."""

    def __init__(
        self, settings: Settings, world: World, data: Corpus, folder: Path, resume: Path | None
    ):
        self.settings = settings
        self.world = world
        self.folder = folder
        self.feed = Feed(data, settings, world.device)
        self.stop_requested = False  # of this rank; one is enough
        prepare_torch(settings, world.device)
        builder = StageBuilder(settings, world.device)
        self.held = [
            HeldStage(index, builder, self.feed, world, folder)
            for index in world.grid.stages_of(world.place)
        ]
        for held in self.held:
            if resume is None:
                builder.initialise(held.stage)
            else:
                held.state.restore(Checkpoint.open(resume, allow_plugins=True))
        self.done = self.first_step = self.held[0].state.step
        self._misses = 0  # steps in a row that were refused
        self._squares = self._places_of_squares()
        self._schedule = self._make_schedule()

    def _make_schedule(self) -> Any:
        """PyTorch's schedule of the grid's name over the stages of this rank."""
        name, count = self.world.grid.schedule, self.world.grid.microbatches
        stages = [held.pipelined for held in self.held]
        options: dict[str, Any] = {"loss_fn": _the_output, "scale_grads": False}
        if name in SINGLE:
            return SINGLE[name](stages[0], count, **options)
        return SEVERAL[name](list(stages), count, **options)

    def train_step(self) -> tuple[Verdict, float, list[Step]]:
        """One step: what all ranks decided, its loss, and what each stage of this rank reports."""
        step, start = self.done, time.monotonic()
        lr = learning_rate(self.settings.optim, step, self.settings.train.steps)
        for held in self.held:
            held.update.begin(step)
            held.chunk.begin(step, training=True)
            held.pipelined.trace.spans.clear()
        losses: list[Tensor] = []
        with weights_rounded_once():
            at = torch.tensor(self.world.grid.numbers(self.world.replica))
            self._schedule.step(at, number=at, target=at, losses=losses, return_outputs=False)
        verdict, loss = self._end_step(step, lr, losses)
        self.done = step + 1
        for held in self.held:
            held.state.step = self.done
        reports = [self._report(held, step, lr, verdict, loss, start) for held in self.held]
        return verdict, loss, reports

    def _end_step(self, step: int, lr: float, losses: list[Tensor]) -> tuple[Verdict, float]:
        """Commit the step on all ranks or on none; also returns its loss, which all ranks know.

        What a stage does then is that of every engine (engine/update.py); ranks only tell each
        other what it needs.
        """
        for held in self.held:
            self.world.add_twins([p.grad for p in held.stage.parameters() if p.grad is not None])
            held.update.project()
        keepers = [held.update.keeper for held in self.held if held.update.keeper is not None]
        moves = bool(keepers) and keepers[0].moves_after(step)
        basis_DK = self._proposed(keepers) if moves else None
        squares = {held.index: held.update.squared_norms() for held in self.held}
        for held in self.held:
            if not all(map(math.isfinite, squares[held.index])):
                held.sightings.note(step, BACKWARD)
        verdict, loss = self._agree(step, squares, losses)
        for held in self.held:
            with held.pipelined.trace.span("compute", "U"):
                if verdict.commit:
                    held.update.commit(step, lr, verdict.grad_norm)
                else:
                    held.update.withdraw(step)
        if verdict.commit and basis_DK is not None:  # one space for all stages of a rank
            space = keepers[0].space
            old_DK = space.basis_DK.clone()
            space.move(basis_DK)
            for keeper in keepers:
                keeper.follow(old_DK)
        for held in self.held if verdict.commit else ():
            held.update.check(step)
        return verdict, loss

    def _agree(
        self, step: int, squares: dict[int, list[float]], losses: list[Tensor]
    ) -> tuple[Verdict, float]:
        """What all ranks decide alike, and the loss of the step.

        They add up one list of numbers: the squared gradient norm of each parameter, the loss of
        each microbatch, and who was asked to stop. The decision is that of the first stage in a
        pipeline of peers (engine/worker.py).
        """
        settings, world = self.settings, self.world
        total = self._squares[-1].stop
        said = [0.0] * (total + settings.pipeline.microbatches + 1)
        if world.replica == 0:
            for index, own in squares.items():
                start = self._squares[index].start
                said[start : start + len(own)] = own
        for number, one in zip(world.grid.numbers(world.replica), losses, strict=False):
            said[total + number] = float(one)
        said[-1] = float(self.stop_requested)
        heard = world.sum(said)
        norm = global_norm(heard[:total])
        commit = math.isfinite(norm)
        self._misses = 0 if commit else self._misses + 1
        stop = heard[-1] > 0 or self._misses >= PATIENCE
        checkpoint = commit and (settings.is_checkpoint_step(step + 1) or stop)
        dtype = torch.float64 if settings.run.precision == "fp64" else torch.float32
        loss = float(torch.tensor(heard[total:-1], dtype=dtype).sum())
        return Verdict(norm, commit, checkpoint, stop), loss

    def _proposed(self, keepers: list[Keeper]) -> Tensor:
        """The next basis, from the last stage, which alone sees the gradient of the stream."""
        last = self.settings.pipeline.stages - 1
        is_here = self.world.holds(last)
        basis_DK = keepers[-1].propose() if is_here else keepers[0].space.basis_DK
        return self.world.spread(basis_DK, last)

    def _places_of_squares(self) -> list[range]:
        """Where the norms of each stage's parameters stand in the list that all ranks add up."""
        counts = [0.0] * self.settings.pipeline.stages
        if self.world.replica == 0:
            for held in self.held:
                counts[held.index] = float(len(held.stage.trained_parameters()))
        ends = [int(end) for end in itertools.accumulate(self.world.sum(counts), initial=0.0)]
        return [range(start, end) for start, end in itertools.pairwise(ends)]

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """The validation as things are; every rank gets its result."""
        start, found = time.monotonic(), [0.0, 0.0, 0.0]
        for held in self.held:
            held.chunk.begin(self.done, training=False)
        for number in range(self.feed.validation_count):
            self._forward(torch.tensor([number]))
        for held in self.held:
            held.chunk.train()
            if held.above is None and self.world.replica == 0:
                score = held.chunk.score
                found = [score.loss, time.monotonic() - start, score.count]
        loss, seconds, count = self.world.sum(found)
        return Evaluation(self.done, loss, seconds, int(count))

    def _forward(self, number: Tensor) -> None:
        """A validation microbatch through the stages of this rank, in the order of all stages.

        Not by the schedule: that of zbv cannot leave out the way back.
        """
        output = number
        for held in self.held:
            if held.below is not None and not self.world.holds(held.index - 1):
                output = self.world.receive(held.below, held.index - 1)
            output = held.chunk(output, number)
            if held.above is not None and not self.world.holds(held.index + 1):
                self.world.send(output, held.above, held.index + 1)

    def save(self) -> list[ShardWritten | ShardFailed]:
        """Write this rank's parts of a checkpoint; replicas hold the same, so one of them does."""
        found: list[ShardWritten | ShardFailed] = []
        for held in self.held if self.world.replica == 0 else ():
            folder = partial_folder(self.folder, self.done)
            try:
                shard = write_shard(folder, held.index, held.state.shard())
            except CheckpointError as error:
                found.append(ShardFailed(self.done, str(error)))
                continue
            agreements = {str(end.cut): end.agreements() for end in held.ends}
            found.append(ShardWritten(self.done, held.update.versions, shard, agreements))
        return found

    def _report(
        self, held: HeldStage, step: int, lr: float, verdict: Verdict, loss: float, start: float
    ) -> Step:
        """Times count from the step's beginning on this rank: clocks of machines differ."""
        seconds, trace = time.monotonic() - start, held.pipelined.trace
        count, keeper = self.world.grid.microbatches, held.update.keeper
        forward, backward, update = (trace.seconds("compute", kind) for kind in "FBU")
        is_last = held.index == self.settings.pipeline.stages - 1
        if is_last and not math.isfinite(loss):
            held.sightings.note(step, FORWARD)
        return Step(
            step=step,
            loss=loss if is_last else None,
            lr=lr,
            grad_norm=verdict.grad_norm,
            committed=verdict.commit,
            start=0.0,
            end=seconds,
            wait=max(0.0, seconds - forward - backward - update),
            costs=StageCosts(forward / count, backward / count, update),
            spans=[(lane, label, a - start, b - start) for lane, label, a, b in trace.spans],
            measures=keeper.measures(step) if keeper else {},
            meters=held.meters(),
            dropped=0,
            not_finite=held.sightings.take_first(step),
        )


def _the_output(output: Tensor, target: Tensor) -> Tensor:
    """The last module has computed the loss."""
    return output
