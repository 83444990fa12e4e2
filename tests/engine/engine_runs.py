"""Built stages, trained chains and comparisons that many tests of the engine share."""

from typing import Any

import torch

from thinwire.data import Corpus
from thinwire.engine.build import StageBuilder
from thinwire.engine.feed import Feed
from thinwire.model import Stage
from thinwire.settings import Settings
from thinwire_lab.chain import Chain

CPU = torch.device("cpu")


def built(settings: Settings) -> tuple[StageBuilder, list[Stage]]:
    """All stages with their first weights, and what built them."""
    builder = StageBuilder(settings, CPU)
    stages = [builder.build(index) for index in range(settings.pipeline.stages)]
    for stage in stages:
        builder.initialise(stage)
    return builder, stages


def trained_chain(settings: Settings, corpus: Corpus, steps: int | None = None) -> Chain:
    """A chain after some of its steps, or all."""
    device = torch.device(settings.run.device)
    chain = Chain(settings, Feed(corpus, settings, device))
    for step in range(settings.train.steps if steps is None else steps):
        chain.train_step(step)
    return chain


def are_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """The same names, and the same bits under each."""
    return first.keys() == second.keys() and all(
        torch.equal(t, second[n]) for n, t in first.items()
    )


def furthest(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """The largest difference between two sets of weights."""
    assert first.keys() == second.keys()
    return max((first[name] - weight).abs().max().item() for name, weight in second.items())


def assert_same_course(resumed: Any, whole: Any, step: int = 0) -> None:
    """From this step on, the losses and the last weights of the other run, bit for bit."""
    assert resumed.losses() == whole.losses()[step:]
    assert are_equal(resumed.weights(), whole.weights())
