"""A whole pipeline in one process: stages joined by autograd, boundaries and codecs included.

Experiments that ask about learning and not about time use this: no processes, no links, one
device. A step ends as in the pipeline (engine/step_end.py), so both train the same weights, bit for
bit where both compute with one thread.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.codec import Leg
from thinwire.engine.build import (
    StageBuilder,
    autocast_for,
    choose_device,
    prepare_torch,
    weights_rounded_once,
)
from thinwire.engine.cut import Cut
from thinwire.engine.feed import Feed
from thinwire.engine.keeper import Keeper
from thinwire.engine.step_end import StageUpdate, StepEnd
from thinwire.engine.trace import StepTrace
from thinwire.model import Past, Score, learning_rate
from thinwire.settings import Settings

Told = Callable[[int, int], None]
"""Called after every batch of a validation: how many are done, of how many."""


class ThroughCut(torch.autograd.Function):
    """What a cut does to a tensor on its way up, and to the gradient on its way down."""

    @staticmethod
    def forward(ctx, z: Tensor, cut: Cut) -> Tensor:  # type: ignore[no-untyped-def]
        """The tensor as the receiver unpacks it."""
        ctx.cut = cut
        return cut.forward(z)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        """The gradient as the sender unpacks it."""
        return ctx.cut.backward(gradient), None


class Joined:
    """All stages of a model and the cuts between them, on one device; weights are still empty."""

    def __init__(self, settings: Settings, device: torch.device, feed: Feed | None = None):
        self.settings = settings
        self.device = device
        self.builder = StageBuilder(settings, device)
        self.stages = [self.builder.build(i) for i in range(settings.pipeline.stages)]
        self.cuts = [
            Cut.build(settings, index, self.builder.wire_spec(index), feed)
            for index in range(len(self.stages) - 1)
        ]
        self._autocast = autocast_for(settings.run.precision, device)

    def logits(
        self, inputs: Tensor, compressed: bool = True, pasts: list[Past] | None = None
    ) -> Tensor:
        """The model's output, across all cuts; codecs may be left out, narrow boundaries not.

        With the past of each stage, of the positions that follow those in it.
        """
        x = inputs
        for index, stage in enumerate(self.stages):
            if compressed and index > 0:
                x = ThroughCut.apply(x, self.cuts[index - 1])
            with self._autocast():
                x = stage(x, inputs) if pasts is None else stage.extend(x, pasts[index], inputs)
        return x

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a microbatch."""
        with self._autocast():
            return self.stages[-1].loss(logits, targets)

    def go_to(self, step: int, microbatch: int, training: bool) -> None:
        """Tell the cuts where in the run the tensors are that cross next."""
        for cut in self.cuts:
            cut.at, cut.training = (step, microbatch), training

    @torch.no_grad()
    def validate(self, feed: Feed, step: int, compressed: bool, told: Told | None = None) -> Score:
        """The loss of the validation after `step` updates, as the pipeline makes it."""
        score, trains = Score(), self.stages[0].training
        for stage in self.stages:
            stage.eval()
        for number in range(feed.validation_count):
            batch = feed.validation(number)
            self.go_to(step, number, training=False)
            logits = self.logits(batch.inputs, compressed)
            score.add(self.loss(logits, batch.targets), batch.targets)
            if told is not None:
                told(number + 1, feed.validation_count)
        for stage in self.stages:
            stage.train(trains)
        return score


class Chain(Joined):
    """Trains the model of some settings in this process, as its pipeline would."""

    def __init__(self, settings: Settings, feed: Feed | None = None):
        device = choose_device(settings.run.device, 0)
        prepare_torch(settings, device)
        super().__init__(settings, device, feed)
        self.feed = feed
        for stage in self.stages:
            self.builder.initialise(stage)
        self.updates = [
            StageUpdate.build(self.builder, stage, index) for index, stage in enumerate(self.stages)
        ]
        self._end = StepEnd(self.updates, device=device)
        self.row_bytes = self._end.row_bytes  # that crossed all cuts for a shared embedding
        self.done = 0
        self.move_jumps: list[float] | None = None
        """Set to a list to have the change of validation loss by each move of the basis."""
        self._before_move = 0.0

    @property
    def keepers(self) -> list[Keeper]:
        """The keeper of each stage, where they share a space."""
        return [update.keeper for update in self.updates if update.keeper is not None]

    def train_step(self, step: int) -> float:
        """One update, as all stages together would make it; returns the loss."""
        assert self.feed is not None, "training needs a feed"
        for update in self.updates:
            update.of_step(step).begin(step)
        losses, count = [], self.settings.pipeline.microbatches
        with weights_rounded_once():
            for microbatch in range(count):
                used = [update.of_microbatch(step, microbatch) for update in self.updates]
                self.stages = [update.stage for update in used]
                batch = self.feed.training(step, microbatch)
                self.go_to(step, microbatch, training=True)
                for update in used:
                    if update.rows is not None:
                        update.rows.see(batch.inputs)
                logits = self.logits(batch.inputs)
                with self._autocast():
                    loss = batch.loss(self.stages[-1], logits, count)
                loss.backward()
                losses.append(loss.detach())
        self.update(step)
        self.done = step + 1
        self.stages = [update.latest.stage for update in self.updates]
        return float(torch.stack(losses).sum())

    def update(self, step: int) -> bool:
        """End the step as the pipeline does; False where it was refused."""
        self._end.trace = StepTrace()
        lr = learning_rate(self.settings.optim, step, self.settings.train.steps)
        verdict = self._end.end(step, lr, lambda step, commit: (False, False), self._probe)
        return verdict.commit

    def _probe(self, step: int, number: int) -> float | None:
        if self.move_jumps is not None:
            loss = self.evaluate()
            if number == 1:
                self.move_jumps.append(loss - self._before_move)
            self._before_move = loss
        return None

    def evaluate(self, compressed: bool = True) -> float:
        """Mean validation loss, with what codecs do to activations or without it."""
        return self.score(compressed).loss

    def score(self, compressed: bool = True) -> Score:
        """The loss of a validation, as the pipeline would make it."""
        assert self.feed is not None, "evaluation needs a feed"
        return self.validate(self.feed, self.done, compressed)

    def payload_bytes_per_token(self, leg: Leg) -> float:
        """Mean over the cuts of what one token costs on this leg, without frame headers; rows of a
        shared embedding are included, with theirs.
        """
        total = sum(cut.payload_bytes_per_token(leg) for cut in self.cuts)
        total += self.row_bytes[leg] / max(1, self.done * self.settings.tokens_per_step)
        return total / max(1, len(self.cuts))
