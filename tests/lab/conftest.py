"""Logs of arms that nobody trained: losses by a formula."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from thinwire.lab.arms import ground_of
from thinwire.lab.recipe_arms import recipe_grid, with_rates

BASE = {
    "model": {"preset": "tiny", "layers": 8},
    "pipeline": {"microbatches": 2, "window": 2, "schedule": "gpipe"},
    "train": {"batch": 16},
}
RATIOS = {"dense": 1.0, "thin32": 26.0, "thin100": 68.0}
Loss = Callable[[str, float, int], float]
"""From label, tokens and seed to a validation loss."""


class NoData:
    """What names the data of a ground."""

    fingerprint = "none"
    folder = Path("none")


@pytest.fixture
def write_log(tmp_path: Path) -> Callable[..., Path]:
    """Writes convergence.jsonl with recipes of several lengths, whose curves follow the losses."""

    def write(
        loss: Loss, lengths: list[int], seeds: tuple[int, ...] = (0,), stages: int = 4
    ) -> Path:
        base = with_rates(BASE)
        lines = []
        for steps in lengths:
            arms = recipe_grid("thin32,thin100", base, [0.02], [stages], seeds, steps)
            ground = ground_of(arms[0], base, NoData())  # type: ignore[arg-type]
            for arm in arms:
                step = arm.settings(base).tokens_per_step
                points = [part * steps // 10 * step for part in range(1, 11)]
                curve = [(tokens, loss(arm.label, tokens, arm.seed)) for tokens in points]
                figures = {
                    "loss": curve[-1][1],
                    "curve": curve,
                    "ratio": RATIOS[arm.label],
                    "bytes_forward": 10.0,
                    "bytes_backward": 10.0,
                    "seconds": 1.0,
                }
                row = {"arm": asdict(arm), "ground": ground.names, "figures": figures}
                lines.append(json.dumps(row))
        log = tmp_path / "convergence.jsonl"
        log.write_text("\n".join(lines) + "\n")
        return log

    return write
