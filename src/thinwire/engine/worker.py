"""One stage at work: built as it is told, agreed with its neighbours, run to the end.

Compute waits for nothing but the tensors that it needs next: links queue what is sent, and their
threads fill the mailbox. With delayed updates two steps are under way at once. A step ends in
engine/step_end.py. The same worker runs in a peer process over TLS links and in a thread over
in-memory ones.
"""

import contextlib
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import thinwire
from thinwire.data import Corpus
from thinwire.engine.build import StageBuilder, choose_device, prepare_torch
from thinwire.engine.checkpoint import Checkpoint, content_hash
from thinwire.engine.cut import CutEnd, ends_of
from thinwire.engine.feed import DeviceBatch, Feed, TokenSource
from thinwire.engine.passes import GraphPasses, Pass, Passes, autocast_for, weights_rounded_once
from thinwire.engine.port import Due, Mailbox, Port, decision_number
from thinwire.engine.reports import Evaluation, Report, StageCosts, Step, meters_of
from thinwire.engine.state import StageState
from thinwire.engine.step_end import StageUpdate, StepEnd, Verdict
from thinwire.engine.trace import FORWARD, Progress, StepTrace
from thinwire.model import Score, learning_rate
from thinwire.schedule.build import Kind
from thinwire.settings import Settings
from thinwire.settings.crossing import checkpoint_steps
from thinwire.wire import FrameKind, Link

RELEASE, EPOCH, SECTIONS = "thinwire", "epoch", "settings"  # of a contract between machines
# What is sent in a training step, and its label in the trace.
_SENT = {"FORWARD": "F{}>", "BACKWARD": "<B{}"}
_SENT |= {kind: kind.lower() for kind in ("TALLY", "VERDICT", "BASIS", "PROBE", "ROWS")}
PATIENCE = 5  # steps in a row without a finite gradient before a run gives up

Tell = Callable[[Report], None]


def scratch_folder(run_folder: Path) -> Path:
    """Where codecs keep what is too large for memory while a run lasts; checkpoints have it too."""
    return run_folder / "scratch"


@contextlib.contextmanager
def scratch(run_folder: Path) -> Iterator[None]:
    """That folder for one run: empty when it starts, gone when its stages are."""
    shutil.rmtree(scratch_folder(run_folder), ignore_errors=True)
    try:
        yield
    finally:
        shutil.rmtree(scratch_folder(run_folder), ignore_errors=True)


class Running(StepTrace):
    """A step under way, and what is in flight of it. With delayed updates steps overlap: one lasts
    from the last backward of the step before to its own, or before a pause to its update.
    """

    def __init__(self, step: int, progress: Progress):
        super().__init__(step, progress)
        self.start, self.end = time.monotonic(), math.inf  # or until it is over
        self.in_flight: dict[int, Pass] = {}
        self.losses: list[Tensor] = []


class Worker:
    """Holds a stage and trains it, once its links are attached."""

    def __init__(
        self,
        settings: Settings,
        stage: int,
        data: Corpus | TokenSource,
        run_folder: Path,
        resume: Path | None = None,
        began: int | None = None,
        progress: Progress | None = None,
    ):
        """`began`: where the run began, if this stage takes the place of one that was lost."""
        self.settings, self.index, self.run_folder = settings, stage, run_folder
        self.progress = progress or Progress()
        self.last = settings.pipeline.stages - 1
        self.scratch = scratch_folder(run_folder) / f"stage-{stage}"  # of codecs and logs
        shutil.rmtree(self.scratch, ignore_errors=True)  # of a lost process in whose place it is
        self.stop_requested = threading.Event()
        self.decided, self.stops = 0, False  # the last known decision of a first stage that is lost
        self.device = choose_device(settings.run.device, self.index)
        self.data, self.feed = data, Feed(data, settings, self.device)
        self.mailbox = Mailbox()
        prepare_torch(settings, self.device)
        self.builder = StageBuilder(settings, self.device)
        self.stage = self.builder.build(self.index)
        if resume is None:
            self.builder.initialise(self.stage)
        self.update = StageUpdate(self.builder, self.stage, self.index)
        spec = self.builder.wire_spec
        self.below, self.above = ends_of(settings, self.index, spec, self.feed, self.scratch)
        self.state = StageState(self.update, (self.below, self.above))
        if resume is not None:
            # Whoever started the run has been asked about plugins before any stage was.
            self.state.restore(Checkpoint.open(resume, allow_plugins=True))
        self._schedule = settings.schedule()
        self._saves_after = checkpoint_steps(settings)
        self._misses, self._is_stopping = 0, False
        self._pause = self.state.step  # until where steps follow on each other
        self._running: dict[int, Running] = {}
        self._ports: list[Port] = []
        self._first_step = self.state.step if began is None else began

    def contract(self, cut: int, epoch: int = 0, at_start: bool = True) -> dict[str, Any]:
        """What both ends of a cut must agree on before the first frame; with an `epoch`, on other
        machines, also the release of thinwire. A stage that takes the place of a lost one is at
        another step than its neighbours: without `at_start` that is left out.
        """
        end = self.above if cut == self.index else self.below
        assert end is not None, f"stage {self.index} has no part in cut {cut}"
        settings, space, terms = self.settings, self.builder.space, dict[str, Any]()
        if epoch:
            # Of the settings a hash of each section, so that a difference is named.
            sections = settings.of_scope("result").items()
            digests = {name: content_hash(values)[:12] for name, values in sections if values}
            terms = {RELEASE: thinwire.__version__, EPOCH: epoch, SECTIONS: digests}
        terms |= {
            "config_hash": settings.hash,
            "cut": cut,
            **{f"{leg.value}_codec": codec.name for leg, codec in end.codecs.items()},
            "wire_shape": list(end.spec.shape),
            "corpus": self.data.fingerprint,
        }
        if at_start:
            memories = {f"{leg}_codec_memory": seen for leg, seen in end.agreements().items()}
            terms |= {**memories, "first_step": self.state.step}
            terms |= space.fingerprints() if space else {}
            terms |= {"token_table": self.update.rows.fingerprint()} if self.update.rows else {}
        return terms

    def max_payload(self) -> int:
        """The largest payload that a neighbour may send."""
        cuts = ((c, end.spec) for end in self.state.ends for c in end.codecs.values())
        largest = max((codec.payload_limit(spec.shape) for codec, spec in cuts), default=0)
        basis, (_, rows) = self._shared_limits()
        return max(largest, basis, rows) + 65536

    def _shared_limits(self) -> tuple[int, tuple[int, int]]:
        """The bytes of a basis that moves, and the most frames and bytes of an embedding's rows."""
        keeper, rows = self.update.keeper, self.update.rows
        return keeper.most_basis_bytes if keeper else 0, rows.limits() if rows else (0, 0)

    def run(self, below: Link | None, above: Link | None, tell: Tell) -> None:
        """Train from the first step to the last, reporting as it goes. Validations come first, in
        between and last; what a step has won is saved before one. A request to stop cuts a
        validation short, and none begins after it.
        """
        self._begin(below, above, tell)
        done, settings = self.state.step, self.settings
        # One that begins after the last step of the run has nothing to do.
        stop = self.stops and self.decided < decision_number(FrameKind.VALIDATED, done)
        unsaved = False
        while done < settings.train.steps and not stop:
            if done == self._first_step or settings.is_evaluation_step(done):
                stop = self._evaluate(done)
                if stop and unsaved:
                    self._checkpoint(done)
                self.progress.begin("waits for its links to send what is queued")
                for port in self._ports:
                    port.link.wait_for_room(1)  # the next step's clock must not pay for this
                if stop:
                    break
            # All stages pause after a step, or with delayed updates where nothing may be under way.
            ends, has_delay = range(done + 1, settings.train.steps + 1), settings.pipeline.delay > 0
            saves, validates = self._saves_after, settings.is_evaluation_step
            self._pause = next(n for n in ends if not has_delay or validates(n) or saves(n))
            verdict = self._train(done, self._pause)
            done = self.state.step
            stop = verdict.stop
            unsaved = verdict.commit and not verdict.checkpoint
            if verdict.checkpoint:
                self._checkpoint(done)
        if not stop:
            self._evaluate(done)
        self.progress.begin("waits for its links to send what is queued")
        for port in self._ports:
            port.link.close(None)

    def _begin(self, below: Link | None, above: Link | None, tell: Tell) -> None:
        """Attach the links."""
        run, limits = self.settings.run, self._shared_limits()

        def port(link: Link | None, end: CutEnd | None) -> Port | None:
            if link is None or end is None:
                return None
            at = self.index, end is self.below, self.state.step
            due = Due(*at, self._schedule, self.feed.validation_count, *limits)
            return Port(link, end, self.mailbox, due, self.update.sightings)

        self._tell = tell
        # To the stages below and above, where there are such.
        self._down, self._up = port(below, self.below), port(above, self.above)
        self._ports = [one for one in (self._down, self._up) if one is not None]
        self._end = StepEnd([self.update], self._down, self._up)
        kind = GraphPasses if run.graphs and self.device.type == "cuda" else Passes
        autocast = autocast_for(run.precision, self.device)
        updates = [one for one in (self.update, self.update.twin) if one is not None]
        self._passes = {one.stage: kind(one.stage, autocast) for one in updates}

    def _train(self, first: int, until: int) -> Verdict:
        """This stage's actions from step `first` to the one before `until`; the last verdict, which
        may end them before: with delayed updates after the step that has begun on other stages.
        """
        last, microbatches = until - 1, self._schedule.microbatches
        with contextlib.ExitStack() as unchanged:
            unchanged.enter_context(weights_rounded_once())
            for step, action in self._schedule.stream(self.index, first, until):
                if step > last:
                    continue
                if action.kind is Kind.F:
                    if action.microbatch == 0:
                        self._begin_step(step)
                    self._forward(step, action.microbatch)
                elif action.kind is Kind.B:
                    self._backward(step, action.microbatch)
                    if action.microbatch == microbatches - 1:
                        self._gather(step)
                else:
                    unchanged.close()
                    verdict = self._conclude(step)
                    if verdict.stop:
                        last = min(last, step + min(self._schedule.delay, 1))
                    if step == last:
                        break
                    unchanged.enter_context(weights_rounded_once())
        return verdict

    def _begin_step(self, step: int) -> None:
        """Let the tensors of a step in, and note what it starts from."""
        self._running[step] = Running(step, self.progress)
        for port in self._ports:
            port.open_step(step)
        self.update.of_step(step).begin(step)

    def _forward(self, step: int, microbatch: int) -> None:
        running, update = self._running[step], self.update.of_microbatch(step, microbatch)
        versions, batch = update.versions, self.feed.training(step, microbatch)
        if batch.is_due:
            with running.span("wait", f"ids{microbatch}"):
                batch.wait()
        if update.rows is not None:
            update.rows.see(batch.inputs)
        received = None
        if self._down is not None:
            with running.span("wait", f"F{microbatch}"):
                received = self._down.take_tensor(FrameKind.FORWARD, step, microbatch, versions)
        with running.span("compute", f"F{microbatch}"):
            passes = self._passes[update.stage]
            passed = passes.forward(received, batch, self._schedule.microbatches)
            if self._up is None:
                running.losses.append(passed.output.detach())
            self._end.sync()
        running.in_flight[microbatch] = passed
        if self._up is not None:
            sent = passed.output.detach()
            self._up.send_tensor(FrameKind.FORWARD, sent, step, microbatch, versions)

    def _backward(self, step: int, microbatch: int) -> None:
        running = self._running[step]
        versions = self.update.of_microbatch(step, microbatch).versions
        passed = running.in_flight.pop(microbatch)
        gradient = None
        if self._up is not None:
            with running.span("wait", f"B{microbatch}"):
                gradient = self._up.take_tensor(FrameKind.BACKWARD, step, microbatch, versions)
                gradient = gradient.to(passed.output.dtype)
        with running.span("compute", f"B{microbatch}"):
            sent_back = passed.backward(gradient)
            self._end.sync()
        if self._down is not None:
            assert sent_back is not None, "a stage with one below received something"
            self._down.send_tensor(FrameKind.BACKWARD, sent_back, step, microbatch, versions)

    def _gather(self, step: int) -> None:
        self._end.trace = self._running[step]
        self._end.gather(step, self._decide)
        if self._schedule.delay:
            self._running[step].end = time.monotonic()
            if following := self._running.get(step + 1):
                following.start = time.monotonic()

    def _conclude(self, step: int) -> Verdict:
        """End a step, report it, and let nothing of it in any more."""
        running = self._end.trace = self._running[step]
        update = self.update.of_step(step)
        lr = learning_rate(self.settings.optim, step, self.settings.train.steps)
        verdict = self._end.conclude(step, lr, self._probe)
        if verdict.commit:
            with running.span("compute", "U"):
                update.check(step)
        loss = float(torch.stack(running.losses).sum()) if running.losses else None
        if loss is not None and not math.isfinite(loss):
            self.update.sightings.note(step, FORWARD)
        for port in self._ports:
            # The tensors of this step have arrived, or it would not be over.
            for kind, of_step, microbatch, begun, ended in port.link.take_spans():
                if of_step in self._running and kind in _SENT:
                    label = _SENT[kind].format(microbatch)
                    self._running[of_step].spans.append(("send", label, begun, ended))
        del self._running[step]
        count, seconds = self._schedule.microbatches, partial(running.seconds, "compute")
        now = time.monotonic()
        self._tell(
            Step(
                step=step,
                loss=loss,
                lr=lr,
                grad_norm=verdict.grad_norm,
                committed=verdict.commit,
                start=running.start,
                end=min(now, running.end) if self._running else now,
                wait=running.seconds("wait"),
                costs=StageCosts(
                    seconds("F") / count, seconds("B") / count, seconds("U") + seconds("norm")
                ),
                spans=running.spans,
                measures=update.keeper.measures(step) if update.keeper else {},
                meters=meters_of(port.link for port in self._ports),
                dropped=self.mailbox.dropped,
                not_finite=self.update.sightings.take_first(step),
            )
        )
        self.mailbox.close_step(step)
        for port in self._ports:
            port.close_step(step)
        self.state.step = step + 1
        return verdict

    def _decide(self, step: int, commit: bool) -> tuple[bool, bool]:
        """On the first stage: whether all stages checkpoint after this step, and stop. Gradients
        that are not finite may have ruined the weights: they must not take the place of an earlier
        checkpoint. With delayed updates the next step is under way: it is finished before a stop.
        """
        self._misses = 0 if commit else self._misses + 1
        self._is_stopping |= self._misses >= PATIENCE or self._stops_at(FrameKind.VERDICT, step)
        if self._is_stopping:
            self._pause = min(self._pause, step + 1 + self.settings.pipeline.overlap)
        is_due = self._saves_after(step + 1) or self._is_stopping
        return is_due and commit and step + 1 == self._pause, self._is_stopping

    def _stops_at(self, kind: FrameKind, step: int) -> bool:
        """Whether to stop now: the first stage decides, as its lost self did where that is known.
        The others do what follows from its frames alone, so that each can be replaced.
        """
        number = decision_number(kind, step)
        is_new = number > self.decided and not self.stops
        if is_new and self.index == 0 and self.stop_requested.is_set():
            self.decided, self.stops = number, True
        return self.stops and number == self.decided

    @torch.no_grad()
    def _evaluate(self, done: int) -> bool:
        """Validate and report the score; whether all stages leave now, as was asked meanwhile.

        A stage that hears so computes no more of it. The first then sends no more either, and its
        verdict behind the last frame tells the others. One that was cut short has no score.
        """
        start, batches = time.monotonic(), self.feed.validation_count
        score, computed, latest = Score(), 0, self.update.latest
        leaves = partial(self._stops_at, FrameKind.VALIDATED, done)
        latest.stage.eval()
        for number in range(batches):
            received = None
            if self._down is not None:
                self.progress.begin(f"waits for validation batch {number} after step {done}")
                received = self._down.take_tensor(FrameKind.EVALUATE, done, number, latest.versions)
                if received is None:
                    break
            if leaves():
                if self._down is None:
                    break
                continue
            batch = self.feed.validation(number)
            if batch.is_due:
                self.progress.begin(f"waits for ids of validation batch {number}")
                batch.wait()
            self.progress.begin(f"validates with batch {number} after step {done}")
            loss = self._score(FrameKind.EVALUATE, (done, number), batch, received)
            if loss is not None:
                score.add(loss, batch.targets)
            computed += 1
        latest.stage.train()
        decided = None
        if self._down is not None:
            self.progress.begin(f"waits for the end of the validation after step {done}")
        else:
            decided = Verdict(0.0, commit=False, checkpoint=False, stop=leaves())
        stop = self._end.pass_up(FrameKind.VALIDATED, done, decided).stop
        if self._up is None and computed == batches:
            self._tell(Evaluation(done, score.loss, time.monotonic() - start, score.count))
        return stop

    def _score(
        self, kind: FrameKind, at: tuple[int, int], batch: DeviceBatch, received: Tensor | None
    ) -> Tensor | None:
        """One forward without gradients: to the stage above, or its loss."""
        latest = self.update.latest
        passes = self._passes[latest.stage]
        with passes.autocast():
            output = passes.run_layers(received, batch)
            if self._up is None:
                return latest.stage.loss(output, batch.targets)
        self._end.sync()
        self._up.send_tensor(kind, output, *at, latest.versions)
        return None

    @torch.no_grad()
    def _probe(self, step: int, number: int) -> float | None:
        """The loss of the first validation microbatch as things are, on the last stage."""
        received, update = None, self.update
        if self._down is not None:
            with self._end.trace.span("wait", "basis"):
                received = self._down.take_tensor(FrameKind.PROBE, step, number, update.versions)
        with self._end.trace.span("compute", "U"):
            update.stage.eval()
            batch = self.feed.validation(0)
            loss = self._score(FrameKind.PROBE, (step, number), batch, received)
            update.stage.train()
        return None if loss is None else float(loss)

    def _checkpoint(self, done: int) -> None:
        self.progress.begin(f"saves the checkpoint of step {done}")
        self._tell(self.state.save(self.run_folder, self.index))


def remedy(key: str, mine: Any, theirs: Any) -> str:
    """What to do about a difference, mostly a command; nothing where it only follows from others.
    `theirs` may be anything: it comes from the other end.
    """
    if key == SECTIONS and isinstance(mine, dict) and isinstance(theirs, dict):
        names = [name for name, digest in mine.items() if theirs.get(name) != digest]
        return f"they differ in {', '.join(names)}"
    return _REMEDIES.get(key) or _REMEDIES.get(key.rpartition("_")[2], "")


_SAME_START = "start all stages from the same checkpoint: --resume on the host"
_REMEDIES = {
    RELEASE: "run `pip install --upgrade thinwire` on the machine with the older one, and join "
    "again",
    EPOCH: "the run was formed again meanwhile. Run the `thinwire join` command again on the "
    "machine with the lower number",
    "config_hash": "both ends need the same settings: start both from the same run.toml",
    "corpus": "the prepared data differ: give both machines the same data.path and the same "
    "tokenizer, and start again with --resume",
    **dict.fromkeys(("first_step", "basis", "basis_version", "token_table"), _SAME_START),
    "memory": _SAME_START,  # of a codec
    "codec": "give both the same codec settings, and the same plugins where they name one",
}
