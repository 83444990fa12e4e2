"""Hours to a loss: which loss, and after how many tokens a curve reaches it."""

from typing import Any

import pytest

from thinwire.errors import ConfigError
from thinwire.lab.bandwidth import tokens_to_loss

ARMS = {"dense": {"mode": "dense", "rank": 0}, "thin": {"mode": "subspace", "rank": 8}}


def curve(mode: str, rank: int, lr: float, points: list[tuple[int, float]]) -> dict[str, Any]:
    return {
        "mode": mode,
        "rank": rank,
        "lr": lr,
        "stages": 4,
        "seed": 0,
        "steps": 10,
        "anchor": "auto",
        "learn": False,
        "update_every": 0,
        "curve": points,
        "loss": points[-1][1],
        "seconds": 1.0,
    }


def test_every_arm_reaches_the_loss_and_the_best_rate_counts() -> None:
    rows = [
        curve("dense", 0, 1e-3, [(0, 8.0), (100, 6.0), (200, 4.0)]),
        curve("dense", 0, 2e-3, [(0, 8.0), (100, 8.0), (200, 7.0)]),
        curve("subspace", 8, 1e-3, [(0, 8.0), (100, 7.0), (200, 5.0)]),
    ]
    loss, tokens = tokens_to_loss(rows, ARMS)
    assert loss == 5.0
    assert tokens == {"dense": pytest.approx(150), "thin": pytest.approx(200)}


def test_an_arm_without_a_curve_is_refused() -> None:
    with pytest.raises(ConfigError, match="no run of 10 steps of subspace k=8"):
        tokens_to_loss([curve("dense", 0, 1e-3, [(0, 8.0), (100, 6.0)])], ARMS)
