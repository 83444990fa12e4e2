"""The story of a run, top to bottom: settings in, trained model out.

prepare the data -> start the peers -> follow their steps -> commit checkpoints
-> sum up: summary.json, plots, tables
"""

import contextlib
import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from thinwire.data import Corpus, ImageSet, prepare, prepare_images
from thinwire.engine import Checkpoint, list_checkpoints
from thinwire.engine.build import check_devices, parameter_count
from thinwire.engine.checkpoint import (
    Shard,
    commit,
    discard_partial,
    prune,
    set_aside_later,
)
from thinwire.engine.feed import Data, Feed
from thinwire.engine.worker import scratch_folder
from thinwire.errors import CheckpointError, ConfigError, StageError, ThinwireError
from thinwire.paths import cache_folder
from thinwire.report import Display, EvaluationRecord, MetricsWriter, write_timeline
from thinwire.report.metrics import without_nan
from thinwire.run.claim import claim_folder
from thinwire.run.commit import check_agreement, divergence, way_back
from thinwire.run.coordinator import Coordinator
from thinwire.run.proof import Proof, begin_proof, is_proven
from thinwire.run.resume import open_resume
from thinwire.settings import Settings
from thinwire.settings.remarks import remarks
from thinwire.summary import Ledger, bits_per_byte
from thinwire.typed import to_plain, to_toml

DataT = TypeVar("DataT", Corpus, ImageSet)


class Interrupted(KeyboardInterrupt):
    """The user asked twice to stop: leave at once."""


def train(
    settings: Settings,
    display: Display,
    resume: Path | None = None,
    allow_plugins: bool = False,
) -> dict[str, Any]:
    """Run to the end (or to a Ctrl-C, which drains and checkpoints); returns the summary.

    `allow_plugins`: import plugins that only the checkpoint to resume names.
    """
    started = time.monotonic()
    for line in describe(settings):
        display.phase("config", line)
    check_devices(settings)
    folder = Path(settings.run.out) / settings.run.name
    checkpoint = open_resume(resume, settings, display, allow_plugins) if resume else None
    with heeding(_leave_at_once), claim_folder(folder, checkpoint):
        data = prepare_data(settings, display)
        if checkpoint is not None and checkpoint.manifest["corpus"] != data.fingerprint:
            raise CheckpointError(
                f"{checkpoint.folder} was trained on another corpus (fingerprint "
                f"{checkpoint.manifest['corpus']}, now {data.fingerprint}): resume with the "
                "same data"
            )
        stages, from_folder = settings.pipeline.stages, checkpoint.folder if checkpoint else None
        origin = f", from {from_folder}" if from_folder else ""
        display.phase("start", f"{stages} stages as processes, links under mutual TLS{origin}")

        def on_start(count: int, what: str) -> None:
            display.progress("start", count, stages, what)

        with (
            _scratch(folder),
            Coordinator(
                settings, folder, data.folder, from_folder, display.note, on_start
            ) as coordinator,
        ):
            coordinator.launch()
            ready = time.monotonic()
            run = _Run(settings, folder, data, coordinator, display, checkpoint)
            with _stopping(coordinator, run):
                run.open_record()
                run.follow()
                return run.finish(time.monotonic() - started, ready - started)


def describe(settings: Settings) -> list[str]:
    """What a run is, in a line or two: its size, and the settings that are not at their defaults.

    All settings, resolved, stand in the run's config.toml.
    """
    count, stages = parameter_count(settings), settings.pipeline.stages
    first = (
        f"{settings.run.name}: {count:,} parameters in {stages} stages, "
        f"{settings.train.steps} steps of {settings.tokens_per_step:,} {settings.unit}s, "
        f"hash {settings.hash}"
    )
    asked, defaults = settings.relaxed().to_plain(), to_plain(Settings())
    changed = [
        f"{section}.{key} = {value}"
        for section, keys in asked.items()
        for key, value in keys.items()
        if value != defaults[section][key] and (section, key) != ("run", "name")
    ]
    own = [f"set: {', '.join(changed)}"] if changed else []
    return [first, *own, *(f"note: {remark}" for remark in remarks(settings))]


def prepare_data(settings: Settings, display: Display) -> Data:
    """The data of these settings, from the cache if it was prepared before."""
    if not settings.model.sees_images:
        return prepare_corpus(settings, display)
    images = prepare_images(settings.data.path, cache_folder(), _progress(display))
    return _announced(images, settings, display)


def prepare_corpus(settings: Settings, display: Display) -> Corpus:
    """The tokenised corpus of these settings, from the cache if it was prepared before."""
    corpus = prepare(settings.data, settings.model.vocab, cache_folder(), _progress(display))
    return _announced(corpus, settings, display)


def _progress(display: Display) -> Callable[[str, int, int], None]:
    return lambda phase, done, total: display.progress(phase, done, total, "B")


def _announced(data: DataT, settings: Settings, display: Display) -> DataT:
    display.phase("data", data.summary())
    for note in data.notes:
        display.note(note)
    Feed(data, settings, torch.device("cpu"))  # too little of it is refused here, not later
    return data


class _Run:
    """A run under way: files what the stages say, commits checkpoints, shows progress."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        data: Data,
        coordinator: Coordinator,
        display: Display,
        resumed: Checkpoint | None,
    ):
        self.settings = settings
        self.folder = folder
        self.data = data
        self._feed = Feed(data, settings, torch.device("cpu"))
        self.coordinator = coordinator
        self.display = display
        self.ledger = Ledger(settings, coordinator.descriptions, resumed.step if resumed else 0)
        self.is_over = False  # its stages are done; results are left to write
        self._is_drawing = self._in_haste = False
        self._metrics: MetricsWriter | None = None
        self._resumed = resumed
        self._stop_asked = False
        self._parts: dict[int, dict[int, dict[str, Any]]] = {}
        self._failed: dict[int, str] = {}
        self._latest: Path | None = None
        self._proof, self._proof_is_due = Proof(), False

    def open_record(self) -> None:
        """Begin or continue what is written of the run, now that its stages stand ready."""
        settings, resume_step = self.settings, None
        if self._resumed is not None:
            resume_step = self._resumed.step
            for moved in set_aside_later(self.folder, resume_step):
                self.display.note(f"a later checkpoint, not continued from, is kept as {moved}")
        self._proof = begin_proof(self.folder, self._resumed)
        self._proof.write(self.folder)
        self._proof_is_due = bool(list_checkpoints(self.folder))
        header = f"# settings of run {settings.run.name}, hash {settings.hash}\n\n"
        try:
            text = header + to_toml(settings.relaxed(), settings)
            (self.folder / "config.toml").write_text(text)
            self._metrics = MetricsWriter(self.folder, resume_step)
        except OSError as error:
            raise ConfigError(f"cannot write the run's record to {self.folder}: {error}") from error

    def follow(self) -> None:
        """Handle everything the stages report, until they are done."""
        try:
            for stage, message in self.coordinator.messages():
                self._on_message(stage, message)
        finally:
            self.is_over = True
            self._record(MetricsWriter.close)

    def finish(self, total_seconds: float, start_seconds: float = 0.0) -> dict[str, Any]:
        """Write the summary, then draw the plots; complain last about what was lost."""
        steps = self.settings.train.steps
        trouble = self._trouble()
        if trouble is None:
            self._write_proof(ended=self.ledger.done)
        summary = {
            **self.ledger.summary(self.coordinator.versions, total_seconds, start_seconds),
            "control_bytes": self.coordinator.control_bytes(),
            "first_step": self.ledger.first_step,
            "steps_planned": steps,
            "interrupted": self._stop_asked and self.ledger.done < steps,
            "paths": {
                "folder": str(self.folder),
                "checkpoint": str(self._latest) if self._latest else None,
                "metrics": str(self.folder / "metrics.jsonl"),
                "logs": str(self.folder / "logs"),
                "plots": str(self.folder / "plots"),
            },
        }
        text = json.dumps(without_nan(summary), indent=1, allow_nan=False)
        try:
            (self.folder / "summary.json").write_text(text + "\n")
        except OSError as error:
            self.display.note(f"summary.json could not be written: {error}")
        try:
            self._is_drawing = True
            self._draw()
            self._is_drawing = False
        except Interrupted:
            self.display.note("the plots are left out: you asked to end")
        except Exception as error:  # whatever a plot stumbles over, the run itself is done
            self.display.note(f"the plots could not be drawn: {error}")
        self._is_drawing = False
        if trouble is not None:
            raise trouble
        return summary

    def hurry(self) -> None:
        """The user asks to end when only results are left: write them, but draw no plots.

        For a signal handler.
        """
        self._in_haste = True
        if self._is_drawing:
            raise Interrupted

    def _draw(self) -> None:
        if self._in_haste:
            raise Interrupted
        from thinwire.report.losses import Losses
        from thinwire.report.plots import plot_loss, plot_step  # slow to import

        plots, name = self.folder / "plots", self.settings.run.name
        plots.mkdir(exist_ok=True)
        plot_loss(Losses.read(self.folder), plots / "loss.png", f"{name}: loss")
        if self.ledger.records:
            timeline = self.ledger.typical_step()
            write_timeline(timeline, plots / "step.json")
            plot_step(timeline, plots / "step.png")

    def _trouble(self) -> ThinwireError | None:
        """What a user must know about a run whose last weights are lost or no good."""
        done, good = self.ledger.done, self._last_good()
        if (lost := divergence(self.ledger.refused, done, good)) is not None:
            return lost
        last_losses = [record.loss for record in self.ledger.records[-1:]]
        last_losses += [loss for _, loss in self.ledger.valid_losses[-1:]]
        if self.ledger.refused or not all(map(math.isfinite, last_losses)):
            return StageError(
                f"the run ended at step {done} with a loss or gradients that are not finite: "
                f"{way_back(good)} with a lower optim.lr"
            )
        return CheckpointError(self._failed[done]) if done in self._failed else None

    def _last_good(self) -> Path | None:
        """The newest checkpoint from which a step was trained and committed."""
        if (good := self._proof.newest(self.folder)) is not None:
            return good
        resumed = self._resumed
        if resumed and (self._proof.step >= resumed.step or is_proven(resumed.folder)):
            return resumed.folder
        return None

    def _prove(self, step: int) -> None:
        """Weights after `step` updates have trained: checkpoints up to there are good."""
        self._proof = Proof(max(step, self._proof.step))
        if self._proof_is_due:
            self._settle()

    def _settle(self) -> None:
        """Write down which checkpoints are good, and remove those that are no longer needed."""
        good = self._proof.newest(self.folder)
        self._proof_is_due = [good] != list_checkpoints(self.folder)[-1:]
        self._write_proof()
        if self._latest is not None:
            prune(self.folder, self.settings.train.keep, self._latest, good)

    def _write_proof(self, ended: int = 0) -> None:
        try:
            Proof(self._proof.step, ended).write(self.folder)
        except CheckpointError as error:
            self.display.note(str(error))

    def _record(self, write: Callable[..., None], *values: Any) -> None:
        """Give the metrics something to write; a full disk costs them, but not the training."""
        if self._metrics is None:
            return
        try:
            write(self._metrics, *values)
        except Exception as error:  # TensorBoard has errors of its own
            self.display.note(f"metrics are no longer written, training continues: {error}")
            with contextlib.suppress(Exception):
                self._metrics.close()
            self._metrics = None

    def _on_message(self, stage: int, message: dict[str, Any]) -> None:
        if message["type"] == "step":
            self._on_step(stage, message)
        elif message["type"] == "evaluation":
            self._on_evaluation(message)
        elif message["type"] in ("shard", "shard_failed"):
            self._on_shard(stage, message)
        elif message["type"] == "finished":
            self.ledger.add_finished(stage, message)
        elif message["type"] == "stopping":
            self._stop_asked = True
            self.display.note(
                "stopping after this step, with a checkpoint; press Ctrl-C again to exit now"
            )

    def _on_step(self, stage: int, message: dict[str, Any]) -> None:
        record = self.ledger.add_step(stage, message)
        if record is None:
            return
        if math.isfinite(record.loss) and not self.ledger.refused:
            self._prove(record.step - 1)  # the loss was measured before the update of its step
        self._record(MetricsWriter.step, record)
        self.display.step(record)
        if self.ledger.refused:
            self.display.note(
                f"step {record.step}: gradients are not finite, so no stage updated its weights"
            )

    def _on_evaluation(self, message: dict[str, Any]) -> None:
        step, loss, accuracy = message["step"], message["loss"], message["accuracy"]
        self.ledger.add_evaluation(step, loss, accuracy, message["seconds"])
        record = EvaluationRecord(step, loss, text_ratio(self._feed, loss), accuracy)
        self._record(MetricsWriter.evaluation, record)
        self.display.evaluation(record)

    def _on_shard(self, stage: int, message: dict[str, Any]) -> None:
        """File one stage's word; when all have spoken, complete the checkpoint or drop it."""
        step = message["step"]
        parts = self._parts.setdefault(step, {})
        parts[stage] = message
        if message["type"] == "shard_failed":
            self._on_failure(step, message["error"])
        if len(parts) < self.settings.pipeline.stages:
            return  # another stage may be writing still
        del self._parts[step]
        if step not in self._failed:
            self._commit(step, [parts[s] for s in sorted(parts)])
        if step in self._failed:
            discard_partial(self.folder, step)

    def _commit(self, step: int, parts: list[dict[str, Any]]) -> None:
        agreements = [part["agreements"] for part in parts]
        try:
            check_agreement(step, agreements)
        except StageError:
            discard_partial(self.folder, step)
            raise
        facts = {
            "settings": self.settings.to_plain(),
            "config_hash": self.settings.hash,
            "corpus": self.data.fingerprint,
            "codec_memory": {cut: legs for part in agreements for cut, legs in part.items()},
            **parts[0]["versions"],
        }
        shards = [Shard(**part["shard"]) for part in parts]
        try:
            self._latest = commit(self.folder, step, shards, facts, self.data.tokenizer())
        except CheckpointError as error:
            self._on_failure(step, str(error))
            return
        self._settle()
        self.display.phase("save", f"checkpoint of step {step} in {self._latest}")

    def _on_failure(self, step: int, error: str) -> None:
        if step not in self._failed:
            self._failed[step] = error
            self.display.note(f"checkpoint of step {step} not written, training continues: {error}")


def text_ratio(feed: Feed, loss: float) -> float | None:
    """A validation's loss as bits per byte of its text; None for images, or if that is unknown."""
    return bits_per_byte(loss, *feed.validation_text)


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[None]:
    """The scratch of the run's codecs: empty when it starts, gone when its stages are."""
    shutil.rmtree(scratch_folder(folder), ignore_errors=True)
    try:
        yield
    finally:
        shutil.rmtree(scratch_folder(folder), ignore_errors=True)


def _leave_at_once(number: int, frame: FrameType | None) -> None:
    """Before the stages stand ready there is nothing to save, whichever signal asks to end."""
    raise Interrupted


@contextlib.contextmanager
def _stopping(coordinator: Coordinator, run: _Run) -> Iterator[None]:
    """First Ctrl-C: finish the step, checkpoint, end. Second: leave at once.

    Once the stages are done only results are left to write: a signal costs no more than the plots.
    """
    asked = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if run.is_over:
            run.hurry()
            return
        if asked:
            raise Interrupted
        asked = True
        coordinator.interrupt()

    with heeding(on_signal):
        yield


@contextlib.contextmanager
def heeding(on_signal: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within, signals that ask a process to end call `on_signal`; for the main thread alone."""
    heeded = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # a closed terminal; nohup has it ignored
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        heeded.append(hangup)
    before = {number: signal.signal(number, on_signal) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
