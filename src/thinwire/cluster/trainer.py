"""One rank at work: its stages, PyTorch's schedule over them, the end of a step with all other
ranks, validations, checkpoints.
"""

import math
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.pipelining.schedules import get_schedule_class

from thinwire.cluster.grid import SCHEDULES, SINGLE
from thinwire.cluster.pipelining import CARRIER, Chunk, Crossing, ThinStage
from thinwire.cluster.world import World
from thinwire.codec import Leg
from thinwire.data import Corpus
from thinwire.engine.build import StageBuilder, prepare_torch
from thinwire.engine.checkpoint import Checkpoint
from thinwire.engine.cut import CutEnd, ends_of
from thinwire.engine.feed import Feed
from thinwire.engine.passes import autocast_for, weights_rounded_once
from thinwire.engine.reports import Evaluation, Meters, ShardFailed, ShardWritten, StageCosts, Step
from thinwire.engine.state import StageState
from thinwire.engine.step_end import StageUpdate, StepEnd, Verdict, global_norm, unpack_tally
from thinwire.engine.trace import FORWARD, Sightings
from thinwire.engine.worker import PATIENCE, scratch_folder
from thinwire.model import learning_rate
from thinwire.settings import Settings
from thinwire.settings.crossing import checkpoint_steps
from thinwire.wire import FrameKind


class HeldStage:
    """A stage as a rank holds it: its layers, its ends of two cuts, its update and its state."""

    def __init__(self, index: int, builder: StageBuilder, feed: Feed, world: World, folder: Path):
        settings, stages = builder.settings, builder.settings.pipeline.stages
        self.index = index
        self.stage = builder.build(index)
        self.update = StageUpdate(builder, self.stage, index)
        self.sightings = Sightings()
        scratch = scratch_folder(folder) / f"stage-{index}"

        def crossing(end: CutEnd | None) -> Crossing | None:
            return None if end is None else Crossing(end, world.carriers, self.sightings)

        ends = ends_of(settings, index, builder.wire_spec, feed, scratch)
        self.below, self.above = map(crossing, ends)
        self.crossings = [one for one in (self.below, self.above) if one is not None]
        self.state = StageState(self.update, ends)
        autocast = autocast_for(settings.run.precision, world.device)
        count = settings.pipeline.microbatches
        self.chunk = Chunk(self.stage, feed, self.below, self.above, count, autocast)
        place = self.below, self.above, world.carriers, world.pipeline
        self.pipelined = ThinStage(self.chunk, index, stages, *place)

    def meters(self) -> Meters:
        """What this stage has sent over each of its cuts, as a meter of frames would count it."""
        found: Meters = {}
        for crossing in self.crossings:
            leg = Leg.FORWARD if crossing is self.above else Leg.BACKWARD
            size = crossing.floats(leg) * CARRIER.itemsize
            sent = {
                kind: {"frames": count, "header_bytes": 0, "payload_bytes": count * size}
                for kind, count in crossing.sent.items()
            }
            found[f"cut-{crossing.end.cut}"] = {"sent": sent, "received": {}}  # type: ignore[typeddict-item]
        return found


class OtherRanks:
    """All other ranks in the place of both neighbours, as the end of a step needs them.

    A tally that goes down and the losses of a rank reach every other one, and each makes the same
    verdict of them, the one of the first stage in a pipeline of peers (engine/worker.py). A basis
    that moves comes from the rank of the last stage, which alone sees the gradient of the stream.
    """

    def __init__(self, settings: Settings, world: World):
        self.losses: list[float] = []  # of the step, those of this rank's microbatches
        self.asks_to_stop = False
        self.loss = 0.0  # of the step, once there is a verdict
        self._settings, self._world = settings, world
        self._saves_after = checkpoint_steps(settings)
        self._proposer = settings.pipeline.stages - 1
        self._squares: list[float] = []
        self._misses = 0  # steps in a row that were refused

    def send_message(self, kind: FrameKind, step: int, payload: bytes, number: int = 0) -> None:
        """Keep a tally until the verdict is due; hand a basis on where it was proposed."""
        if kind is FrameKind.TALLY:
            self._squares = unpack_tally(payload)
        elif kind is FrameKind.BASIS and self._world.holds(self._proposer):
            self._world.share(payload, self._proposer)

    def take_message(self, kind: FrameKind, step: int, number: int = 0) -> bytes:
        """The verdict of all ranks, or the basis; a tally brings nothing that it does not have."""
        if kind is FrameKind.BASIS:
            return self._world.share(b"", self._proposer)
        return self._verdict(step).to_bytes() if kind is FrameKind.VERDICT else b""

    def _verdict(self, step: int) -> Verdict:
        squares = self._squares if self._world.replica == 0 else []  # replicas have the same
        said = msgspec.msgpack.encode((squares, self.losses, self.asks_to_stop))
        form = tuple[list[float], list[float], bool]
        heard = [msgspec.msgpack.decode(text, type=form) for text in self._world.gather(said)]
        norm = global_norm([square for squares, _, _ in heard for square in squares])
        commit = math.isfinite(norm)
        self._misses = 0 if commit else self._misses + 1
        stop = self._misses >= PATIENCE or any(asked for _, _, asked in heard)
        dtype = torch.float64 if self._settings.run.precision == "fp64" else torch.float32
        losses = [loss for _, losses, _ in heard for loss in losses]  # in microbatches' order
        self.loss = float(torch.tensor(losses, dtype=dtype).sum())
        checkpoint = commit and (self._saves_after(step + 1) or stop)
        return Verdict(norm, commit, checkpoint, stop)


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
        self._others = below = OtherRanks(settings, world)
        above = None if world.holds(settings.pipeline.stages - 1) else self._others
        updates = [held.update for held in self.held]
        sightings = [held.sightings for held in self.held]
        self._step_end = StepEnd(updates, 0, below, above, world.device, sightings)
        name, count = world.grid.schedule, world.grid.microbatches
        stages = [held.pipelined for held in self.held]
        # The last module has computed the loss.
        options: dict[str, Any] = {"loss_fn": lambda output, _: output, "scale_grads": False}
        own: Any = stages[0] if name in SINGLE else stages
        self._schedule = get_schedule_class(SCHEDULES[name])(own, count, **options)

    def train_step(self) -> tuple[Verdict, float, list[tuple[int, Step]]]:
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
        verdict, loss = self._end_step(step, lr, losses), self._others.loss
        self.done = step + 1
        for held in self.held:
            held.state.step = self.done
        reports = [
            (held.index, self._report(held, step, lr, verdict, loss, start)) for held in self.held
        ]
        return verdict, loss, reports

    def _end_step(self, step: int, lr: float, losses: list[Tensor]) -> Verdict:
        """Commit the step on all ranks or on none, by the lines that end it in every engine."""
        for held in self.held:
            self.world.add_twins([p.grad for p in held.stage.parameters() if p.grad is not None])
        self._others.losses = [float(loss) for loss in losses]
        self._others.asks_to_stop = self.stop_requested
        self._step_end.trace.spans.clear()
        # Ranks do not score a move of the basis.
        self._step_end.gather(step, lambda step, commit: (False, False))
        verdict = self._step_end.conclude(step, lr, lambda step, number: None)
        for held in self.held if verdict.commit else ():
            held.update.check(step)
        return verdict

    @torch.no_grad()
    def evaluate(self) -> Evaluation | None:
        """The validation as things are; every rank gets its result. None where a rank is asked to
        stop: torchrun soon kills who does not.
        """
        start, found = time.monotonic(), [0.0, 0.0, 0.0]
        for held in self.held:
            held.chunk.begin(self.done, training=False)
        is_left = False
        for number in range(self.feed.validation_count):
            if number % 8 == 0:  # seldom, since ranks wait for each other here
                is_left = self.world.sum([self.stop_requested])[0] > 0
            if is_left:
                break
            self._forward(torch.tensor([number]))
        for held in self.held:
            held.chunk.train()
            if held.above is None and self.world.replica == 0 and not is_left:
                score = held.chunk.score
                found = [score.loss, time.monotonic() - start, score.count]
        loss, seconds, count = self.world.sum(found)
        return None if is_left else Evaluation(self.done, loss, seconds, int(count))

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

    def save(self) -> list[tuple[int, ShardWritten | ShardFailed]]:
        """Write this rank's parts of a checkpoint; replicas hold the same, so one of them does."""
        held = self.held if self.world.replica == 0 else []
        return [(one.index, one.state.save(self.folder, one.index)) for one in held]

    def _report(
        self, held: HeldStage, step: int, lr: float, verdict: Verdict, loss: float, start: float
    ) -> Step:
        """Times count from the step's beginning on this rank: clocks of machines differ."""
        seconds, trace = time.monotonic() - start, held.pipelined.trace
        count, keeper = self.world.grid.microbatches, held.update.keeper
        spans = trace.spans + self._step_end.trace.spans  # of all stages here together
        forward, backward = (trace.seconds("compute", kind) for kind in "FB")
        update = self._step_end.trace.seconds("compute", "U") / len(self.held)
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
            spans=[(lane, label, a - start, b - start) for lane, label, a, b in spans],
            measures=keeper.measures(step) if keeper else {},
            meters=held.meters(),
            dropped=0,
            not_finite=held.sightings.take_first(step),
        )
