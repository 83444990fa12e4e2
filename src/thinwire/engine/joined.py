"""All stages of a model in one process, with its boundaries and what codecs do at its cuts."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.codec import Leg, cross
from thinwire.engine.build import StageBuilder, autocast_for
from thinwire.engine.cut import CutEnd
from thinwire.engine.feed import Feed
from thinwire.model import Past, Score
from thinwire.settings import Settings

Told = Callable[[int, int], None]
"""Called after every batch of a validation: how many are done, of how many."""


class Joined:
    """All stages of a model and both ends of its cuts; weights are still empty."""

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        feed: Feed | None = None,
        devices: Sequence[torch.device] = (),
    ):
        """`device` has what goes in and what comes out, and all stages unless `devices` says where
        each of them is. Without that, whoever moves all stages need not say so here.
        """
        self.settings = settings
        self.device = device
        self.devices = devices
        places = devices or [device] * settings.pipeline.stages
        builders = {one: StageBuilder(settings, one) for one in {device, *places}}
        self.builder = builders[device]
        self.stages = [builders[one].build(i) for i, one in enumerate(places)]
        self.spaces = [builders[one].space for one in places]
        self.ends = [
            tuple(
                CutEnd.build(settings, cut, is_lower, self.builder.wire_spec, feed)
                for is_lower in (True, False)
            )
            for cut in range(len(self.stages) - 1)
        ]
        self._at = 0, 0
        self._autocast = autocast_for(settings.run.precision, device)

    def logits(
        self, inputs: Tensor, compressed: bool = True, pasts: list[Past] | None = None
    ) -> Tensor:
        """The model's output, across all cuts; codecs may be left out, narrow boundaries not.

        With the past of each stage, of the positions that follow those in it.
        """
        x = ids = inputs
        for index, stage in enumerate(self.stages):
            if compressed and index > 0:
                x = self.crossed(x, index - 1)
            if self.devices:
                x, ids = x.to(self.devices[index]), ids.to(self.devices[index])
            with self._autocast():
                x = stage(x, ids, pasts[index] if pasts is not None else None)
        return x.to(self.device) if self.devices else x

    def crossed(self, z: Tensor, cut: int) -> Tensor:
        """An activation as the stage above the cut unpacks it."""
        lower, upper = self.ends[cut]
        place = lower.place(Leg.FORWARD, *self._at, training=False)
        z = z.detach().to(lower.spec.dtype)
        return cross(lower.codecs[Leg.FORWARD], upper.codecs[Leg.FORWARD], z, place)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a microbatch."""
        with self._autocast():
            return self.stages[-1].loss(logits, targets)

    def go_to(self, step: int, microbatch: int) -> None:
        """Say where in the run the tensors are that cross next."""
        self._at = step, microbatch

    @torch.no_grad()
    def validate(self, feed: Feed, step: int, compressed: bool, told: Told | None = None) -> Score:
        """The loss of the validation after `step` updates, as the pipeline makes it."""
        score = Score()
        for number in range(feed.validation_count):
            batch = feed.validation(number)
            self.go_to(step, number)
            logits = self.logits(batch.inputs, compressed)
            score.add(self.loss(logits, batch.targets), batch.targets)
            if told is not None:
                told(number + 1, feed.validation_count)
        return score
