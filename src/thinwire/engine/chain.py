"""A whole pipeline in one process: stages joined by autograd, boundaries and codecs included.

Experiments that ask about learning and not about time use this: no processes, no links, one
device. A step ends as in the pipeline (engine/update.py), so both train the same weights, bit for
bit where both compute with one thread.
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
from thinwire.engine.rows import SharedRows
from thinwire.engine.update import StageUpdate
from thinwire.engine.verdict import global_norm
from thinwire.model import Past, Score
from thinwire.optim import learning_rate
from thinwire.settings import Settings
from thinwire.wire import HEADER_BYTES

Told = Callable[[int, int], None]
"""Called after every batch of a validation: how many are done, of how many."""


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
                x = Crossing.apply(x, self.cuts[index - 1])
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
        self.row_bytes = dict.fromkeys(Leg, 0)  # that crossed all cuts for a shared embedding
        self.done = 0
        self.move_jumps: list[float] | None = None
        """Set to a list to have the change of validation loss by each move of the basis."""

    @property
    def keepers(self) -> list[Keeper]:
        """The keeper of each stage, where they share a space."""
        return [update.keeper for update in self.updates if update.keeper is not None]

    def train_step(self, step: int) -> float:
        """One update, as all stages together would make it; returns the loss."""
        assert self.feed is not None, "training needs a feed"
        for update in self.updates:
            update.begin(step)
        losses, count = [], self.settings.pipeline.microbatches
        with weights_rounded_once():
            for microbatch in range(count):
                batch = self.feed.training(step, microbatch)
                self.go_to(step, microbatch, training=True)
                for rows in self._rows():
                    rows.see(batch.inputs)
                logits = self.logits(batch.inputs)
                with self._autocast():
                    loss = batch.loss(self.stages[-1], logits, count)
                loss.backward()
                losses.append(loss.detach())
        self.update(step)
        self.done = step + 1
        return float(torch.stack(losses).sum())

    def update(self, step: int) -> bool:
        """End the step as the pipeline does; False where it was refused."""
        for update in self.updates:
            update.project()
        self._add_rows(step)
        moves = bool(self.keepers) and self.keepers[-1].moves_after(step)
        basis_DK = self.keepers[-1].propose() if moves else None
        norm = global_norm([square for update in self.updates for square in update.squared_norms()])
        if not math.isfinite(norm):
            for update in self.updates:
                update.withdraw(step)
            return False
        lr = learning_rate(self.settings.optim, step, self.settings.train.steps)
        for update in self.updates:
            update.commit(step, lr, norm)
        self._change_rows(step)
        if basis_DK is not None:
            self._switch(basis_DK)
        return True

    def _rows(self) -> list[SharedRows]:
        """Of each stage, where they share the embedding."""
        return [update.rows for update in self.updates if update.rows is not None]

    def _add_rows(self, step: int) -> None:
        """Gradients of due rows down the stages, each adding its own."""
        payloads: list[bytes] = []
        for own in reversed(self._rows()):
            own.choose(step)
            for frame, payload in enumerate(payloads):
                own.add(step, frame, payload)
                self.row_bytes[Leg.BACKWARD] += len(payload) + HEADER_BYTES
            payloads = [own.gradients(step, frame) for frame in range(own.frames)]

    def _change_rows(self, step: int) -> None:
        """Changes of due rows from the first stage up to all."""
        rows = self._rows()
        payloads = rows[0].changes(step, self.updates[0].version) if rows and rows[0].frames else []
        for frame, payload in enumerate(payloads):
            for own in rows:
                own.follow(step, frame, payload)
            self.row_bytes[Leg.FORWARD] += (len(rows) - 1) * (len(payload) + HEADER_BYTES)
        for own in rows:
            own.commit()

    def _switch(self, basis_DK: Tensor) -> None:
        """All stages share one space here: it moves once, and every stage's weights follow."""
        assert self.builder.space is not None
        before = None if self.move_jumps is None else self.evaluate()
        old_DK = self.builder.space.basis_DK.clone()
        self.builder.space.move(basis_DK)
        for keeper in self.keepers:
            keeper.follow(old_DK)
        if self.move_jumps is not None and before is not None:
            self.move_jumps.append(self.evaluate() - before)

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
