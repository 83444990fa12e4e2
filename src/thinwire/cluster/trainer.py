"""One rank at work: its stages, PyTorch's schedule over them, validations, checkpoints."""

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

from thinwire.cluster.chunk import ThinStage
from thinwire.cluster.ending import Ending
from thinwire.cluster.held import Held
from thinwire.cluster.world import World
from thinwire.data import Corpus
from thinwire.engine.build import StageBuilder, prepare_torch, weights_rounded_once
from thinwire.engine.checkpoint import Checkpoint, partial_folder, write_shard
from thinwire.engine.feed import Feed
from thinwire.engine.reports import Evaluation, ShardFailed, ShardWritten, StageCosts, Step
from thinwire.engine.step_end import Verdict
from thinwire.engine.trace import FORWARD
from thinwire.errors import CheckpointError
from thinwire.model import learning_rate
from thinwire.settings import Settings

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SEVERAL = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class Trainer:
    """The stages of one rank, trained together with all other ranks."""

    def __init__(
        self, settings: Settings, world: World, data: Corpus, folder: Path, resume: Path | None
    ):
        self.settings = settings
        self.world = world
        self.folder = folder
        self.feed = Feed(data, settings, world.device)
        prepare_torch(settings, world.device)
        self.builder = StageBuilder(settings, world.device)
        self.held = [
            Held(index, self.builder, self.feed, world, folder)
            for index in world.grid.stages_of(world.place)
        ]
        for held in self.held:
            if resume is None:
                self.builder.initialise(held.stage)
            else:
                held.state.restore(Checkpoint.open(resume, allow_plugins=True))
        self.done = self.first_step = self.held[0].state.step
        self.ending = Ending(settings, world, self.held)
        self._schedule = self._make_schedule([held.pipelined for held in self.held])

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
        verdict, loss = self.ending.end_step(step, lr, losses)
        self.done = step + 1
        for held in self.held:
            held.state.step = self.done
        seconds = time.monotonic() - start
        reports = [
            self._report(held, step, lr, verdict, loss, start, seconds) for held in self.held
        ]
        return verdict, loss, reports

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
        if self.world.replica:
            return []
        found: list[ShardWritten | ShardFailed] = []
        for held in self.held:
            folder = partial_folder(self.folder, self.done)
            try:
                shard = write_shard(folder, held.index, held.state.shard())
            except CheckpointError as error:
                found.append(ShardFailed(self.done, str(error)))
                continue
            agreements = {str(end.cut): end.agreements() for end in held.ends()}
            found.append(ShardWritten(self.done, held.update.versions, shard, agreements))
        return found

    def _make_schedule(self, stages: list[ThinStage]) -> Any:
        """PyTorch's schedule of the grid's name over the stages of this rank."""
        name, count = self.world.grid.schedule, self.world.grid.microbatches
        options: dict[str, Any] = {"loss_fn": _the_output, "scale_grads": False}
        if name in SINGLE:
            return SINGLE[name](stages[0], count, **options)
        return SEVERAL[name](list(stages), count, **options)

    def _report(
        self,
        held: Held,
        step: int,
        lr: float,
        verdict: Verdict,
        loss: float,
        start: float,
        seconds: float,
    ) -> Step:
        """Times count from the step's beginning on this rank: clocks of machines differ."""
        trace, count = held.pipelined.trace, self.world.grid.microbatches
        forward, backward, update = (trace.seconds("compute", kind) for kind in "FBU")
        is_last = held.index == self.settings.pipeline.stages - 1
        if is_last and not math.isfinite(loss):
            held.sightings.note(step, FORWARD)
        keeper = held.update.keeper
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
