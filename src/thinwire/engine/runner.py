"""The runner: executes one schedule on one stage.

Compute never waits for a send (links queue), receives are posted early (link threads fill the
mailbox), and the only things the compute thread waits for are the tensors it needs next.

A step ends in engine/step_end.py. With delayed updates two steps are under way at once: the second
begins while the first still has backwards to come.
"""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.engine.build import weights_rounded_once
from thinwire.engine.feed import DeviceBatch, Feed
from thinwire.engine.passes import Autocast, GraphPasses, Pass, Passes
from thinwire.engine.port import Port
from thinwire.engine.reports import StageCosts
from thinwire.engine.step_end import Decide, StageUpdate, StepEnd, Verdict
from thinwire.engine.trace import FORWARD, Progress, Sightings, StepTrace
from thinwire.model import Score
from thinwire.schedule import Kind, Schedule
from thinwire.wire import FrameKind


@dataclass
class Running:
    """A step under way on this stage, with what its update will change.

    With delayed updates steps overlap: one lasts from the last backward of the step before to its
    own, and the last before a pause to its update.
    """

    update: StageUpdate
    trace: StepTrace
    start: float
    end: float | None = None
    in_flight: dict[int, Pass] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)

    def costs(self, microbatches: int) -> StageCosts:
        """Mean seconds of a forward, a backward and an update."""
        seconds = self.trace.seconds
        return StageCosts(
            seconds("compute", "F") / microbatches,
            seconds("compute", "B") / microbatches,
            seconds("compute", "U") + seconds("compute", "norm"),
        )


Ended = Callable[[int, Verdict, float | None, Running], None]
"""Called with a step that is over: its verdict, the loss on the last stage, and how it went."""


class Runner:
    """Runs training steps and validations of one stage, in the order its schedule gives."""

    def __init__(
        self,
        feed: Feed,
        update: StageUpdate,
        below: Port | None,
        above: Port | None,
        schedule: Schedule,
        index: int,
        autocast: Autocast,
        progress: Progress,
        sightings: Sightings,
        graphs: bool = False,
    ):
        """With `graphs` a GPU replays microbatches."""
        self._progress, self._sightings = progress, sightings
        self._feed = feed
        self._update = update
        self._below, self._above = below, above
        self._schedule, self._index = schedule, index
        device = next(update.stage.parameters()).device
        kind = GraphPasses if graphs and device.type == "cuda" else Passes
        both = [update, *([update.twin] if update.twin is not None else [])]
        self._passes = {one.stage: kind(one.stage, autocast) for one in both}
        self._end = StepEnd([update], index, below, above, device, [self._sightings])
        self._running: dict[int, Running] = {}

    def train(
        self, first: int, until: int, lr: Callable[[int], float], decide: Decide, ended: Ended
    ) -> Verdict:
        """All of this stage's actions from step `first` to the one before `until`; the last
        verdict.

        A verdict may end them before: with delayed updates after the step that follows, which has
        begun on other stages. No step is under way then.
        """
        last, microbatches = until - 1, self._schedule.microbatches
        with ExitStack() as unchanged:
            unchanged.enter_context(weights_rounded_once())
            for step, action in self._schedule.stream(self._index, first, until):
                if step > last:
                    continue
                if action.kind is Kind.F:
                    if action.microbatch == 0:
                        self._begin(step)
                    self._forward(step, action.microbatch)
                elif action.kind is Kind.B:
                    self._backward(step, action.microbatch)
                    if action.microbatch == microbatches - 1:
                        self._gather(step, decide)
                else:
                    unchanged.close()
                    verdict = self._conclude(step, lr(step), ended)
                    if verdict.stop:
                        last = min(last, step + min(self._schedule.delay, 1))
                    if step == last:
                        break
                    unchanged.enter_context(weights_rounded_once())
        return verdict

    def _begin(self, step: int) -> None:
        """Let the tensors of a step in, and note what it starts from."""
        verbs = {"wait": "waits for", "compute": "computes"}

        def on_begin(lane: str, label: str) -> None:
            self._progress.begin(f"{verbs[lane]} {label} of step {step + 1}")

        start = time.monotonic()
        for port in (self._below, self._above):
            if port is not None:
                port.open_step(step)
        update = self._update.of_step(step)
        update.begin(step)
        self._running[step] = Running(update, StepTrace(on_begin=on_begin), start)

    def _gather(self, step: int, decide: Decide) -> None:
        self._end.trace = self._running[step].trace
        self._end.gather(step, decide)
        if self._schedule.delay:
            self._running[step].end = time.monotonic()
            if following := self._running.get(step + 1):
                following.start = time.monotonic()

    def _conclude(self, step: int, lr: float, ended: Ended) -> Verdict:
        running = self._running.pop(step)
        self._end.trace = running.trace
        verdict = self._end.conclude(step, lr, self._probe)
        if verdict.commit:
            with running.trace.span("compute", "U"):
                running.update.check(step)
        loss = float(torch.stack(running.losses).sum()) if running.losses else None
        if loss is not None and not math.isfinite(loss):
            self._sightings.note(step, FORWARD)
        if not self._running:
            running.end = None  # it lasts until now
        ended(step, verdict, loss, running)
        return verdict

    @torch.no_grad()
    def evaluate(
        self, step: int, batches: int, leaves: Callable[[], bool] = lambda: False
    ) -> tuple[Score | None, bool]:
        """The score of `batches` validation microbatches, and whether the run ends here.

        Once `leaves` says so, a stage computes no more of them. The first stage then sends no more
        either, and its verdict behind the last one tells the others. The score is known on the
        last stage only, and None if the validation was cut short.
        """
        score, done, latest = Score(), 0, self._update.latest
        latest.stage.eval()
        for number in range(batches):
            received = None
            if self._below is not None:
                self._progress.begin(f"waits for validation batch {number} after step {step}")
                received = self._below.take_evaluated(step, number, latest.versions)
                if received is None:
                    break
            if not leaves():
                batch = self._feed.validation(number)
                if batch.wait is not None:
                    self._progress.begin(f"waits for ids of validation batch {number}")
                    batch.wait()
                self._progress.begin(f"validates with batch {number} after step {step}")
                self._score(FrameKind.EVALUATE, step, number, batch, received, score)
                done += 1
            elif self._below is None:
                break
        latest.stage.train()
        decided = None
        if self._below is not None:
            self._progress.begin(f"waits for the end of the validation after step {step}")
        else:
            decided = Verdict(0.0, commit=False, checkpoint=False, stop=leaves())
        stop = self._end.pass_up(FrameKind.VALIDATED, step, decided).stop
        return score if self._above is None and done == batches else None, stop

    def _score(
        self,
        kind: FrameKind,
        step: int,
        number: int,
        batch: DeviceBatch,
        received: Tensor | None,
        score: Score,
    ) -> None:
        """One forward without gradients: to the stage above, or into the score."""
        latest = self._update.latest
        passes = self._passes[latest.stage]
        with passes.autocast():
            output = passes.run_layers(received, passes.ids_read(received, batch))
            if self._above is None:
                score.add(latest.stage.loss(output, batch.targets), batch.targets)
        if self._above is not None:
            self._end.sync()
            self._above.send_tensor(kind, output, step, number, latest.versions)

    def _forward(self, step: int, microbatch: int) -> None:
        running = self._running[step]
        update, trace = self._update.of_microbatch(step, microbatch), running.trace
        batch = self._feed.training(step, microbatch)
        if batch.wait is not None:
            with trace.span("wait", f"ids{microbatch}"):
                batch.wait()
        if update.rows is not None:
            update.rows.see(batch.inputs)
        received = None
        if self._below is not None:
            with trace.span("wait", f"F{microbatch}"):
                received = self._below.take_tensor(
                    FrameKind.FORWARD, step, microbatch, update.versions
                )
        with trace.span("compute", f"F{microbatch}"):
            passes = self._passes[update.stage]
            passed = passes.forward(received, batch, self._schedule.microbatches)
            if self._above is None:
                running.losses.append(passed.output.detach())
            self._end.sync()
        running.in_flight[microbatch] = passed
        if self._above is not None:
            sent = passed.output.detach()
            self._above.send_tensor(FrameKind.FORWARD, sent, step, microbatch, update.versions)

    def _backward(self, step: int, microbatch: int) -> None:
        running = self._running[step]
        versions, trace = self._update.of_microbatch(step, microbatch).versions, running.trace
        passed = running.in_flight.pop(microbatch)
        gradient = None
        if self._above is not None:
            with trace.span("wait", f"B{microbatch}"):
                gradient = self._above.take_tensor(
                    FrameKind.BACKWARD, step, microbatch, versions
                ).to(passed.output.dtype)
        with trace.span("compute", f"B{microbatch}"):
            sent_back = passed.backward(gradient)
            self._end.sync()
        if self._below is not None:
            assert sent_back is not None, "a stage with one below received something"
            self._below.send_tensor(FrameKind.BACKWARD, sent_back, step, microbatch, versions)

    @torch.no_grad()
    def _probe(self, step: int, number: int) -> float | None:
        """The loss of the first validation microbatch as things are, on the last stage.

        Two of them for each move of the basis cost two forwards; no answer has to come back.
        """
        received, score, update = None, Score(), self._update
        if self._below is not None:
            with self._end.trace.span("wait", "basis"):
                received = self._below.take_tensor(FrameKind.PROBE, step, number, update.versions)
        with self._end.trace.span("compute", "U"):
            update.stage.eval()
            batch = self._feed.validation(0)
            self._score(FrameKind.PROBE, step, number, batch, received, score)
            update.stage.train()
            return score.loss if self._above is None else None
