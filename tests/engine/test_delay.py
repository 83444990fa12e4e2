"""Delayed updates: a step is computed without the update of the step before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import TOLERANCE, plain_loop

from thinwire.data import Corpus
from thinwire.engine.chain import Chain
from thinwire.engine.feed import Feed
from thinwire.errors import ConfigError
from thinwire.settings import Settings

CPU = torch.device("cpu")


@pytest.fixture
def delayed(make_settings: Callable[..., Settings]) -> Callable[..., Settings]:
    """Settings of a tiny exact run with delayed updates."""
    return lambda **changes: make_settings(**{"pipeline__delay": 1, **changes})


def chain_of(settings: Settings, corpus: Corpus, refused: int = -1) -> tuple[Chain, list[float]]:
    """A chain and the losses of its steps; the gradients of one step are spoiled."""
    chain, losses = Chain(settings, Feed(corpus, settings, CPU)), []
    for step in range(settings.train.steps):
        if step == refused:
            update = chain.updates[0].of_step(step)
            update.squared_norms = lambda: [float("nan")]  # type: ignore[method-assign]
        losses.append(chain.train_step(step))
        if step == refused:
            del update.squared_norms
    return chain, losses


def weights_of(chain: Chain) -> dict[str, torch.Tensor]:
    return {name: p for stage in chain.stages for name, p in stage.global_parameters().items()}


def furthest(found: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> float:
    """The largest difference between two sets of weights."""
    assert found.keys() == weights.keys()
    return max((found[name] - weight).abs().max().item() for name, weight in weights.items())


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("refused", [-1, 0, 2])
def test_a_chain_is_a_plain_loop_of_delayed_updates(
    stages: int, refused: int, delayed: Callable, corpus: Corpus
) -> None:
    settings = delayed(pipeline__stages=stages, train__steps=6)
    losses, weights = plain_loop(settings, corpus, delay=True, refused=refused)
    chain, found = chain_of(settings, corpus, refused)
    assert found == pytest.approx(losses, abs=TOLERANCE)
    assert furthest(weights_of(chain), weights) < TOLERANCE


def test_without_delay_training_differs(delayed: Callable, corpus: Corpus) -> None:
    """The failing side: a loop whose updates are not delayed begins alike and goes elsewhere."""
    settings = delayed(pipeline__stages=2, train__steps=3)
    losses, weights = plain_loop(settings, corpus, delay=False)
    chain, found = chain_of(settings, corpus)
    assert found[0] == pytest.approx(losses[0], abs=TOLERANCE)
    assert min(abs(a - b) for a, b in zip(found[1:], losses[1:], strict=True)) > 1e-6
    assert furthest(weights_of(chain), weights) > 1e-6


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"pipeline__schedule": "gpipe"}, "1f1b"),
        ({"boundary__mode": "subspace", "boundary__anchor": "embedding"}, "thin32"),
        ({"boundary__mode": "subspace", "boundary__basis_update_every": 5}, "update_every = 0"),
    ],
)
def test_what_cannot_be_delayed_is_refused(
    changes: dict[str, Any], remedy: str, delayed: Callable
) -> None:
    with pytest.raises(ConfigError, match=r"pipeline.delay = 1") as refused:
        delayed(**{"boundary__rank": 8, **changes} if "boundary__mode" in changes else changes)
    assert remedy in str(refused.value)
