"""Fits over lengths: they find the trend that was put in, and admit what chance hides."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from thinwire.errors import ConfigError
from thinwire_lab import scaling as lab
from thinwire_lab.experiment import EXPERIMENTS
from thinwire_lab.outcome import Outcome, Row, write_outcome

TOKENS = np.array([1e6, 3e6, 1e7, 3e7])


def test_a_power_law_is_found_again() -> None:
    losses = 2.5 + 3.0 * (TOKENS / TOKENS[0]) ** -0.3
    a, b, c = lab.law(TOKENS, losses)
    assert (a, b, c) == pytest.approx((2.5, 3.0, 0.3), rel=0.05)
    narrow = 2.5 * 1.02 + 3.0 * (TOKENS / TOKENS[0]) ** -0.3
    wanted = (2.55 + 3.0 * 1e3**-0.3) / (2.5 + 3.0 * 1e3**-0.3) - 1
    assert lab.law_gap(TOKENS, losses, narrow, 1e9) == pytest.approx(wanted, abs=2e-3)
    rising = np.array([1.0, 2.0, 3.0, 4.0])
    assert lab.law(TOKENS, rising)[:2] == pytest.approx((2.5, 0.0)), "a loss does not grow"


def report(log: Path, *more: str) -> tuple[Outcome, dict[str, Row]]:
    experiment = EXPERIMENTS["scaling"]
    found = experiment.run(experiment.parse("--logs", str(log), *more), print)
    return found, {row["method"]: row for row in found.rows}


def test_a_trend_is_told_from_chance(write_log: Callable[..., Path], tmp_path: Path) -> None:
    def loss(label: str, tokens: float, seed: int) -> float:
        chance = 0.0002 * (seed if label != "dense" else 0)
        grows = {"dense": 0.0, "thin32": 0.01 + 0.004 * np.log10(tokens / 2e5), "thin100": 0.02}
        return (4 + (tokens / 2e5) ** -0.5) * (1 + grows[label] + chance)

    log = write_log(loss, [100, 300, 1000], seeds=(0, 1))
    found, rows = report(log, "--at", "2.048e7")
    thin32, thin100 = rows["thin32"], rows["thin100"]
    assert thin32["gap per tenfold"] == pytest.approx(0.004, abs=1e-5)
    assert 0 < thin32["from"] < 0.004 < thin32["to"] < 0.005
    assert thin32["trend, predicted"] == pytest.approx(0.0182, abs=2e-4)
    assert thin32["trend, from"] < thin32["trend, predicted"] < thin32["trend, to"]
    assert thin100["from"] < 0 < thin100["to"] and thin100["gap, longest"] == pytest.approx(0.0201)
    assert "thin32 (4 stages) grows" in found.verdict
    assert "thin100 (4 stages) neither grows nor shrinks by more than chance" in found.verdict
    assert any("by 10 times the longest" in note for note in found.notes)
    assert any("0.01%, measured between seeds" in note for note in found.notes)
    assert write_outcome(found, tmp_path).joinpath("plot.png").exists()


def test_with_one_seed_the_noise_is_assumed_and_two_lengths_are_too_few(
    write_log: Callable[..., Path],
) -> None:
    def loss(label: str, tokens: float, seed: int) -> float:
        return 4 + 1e5 / tokens + (label != "dense") * 0.1

    found, rows = report(write_log(loss, [100, 200, 400]))
    assert any("assumed: every length has one seed" in note for note in found.notes)
    assert rows["thin32"]["to"] - rows["thin32"]["from"] > 0.01, "little is known"
    with pytest.raises(ConfigError, match="no method has runs of 3 lengths"):
        report(write_log(loss, [100, 200]))
