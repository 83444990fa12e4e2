"""A run under torchrun, from start to end, as one of its ranks lives it: its stages, PyTorch's
schedule over them, the end of a step with all other ranks, validations, checkpoints, the record.

The first rank keeps the record and completes the checkpoints, as `thinwire train` does. Carriers
travel over NCCL where every rank has a GPU of its own; all else as tensors of numbers and bytes
over gloo. Nothing is pickled.
"""

import contextlib
import dataclasses
import functools
import gc
import json
import math
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import get_schedule_class

from thinwire.cluster.grid import SCHEDULES, SINGLE, Grid, Seat
from thinwire.cluster.pipelining import CARRIER, Crossing, ThinStage
from thinwire.codec import Leg
from thinwire.data import Corpus
from thinwire.engine.build import StageBuilder, choose_device, prepare_torch
from thinwire.engine.checkpoint import Checkpoint, list_checkpoints
from thinwire.engine.cut import ends_of
from thinwire.engine.feed import Feed
from thinwire.engine.passes import autocast_for, weights_rounded_once
from thinwire.engine.reports import Evaluation, Meters, StageCosts, Step
from thinwire.engine.state import StageState
from thinwire.engine.step_end import StageUpdate, StepEnd, Verdict, global_norm, unpack_tally
from thinwire.engine.trace import FORWARD
from thinwire.engine.worker import PATIENCE, scratch, scratch_folder
from thinwire.errors import ConfigError, StageError
from thinwire.model import Score, learning_rate
from thinwire.report import Display
from thinwire.run.coordinator import settled_checkpoint
from thinwire.run.events import Begin, Command, Record
from thinwire.run.peer import versions
from thinwire.run.protocol import FROM_PEER, Envelope, Finished, Ready, pack, unpack
from thinwire.run.record import RunRecord
from thinwire.run.signals import heeding
from thinwire.run.start import make_start, opened, prepare_data
from thinwire.settings import Settings
from thinwire.settings.crossing import checkpoint_steps
from thinwire.wire import FrameKind

ENDED = ".ended"
"""In a run's folder: why it ended by itself with an error, for a torchrun that restarts it."""


class World:
    """All ranks of a run as one of them sees them: who it is, and what they agree on."""

    def __init__(self, seat: Seat, grid: Grid, wanted_device: str):
        self.seat, self.grid = seat, grid
        self.device = choose_device(wanted_device, seat.local_rank)
        on_gpu = self.device.type == "cuda" and seat.local_world <= torch.cuda.device_count()
        self.backend = "nccl" if on_gpu else "gloo"
        self.carriers = self.device if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        if not dist.is_initialized():
            # torchrun's store outlives a restart and still has the addresses of dead processes:
            # all ranks meet by names of this attempt alone.
            store, _, _ = next(dist.rendezvous("env://"))
            own = dist.PrefixStore(_name_of_attempt(store, seat), store)
            dist.init_process_group(self.backend, store=own, rank=seat.rank, world_size=seat.world)
        mesh = init_device_mesh(
            self.carriers.type, (grid.replicas, grid.ranks), mesh_dim_names=("replica", "rank")
        )
        self.replica, self.place = divmod(seat.rank, grid.ranks)
        self.pipeline = mesh["rank"].get_group()
        self.twins = mesh["replica"].get_group()
        # One rank may prepare data for hours while the others wait.
        self._all = dist.new_group(backend="gloo", timeout=timedelta(hours=24))

    def __str__(self) -> str:
        grid = self.grid
        copies = f", {grid.replicas} replicas" if grid.replicas > 1 else ""
        where = f"{grid.stages} stages on {grid.ranks} ranks{copies}"
        return f"{where}, schedule {grid.schedule} of PyTorch, {self.backend}"

    @property
    def leads(self) -> bool:
        """Whether this rank keeps the record of the run."""
        return self.seat.rank == 0

    def close(self) -> None:
        """Leave in good order."""
        dist.barrier(group=self._all)
        gc.collect()  # the stages of the run, in cycles, hold groups that would outlive this
        dist.destroy_process_group()

    def gather(self, said: bytes) -> list[bytes]:
        """What every rank says, in their order, on every rank; all wait for it."""
        sizes = [int(size) for size in self._gathered(torch.tensor([len(said)]))]
        room = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        room.numpy()[: len(said)] = np.frombuffer(said, np.uint8)
        found = zip(self._gathered(room), sizes, strict=True)
        return [room.numpy().tobytes()[:size] for room, size in found]

    def _gathered(self, own: Tensor) -> list[Tensor]:
        rooms = [torch.empty_like(own) for _ in range(self.seat.world)]
        dist.all_gather(rooms, own, group=self._all)
        return rooms

    def share(self, said: bytes, stage: int = 0) -> bytes:
        """What the rank that holds a stage, in the first pipeline, says: on every rank."""
        source = self.grid.holders[stage]
        return self.gather(said if self.seat.rank == source else b"")[source]

    def any(self, is_so: bool) -> bool:
        """Whether it is so on one rank at least."""
        return any(self.gather(b"1" * is_so))

    def elsewhere(self, stage: int) -> int | None:
        """The rank of this pipeline that holds a stage; None where this one does."""
        holder = self.grid.holders[stage]
        return holder if holder != self.place else None


def _name_of_attempt(store: dist.Store, seat: Seat) -> str:
    """A name that the living ranks agree on, in a store that also has what dead ones wrote. (Each
    machine's torchrun counts only the restarts that it saw itself.)
    """
    mine = secrets.token_hex(8)
    if seat.rank:
        store.set(f"asks-{seat.rank}", mine)
        name = store.get(f"answer-{mine}").decode()
        store.set(f"{name}-{seat.rank}", "")
        return name
    others = range(1, seat.world)
    while not all(store.check([f"{mine}-{rank}"]) for rank in others):
        for rank in others:
            store.set(f"answer-{store.get(f'asks-{rank}').decode()}", mine)
        time.sleep(0.02)
    return mine


def run(
    settings: Settings, world: World, display: Display, resume: Path | None, allow_plugins: bool
) -> dict[str, Any] | None:
    """Be one rank of a run to its end; the first rank returns the summary.

    A process that torchrun has started again goes on from the run's newest good checkpoint.
    """
    started = time.monotonic()
    # Of any machine: torchrun counts on each one only the failures that it saw itself.
    restarted = world.any(world.seat.restarts > 0)
    link = dataclasses.replace(settings.link, emulate=False)  # PyTorch sends as the network does
    kept = dataclasses.replace(settings.train, log_mb=0)  # for no rank is replaced
    settings = dataclasses.replace(settings, link=link, train=kept)
    folder = settings.run.folder.resolve()
    with contextlib.ExitStack() as stack:
        checkpoint = weights = None
        if world.leads:
            if settings.pipeline.window and world.grid.schedule != "gpipe":
                note = "note: pipeline.window is not used: PyTorch's schedule has its own"
                display.phase("config", note)
            if restarted and list_checkpoints(folder):
                resume = folder  # else it starts again as it was told to
            if restarted and (folder / ENDED).exists():
                raise StageError((folder / ENDED).read_text(encoding="utf-8"))
            beginning = opened(settings, display, resume, allow_plugins, goes_on=restarted)
            settings, checkpoint, weights = stack.enter_context(beginning)
            stack.enter_context(scratch(folder))
            (folder / ENDED).unlink(missing_ok=True)
        place = str(weights.folder.resolve()) if weights else ""
        plain, place = json.loads(world.share(json.dumps([settings.to_plain(), place]).encode()))
        settings = Settings.from_plain(plain)
        if place and weights is None:
            weights = Checkpoint.open(Path(place), allow_plugins=True)  # rank 0 has been asked
        prepare = functools.partial(prepare_data, settings, display, weights, checkpoint)
        data = _same_everywhere(world, prepare)
        if world.leads and checkpoint is None and weights is not None:
            checkpoint = make_start(weights, settings, folder, data, display)
        said = world.share(str(checkpoint.folder.resolve()).encode() if checkpoint else b"")
        origin = Path(said.decode()) if said else None
        if not (folder / ".lock").exists():  # checkpoints have a part of each stage
            raise ConfigError(
                f"rank {world.seat.rank} does not see the run's folder {folder}, which rank 0 has "
                "made: put run.out on a file system that all machines share"
            )
        rank = Rank(settings, world, data, folder, origin)
        source = f", from {origin}" if origin else ""
        display.phase("start", f"{world}; links are not emulated{source}")
        if world.leads:
            rank.record = RunRecord(settings, folder, data, checkpoint, display)
        return rank.live(started)


def _same_everywhere(world: World, prepare: Callable[[], Corpus]) -> Corpus:
    """The run's data: prepared by one rank of each machine, then opened by the others."""
    data = prepare() if world.seat.local_rank == 0 else None
    world.gather(b"")  # until they have
    data = data or prepare()
    wanted = world.share(data.fingerprint.encode()).decode()
    if data.fingerprint != wanted:
        raise ConfigError(
            f"the data of rank {world.seat.rank} is not that of rank 0 (fingerprint "
            f"{data.fingerprint} instead of {wanted}): give every machine the same files"
        )
    return data


class HeldStage(nn.Module):
    """A stage as a rank holds it: its layers, its ends of two cuts, its update and its state.

    As a module it leads from a carrier, or the model's inputs, to a carrier, or the loss.
    """

    def __init__(self, index: int, builder: StageBuilder, feed: Feed, world: World, folder: Path):
        super().__init__()
        settings, self.index = builder.settings, index
        self.stage = builder.build(index)
        self.update = StageUpdate(builder, self.stage, index)
        scratch = scratch_folder(folder) / f"stage-{index}"
        ends = ends_of(settings, index, builder.wire_spec, feed, scratch)
        self.below, self.above = (
            Crossing(end, world.carriers, self.update.sightings) if end else None for end in ends
        )
        self.state = StageState(self.update, ends)
        self._autocast = autocast_for(settings.run.precision, world.device)
        self._feed, self._microbatches = feed, settings.pipeline.microbatches
        place = self.below, self.above, world.carriers, world.pipeline
        self.pipelined = ThinStage(self, index, settings.pipeline.stages, *place)

    def begin(self, step: int, training: bool) -> None:
        """Before the first forward of a step, or of the validation after so many steps."""
        self._step = step
        self.score = Score()  # of a validation, on the last stage
        self.train(training)
        for crossing in (self.below, self.above):
            if crossing is not None:
                crossing.step, crossing.training = step, training

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        """`x` is a carrier; the first stage has no use for it."""
        at = int(number)
        batch = self._feed.training(self._step, at) if self.training else self._feed.validation(at)
        received = batch.inputs if self.below is None else self.below.receive(x, at)
        with self._autocast():
            output = self.stage(received, batch.inputs if self.stage.needs_ids else None)
            if self.above is None and self.training:  # a microbatch's share of the step's loss
                return batch.loss(self.stage, output, self._microbatches)
            if self.above is None:
                loss = self.stage.loss(output, batch.targets)
                self.score.add(loss, batch.targets)
                return loss
        return self.above.send(output, at)

    def meters(self) -> Meters:
        """What this stage has sent over each of its cuts, as a meter of frames would count it."""
        found: Meters = {}
        for crossing, leg in (self.below, Leg.BACKWARD), (self.above, Leg.FORWARD):
            if crossing is not None:
                size = crossing.floats[leg] * CARRIER.itemsize
                sent = {
                    kind: {"frames": count, "header_bytes": 0, "payload_bytes": count * size}
                    for kind, count in crossing.sent.items()
                }
                found[f"cut-{crossing.end.cut}"] = {"sent": sent, "received": {}}  # type: ignore[typeddict-item]
        return found


class Rank:
    """The stages of one rank, trained together with all other ranks; one of them keeps the record.

    For the end of a step it is the way to both neighbours. The tally and the losses of a rank reach
    every other one, and each makes of them the verdict of a first stage (engine/worker.py).
    """

    def __init__(
        self, settings: Settings, world: World, data: Corpus, folder: Path, resume: Path | None
    ):
        self.settings, self.world, self.folder = settings, world, folder
        self.record: RunRecord | None = None
        self.feed = Feed(data, settings, world.device)
        self.stop_requested = False  # of this rank; one is enough
        self.loss = 0.0  # of the step, once there is a verdict
        self._losses: list[float] = []  # of the step, those of this rank's microbatches
        self._squares: list[float] = []  # of the step, those of this rank's gradients
        self._misses = 0  # steps in a row that were refused
        self._saves_after, self._proposer = checkpoint_steps(settings), settings.pipeline.stages - 1
        prepare_torch(settings, world.device)
        builder = StageBuilder(settings, world.device)
        self.held = [
            HeldStage(index, builder, self.feed, world, folder)
            for index, holder in enumerate(world.grid.holders)
            if holder == world.place
        ]
        for held in self.held:
            if resume is None:
                builder.initialise(held.stage)
            else:
                held.state.restore(Checkpoint.open(resume, allow_plugins=True))
        self.done = self.first_step = self.held[0].state.step
        above = self if self.held[-1].above else None
        self._step_end = StepEnd([held.update for held in self.held], self, above)
        name, stages = world.grid.schedule, [held.pipelined for held in self.held]
        own: Any = stages[0] if name in SINGLE else stages
        kind: Any = get_schedule_class(SCHEDULES[name])
        # The last module has computed the loss.
        options = {"loss_fn": lambda output, _: output, "scale_grads": False}
        self._schedule = kind(own, world.grid.microbatches, **options)

    def train_step(self) -> tuple[Verdict, list[tuple[int, Step]]]:
        """One step: what all ranks decided, and what each stage of this rank reports."""
        step, start = self.done, time.monotonic()
        lr = learning_rate(self.settings.optim, step, self.settings.train.steps)
        for held in self.held:
            held.update.begin(step)
            held.begin(step, training=True)
            held.pipelined.trace.spans.clear()
        losses: list[Tensor] = []
        with weights_rounded_once():
            count = self.world.grid.microbatches
            at = torch.arange(count) + self.world.replica * count
            self._schedule.step(at, number=at, target=at, losses=losses, return_outputs=False)
        if self.world.grid.replicas > 1:
            parameters = (p for held in self.held for p in held.stage.parameters())
            gradients = (p.grad for p in parameters if p.grad is not None)
            added = [dist.all_reduce(g, group=self.world.twins, async_op=True) for g in gradients]
            for work in added:
                work.wait()
        self._losses = [float(loss) for loss in losses]
        self._step_end.trace.spans.clear()
        # The verdict comes by `take_message`, and nobody scores a move of the basis.
        self._step_end.gather(step, lambda *_: (False, False))
        verdict = self._step_end.conclude(step, lr, lambda *_: None)
        self.done = step + 1
        for held in self.held:
            if verdict.commit:
                held.update.check(step)
            held.state.step = self.done
        reports = [(held.index, self._report(held, step, lr, verdict, start)) for held in self.held]
        return verdict, reports

    def send_message(self, kind: FrameKind, step: int, payload: bytes, number: int = 0) -> None:
        """Keep a tally until the verdict is due; hand a basis on where it was proposed."""
        if kind is FrameKind.TALLY:
            self._squares = unpack_tally(payload)
        elif kind is FrameKind.BASIS and self.world.elsewhere(self._proposer) is None:
            self.world.share(payload, self._proposer)

    def take_message(self, kind: FrameKind, step: int, number: int = 0) -> bytes:
        """The verdict of all ranks, or the basis; a tally brings nothing that it does not have."""
        if kind is FrameKind.BASIS:
            return self.world.share(b"", self._proposer)
        return self._verdict(step).to_bytes() if kind is FrameKind.VERDICT else b""

    def _verdict(self, step: int) -> Verdict:
        squares = self._squares if self.world.replica == 0 else []  # replicas have the same
        said = msgspec.msgpack.encode((squares, self._losses, self.stop_requested))
        form = tuple[list[float], list[float], bool]
        heard = [msgspec.msgpack.decode(text, type=form) for text in self.world.gather(said)]
        norm = global_norm([square for squares, _, _ in heard for square in squares])
        commit = math.isfinite(norm)
        self._misses = 0 if commit else self._misses + 1
        stop = self._misses >= PATIENCE or any(asked for _, _, asked in heard)
        losses = [loss for _, losses, _ in heard for loss in losses]  # in microbatches' order
        dtype = torch.float64 if self.settings.run.precision == "fp64" else torch.float32
        self.loss = float(torch.tensor(losses, dtype=dtype).sum())
        checkpoint = commit and (self._saves_after(step + 1) or stop)
        return Verdict(norm, commit, checkpoint, stop)

    @torch.no_grad()
    def evaluate(self) -> list[tuple[int, Evaluation]]:
        """The validation as things are, on every rank: the report of the last stage, where it is
        held. It is left where one rank is asked to stop.
        """
        start, last = time.monotonic(), self.held[-1]
        for held in self.held:
            held.begin(self.done, training=False)
        for number in range(self.feed.validation_count):
            # Asked seldom, since ranks wait for each other here.
            if number % 8 == 0 and self.world.any(self.stop_requested):
                return []
            self._forward(torch.tensor([number]))
        if last.above is not None:
            return []
        score, seconds = last.score, time.monotonic() - start
        return [(last.index, Evaluation(self.done, score.loss, seconds, score.count))]

    def _forward(self, number: Tensor) -> None:
        """A validation microbatch through the stages of this rank, in the order of all stages: not
        by the schedule, since that of zbv cannot leave out the way back.
        """
        output, world = number, self.world
        for held in self.held:
            if held.below and (source := world.elsewhere(held.index - 1)) is not None:
                size = held.below.floats[Leg.FORWARD]
                output = torch.empty(size, dtype=CARRIER, device=world.carriers)
                dist.recv(output, group=world.pipeline, group_src=source)
            output = held(output, number)
            if held.above and (target := world.elsewhere(held.index + 1)) is not None:
                part = output[: held.above.floats[Leg.FORWARD]]
                dist.send(part, group=world.pipeline, group_dst=target)

    def _report(
        self, held: HeldStage, step: int, lr: float, verdict: Verdict, start: float
    ) -> Step:
        """Times count from the step's beginning on this rank: clocks of machines differ."""
        seconds, trace = time.monotonic() - start, held.pipelined.trace
        count, keeper = self.world.grid.microbatches, held.update.keeper
        spans = trace.spans + self._step_end.trace.spans  # of all stages here together
        forward, backward = (trace.seconds("compute", kind) for kind in "FB")
        update = self._step_end.trace.seconds("compute", "U") / len(self.held)
        loss = self.loss if held.above is None else None
        if loss is not None and not math.isfinite(loss):
            held.update.sightings.note(step, FORWARD)
        return Step(
            step=step,
            loss=loss,
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
            not_finite=held.update.sightings.take_first(step),
        )

    def live(self, started: float) -> dict[str, Any] | None:
        """Train to the end; the summary where the record is kept."""
        device = str(self.world.device)
        ready = [(h.index, Ready("", h.stage.describe(), device, versions())) for h in self.held]
        self._do(Begin([message for _, message in self._gather(ready)]))
        with heeding(self._on_signal):
            try:
                self._train()
            finally:
                if self.record is not None:
                    self.record.close()
        self._keep([(held.index, Finished(held.meters())) for held in self.held])
        if self.record is None:
            return None
        try:
            return self.record.finish(0, self.stop_requested, started)
        except StageError as error:  # no torchrun that starts all ranks again shall go on
            (self.folder / ENDED).write_text(str(error), encoding="utf-8")
            raise

    def _train(self) -> None:
        settings, stop = self.settings, False
        while self.done < settings.train.steps and not stop:
            if self.done == self.first_step or settings.is_evaluation_step(self.done):
                self._keep(self.evaluate())
            verdict, reports = self.train_step()
            self._keep(reports)
            stop = verdict.stop
            if verdict.checkpoint:
                self.save()
        if not stop:
            self._keep(self.evaluate())
        self.stop_requested = stop

    def save(self) -> None:
        """Save a checkpoint with all ranks; replicas hold the same, so one of them writes it."""
        held = self.held if self.world.replica == 0 else []
        parts = self._gather([(one.index, one.state.save(self.folder, one.index)) for one in held])
        made, error = settled_checkpoint(self.done, [part for _, part in parts])
        self._do(made)
        if error is not None:
            raise error

    def _do(self, command: Command) -> None:
        if self.record is not None:
            self.record.carry_out(command)
            if self.record.is_to_stop:  # a signal may ask for it meanwhile
                self.stop_requested = True

    def _keep(self, said: Sequence[tuple[int, Step | Evaluation | Finished]]) -> None:
        """Record what all stages say."""
        for stage, report in self._gather(said):
            self._do(Record(stage, report))

    def _gather(self, said: Sequence[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """What all stages say, each with its number and in their order."""
        is_twin = self.world.replica > 0  # its stages are told of by the first replica
        own = [] if is_twin else [pack(Envelope(message, stage)) for stage, message in said]
        heard = self.world.gather(msgspec.msgpack.encode(own))
        lines = [line for text in heard for line in msgspec.msgpack.decode(text, type=list[bytes])]
        found = [unpack(line, FROM_PEER) for line in lines]
        return sorted(((one.stage, one.message) for one in found), key=lambda pair: pair[0])

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The step under way is finished and saved; torchrun ends whoever takes too long."""
        self.stop_requested = True
