"""One rank at work: its stages, PyTorch's schedule over them, and the end of each step.

What a stage does at the end of a step is that of every engine (engine/update.py); here ranks only
tell each other what it needs. All ranks add up one list of numbers: the squared gradient norm of
each parameter, the loss of each microbatch, and who was asked to stop. So all of them make the same
decision, and the rank that keeps the record knows the loss.
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

from thinwire.cluster.carry import Crossing
from thinwire.cluster.chunk import Chunk, ThinStage
from thinwire.cluster.world import World
from thinwire.codec import Leg
from thinwire.engine.build import (
    StageBuilder,
    autocast_for,
    prepare_torch,
    weights_rounded_once,
)
from thinwire.engine.checkpoint import Checkpoint, partial_folder, write_shard
from thinwire.engine.cut import CutEnd
from thinwire.engine.feed import Data, Feed
from thinwire.engine.finite import BACKWARD, FORWARD, Sightings
from thinwire.engine.keeper import Keeper
from thinwire.engine.reports import (
    Evaluation,
    Meters,
    ShardFailed,
    ShardWritten,
    StageCosts,
    Step,
)
from thinwire.engine.state import StageState
from thinwire.engine.update import StageUpdate
from thinwire.engine.verdict import Verdict, global_norm
from thinwire.engine.worker import PATIENCE, scratch_folder
from thinwire.errors import CheckpointError
from thinwire.optim import learning_rate
from thinwire.settings import Settings

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SEVERAL = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class Held:
    """A stage of this rank with all that belongs to it."""

    def __init__(self, trainer: "Trainer", index: int):
        settings, builder, world = trainer.settings, trainer.builder, trainer.world
        self.index = index
        self.stage = builder.build(index)
        self.update = StageUpdate.build(builder, self.stage)
        self.sightings = Sightings()
        self._last = settings.pipeline.stages - 1
        self.below, self.above = trainer.crossing(self, index - 1), trainer.crossing(self, index)
        self.state = StageState(settings, self.stage, self.update, self.ends())
        self.chunk = Chunk(
            self.stage,
            trainer.feed,
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


class Trainer:
    """The stages of one rank, trained together with all other ranks."""

    def __init__(
        self, settings: Settings, world: World, data: Data, folder: Path, resume: Path | None
    ):
        self.settings = settings
        self.world = world
        self.folder = folder
        self.feed = Feed(data, settings, world.device)
        prepare_torch(settings, world.device)
        self.builder = StageBuilder(settings, world.device)
        self.held = [Held(self, index) for index in world.grid.stages_of(world.place)]
        for held in self.held:
            if resume is None:
                self.builder.initialise(held.stage)
            else:
                held.state.restore(Checkpoint.open(resume, allow_plugins=True))
        self.done = self.first_step = self.held[0].state.step
        self.stop_requested = False
        self._misses = 0
        self._numbers = world.grid.numbers(world.replica)
        self._squares = self._places_of_squares()
        self._schedule = self._make_schedule([held.pipelined for held in self.held])

    def crossing(self, held: Held, cut: int) -> Crossing | None:
        """A stage's end of a cut, or None where there is no such cut."""
        if not 0 <= cut < self.settings.pipeline.stages - 1:
            return None
        spec = self.builder.wire_spec(cut)
        scratch = scratch_folder(self.folder) / f"stage-{held.index}"
        end = CutEnd.build(self.settings, cut, cut == held.index, spec, self.feed, scratch)
        return Crossing(end, self.world.carriers, held.sightings)

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
            at = torch.tensor(self._numbers)
            self._schedule.step(at, number=at, target=at, losses=losses, return_outputs=False)
        verdict, loss = self._end_step(step, lr, losses)
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
                accuracy = self.settings.model.task.accuracy(score)
                seconds = time.monotonic() - start
                found = [score.loss, math.nan if accuracy is None else accuracy, seconds]
        loss, accuracy, seconds = self.world.sum(found)
        return Evaluation(self.done, loss, None if math.isnan(accuracy) else accuracy, seconds)

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

    def _end_step(self, step: int, lr: float, losses: list[Tensor]) -> tuple[Verdict, float]:
        """As the chain ends a step (engine/chain.py), over all ranks."""
        updates, world = {held.index: held.update for held in self.held}, self.world
        for held in self.held:
            world.add_twins([p.grad for p in held.stage.parameters() if p.grad is not None])
            held.update.project()
        self._lend_gradients(updates)
        keepers = [u.keeper for u in updates.values() if u.keeper is not None]
        moves = bool(keepers) and keepers[0].moves_after(step)
        basis_DK = self._proposed(keepers) if moves else None
        squares = {index: update.squared_norms() for index, update in updates.items()}
        for held in self.held:
            if not all(map(math.isfinite, squares[held.index])):
                held.sightings.note(step, BACKWARD)
        norm, loss, stop = self._agree(squares, losses)
        verdict = self._decide(step, norm, stop)
        for held in self.held:
            with held.pipelined.trace.span("compute", "U"):
                if verdict.commit:
                    held.update.commit(step, lr, norm)
                else:
                    held.update.withdraw(step)
        if verdict.commit:
            if basis_DK is not None:
                self._move(basis_DK, keepers)
            self._lend_values(updates)
            for update in updates.values():
                update.check(step)
        return verdict, loss

    def _agree(
        self, squares: dict[int, list[float]], losses: list[Tensor]
    ) -> tuple[float, float, bool]:
        """The norm of all gradients, the loss of the step, and whether anybody asks to stop."""
        count, world = self.settings.pipeline.microbatches, self.world
        total = self._squares[-1].stop
        said = [0.0] * (total + count + 1)
        if world.replica == 0:
            for index, own in squares.items():
                start = self._squares[index].start
                said[start : start + len(own)] = own
        for number, one in zip(self._numbers, losses, strict=False):
            said[total + number] = float(one)
        said[-1] = float(self.stop_requested)
        heard = world.sum(said)
        dtype = torch.float64 if self.settings.run.precision == "fp64" else torch.float32
        loss = float(torch.tensor(heard[total:-1], dtype=dtype).sum())
        return global_norm(heard[:total]), loss, heard[-1] > 0

    def _decide(self, step: int, norm: float, stop: bool) -> Verdict:
        """What the first stage decides in a pipeline of peers (engine/worker.py)."""
        commit = math.isfinite(norm)
        self._misses = 0 if commit else self._misses + 1
        stop = stop or self._misses >= PATIENCE
        checkpoint = self.settings.is_checkpoint_step(step + 1) or stop
        return Verdict(norm, commit, checkpoint and commit, stop)

    def _lend_gradients(self, updates: dict[int, StageUpdate]) -> None:
        """What stages found for the parameters that they borrow, to the stages that own these."""
        if not self.settings.boundary.learn:
            return
        stages = {held.index: held.stage for held in self.held}
        out = {i: update.take_borrowed_gradients() for i, update in updates.items() if i > 0}
        into = {i: stage.lent() for i, stage in stages.items() if stage.lent()}
        for index, gradients in self.world.exchange(out, into, up=False).items():
            updates[index].add_lent_gradients(gradients)

    def _lend_values(self, updates: dict[int, StageUpdate]) -> None:
        """What stages have learned for the cuts above, to the stages that borrow it."""
        if not self.settings.boundary.learn:
            return
        stages = {held.index: held.stage for held in self.held}
        out = {i: stage.lent() for i, stage in stages.items() if stage.lent()}
        into = {i: stage.borrowed() for i, stage in stages.items() if stage.borrowed()}
        for index, values in self.world.exchange(out, into, up=True).items():
            updates[index].follow_lender(values)

    def _proposed(self, keepers: list[Keeper]) -> Tensor:
        """The next basis, from the last stage, which alone sees the gradient of the stream."""
        last = self.settings.pipeline.stages - 1
        is_here = any(held.index == last for held in self.held)
        basis_DK = keepers[-1].propose() if is_here else keepers[0].space.basis_DK
        return self.world.spread(basis_DK, last)

    def _move(self, basis_DK: Tensor, keepers: list[Keeper]) -> None:
        """All stages of a rank share one space: it moves once, and their weights follow."""
        space = keepers[0].space
        old_DK = space.basis_DK.clone()
        space.move(basis_DK)
        for keeper in keepers:
            keeper.follow(old_DK)

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

    def _places_of_squares(self) -> list[range]:
        """Where the norms of each stage's parameters stand in the list that all ranks add up."""
        stages = self.settings.pipeline.stages
        counts = [0.0] * stages
        if self.world.replica == 0:
            for held in self.held:
                counts[held.index] = float(len(held.stage.trained_parameters()))
        ends = [int(end) for end in itertools.accumulate(self.world.sum(counts), initial=0.0)]
        return [range(start, end) for start, end in itertools.pairwise(ends)]


def _the_output(output: Tensor, target: Tensor) -> Tensor:
    """The last module has computed the loss."""
    return output
