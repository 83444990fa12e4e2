"""Biases, norms of heads, wide heads and stretched positions train in every mode."""

from collections.abc import Callable
from typing import Any

import pytest
from plain import TOLERANCE, plain_loop

from thinwire.data import Corpus

SHAPE = {
    "model__head_dim": 12,
    "model__qkv_bias": True,
    "model__qk_norm": True,
    "model__rope_scaling": "llama3(factor=4, low=1, high=4, context=8)",
    "train__steps": 3,
    "train__eval_every": 0,
}
NARROW = {"boundary__rank": 8, "boundary__free_layers": 1}


def test_the_pipeline_equals_the_plain_loop(
    make_settings: Callable, run_in_threads: Callable, corpus: Corpus
) -> None:
    settings = make_settings(**SHAPE)
    losses, weights = plain_loop(settings, corpus)
    outcome = run_in_threads(settings)
    assert outcome.losses() == pytest.approx(losses, abs=TOLERANCE)
    for name, weight in outcome.weights().items():
        assert (weight - weights[name]).abs().max() < TOLERANCE, name
    assert any(name.endswith("q_proj.bias") and w.any() for name, w in weights.items())


@pytest.mark.parametrize(
    "changes",
    [
        {"optim__name": "muon"},
        {"boundary__mode": "subspace", **NARROW},
        {"boundary__mode": "reparam", **NARROW},
    ],
    ids=str,
)
def test_other_numbers_of_stages_agree(
    changes: dict[str, Any], make_settings: Callable, run_in_threads: Callable
) -> None:
    two = run_in_threads(make_settings(**SHAPE, **changes))
    four = run_in_threads(make_settings(**SHAPE, **changes, pipeline__stages=4))
    assert two.losses() == pytest.approx(four.losses(), abs=TOLERANCE)
    assert two.losses()[-1] < two.losses()[0]
    weights = four.weights()
    for name, weight in two.weights().items():
        assert (weight - weights[name]).abs().max() < TOLERANCE, name


def test_a_projected_cut_trains_too(make_settings: Callable, run_in_threads: Callable) -> None:
    changes = {"boundary__mode": "projected", "boundary__rank": 8, "boundary__anchor": "per-stage"}
    losses = run_in_threads(make_settings(**SHAPE, **changes)).losses()
    assert losses[-1] < losses[0]
