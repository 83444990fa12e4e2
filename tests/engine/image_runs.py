"""What the tests of image runs share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire.settings import Settings

CPU = torch.device("cpu")
SIDE, CLASSES, TRAIN, TEST = 8, 3, 40, 21


def in_fp32(image_settings: Callable, **changes: Any) -> Settings:
    """Tensors cross as they are in float32; six steps, saved in the middle."""
    return image_settings(
        **{
            "run__precision": "fp32",
            "codec__forward": "fp32",
            "codec__backward": "fp32",
            "train__steps": 6,
            "train__checkpoint_every": 3,
            **changes,
        }
    )


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def accuracies(outcome: Any) -> list[float]:
    return [r.accuracy for r in outcome.evaluations()]


def momentum(outcome: Any) -> dict[str, Tensor]:
    found = {}
    for worker in outcome.workers:
        found |= worker.update.optimizer.state_tensors()
    return found
