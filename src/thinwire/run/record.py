"""What is kept and shown of a run: metrics and checkpoints on the way, then summary and plots."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch

from thinwire.data import Corpus
from thinwire.engine.checkpoint import Checkpoint
from thinwire.engine.feed import Feed
from thinwire.engine.reports import Evaluation, Step
from thinwire.engine.worker import PATIENCE
from thinwire.errors import CheckpointError, ConfigError, StageError, ThinwireError
from thinwire.folders import replace_file
from thinwire.lazy import needs
from thinwire.report import Display, EvaluationRecord, MetricsWriter
from thinwire.report.metrics import FILE_NAME, Curves, without_nan
from thinwire.run import events as ev
from thinwire.run.checkpoints import Checkpoints, origin_in
from thinwire.run.ledger import Ledger, LossWatch, bits_per_byte
from thinwire.run.protocol import Finished, LinkUp, RunProgress
from thinwire.run.signals import Interrupted, heeding
from thinwire.schedule import Links
from thinwire.settings import Settings
from thinwire.typed import to_toml

PROGRESS_FILE = "progress.json"
PROGRESS_SECONDS = 5.0  # between two writings of it


class RunRecord:
    """Keeps the record of a run under way, as its coordinator asks."""

    ledger: Ledger  # from the moment that training begins

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        data: Corpus,
        resumed: Checkpoint | None,
        display: Display,
        earlier: "RunRecord | None" = None,
        links: Links | None = None,
    ):
        """`earlier`: the record of the epoch before. `links`: as a Ledger takes them."""
        self.settings, self.folder, self.display = settings, folder, display
        self.checkpoints = Checkpoints(settings, folder, data, resumed, display)
        self.is_over = False  # its stages are done; results are left to write
        self._feed = Feed(data, settings, torch.device("cpu"))
        self._first_step = resumed.step if resumed else 0
        self._origin = origin_in(resumed)
        self._earlier, self._links, self._losses = earlier, links, LossWatch()
        self._began = self._closed = time.monotonic()
        self._metrics: MetricsWriter | None = None
        self._trouble_of_metrics = ""  # which the last writing had
        self._is_drawing = self._in_haste = False
        self._due = 0.0  # when progress is written again

    def carry_out(self, command: ev.Command) -> None:
        """Do what the coordinator of the run asks."""
        match command:
            case ev.Say(text, for_us=True):
                self.display.phase("note", text)  # which a hosted run shows on its host alone
            case ev.Say(text):
                self.display.note(text)
            case ev.Starting(count, what):
                self.display.progress("start", count, self.settings.pipeline.stages, what)
            case ev.Begin():
                self._begin(command)
            case ev.Record(stage, Step() as report):
                self._on_step(stage, report)
                self._hear_loss(report)
            case ev.Record(_, Evaluation() as report):
                self._on_evaluation(report)
                self._hear_loss(report)
            case ev.Record(_, LinkUp(cut, seconds)):
                self.ledger.add_outage(cut, seconds)
            case ev.Record(stage, Finished(meters)):
                self.ledger.add_finished(stage, meters)
            case ev.Commit(step, parts):
                self.checkpoints.complete(step, parts)
            case ev.Discard(step, error):
                self.checkpoints.drop(step, error)

    @property
    def has_begun(self) -> bool:
        """Whether its stages have begun to train."""
        return hasattr(self, "ledger")

    @property
    def is_to_stop(self) -> bool:
        """Whether its loss has exploded, and the settings say that it ends then."""
        return bool(self._losses.explosion) and self.settings.run.on_explosion == "stop"

    def close(self) -> None:
        """The stages are done, or the run has failed: nothing more is reported."""
        self.is_over, self._closed = True, time.monotonic()
        self._due = 0.0
        self._write_progress()
        self._write(MetricsWriter.close)

    def pause(self) -> None:
        """All stages stopped, and the run goes on later, perhaps from an earlier checkpoint."""
        trouble = self._trouble(counts_explosion=self.is_to_stop)
        if isinstance(trouble, StageError):
            raise trouble
        if trouble is None and not self._losses.explosion:
            self.checkpoints.end(self.ledger.done)

    def finish(
        self,
        control_bytes: int,
        stop_asked: bool,
        started: float,
        beside_bytes: Mapping[str, int] | None = None,
        tell: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Write the summary, then draw the plots; complain last about what was lost. `tell` is
        called before plots, where all is well. `beside_bytes`: what travelled beside cuts.
        """
        steps, ledger, trouble = self.settings.train.steps, self.ledger, self._trouble()
        if trouble is None:
            self.checkpoints.end(ledger.done)
            tell()
        latest, valid = self.checkpoints.latest, Curves.read(self.folder).valid
        earlier = [(one.step, one.loss) for one in valid]
        logs = self.folder / "logs"  # absent where all stages are on other machines
        paths = {"folder": self.folder, "checkpoint": latest, "metrics": self.folder / FILE_NAME}
        paths |= {"logs": logs if logs.is_dir() else None, "plots": self.folder / "plots"}
        seconds = time.monotonic() - started
        summary = {
            **ledger.summary(seconds, self._began - started, earlier),
            "control_bytes": control_bytes,
            **({"beside_bytes": dict(beside_bytes)} if beside_bytes is not None else {}),
            **self._origin,
            "first_step": ledger.first_step,
            "steps_planned": steps,
            "interrupted": stop_asked and ledger.done < steps,
            "paths": {name: str(path) if path else None for name, path in paths.items()},
        }
        text = json.dumps(without_nan(summary), indent=1, allow_nan=False)
        try:
            (self.folder / "summary.json").write_text(text + "\n")
        except OSError as error:
            self.display.note(f"summary.json could not be written: {error}")
        try:
            self._draw()
        except Interrupted:
            self.display.note("the plots were skipped, as you asked to end")
        except Exception as error:  # whatever a plot stumbles over, the run itself is done
            self.display.note(f"the plots could not be drawn: {error}")
        if trouble is not None:
            raise trouble
        return summary

    @contextlib.contextmanager
    def stopping(self, ask_to_stop: Callable[[], None]) -> Iterator[None]:
        """First Ctrl-C: ask the run to end. Second: leave at once; at its end, without plots."""
        asked = False

        def on_signal(number: int, frame: FrameType | None) -> None:
            nonlocal asked
            self._in_haste |= self.is_over
            if self._is_drawing or (asked and not self.is_over):
                raise Interrupted
            if not self.is_over:
                asked = True
                ask_to_stop()

        with heeding(on_signal):
            yield

    def _begin(self, begun: ev.Begin) -> None:
        """Begin or continue what is written of the run, now that its stages train."""
        settings, run = self.settings, self.settings.run
        now, first_step = time.monotonic(), self._first_step
        if self._earlier is None:
            self._began = now
            self.ledger = Ledger(settings, begun.stages, first_step, self._links)
        else:
            self._began, self.ledger = self._earlier._began, self._earlier.ledger
            waited = now - self._earlier._closed
            self.ledger.go_on(begun.stages, first_step, self._links, waited)
            self._earlier = None
        header = f"# settings of run {run.name}, hash {settings.hash}\n"
        for origin in self._origin.values():
            facts = ", ".join(f"{key} {json.dumps(value)}" for key, value in origin.items())
            header += f"# its weights started from: {facts}\n"
        try:
            self._losses = LossWatch(self.checkpoints.begin())
            text = header + "\n" + to_toml(settings.relaxed(), settings.with_window())
            (self.folder / "config.toml").write_text(text)
            self._metrics = MetricsWriter(self.folder, first_step)
        except OSError as error:
            raise ConfigError(f"cannot write the run's record to {self.folder}: {error}") from error
        if run.wandb:
            self._write(MetricsWriter.log_to_wandb, run.wandb, run.name, settings.to_plain())

    def _on_step(self, stage: int, report: Step) -> None:
        record = self.ledger.add_step(stage, report)
        if record is None:
            return
        if math.isfinite(record.loss) and not (self.ledger.refused or self._losses.explosion):
            # The loss was measured before the update of its step, and the delayed one before that.
            self.checkpoints.prove(record.step - 1 - self.ledger.settings.pipeline.overlap)
        self._write(MetricsWriter.step, record)
        self._write_progress()
        self.display.step(record)
        if self.ledger.refused:
            note = f"step {record.step}: gradients are not finite, so no stage updated its weights"
            is_news = self.ledger.origin and self.ledger.refused == 1
            self.display.note(f"{note}; {self.ledger.origin}" if is_news else note)

    def _on_evaluation(self, report: Evaluation) -> None:
        self.ledger.add_evaluation(report)
        self.checkpoints.validated(report.step, report.loss)
        ratio = bits_per_byte(report.loss, *self._feed.validation_text)
        record = EvaluationRecord(report.step, report.loss, ratio)
        self._write(MetricsWriter.evaluation, record)
        self.display.evaluation(record)

    def _hear_loss(self, report: Step | Evaluation) -> None:
        """While it has exploded, what is saved proves nothing."""
        if news := self._losses.hear(report):
            if self._losses.explosion:
                self.checkpoints.doubt()
                news += f"; {self.checkpoints.way_back(after_best=True)}"
            self.display.note(news)

    def _write(self, write: Callable[..., None], *values: Any) -> None:
        """Give the metrics something to write; a full disk costs rows, but not the training."""
        if self._metrics is None:
            return
        trouble = ""
        try:
            write(self._metrics, *values)
        except Exception as error:  # TensorBoard and wandb have many of their own
            trouble = f"metrics could not be written, training continues: {error}"
        if trouble and trouble != self._trouble_of_metrics:
            self.display.note(trouble)
        self._trouble_of_metrics = trouble

    def _write_progress(self) -> None:
        """Keep how the run works, for whoever looks on; in a hundredth of this thread's time."""
        began = time.monotonic()
        if began < self._due or not self.has_begun or not self.ledger.records:
            return
        with contextlib.suppress(Exception):  # what is only looked at must not end a run
            write_progress(self.folder, self.ledger.progress())
        now = time.monotonic()
        self._due = now + max(PROGRESS_SECONDS, 100 * (now - began))

    def _trouble(self, counts_explosion: bool = True) -> ThinwireError | None:
        """What a user must know about a run whose last weights are lost or no good."""
        ledger, done = self.ledger, self.ledger.done
        origin = f"{ledger.origin}; " if ledger.origin else ""
        way = f"{origin}{self.checkpoints.way_back()} with a lower optim.lr"
        if (misses := ledger.refused) >= PATIENCE:
            what = f"gradients were not finite in {misses} steps in a row, up to step {done}"
            return StageError(f'{what}: {way}, or with codec.backward = "fp32"')
        if misses or not all(map(math.isfinite, ledger.last_losses())):
            what = f"the run ended at step {done} with a loss or gradients that are not finite"
            return StageError(f"{what}: {way}")
        if self._losses.explosion and counts_explosion:
            way = f"{self.checkpoints.way_back(after_best=True)} with a lower optim.lr"
            return StageError(f"{self._losses.explosion}; {way}")
        failed = self.checkpoints.failed.get(done)
        return CheckpointError(failed) if failed is not None else None

    def _draw(self) -> None:
        try:
            self._is_drawing = True
            if self._in_haste:
                raise Interrupted
            plots, name = self.folder / "plots", self.settings.run.name
            plots.mkdir(exist_ok=True)
            needs("matplotlib", extra="plots", what="drawing")
            from thinwire.report.plots import loss_figure, steps_figure  # slow to import

            loss_figure(Curves.read(self.folder), f"{name}: loss").savefig(plots / "loss.png")
            if self.ledger.records:
                steps_figure([self.ledger.progress().timeline]).savefig(plots / "step.png")
        finally:
            self._is_drawing = False


def write_progress(folder: Path, progress: RunProgress) -> None:
    """Keep how a run works in its folder."""
    replace_file(folder / PROGRESS_FILE, msgspec.json.encode(progress))


def read_progress(folder: Path) -> RunProgress | None:
    """What was written there last; None where nothing was, or by another version."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((folder / PROGRESS_FILE).read_bytes(), type=RunProgress)
    return None
