"""The story of a run, top to bottom: settings in, trained model out.

prepare the corpus -> start the peers -> follow their steps -> commit checkpoints
-> sum up: summary.json, plots, tables
"""

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from thinwire.data import Corpus, prepare
from thinwire.engine import Checkpoint, Host, Settings, list_checkpoints
from thinwire.engine.checkpoint import Shard, commit, discard_partial, prune
from thinwire.engine.feed import Feed
from thinwire.engine.worker import check_divergence
from thinwire.errors import CheckpointError, ConfigError
from thinwire.model import parameter_count
from thinwire.paths import cache_folder
from thinwire.report import Display, MetricsWriter, read_metrics
from thinwire.summary import Ledger, bits_per_byte
from thinwire.typed import to_toml

FREE_ON_RESUME = ("pipeline", "link", "run.name", "run.out", "run.device", "run.threads", "train")
"""Settings that may differ between a checkpoint and the run that goes on from it."""


class Interrupted(Exception):
    """The user asked twice to stop: leave at once."""


def train(settings: Settings, display: Display, resume: Path | None = None) -> dict[str, Any]:
    """Run to the end (or to a Ctrl-C, which drains and checkpoints); returns the summary."""
    started = time.monotonic()
    for line in describe(settings):
        display.phase("config", line)
    folder = Path(settings.run.out) / settings.run.name
    checkpoint = open_resume(resume, settings) if resume else None
    claim_folder(folder, checkpoint)
    corpus = prepare_corpus(settings, display)
    if checkpoint is not None and checkpoint.manifest["corpus"] != corpus.fingerprint:
        raise CheckpointError(
            f"{checkpoint.folder} was trained on another corpus (fingerprint "
            f"{checkpoint.manifest['corpus']}, now {corpus.fingerprint}): resume with the same data"
        )
    save_settings(settings, folder)
    first_step = checkpoint.step if checkpoint else 0
    display.phase(
        "start", f"{settings.pipeline.stages} stages as processes, links under mutual TLS"
    )
    with (
        MetricsWriter(folder, resume_step=first_step if checkpoint else None) as metrics,
        Host(settings, folder, corpus.folder, checkpoint.folder if checkpoint else None) as host,
    ):
        host.launch()
        run = _Run(settings, folder, corpus, host, display, metrics, first_step)
        with _stopping(host):
            run.follow()
    return run.finish(time.monotonic() - started)


def describe(settings: Settings) -> list[str]:
    """The resolved settings, a line per section, printed before anything starts."""
    first = (
        f"{settings.run.name}: hash {settings.hash}, {parameter_count(settings.model):,} "
        f"parameters, {settings.train.steps} steps of {settings.tokens_per_step:,} tokens"
    )
    sections = settings.to_plain().items()
    return [first] + [
        f"[{section}] " + ", ".join(f"{key} {value}" for key, value in keys.items() if value != "")
        for section, keys in sections
    ]


def prepare_corpus(settings: Settings, display: Display) -> Corpus:
    """The tokenised corpus of these settings, from the cache if it was prepared before."""

    def progress(phase: str, done: int, total: int) -> None:
        display.progress(phase, done, total, "B")

    corpus = prepare(settings.data, settings.model.vocab, cache_folder(), progress)
    display.phase("data", corpus.summary())
    Feed(corpus, settings, torch.device("cpu"))  # a corpus too short is refused here, not later
    return corpus


def open_resume(place: Path, settings: Settings) -> Checkpoint:
    """The checkpoint to go on from, verified and compatible with the settings."""
    checkpoint = Checkpoint.open(place)
    checkpoint.verify()
    before, now = checkpoint.manifest["settings"], settings.to_plain()
    changed = [
        f"{section}.{key}"
        for section, keys in now.items()
        for key in keys
        if before.get(section, {}).get(key) != now[section][key]
    ]
    fixed = [
        k for k in changed if k not in FREE_ON_RESUME and k.split(".")[0] not in FREE_ON_RESUME
    ]
    allowed = ("optim.lr", "optim.clip", "optim.warmup", "optim.schedule", "optim.weight_decay")
    fixed = [k for k in fixed if k not in allowed and not k.startswith(("codec.", "data.path"))]
    if "train.batch" in changed:
        fixed.append("train.batch")
    if fixed:
        was = {k: before.get(k.split(".")[0], {}).get(k.split(".")[1]) for k in fixed}
        raise ConfigError(
            f"cannot resume {checkpoint.folder} with other values of {', '.join(fixed)} "
            f"(there: {was}): they decide what the weights mean. Start a new run instead"
        )
    if checkpoint.step >= settings.train.steps:
        raise ConfigError(
            f"{checkpoint.folder} has done {checkpoint.step} steps already: raise train.steps "
            f"(now {settings.train.steps}) to go on"
        )
    return checkpoint


def claim_folder(folder: Path, checkpoint: Checkpoint | None) -> None:
    """Make the run's folder, without ever writing over another run."""
    if checkpoint is None and (folder / "metrics.jsonl").exists():
        saved = list_checkpoints(folder)
        way = f"go on with --resume {saved[-1]}, or " if saved else ""
        raise ConfigError(
            f"{folder} already holds a run: {way}choose another name (--set run.name=...)"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the run's folder {folder}: {error}") from error
    discard_partial(folder)


def save_settings(settings: Settings, folder: Path) -> None:
    """Keep the resolved settings beside the results."""
    header = f"# resolved settings of run {settings.run.name}, hash {settings.hash}\n\n"
    (folder / "config.toml").write_text(header + to_toml(settings))


class _Run:
    """A run under way: files what the stages say, commits checkpoints, shows progress."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        corpus: Corpus,
        host: Host,
        display: Display,
        metrics: MetricsWriter,
        first_step: int,
    ):
        self.settings = settings
        self.folder = folder
        self.corpus = corpus
        self.host = host
        self.display = display
        self.metrics = metrics
        self.ledger = Ledger(settings, host.descriptions, first_step)
        self._shards: dict[int, dict[int, Shard]] = {}
        self._failed: dict[int, str] = {}
        self._latest: Path | None = None

    def follow(self) -> None:
        """Handle everything the stages report, until they are done."""
        for stage, message in self.host.messages():
            if message["type"] == "step":
                self._on_step(stage, message)
            elif message["type"] == "evaluation":
                self._on_evaluation(message["step"], message["loss"])
            elif message["type"] == "shard":
                self._on_shard(stage, message)
            elif message["type"] == "shard_failed":
                self._on_shard_failed(message["step"], message["error"])
            elif message["type"] == "stopping":
                self.display.note(
                    "stopping after this step, with a checkpoint; press Ctrl-C again to leave now"
                )

    def finish(self, total_seconds: float) -> dict[str, Any]:
        """Write the summary and the plots; complain last about what was lost."""
        from thinwire.report.plots import plot_loss, plot_step  # slow to import

        check_divergence(self.ledger.refused, self.ledger.done, self._latest)
        summary = self.ledger.summary(self.host.versions, total_seconds)
        summary["first_step"] = self.ledger.first_step
        steps, evaluations = read_metrics(self.folder)
        plots = self.folder / "plots"
        plots.mkdir(exist_ok=True)
        plot_loss(steps, evaluations, plots / "loss.png")
        if self.ledger.records:
            number, spans = self.ledger.median_trace()
            title = f"{self.settings.run.name}: step {number + 1}"
            plot_step(spans, self.ledger.records[-1].stages, plots / "step.png", title)
        summary["paths"] = {
            "folder": str(self.folder),
            "checkpoint": str(self._latest) if self._latest else None,
            "metrics": str(self.folder / "metrics.jsonl"),
            "logs": str(self.folder / "logs"),
            "plots": str(plots),
        }
        (self.folder / "summary.json").write_text(json.dumps(_finite(summary), indent=1) + "\n")
        if self.ledger.done in self._failed:
            raise CheckpointError(self._failed[self.ledger.done])
        return summary

    def _on_step(self, stage: int, message: dict[str, Any]) -> None:
        record = self.ledger.add_step(stage, message)
        if record is None:
            return
        self.metrics.step(record)
        self.display.step(record)
        if self.ledger.refused:
            self.display.note(
                f"step {record.step}: gradients are not finite, so no stage updated its weights"
            )

    def _on_evaluation(self, step: int, loss: float) -> None:
        self.ledger.add_evaluation(step, loss)
        ratio = bits_per_byte(loss, len(self.corpus.valid), self.corpus.valid_bytes)
        self.metrics.evaluation(step, loss, ratio)
        self.display.evaluation(step, loss, ratio)

    def _on_shard(self, stage: int, message: dict[str, Any]) -> None:
        step = message["step"]
        shards = self._shards.setdefault(step, {})
        shards[stage] = Shard(**message["shard"])
        if len(shards) < self.settings.pipeline.stages:
            return
        facts = {
            "settings": self.settings.to_plain(),
            "config_hash": self.settings.hash,
            "corpus": self.corpus.fingerprint,
            **message["versions"],
        }
        ordered = [shards[s] for s in sorted(self._shards.pop(step))]
        try:
            self._latest = commit(self.folder, step, ordered, facts, self.corpus.tokenizer())
        except CheckpointError as error:
            self._on_shard_failed(step, str(error))
            return
        prune(self.folder, self.settings.train.keep)
        self.display.phase("save", f"checkpoint of step {step} in {self._latest}")

    def _on_shard_failed(self, step: int, error: str) -> None:
        if step not in self._failed:
            self._failed[step] = error
            self.display.note(f"checkpoint of step {step} not written, training goes on: {error}")
            discard_partial(self.folder)


@contextlib.contextmanager
def _stopping(host: Host) -> Iterator[None]:
    """First Ctrl-C: finish the step, checkpoint, end. Second: leave at once."""
    asked = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise Interrupted
        asked = True
        host.interrupt()

    before = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _finite(value: Any) -> Any:
    """JSON has no NaN: absent numbers become null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and value != value:
        return None
    return value
