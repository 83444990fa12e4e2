"""A run under torchrun, from start to end, as one of its ranks lives it.

The first rank prepares what all read, keeps the record and completes the checkpoints: the same
files as those of `thinwire train`, so either engine continues the other's runs.
"""

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from thinwire.cluster.trainer import Trainer
from thinwire.cluster.world import World
from thinwire.data import Corpus
from thinwire.engine.checkpoint import Checkpoint, list_checkpoints
from thinwire.engine.reports import Evaluation, ShardFailed, ShardWritten, Step
from thinwire.engine.worker import scratch
from thinwire.errors import ConfigError, StageError
from thinwire.report import Display
from thinwire.run.coordinator import disagreement
from thinwire.run.events import Begin, Commit, Discard, Exploded, Record
from thinwire.run.ledger import LossWatch, watch_losses
from thinwire.run.peer import versions
from thinwire.run.protocol import FROM_PEER, Envelope, Finished, Ready, pack, unpack
from thinwire.run.record import RunRecord
from thinwire.run.signals import heeding
from thinwire.run.start import make_start, opened, prepare_data
from thinwire.settings import Settings

ENDED = ".ended"
"""In a run's folder: why it ended by itself with an error, for a torchrun that restarts it."""


def run(
    settings: Settings,
    world: World,
    display: Display,
    resume: Path | None = None,
    allow_plugins: bool = False,
) -> dict[str, Any] | None:
    """Be one rank of a run to its end; the first rank returns the summary.

    A process that torchrun has started again goes on from the run's newest good checkpoint.
    """
    started = time.monotonic()
    # Of any machine: torchrun counts on each one only the failures that it saw itself.
    restarted = world.sum([world.seat.restarts])[0] > 0
    link = dataclasses.replace(settings.link, emulate=False)  # PyTorch sends as the network does
    kept = dataclasses.replace(settings.train, log_mb=0)  # for no rank is replaced
    settings = dataclasses.replace(settings, link=link, train=kept)
    folder = settings.run.folder.resolve()
    with contextlib.ExitStack() as stack:
        checkpoint = weights = None
        if world.leads:
            if settings.pipeline.window and world.grid.schedule != "gpipe":
                told = "note: pipeline.window is not used: PyTorch's schedule has its own"
                display.phase("config", told)
            if restarted and list_checkpoints(folder):
                resume = folder  # else it starts again as it was told to
            if restarted and (folder / ENDED).exists():
                raise StageError((folder / ENDED).read_text(encoding="utf-8"))
            beginning = opened(settings, display, resume, allow_plugins, goes_on=restarted)
            settings, checkpoint, weights = stack.enter_context(beginning)
            stack.enter_context(scratch(folder))
            (folder / ENDED).unlink(missing_ok=True)
        settings = Settings.from_plain(
            json.loads(world.share(json.dumps(settings.to_plain()).encode()))
        )
        weights = _shared_checkpoint(world, weights)
        data = _data(settings, world, display, weights, checkpoint)
        if world.leads and checkpoint is None and weights is not None:
            checkpoint = make_start(weights, settings, folder, data, display)
        checkpoint = _shared_checkpoint(world, checkpoint)
        _check_shared(folder, world)
        origin = checkpoint.folder if checkpoint else None
        trainer = Trainer(settings, world, data, folder, origin)
        display.phase("start", _described(world, origin))
        record = None
        if world.leads:
            record = RunRecord(settings, folder, data, checkpoint, display, goes_on=restarted)
        losses = watch_losses(settings, folder, checkpoint)
        return Rank(trainer, record, started, losses).live()


class Rank:
    """The life of a rank once all is prepared: steps, validations, checkpoints."""

    def __init__(
        self, trainer: Trainer, record: RunRecord | None, started: float, losses: LossWatch
    ):
        self._trainer = trainer
        self._world = trainer.world
        self._record = record
        self._losses = losses
        self._started = started

    def live(self) -> dict[str, Any] | None:
        """Train to the end; the summary where the record is kept."""
        ready = [
            (held.index, Ready("", held.stage.describe(), str(self._world.device), versions()))
            for held in self._trainer.held
        ]
        stages = [message for _, message in self._gather(ready)]
        if self._record is not None:
            self._record.carry_out(Begin(stages))
        with heeding(self._on_signal):
            try:
                self._train()
            finally:
                if self._record is not None:
                    self._record.close()
        finished = [(held.index, Finished(held.meters())) for held in self._trainer.held]
        for stage, message in self._gather(finished):
            self._keep(stage, message)
        if self._record is None:
            return None
        try:
            return self._record.finish(0, self._trainer.stop_requested, self._started)
        except StageError as error:  # no torchrun that starts all ranks again shall go on
            (self._trainer.folder / ENDED).write_text(str(error), encoding="utf-8")
            raise

    def _train(self) -> None:
        trainer, settings = self._trainer, self._trainer.settings
        stop = False
        while trainer.done < settings.train.steps and not stop:
            if trainer.done == trainer.first_step or settings.is_evaluation_step(trainer.done):
                self._keep(-1, trainer.evaluate())
            verdict, _, reports = trainer.train_step()
            for stage, message in self._gather(reports):
                self._keep(stage, message)
            stop = verdict.stop
            if verdict.checkpoint:
                self._save()
        if not stop:
            self._keep(-1, trainer.evaluate())
        trainer.stop_requested = stop

    def _save(self) -> None:
        parts = [message for _, message in self._gather(self._trainer.save())]
        if self._record is None:
            return
        step = self._trainer.done
        failed = [part.error for part in parts if isinstance(part, ShardFailed)]
        written = [part for part in parts if isinstance(part, ShardWritten)]
        if failed:
            self._record.carry_out(Discard(step, failed[0]))
        elif difference := disagreement(step, [part.agreements for part in written]):
            self._record.carry_out(Discard(step))
            raise StageError(difference)
        else:
            self._record.carry_out(Commit(step, written))

    def _keep(self, stage: int, report: Step | Evaluation | Finished | None) -> None:
        if self._record is None or report is None:
            return
        self._record.carry_out(Record(stage, report))
        for change in [] if isinstance(report, Finished) else self._losses.hear(report):
            self._record.carry_out(change)
            if isinstance(change, Exploded) and self._losses.stops:
                self._trainer.stop_requested = True

    def _gather(self, said: Sequence[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """What all stages say, each with its number and in their order."""
        is_twin = self._world.replica > 0  # its stages are told of by the first replica
        own = [] if is_twin else [pack(Envelope(message, stage)) for stage, message in said]
        heard = self._world.gather(msgspec.msgpack.encode(own))
        lines = [line for text in heard for line in msgspec.msgpack.decode(text, type=list[bytes])]
        found = [unpack(line, FROM_PEER) for line in lines]
        return sorted(((one.stage, one.message) for one in found), key=lambda pair: pair[0])

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The step under way is finished and saved; torchrun ends whoever takes too long."""
        self._trainer.stop_requested = True


def _shared_checkpoint(world: World, opened: Checkpoint | None) -> Checkpoint | None:
    """The checkpoint that the first rank has opened, on every rank."""
    place = world.share(str(opened.folder.resolve() if opened else "").encode()).decode()
    if opened is not None or not place:
        return opened
    return Checkpoint.open(Path(place), allow_plugins=True)  # the first rank has been asked


def _data(
    settings: Settings,
    world: World,
    display: Display,
    weights: Checkpoint | None,
    resumed: Checkpoint | None,
) -> Corpus:
    """The run's data: prepared by one rank of each machine, then opened by the others."""
    prepare = functools.partial(prepare_data, settings, display, weights, resumed)
    data = prepare() if world.seat.local_rank == 0 else None
    world.wait_for_all()
    data = data or prepare()
    wanted = world.share(data.fingerprint.encode()).decode()
    if data.fingerprint != wanted:
        raise ConfigError(
            f"the data of rank {world.seat.rank} is not that of rank 0 (fingerprint "
            f"{data.fingerprint} instead of {wanted}): give every machine the same files"
        )
    return data


def _check_shared(folder: Path, world: World) -> None:
    """Checkpoints have a part of each stage: every rank must see the same folder."""
    if not (folder / ".lock").exists():
        raise ConfigError(
            f"rank {world.seat.rank} does not see the run's folder {folder}, which rank 0 has "
            "made: put run.out on a file system that all machines share"
        )


def _described(world: World, origin: Path | None) -> str:
    grid = world.grid
    source = f", from {origin}" if origin else ""
    copies = f", {grid.replicas} replicas" if grid.replicas > 1 else ""
    return (
        f"{grid.stages} stages on {grid.ranks} ranks{copies}, schedule {grid.schedule} of "
        f"PyTorch, {world.backend}; links are not emulated{source}"
    )
