"""What was measured stays apart from what was simulated."""

import pytest

from thinwire.errors import ConfigError
from thinwire_lab.arms import check_arms
from thinwire_lab.bandwidth import Speeds, Study, boundaries, incomparable, table, verdict

ARMS = {"dense": {"mode": "dense", "rank": 0}, "thin": {"mode": "subspace", "rank": 8}}


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


def test_a_verdict_keeps_measured_and_simulated_apart_and_says_where_they_disagree():
    assert verdict(speeds(60.0)) == (
        "Measured: thin is 1.20x dense at 80 Mbps (0.60 of its unlimited rate). "
        "Simulated: thin is at least 1.05x dense up to 10 Mbps. "
        "The two disagree, so trust the measurement: "
        "thin at 80 Mbps: 1.20x measured, 1.01x simulated."
    )
    assert "disagree" not in verdict(speeds(50.0))


def test_a_cut_that_pays_without_a_link_shows_that_compute_times_do_not_compare():
    found = speeds(60.0)
    assert incomparable(found) == ""
    found["thin"]["simulated"][0.0] = 120.0
    assert "without a rate limit thin is 1.20x as fast as dense" in incomparable(found)


def test_no_column_mixes_the_two(tmp_path):
    study = Study({"optim": {"warmup": 2}}, ARMS, [80.0], 5, str(tmp_path))
    rows = table(study, speeds(60.0))
    ten, eighty, unlimited = (row for row in rows if row["mode"] == "thin")
    assert [row["link"] for row in (ten, eighty, unlimited)] == ["10 Mbps", "80 Mbps", "unlimited"]
    assert ten["measured tokens/s"] is ten["measured, hours to 1B tokens"] is None
    assert ten["simulated, x dense"] == 9 and eighty["measured, x dense"] == 1.2
    assert eighty["measured, hours to 1B tokens"] == 1e9 / 60 / 3600
    assert eighty["simulated, hours to 1B tokens"] == 1e9 / 96 / 3600


def test_every_rank_is_measured_and_what_measurements_override_is_refused(tmp_path):
    arms = boundaries(["dense", "subspace"], [4, 8])
    assert list(arms) == ["dense", "subspace k=4", "subspace k=8"]
    assert list(boundaries(["subspace"], [4])) == ["dense", "subspace"]
    base = {"pipeline": {"stages": 2}, "link": {"mbps_up": 3.0}, "optim": {"warmup": 2}}
    study = Study(base, arms, [80.0], 5, str(tmp_path))
    check_arms(study.arms(), base, ["optim.warmup=2"])
    with pytest.raises(ConfigError, match=r"--set link.mbps_up=3: .* itself: use --mbps"):
        check_arms(study.arms(), base, ["link.mbps_up=3"])
