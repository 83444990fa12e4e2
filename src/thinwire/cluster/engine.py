"""A run under torchrun, from start to end, as one of its ranks lives it.

The first rank keeps the record and completes the checkpoints, as `thinwire train` does.
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
from thinwire.engine.reports import Evaluation, ShardFailed, Step
from thinwire.engine.worker import scratch
from thinwire.errors import ConfigError, StageError
from thinwire.report import Display
from thinwire.run.coordinator import disagreement
from thinwire.run.events import Begin, Commit, Discard, Exploded, Record
from thinwire.run.explosion import LossWatch, watch_losses
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
        source = f", from {origin}" if origin else ""
        display.phase("start", f"{world}; links are not emulated{source}")
        record = None
        if world.leads:
            record = RunRecord(settings, folder, data, checkpoint, display, goes_on=restarted)
        losses = watch_losses(settings, folder, checkpoint)
        return Rank(trainer, record, losses).live(started)


@dataclasses.dataclass
class Rank:
    """The life of a rank once all is prepared; one of them keeps the record."""

    trainer: Trainer
    record: RunRecord | None
    losses: LossWatch

    def live(self, started: float) -> dict[str, Any] | None:
        """Train to the end; the summary where the record is kept."""
        trainer, device = self.trainer, str(self.trainer.world.device)
        ready = [(held.index, Ready("", held.stage.describe(), device)) for held in trainer.held]
        stages = [message for _, message in self._gather(ready)]
        if self.record is not None:
            self.record.carry_out(Begin(stages, versions()))
        with heeding(self._on_signal):
            try:
                self._train()
            finally:
                if self.record is not None:
                    self.record.close()
        self._keep([(held.index, Finished(held.meters())) for held in trainer.held])
        if self.record is None:
            return None
        try:
            return self.record.finish(0, trainer.stop_requested, started)
        except StageError as error:  # no torchrun that starts all ranks again shall go on
            (trainer.folder / ENDED).write_text(str(error), encoding="utf-8")
            raise

    def _train(self) -> None:
        trainer, settings = self.trainer, self.trainer.settings
        stop = False
        while trainer.done < settings.train.steps and not stop:
            if trainer.done == trainer.first_step or settings.is_evaluation_step(trainer.done):
                self._evaluate()
            verdict, _, reports = trainer.train_step()
            self._keep(reports)
            stop = verdict.stop
            if verdict.checkpoint:
                self._save()
        if not stop:
            self._evaluate()
        trainer.stop_requested = stop

    def _evaluate(self) -> None:
        if report := self.trainer.evaluate():
            self._hear(-1, report)

    def _save(self) -> None:
        parts = [message for _, message in self._gather(self.trainer.save())]
        if self.record is None:
            return
        step = self.trainer.done
        failed = [part.error for part in parts if isinstance(part, ShardFailed)]
        if failed:
            self.record.carry_out(Discard(step, failed[0]))
        elif difference := disagreement(step, [part.agreements for part in parts]):
            self.record.carry_out(Discard(step))
            raise StageError(difference)
        else:
            self.record.carry_out(Commit(step, parts))

    def _keep(self, said: Sequence[tuple[int, Any]]) -> None:
        for stage, report in self._gather(said):
            self._hear(stage, report)

    def _hear(self, stage: int, report: Step | Evaluation | Finished) -> None:
        if self.record is None:
            return
        self.record.carry_out(Record(stage, report))
        for change in [] if isinstance(report, Finished) else self.losses.hear(report):
            self.record.carry_out(change)
            if isinstance(change, Exploded) and self.losses.stops:
                self.trainer.stop_requested = True

    def _gather(self, said: Sequence[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """What all stages say, each with its number and in their order."""
        is_twin = self.trainer.world.replica > 0  # its stages are told of by the first replica
        own = [] if is_twin else [pack(Envelope(message, stage)) for stage, message in said]
        heard = self.trainer.world.gather(msgspec.msgpack.encode(own))
        lines = [line for text in heard for line in msgspec.msgpack.decode(text, type=list[bytes])]
        found = [unpack(line, FROM_PEER) for line in lines]
        return sorted(((one.stage, one.message) for one in found), key=lambda pair: pair[0])

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The step under way is finished and saved; torchrun ends whoever takes too long."""
        self.trainer.stop_requested = True


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
