"""A whole pipeline in one process: stages chained by autograd, boundaries and rounding included.

Tests show that the pipeline of processes computes the same. Experiments that ask about learning
and not about time use this: no processes, no links, one device.
"""

import math
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
from thinwire.model import Score
from thinwire.optim import StageOptimizer, learning_rate
from thinwire.settings import Settings


class Crossing(torch.autograd.Function):
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


class Chain:
    """Trains the model of some settings in this process, as its pipeline would."""

    def __init__(self, settings: Settings, feed: Feed | None = None):
        self.settings = settings
        self.device = choose_device(settings.run.device, 0)
        prepare_torch(settings, self.device)
        self.builder = StageBuilder(settings, self.device)
        self.feed = feed
        self.stages = [self.builder.build(i) for i in range(settings.pipeline.stages)]
        for stage in self.stages:
            self.builder.initialise(stage)
        for left, right in zip(self.stages, self.stages[1:], strict=False):
            if settings.boundary.learn:  # one parameter, read on both sides of the cut
                right.incoming.basis = left.outgoing.basis  # type: ignore[union-attr]
        self.optimizers: list[StageOptimizer] = []
        self.keepers: list[Keeper] = []
        for index, stage in enumerate(self.stages):
            constraint = self.builder.constraint(stage)
            optimizer = StageOptimizer(stage.owned_parameters(), settings.optim, constraint)
            self.optimizers.append(optimizer)
            if self.builder.space is not None:
                first, last = index == 0, index == len(self.stages) - 1
                keeper = Keeper(
                    settings.boundary,
                    stage,
                    optimizer,
                    self.builder.space,
                    constraint,
                    settings.train.steps,
                    is_first=first,
                    is_last=last,
                )
                self.keepers.append(keeper)
        self.cuts = [
            Cut(settings, index, self.builder.wire_spec(index), feed)
            for index in range(len(self.stages) - 1)
        ]
        self.done = 0
        self.move_jumps: list[float] | None = None
        """Set to a list to have the change of validation loss by each move of the basis."""
        self._autocast = autocast_for(settings.run.precision, self.device)
        self._loss = self.stages[-1].loss

    def logits(self, inputs: Tensor, compressed: bool = True) -> Tensor:
        """The model's output, across all cuts; codecs may be left out, narrow boundaries not."""
        z = None
        for index, stage in enumerate(self.stages):
            with self._autocast():
                z = stage(z, inputs)
            if compressed and index < len(self.stages) - 1:
                z = Crossing.apply(z, self.cuts[index])
        assert z is not None
        return z

    def train_step(self, step: int) -> float:
        """One update, as all stages together would make it; returns the loss."""
        assert self.feed is not None, "training needs a feed"
        for keeper in self.keepers:
            keeper.begin_step(step)
        buffers = [buffer for stage in self.stages for buffer in stage.global_buffers().values()]
        before = [buffer.clone() for buffer in buffers]
        count = self.settings.pipeline.microbatches
        total = torch.zeros((), device=self.device, dtype=self.builder.dtype)
        with weights_rounded_once():
            for microbatch in range(count):
                batch = self.feed.training(step, microbatch)
                for cut in self.cuts:
                    cut.at = step, microbatch
                    cut.training = True
                loss = self._loss(self.logits(batch.inputs), batch.targets) / count
                loss.backward()
                total += loss.detach()
        if not self.update(step):  # then batch norms have seen nothing either
            for buffer, old in zip(buffers, before, strict=True):
                buffer.copy_(old)
        self.done = step + 1
        return float(total)

    def update(self, step: int) -> bool:
        """Project, clip, step, and move the basis where it is time.

        Nothing of it, and False, where gradients are not finite.
        """
        for keeper in self.keepers:
            keeper.project_gradients()
        moves = bool(self.keepers) and self.keepers[-1].moves_after(step)
        basis_DK = self.keepers[-1].propose() if moves else None
        # A learned basis is one parameter of two stages: count it once, in a fixed order.
        every = dict.fromkeys(p for stage in self.stages for p in stage.parameters())
        parameters = [parameter for parameter in every if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients))
        norm = float(torch.linalg.vector_norm(norms))
        lr = learning_rate(self.settings.optim, step, self.settings.train.steps)
        committed = math.isfinite(norm)
        if committed:
            clip = self.settings.optim.clip
            scale = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
            torch._foreach_mul_(gradients, scale)
            for optimizer in self.optimizers:
                optimizer.step(lr)
            for keeper in self.keepers:
                keeper.after_update(step)
            if basis_DK is not None:
                self._switch(basis_DK)
        else:
            for keeper in self.keepers:
                keeper.withdraw(step)
        for stage in self.stages:
            stage.zero_grad()
        return committed

    def _switch(self, basis_DK: Tensor) -> None:
        """All stages share one space here: it moves once, and every stage's weights follow."""
        assert self.builder.space is not None
        before = None if self.move_jumps is None else self.evaluate()
        old_DK, version = self.builder.space.basis_DK.clone(), self.builder.space.version
        for keeper in self.keepers:
            self.builder.space.basis_DK.copy_(old_DK)
            keeper.switch(basis_DK)
        self.builder.space.version = version + 1
        if self.move_jumps is not None and before is not None:
            self.move_jumps.append(self.evaluate() - before)

    def evaluate(self, compressed: bool = True) -> float:
        """Mean validation loss, with what codecs do to activations or without it."""
        return self.score(compressed).loss

    @torch.no_grad()
    def score(self, compressed: bool = True) -> Score:
        """Loss and accuracy of a validation, as the pipeline would make it."""
        assert self.feed is not None, "evaluation needs a feed"
        score = Score()
        for stage in self.stages:
            stage.eval()
        for microbatch in range(self.feed.validation_count):
            batch = self.feed.validation(microbatch)
            for cut in self.cuts:
                cut.at = self.done, microbatch
                cut.training = False
            logits = self.logits(batch.inputs, compressed)
            score.add(self._loss(logits, batch.targets), logits, batch.targets)
        for stage in self.stages:
            stage.train()
        return score

    def payload_bytes_per_token(self, leg: Leg) -> float:
        """Mean over the cuts of what one token costs on this leg, without frame headers.

        An image counts as one token.
        """
        total = sum(cut.payload_bytes_per_token(leg) for cut in self.cuts)
        return total / max(1, len(self.cuts))


Progress = Callable[[str], None]
