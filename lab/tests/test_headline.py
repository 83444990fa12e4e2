"""Time to a loss: what is measured, what is simulated, and what they give together."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

import thinwire_lab
from thinwire.errors import ConfigError
from thinwire.schedule import Network, simulate
from thinwire.settings import Settings
from thinwire_lab import headline as lab
from thinwire_lab.experiment import EXPERIMENTS, sheet
from thinwire_lab.logs import grounds_of, methods_of, read_logs
from thinwire_lab.outcome import Outcome, write_outcome
from thinwire_lab.stage_times import costs_of, measure_stages

SLOWER = {"dense": 1.0, "thin32": 1.25, "thin100": 1.5}
LOGS = Path(thinwire_lab.__file__).parent / "logs"
SMALL = "pipeline.stages=4 pipeline.microbatches=8 pipeline.window=8 train.batch=16"
TINY = f"model.preset=tiny run.precision=fp32 {SMALL}"


def loss(label: str, tokens: float, seed: int) -> float:
    """Falls with log tokens; an arm takes so many times the tokens of dense."""
    return 4 - 0.5 * math.log(tokens / SLOWER[label] / 2e5)


def headline(log: Path, sets: str, *more: str) -> Outcome:
    experiment = EXPERIMENTS["headline"]
    changes = [part for one in sets.split() for part in ("--set", one)]
    return experiment.run(experiment.parse("--logs", str(log), *changes, *more), print)


def test_bytes_that_vary_are_named_as_expected() -> None:
    log = LOGS / "recipes-160m-entropy.jsonl"
    found = headline(log, "", "--tflops", "234", "--stages", "4", "--methods", "thin32,thin50")
    rows = {row["method"]: row for row in found.rows if row["link"] == "80 Mbps + 25 ms"}
    assert rows["thin50"]["ratio"] == pytest.approx(48.1, abs=0.1)
    assert rows["thin50"]["times as fast"] > 1.4 * rows["thin32"]["times as fast"]
    (note,) = (note for note in found.notes if "the actual size varies" in note)
    assert note.startswith("thin50: bytes: what these codecs are expected to send")


def test_time_is_simulated_seconds_times_measured_steps(
    write_log: Callable[..., Path], tmp_path: Path
) -> None:
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


def test_several_lengths_count_before_curves_and_a_loss_out_of_reach_is_refused(
    write_log: Callable[..., Path],
) -> None:
    methods = methods_of(grounds_of(read_logs([write_log(loss, [100, 400])]))[0])
    goal = lab.goal_of(methods)
    assert "several lengths" in goal.how and goal.loss == max(m.finals()[-1][1] for m in methods)
    assert goal.tokens["thin100"] == 400 * 2048 > goal.tokens["thin32"] > goal.tokens["dense"]
    along = lab.goal_of(methods, loss=4.5)
    assert "along the curves" in along.how and "single lengths" in along.doubt and not goal.doubt
    with pytest.raises(ConfigError, match=r"dense does not reach loss 0\.1000"):
        lab.goal_of(methods, loss=0.1)


def test_ranks_keep_their_share_of_the_width(write_log: Callable[..., Path]) -> None:
    methods = methods_of(grounds_of(read_logs([write_log(loss, [100])]))[0])
    thin32 = next(method for method in methods if method.label == "thin32")
    settings = lab.crossing_settings(thin32, sheet("headline")["settings"])
    assert settings.model.dim == 1024 and settings.boundary.rank == int(1024 / 12.5)
    assert settings.boundary.table == 1024 and settings.codec.backward == "int4"


def test_compute_is_measured_by_stage_and_read_again(
    write_log: Callable[..., Path], make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    settings = make_settings(
        run__precision="fp32", codec__forward="int8", codec__backward="int4",
        boundary__mode="projected", boundary__rank=4, boundary__anchor="per-stage",
        pipeline__stages=4, optim__name="muon",
    )  # fmt: skip
    times = measure_stages(settings, repeats=2)
    assert len(times) == 4 and times[1] is times[2], "stages of a kind are timed once"
    assert all(row["forward"] > 0 and row["update"] > 0 for row in times)
    step = simulate(settings.schedule(), costs_of(settings, times), Network(80, 80, 0.025))
    assert step.step_seconds > 4 * 0.025
    figures = [
        {"method": method, "stage": stage, "forward": 0.01, "backward": 0.02, "update": 0.001}
        for method in SLOWER
        for stage in range(4)
    ]
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"figures": figures, "machine": "a GPU"}))
    log = write_log(loss, [100, 300], stages=2)
    found = headline(log, TINY, "--times", str(result))
    assert "are of pipelines of 2 stages, the seconds of 4" in found.too_small
    assert len(found.figures) == 12 and any("(a GPU)" in note for note in found.notes)
    result.write_text(json.dumps({"figures": figures[:8], "machine": "a GPU"}))
    with pytest.raises(ConfigError, match="has no times of thin100 in 4 stages"):
        headline(log, TINY, "--times", str(result))
    result.write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a result\.json of lab headline"):
        headline(log, TINY, "--times", str(result))


def test_a_small_model_is_timed_by_stages_and_a_large_one_by_a_block(
    write_log: Callable[..., Path],
) -> None:
    log = write_log(loss, [100])
    found = headline(log, TINY, "--device", "cpu")
    assert any("measured: compute, stage by stage" in note for note in found.notes)
    assert found.holds is None and found.too_small.startswith("100 steps")
    assert {row["method"] for row in found.rows} >= {"dense", "thin32", "thin100"}
    assert len(found.figures) == 3 * 4 and all(row["forward"] > 0 for row in found.figures)
    large = headline(log, f"run.precision=fp32 {SMALL}", "--device", "cpu")
    assert any("measured with one block on this machine" in note for note in large.notes)


def test_arms_of_other_grounds_are_left_out(write_log: Callable[..., Path]) -> None:
    log = write_log(loss, [100])
    other = json.loads(log.read_text().splitlines()[0])
    other["ground"]["data"] = "another"
    log.write_text(log.read_text() + json.dumps(other) + "\n")
    found = headline(log, TINY, "--tflops", "1", "--methods", "thin32")
    assert {row["method"] for row in found.rows if "window" in row} == {"dense", "thin32"}
    assert found.notes[-1] == "left out: 1 arms of other models, texts or settings"
