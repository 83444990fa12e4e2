"""What was measured stays apart from what was simulated; hours to a loss."""

from pathlib import Path

import pytest

from thinwire.errors import ConfigError
from thinwire_lab.arms import check_arms
from thinwire_lab.bandwidth import (
    Speeds,
    Study,
    boundaries,
    figure,
    incomparable,
    table,
    tokens_to_loss,
    verdict,
)
from thinwire_lab.convergence import grid
from thinwire_lab.pool import Trained

ARMS = {"dense": {"mode": "dense", "rank": 0}, "thin": {"mode": "subspace", "rank": 8}}


def curve(mode: str, rank: int, lr: float, points: list[tuple[int, float]]) -> Trained:
    (arm,) = grid([mode], [rank], [lr], [4], [0], 10)[bool(rank) :][:1]
    return Trained(arm, {"curve": points, "loss": points[-1][1], "seconds": 1.0})


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


def speeds(measured_thin: float) -> dict[str, Speeds]:
    return {
        "dense": {
            "measured": {0.0: 100.0, 80.0: 50.0},
            "simulated": {10.0: 10.0, 80.0: 95.0, 0.0: 100.0},
        },
        "thin": {
            "measured": {0.0: 100.0, 80.0: measured_thin},
            "simulated": {10.0: 90.0, 80.0: 96.0, 0.0: 100.0},
        },
    }


def test_a_verdict_keeps_measured_and_simulated_apart_and_says_where_they_disagree() -> None:
    assert verdict(speeds(60.0)) == (
        "Measured: thin is 1.20x dense at 80 Mbps (0.60 of its unlimited rate). "
        "Simulated: thin is at least 1.05x dense up to 10 Mbps. "
        "The two disagree, so trust the measurement: "
        "thin at 80 Mbps: 1.20x measured, 1.01x simulated."
    )
    assert "disagree" not in verdict(speeds(50.0))


def test_a_cut_that_pays_without_a_link_shows_that_compute_times_do_not_compare() -> None:
    found = speeds(60.0)
    assert incomparable(found) == ""
    found["thin"]["simulated"][0.0] = 120.0
    assert "without a rate limit, speeds against dense are thin 1.20x" in incomparable(found)


def test_a_limit_that_makes_a_run_faster_shows_that_the_speeds_are_noise() -> None:
    found = speeds(60.0)
    found["thin"]["measured"][80.0] = 102.0
    assert incomparable(found) == "", "about as fast: the limit does not bind"
    found["thin"]["measured"][80.0] = 104.0
    assert "thin at 80 Mbps is 1.04x as fast as without a limit" in incomparable(found)


def test_no_column_mixes_the_two(tmp_path: Path) -> None:
    study = Study({"optim": {"warmup": 2}}, ARMS, [80.0], 5, str(tmp_path))
    rows = table(study, speeds(60.0), "1B tokens", {"dense": 1e9, "thin": 1e9})
    ten, eighty, unlimited = (row for row in rows if row["mode"] == "thin")
    assert [row["link"] for row in (ten, eighty, unlimited)] == ["10 Mbps", "80 Mbps", "unlimited"]
    assert ten["measured tokens/s"] is ten["measured, hours to 1B tokens"] is None
    assert ten["simulated, x dense"] == 9 and eighty["measured, x dense"] == 1.2
    assert eighty["measured, hours to 1B tokens"] == 1e9 / 60 / 3600
    assert eighty["simulated, hours to 1B tokens"] == 1e9 / 96 / 3600
    plot = figure(speeds(60.0), "1B tokens", {"dense": 1e9, "thin": 1e9})
    assert plot.get_suptitle() and plot.legends and not any(a.get_legend() for a in plot.axes)


def test_every_rank_is_measured_and_what_measurements_override_is_refused(tmp_path: Path) -> None:
    arms = boundaries(["dense", "subspace"], [4, 8])
    assert list(arms) == ["dense", "subspace k=4", "subspace k=8"]
    assert list(boundaries(["subspace"], [4])) == ["dense", "subspace"]
    base = {"pipeline": {"stages": 2}, "link": {"mbps_up": 3.0}, "optim": {"warmup": 2}}
    study = Study(base, arms, [80.0], 5, str(tmp_path))
    check_arms(study.arms(), base, ["optim.warmup=2"])
    with pytest.raises(ConfigError, match=r"--set link.mbps_up=3: .* itself: use --mbps"):
        check_arms(study.arms(), base, ["link.mbps_up=3"])
