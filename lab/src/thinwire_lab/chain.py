"""A whole pipeline in one process: stages joined by autograd, boundaries and codecs included.

Experiments that ask about learning and not about time use this: no processes, no links, one
device. A step ends as in the pipeline (engine/step_end.py), so both train the same weights, bit for
bit where both compute with one thread.
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.codec import Leg, cross, spec_of
from thinwire.engine.build import Joined, choose_device, prepare_torch
from thinwire.engine.cut import CutEnd
from thinwire.engine.feed import Feed
from thinwire.engine.passes import weights_rounded_once
from thinwire.engine.step_end import StageUpdate, StepEnd
from thinwire.engine.trace import StepTrace
from thinwire.model import Score, learning_rate
from thinwire.settings import Settings


class Cut:
    """Both ends of a cut in one process, which holds the stage below and the stage above.

    `at` is the step and the microbatch that cross next; bytes are counted of training alone, and
    where the content decides them only while `weigh` is set: that takes packing, which changes
    nothing else. `observe`, if set, is told of every crossing in training: the leg, what was sent,
    what arrived. `tokens` are those of a microbatch.
    """

    def __init__(self, lower: CutEnd, upper: CutEnd, tokens: int) -> None:
        self.at = 0, 0
        self.training = True
        self.weigh = True
        self.observe: Callable[[Leg, Tensor, Tensor], None] | None = None
        self.lower, self.upper = lower, upper
        self._tokens = tokens
        self._crossings: Counter[Leg] = Counter()
        self._bytes: Counter[Leg] = Counter()

    def forward(self, z: Tensor) -> Tensor:
        """The activation as the stage above unpacks it."""
        return self._cross(Leg.FORWARD, z, self.lower, self.upper)

    def backward(self, gradient: Tensor) -> Tensor:
        """The gradient as the stage below unpacks it."""
        return self._cross(Leg.BACKWARD, gradient, self.upper, self.lower)

    def payload_bytes_per_token(self, leg: Leg) -> float:
        """Bytes of payload: by the codec's layout, or as measured so far where sizes vary."""
        codec = self.lower.codecs[leg]
        if codec.size_varies and self._crossings[leg]:
            return self._bytes[leg] / (self._crossings[leg] * self._tokens)
        return codec.payload_limit(self.lower.spec.shape) / self._tokens

    def _cross(self, leg: Leg, tensor: Tensor, sender: CutEnd, receiver: CutEnd) -> Tensor:
        tensor = tensor.detach().to(sender.spec.dtype)
        arrived = self._arrival(leg, tensor, sender, receiver)
        if self.observe is not None and self.training:
            self.observe(leg, tensor, arrived)
        return arrived

    def _arrival(self, leg: Leg, tensor: Tensor, sender: CutEnd, receiver: CutEnd) -> Tensor:
        place = sender.place(leg, *self.at, self.training)
        codec, other = sender.codecs[leg], receiver.codecs[leg]
        if codec.content_decides_size and self.training and self.weigh:
            payload = codec.pack(tensor, place)
            self._count(leg, len(payload))
            return other.unpack(payload, spec_of(tensor), place)
        if codec.size_varies and self.training and not codec.content_decides_size:
            self._count(leg, sum(part.bytes for part in codec.layout(tuple(tensor.shape), place)))
        return cross(codec, other, tensor, place)

    def _count(self, leg: Leg, size: int) -> None:
        self._crossings[leg] += 1
        self._bytes[leg] += size


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


class Chain(Joined):
    """Trains the model of some settings in this process, as its pipeline would."""

    def __init__(self, settings: Settings, feed: Feed | None = None):
        device = choose_device(settings.run.device, 0)
        prepare_torch(settings, device)
        super().__init__(settings, device, feed)
        self.feed = feed
        tokens = settings.tokens_per_microbatch
        self.cuts = [Cut(lower, upper, tokens) for lower, upper in self.ends]
        for stage in self.stages:
            self.builder.initialise(stage)
        self.updates = [
            StageUpdate(self.builder, stage, index) for index, stage in enumerate(self.stages)
        ]
        self._end = StepEnd(self.updates)
        self.row_bytes = self._end.row_bytes  # that crossed all cuts for a shared embedding
        self.done = 0

    def crossed(self, z: Tensor, cut: int) -> Tensor:
        return ThroughCut.apply(z, self.cuts[cut])

    def go_to(self, step: int, microbatch: int, training: bool = False) -> None:
        for cut in self.cuts:
            cut.at, cut.training = (step, microbatch), training

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
        self._end.gather(step, lambda step, commit: (False, False))
        verdict = self._end.conclude(step, lr, lambda step, number: None)
        return verdict.commit

    def evaluate(self, compressed: bool = True) -> float:
        """Mean validation loss, with what codecs do to activations or without it."""
        return self.score(compressed).loss

    def score(self, compressed: bool = True) -> Score:
        """The loss of a validation, as the pipeline would make it."""
        assert self.feed is not None, "evaluation needs a feed"
        trains = self.stages[0].training
        for stage in self.stages:
            stage.eval()
        score = self.validate(self.feed, self.done, compressed)
        for stage in self.stages:
            stage.train(trains)
        return score

    def payload_bytes_per_token(self, leg: Leg) -> float:
        """Mean over the cuts of what one token costs on this leg, without frame headers; rows of a
        shared embedding are included, with theirs.
        """
        total = sum(cut.payload_bytes_per_token(leg) for cut in self.cuts)
        total += self.row_bytes[leg] / max(1, self.done * self.settings.tokens_per_step)
        return total / max(1, len(self.cuts))
