"""How many parameters there are, how many of them are trained, and what they weigh."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.engine.build import StageBuilder
from thinwire.settings import Settings


@dataclass(frozen=True)
class Weights:
    """The parameters of a stage, or of a part of it."""

    count: int = 0
    trained: int = 0
    """Those with a gradient and moments: the others are frozen."""
    bytes: int = 0
    """Of all of them, without gradients and moments."""

    @classmethod
    def of(cls, parameters: Iterable[Tensor]) -> "Weights":
        """Counted one by one."""
        found = list(parameters)
        trained = sum(p.numel() for p in found if p.requires_grad)
        return cls(sum(p.numel() for p in found), trained, sum(p.nbytes for p in found))

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(
            self.count + other.count, self.trained + other.trained, self.bytes + other.bytes
        )


def stage_weights(settings: Settings, stage: int) -> Weights:
    """Of what a stage holds, counted on layers without memory."""
    return Weights.of(StageBuilder(settings, torch.device("meta")).build(stage).parameters())


def model_weights(settings: Settings) -> Weights:
    """Of the whole model as it is trained, with its cuts; what two stages hold counts once."""
    builder = StageBuilder(settings, torch.device("meta"))
    stages = [builder.build(index) for index in range(settings.pipeline.stages)]
    return Weights.of(p for stage in stages for p in stage.owned_parameters().values())


def parameter_count(settings: Settings) -> int:
    """Parameters of the whole model as it is trained, those of its cuts included."""
    return model_weights(settings).count
