"""The runner: executes one schedule on one stage.

Compute never waits for a send (links queue), receives are posted early (link threads fill the
mailbox), and the only things the compute thread waits for are the tensors it needs next.

A step ends in engine/step_end.py.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from thinwire.engine.build import weights_rounded_once
from thinwire.engine.feed import DeviceBatch, Feed
from thinwire.engine.port import Port
from thinwire.engine.reports import StageCosts
from thinwire.engine.step_end import Decide, StageUpdate, StepEnd, Verdict
from thinwire.engine.trace import FORWARD, Progress, Sightings, StepTrace
from thinwire.model import Score, Stage
from thinwire.schedule import Kind, Schedule, forward_only
from thinwire.wire import FrameKind


class Runner:
    """Runs training steps and validations of one stage, in the order its schedule gives."""

    def __init__(
        self,
        stage: Stage,
        feed: Feed,
        update: StageUpdate,
        below: Port | None,
        above: Port | None,
        schedule: Schedule,
        index: int,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
        progress: Progress | None = None,
        sightings: Sightings | None = None,
    ):
        self.stage = stage
        self.trace = StepTrace()
        self._progress = progress or Progress()
        self._sightings = sightings or Sightings()
        self._feed = feed
        self._update = update
        self._below, self._above = below, above
        self._schedule, self._index = schedule, index
        *self._actions, last = schedule.rows[index]
        assert last.kind is Kind.U, "a validated training schedule ends with an update"
        self._autocast = autocast
        device = next(stage.parameters()).device
        self._end = StepEnd([update], index, below, above, device, self._sightings)
        self._in_flight: dict[int, tuple[Tensor | None, Tensor]] = {}  # received, output
        self._losses: list[Tensor] = []

    def train_step(self, step: int, lr: float, decide: Decide) -> tuple[Verdict, float | None]:
        """All of this stage's actions of one step; the loss is known on the last stage only."""
        verbs = {"wait": "waits for", "compute": "computes"}

        def on_begin(lane: str, label: str) -> None:
            self._progress.begin(f"{verbs[lane]} {label} of step {step + 1}")

        self.trace = self._end.trace = StepTrace(on_begin=on_begin)
        self._losses = []
        self._update.begin(step)
        with weights_rounded_once():
            for action in self._actions:
                work = self._forward if action.kind is Kind.F else self._backward
                work(step, action.microbatch)
        verdict = self._end.end(step, lr, decide, self._probe)
        if verdict.commit:
            with self.trace.span("compute", "U"):
                self._update.check(step)
        loss = float(torch.stack(self._losses).sum()) if self._losses else None
        if loss is not None and not math.isfinite(loss):
            self._sightings.note(step, FORWARD)
        return verdict, loss

    @torch.no_grad()
    def evaluate(
        self, step: int, batches: int, leaves: Callable[[], bool] = lambda: False
    ) -> tuple[Score | None, bool]:
        """The score of `batches` validation microbatches, and whether the run ends here.

        Once `leaves` says so, a stage computes no more of them. The first stage then sends no more
        either, and its verdict behind the last one tells the others. The score is known on the
        last stage only, and None if the validation was cut short.
        """
        score, done = Score(), 0
        self.stage.eval()
        for action in forward_only(self._schedule.stages, batches).rows[self._index]:
            number, received = action.microbatch, None
            if self._below is not None:
                self._progress.begin(f"waits for validation batch {number} after step {step}")
                received = self._below.take_evaluated(step, number, self._update.versions)
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
        self.stage.train()
        stop = self._end_evaluation(step, leaves)
        return score if self._above is None and done == batches else None, stop

    def _end_evaluation(self, step: int, leaves: Callable[[], bool]) -> bool:
        """Pass the verdict up that ends a validation: whether all stages leave now."""
        decided = None
        if self._below is not None:
            self._progress.begin(f"waits for the end of the validation after step {step}")
        else:
            decided = Verdict(0.0, commit=False, checkpoint=False, stop=leaves())
        return self._end.pass_up(FrameKind.VALIDATED, step, decided).stop

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
        with self._autocast():
            output = self._run_layers(received, batch)
            if self._above is None:
                score.add(self.stage.loss(output, batch.targets), batch.targets)
        if self._above is not None:
            self._end.sync()
            self._above.send_tensor(kind, output, step, number, self._update.versions)

    def costs(self) -> StageCosts:
        """Mean seconds of a forward, a backward and an update in the last step."""
        seconds, count = self.trace.seconds, self._schedule.microbatches
        return StageCosts(
            seconds("compute", "F") / count,
            seconds("compute", "B") / count,
            seconds("compute", "U") + seconds("compute", "norm"),
        )

    def _forward(self, step: int, microbatch: int) -> None:
        batch = self._feed.training(step, microbatch)
        if batch.wait is not None:
            with self.trace.span("wait", f"ids{microbatch}"):
                batch.wait()
        if self._update.rows is not None:
            self._update.rows.see(batch.inputs)
        received = None
        if self._below is not None:
            with self.trace.span("wait", f"F{microbatch}"):
                received = self._below.take_tensor(
                    FrameKind.FORWARD, step, microbatch, self._update.versions
                )
            received.requires_grad_()
        with self.trace.span("compute", f"F{microbatch}"):
            with self._autocast():
                output = self._run_layers(received, batch)
                if self._above is None:
                    output = batch.loss(self.stage, output, self._schedule.microbatches)
                    self._losses.append(output.detach())
            self._end.sync()
        self._in_flight[microbatch] = received, output
        if self._above is not None:
            sent = output.detach()
            self._above.send_tensor(
                FrameKind.FORWARD, sent, step, microbatch, self._update.versions
            )

    def _run_layers(self, received: Tensor | None, batch: DeviceBatch) -> Tensor:
        x = batch.inputs if received is None else received
        return self.stage(x, batch.inputs if self.stage.needs_ids else None)

    def _backward(self, step: int, microbatch: int) -> None:
        received, output = self._in_flight.pop(microbatch)
        gradient = None
        if self._above is not None:
            with self.trace.span("wait", f"B{microbatch}"):
                gradient = self._above.take_tensor(
                    FrameKind.BACKWARD, step, microbatch, self._update.versions
                ).to(output.dtype)
        with self.trace.span("compute", f"B{microbatch}"):
            torch.autograd.backward(output, gradient)
            self._end.sync()
        if self._below is not None:
            assert received is not None and received.grad is not None
            self._below.send_tensor(
                FrameKind.BACKWARD, received.grad, step, microbatch, self._update.versions
            )

    @torch.no_grad()
    def _probe(self, step: int, number: int) -> float | None:
        """The loss of the first validation microbatch as things are, on the last stage.

        Two of them for each move of the basis cost two forwards; no answer has to come back.
        """
        received, score = None, Score()
        if self._below is not None:
            with self.trace.span("wait", "basis"):
                received = self._below.take_tensor(
                    FrameKind.PROBE, step, number, self._update.versions
                )
        with self.trace.span("compute", "U"):
            self.stage.eval()
            batch = self._feed.validation(0)
            self._score(FrameKind.PROBE, step, number, batch, received, score)
            self.stage.train()
            return score.loss if self._above is None else None
