"""Time to a loss: what is measured, what is simulated, and what they give together."""

import math
from pathlib import Path

import pytest

import thinwire_lab
from thinwire.errors import ConfigError
from thinwire_lab import headline as lab
from thinwire_lab.experiment import EXPERIMENTS, sheet
from thinwire_lab.logs import grounds_of, methods_of, read_logs
from thinwire_lab.outcome import Outcome, write_outcome

SLOWER = {"dense": 1.0, "thin32": 1.25, "thin100": 1.5}
LOGS = Path(thinwire_lab.__file__).parent / "logs"
TINY = (
    "model.preset=tiny run.precision=fp32 pipeline.stages=4 pipeline.microbatches=8 "
    "pipeline.window=8 train.batch=16"
)


def loss(label: str, tokens: float, seed: int) -> float:
    """Falls with log tokens; an arm takes so many times the tokens of dense."""
    return 4 - 0.5 * math.log(tokens / SLOWER[label] / 2e5)


def headline(log: Path, sets: str, *more: str) -> Outcome:
    experiment = EXPERIMENTS["headline"]
    changes = [part for one in sets.split() for part in ("--set", one)]
    return experiment.run(experiment.parse("--logs", str(log), *changes, *more), print)


def test_time_is_simulated_seconds_times_measured_steps(write_log, tmp_path):
    found = headline(write_log(loss, [100, 300], stages=8), "", "--tflops", "300")
    rows = {(row["link"], row["method"]): row for row in found.rows}
    slow, fast = "80 Mbps + 25 ms", "200 Mbps + 50 ms"
    assert rows[slow, "thin32"]["tokens, x dense"] == pytest.approx(1.25, rel=1e-6)
    assert rows[slow, "thin100"]["tokens, x dense"] == pytest.approx(1.5, rel=1e-6)
    for row in found.rows:
        assert row["seconds"] == pytest.approx(row["steps"] * row["seconds per step"], rel=1e-3)
    dense = rows[fast, "dense"]
    assert dense["steps"] == 2925 and dense["times as fast"] == 1
    # 4,096 bytes of each token cross a middle stage's uplink, 25 MB a second at 200 Mbps
    assert 524_288 * 4096 / 25e6 < dense["seconds per step"] < 100.475
    public = rows[fast, "public: ReparamSSN, k 160"]
    assert round(public["seconds"]) == 181_487 and public["times as fast"] == pytest.approx(
        1.62, abs=0.01
    )
    assert (slow, "public: dense") not in rows
    assert rows[fast, "thin32"]["ratio"] == pytest.approx(32, abs=1)
    assert found.holds and "x faster" in found.verdict
    told = " ".join(found.notes)
    assert "measured: tokens to loss" in told and "simulated: seconds per step, for 203.8M" in told
    assert "compute: 300 TFLOP/s per stage, given" in told
    assert write_outcome(found, tmp_path).joinpath("plot.png").exists()


def test_several_lengths_count_before_curves_and_a_loss_out_of_reach_is_refused(write_log):
    methods = methods_of(grounds_of(read_logs([write_log(loss, [100, 400])]))[0])
    goal = lab.goal_of(methods)
    assert "several lengths" in goal.how and goal.loss == max(m.finals()[-1][1] for m in methods)
    assert goal.tokens["thin100"] == 400 * 2048 > goal.tokens["thin32"] > goal.tokens["dense"]
    along = lab.goal_of(methods, loss=4.5)
    assert "along the curves" in along.how and "single lengths" in along.doubt and not goal.doubt
    with pytest.raises(ConfigError, match=r"dense does not reach loss 0\.1000"):
        lab.goal_of(methods, loss=0.1)


def test_ranks_keep_their_share_of_the_width(write_log):
    methods = methods_of(grounds_of(read_logs([write_log(loss, [100])]))[0])
    thin32 = next(method for method in methods if method.label == "thin32")
    settings = lab.crossing_settings(thin32, sheet("headline")["settings"])
    assert settings.model.dim == 1024 and settings.boundary.rank == int(1024 / 12.5)
    assert settings.boundary.table == 1024 and settings.codec.backward == "int4"


def test_compute_is_measured_with_a_block_where_no_rate_is_given(write_log):
    found = headline(write_log(loss, [100, 300], stages=2), TINY, "--device", "cpu")
    assert "are of pipelines of 2 stages, the seconds of 4" in found.too_small
    assert any("measured with one block on this machine" in note for note in found.notes)
    assert {row["method"] for row in found.rows} >= {"dense", "thin32", "thin100"}
