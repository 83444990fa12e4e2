"""The grid, the rules that judge findings, what an arm measures, and tiny studies of each task."""

import csv
import json
from typing import Any

import numpy as np
import pytest
import torch

from thinwire.cli import main
from thinwire.codec import Leg
from thinwire.engine.feed import Feed
from thinwire.errors import ConfigError
from thinwire_lab import codecs, measure
from thinwire_lab.arms import Arm
from thinwire_lab.chain import Chain
from thinwire_lab.experiment import sheet
from thinwire_lab.findings import (
    FAILS,
    HOLDS,
    OPEN,
    PARTLY,
    RULES,
    SMALL,
    WORST,
    GroundReport,
    Harmed,
    Harms,
    judge,
    outcome,
    too_small,
)
from thinwire_lab.image_chain import ImageSettings
from thinwire_lab.measure import Errors, load_weights
from thinwire_lab.pool import Trained

ALL_GROUNDS = ("cifar", "scratch", "tune")


# --- the grid ---


def entry_of(ground: str, name: str) -> dict[str, Any]:
    return next(entry for entry in codecs.grid(ground) if entry["name"] == name)


def arm_of(ground: str, name: str, seed: int = 0, steps: int = 9, **codec: str) -> Arm:
    return codecs.make_arms(ground, [{**entry_of(ground, name), **codec}], [seed], steps)[0]


@pytest.mark.parametrize("ground", ALL_GROUNDS)
def test_every_arm_can_work(ground):
    base = sheet("codecs")["settings"]["cifar"] if ground == "cifar" else {}
    settings = ImageSettings.of_arm if ground == "cifar" else Arm.settings
    arms = codecs.make_arms(ground, codecs.grid(ground), [0, 1], 100)
    names = [arm.tags["name"] for arm in arms]
    assert names[:2] == ["dense", "dense"] and len(set(names)) == len(names) - 1
    for arm in arms:
        expected = arm.tags["forward"], arm.tags["backward"]
        assert settings(arm, base).codec.names(0) == expected
    core = [arm.tags.get("core", False) for arm in arms]
    assert core == sorted(core, reverse=True), "what decides findings is trained first"
    changes = [str(arm.changes) for arm in arms if arm.seed == 0]
    assert len(set(changes)) == len(changes), "no two arms train alike"


def harms_of(ground: str, given: dict[str, Any], noise: float) -> Harms:
    """Harms of arms by name, with compression at test time and without it or both alike."""
    harms = []
    for name, harm in given.items():
        on, off = harm if isinstance(harm, tuple) else (harm, harm)
        harms.append(Harmed(entry_of(ground, name), on, off))
    return Harms(harms, noise, is_accuracy=ground == "cifar")


def test_arms_are_chosen_by_pattern():
    found = codecs.choose("lm", "tune/topk1*,fw2-bw8", False)
    assert [c["name"] for c in found["scratch"]] == ["dense", "fw2-bw8"]
    assert {c["name"] for c in found["tune"]} >= {"dense", "fw2-bw8", "topk10", "topk10+aqsgd"}
    assert codecs.choose("lm", "tune/*", True)["scratch"] == []
    with pytest.raises(ConfigError, match=r'"topk11" matches none of cifar/dense'):
        codecs.choose("cifar", "topk11", False)


# --- the rules ---

Given = dict[str, float | tuple[float, float]]
MILD: Given = {"topk50": 0.0, "topk30": 0.001, "topk20": 0.002, "topk10": 0.01, "topk5": 0.05}


def verdict(number: int, given: Given, noise: float = 0.001) -> str:
    ground = sheet("codecs")["findings"][number - 1]["grounds"][-1]
    return RULES[number](harms_of(ground, given, noise))[0]


@pytest.mark.parametrize(
    ("number", "given", "wanted"),
    [
        (1, {"fw2-bw8": 0.01, "fw8-bw2": 0.2, "fw4-bw8": 0.0, "fw8-bw4": 0.001}, HOLDS),
        (1, {"fw2-bw8": 0.2, "fw8-bw2": 0.01}, FAILS),
        (1, {"fw2-bw8": 0.2, "fw8-bw2": 0.01, "fw4-bw8": 0.0, "fw8-bw4": 0.1}, PARTLY),
        (1, {"fw2-bw8": 0.011, "fw8-bw2": 0.01}, OPEN),
        (1, {"fw2-bw8": 0.011, "fw8-bw2": WORST}, HOLDS),
        (1, {"fw2-bw8": 0.011}, OPEN),
        (2, MILD, HOLDS),
        (2, {**MILD, "topk5": 0.015}, FAILS),
        (2, {**MILD, "topk10": 0.03}, FAILS),
        (2, {**MILD, "topk20": 0.03}, FAILS),  # the floor is where harm begins
        (2, {"topk10": 0.0}, OPEN),
        (3, {"topk20": (0.0, 0.02), "topk10": (0.0, 0.5)}, HOLDS),
        (3, {"topk50": (0.0, 0.0), "topk10": (0.0, 0.5)}, HOLDS),
        (3, {"topk20": (0.0, 0.001), "topk10": (0.0, 0.5)}, PARTLY),
        (3, {"topk20": (0.02, 0.0), "topk10": (0.0, 0.004)}, FAILS),
        (3, {"topk30": (0.0, 0.5)}, OPEN),
        (4, {"topk10": (0.01, 0.3), "topk10+ef": (0.01, 0.012)}, HOLDS),
        (4, {"topk10": (0.05, 0.3), "topk10+ef": (0.01, 0.012)}, PARTLY),  # it improves
        (4, {"topk10": (0.01, 0.3), "topk10+ef": (0.01, 0.2)}, PARTLY),  # off is worse
        (4, {"topk10": (0.05, 0.3), "topk10+ef": (0.01, 0.2)}, FAILS),
        (4, {"topk10": (0.01, 0.3), "topk10+ef": (0.8, 0.8)}, PARTLY),  # nothing was learned
        (4, {"topk10": (0.01, 0.3)}, OPEN),
        (5, {**MILD, "topk30+aqsgd": 0.002, "topk10+aqsgd": 0.2}, HOLDS),
        (5, {**MILD, "topk30+aqsgd": 0.1, "topk10+aqsgd": 0.2}, PARTLY),
        (5, {**MILD, "topk30+aqsgd": 0.0, "topk10+aqsgd": (0.9, 0.0)}, FAILS),
        (5, {**MILD, "topk10+aqsgd": 0.2}, OPEN),
        (6, {**MILD, "topk20": 0.02}, HOLDS),
        (6, {**MILD, "topk20": 0.02, "topk30": 0.02}, PARTLY),
        (6, {"topk30": 0.02, "topk20": 0.0}, FAILS),
        (6, {"topk30": 0.0}, OPEN),
        (7, {**MILD, "topk30-own": 0.2, "topk10-own": WORST}, HOLDS),
        (7, {**MILD, "topk30-own": 0.0, "topk10-own": WORST}, PARTLY),
        (7, {**MILD, "topk30-own": 0.0, "topk10-own": 0.01}, FAILS),
        (7, {"topk10-own": 0.01}, OPEN),
    ],
)
def test_a_verdict_follows_from_figures(number, given, wanted):
    assert verdict(number, given) == wanted


def test_noise_leaves_open_what_it_could_have_made():
    given: Given = {**MILD, "topk10-own": 0.05}
    assert verdict(7, given, noise=0.001) == HOLDS  # worse by 0.04
    assert verdict(7, given, noise=0.03) == SMALL
    assert verdict(7, {**MILD, "topk10-own": 0.01}, noise=0.03) == SMALL
    assert verdict(7, {**MILD, "topk10-own": 0.5}, noise=0.03) == HOLDS
    # One model, tested twice: seeds have no part in that.
    assert verdict(3, {"topk10": (0.0, 0.02)}, noise=0.03) == HOLDS


def test_without_a_second_seed_nothing_is_decided():
    rows = judge("tune", None, too_small(None, 400))
    assert {row["verdict"] for row in rows} == {SMALL} and len(rows) == 6
    assert {row["our figure"] for row in rows} == {"dense has one seed, so the noise is unknown"}


@pytest.mark.parametrize(
    ("noise", "steps", "reason"),
    [
        (0.08, 160, "two seeds of dense differ by 8.0%, more than 2%"),
        (0.001, 16, "16 steps, where at least 100 are needed"),
        (float("nan"), 400, "two seeds of dense differ by nan%"),
        (0.0044, 176, ""),
    ],
)
def test_runs_that_are_too_small_decide_nothing(noise, steps, reason):
    found = too_small(noise, steps)
    assert found.startswith(reason) and bool(found) == bool(reason)
    given = {"topk10": (0.0, 0.9), "topk20": (0.0, 0.9), "topk10-own": (0.9, 0.9)}
    rows = judge("tune", harms_of("tune", given, noise), found)
    verdicts = {row["finding"]: row["verdict"] for row in rows}
    assert verdicts[3] == verdicts[7] == (SMALL if reason else HOLDS)
    assert verdicts[1] == OPEN, "its arms are missing, whatever the size"


def run(name: str, seed: int, loss: float | None, off: float | None = None) -> Trained:
    figures = {
        "loss": loss, "loss_off": loss if off is None else off, "seconds": 1.0,
        "bytes_forward": 10.0, "bytes_backward": 6.0, "ratio": 8.0,
    }  # fmt: skip
    return Trained(arm_of("scratch", name, seed), figures)


def test_arms_are_compared_with_dense_of_their_seed():
    runs = [run("dense", 0, 4.0), run("dense", 1, 4.4), run("topk10", 0, 4.1, 4.4),
            run("topk10", 1, 4.4, 5.28), run("topk5", 0, None)]  # fmt: skip
    report = GroundReport("scratch", runs)
    assert report.noise == pytest.approx(0.4 / 4.2)
    assert report.harms is not None and report.harms.tolerance == pytest.approx(0.8 / 4.2)
    topk = report.harms.of("topk")
    assert topk[10].on == pytest.approx((0.025 + 0.0) / 2)
    assert topk[10].off == pytest.approx((0.1 + 0.2) / 2)
    assert topk[5].on == WORST and report.harms.show(WORST) == "diverged"
    table = {line["arm"]: line for line in report.rows()}
    assert table["topk5"]["loss"] is None and table["dense"]["harm"] == 0
    found = outcome("lm", [report], [])
    json.dumps(found.to_plain(), allow_nan=False)
    alone = GroundReport("scratch", [run("dense", 0, 4.0), run("topk10", 0, 4.4)])
    assert alone.harms is None and alone.arms[1].score == 4.4


# --- what an arm measures ---


@pytest.fixture
def base(make_settings):
    values = make_settings(
        run__precision="fp32", pipeline__microbatches=1, pipeline__schedule="gpipe"
    ).to_plain()
    return {key: values[key] for key in ("model", "data", "pipeline", "optim", "train", "run")}


def test_figures_of_an_arm(base, corpus, tmp_path):
    arm = arm_of("scratch", "fw2-bw8", steps=4)
    keep = tmp_path / "there" / "base.safetensors"
    shared = {"base": base, "data": str(corpus.folder), "from": "", "to": str(keep), "processes": 1}
    figures = measure.train(arm, shared)
    settings = arm.settings(base)
    chain = Chain(settings, Feed(corpus, settings, torch.device("cpu")))
    untrained = chain.evaluate()
    load_weights(chain, keep)
    assert chain.evaluate() == figures["loss"] != untrained
    assert chain.evaluate(compressed=False) == figures["loss_off"] != figures["loss"]
    header = 64 / (8 * 16)  # of 8 sequences of 16 tokens
    assert figures["bytes_forward"] == 2 + 32 * 2 / 8 + header
    assert figures["bytes_backward"] == 2 + 32 + header
    both = figures["bytes_forward"] + figures["bytes_backward"]
    assert figures["ratio"] == pytest.approx(2 * 2 * 32 / both)
    assert "accuracy" not in figures
    assert 0.1 < figures["error_forward"] < 1 and 0 < figures["error_backward"] < 0.02
    # Fine-tuning begins where those weights are: no step at all leaves their loss.
    tuned = measure.train(arm_of("scratch", "fw2-bw8", steps=1), {
        **shared, "from": str(keep), "to": "",
        "base": {**base, "optim": {**base["optim"], "lr": 1e-12}}})  # fmt: skip
    assert tuned["loss"] == pytest.approx(figures["loss"], abs=1e-5)


def test_what_arrives_is_held_against_what_was_sent():
    errors = Errors(steps=1000)
    looked = [step for step in range(1000) if errors.wants(step)]
    assert looked[0] == 500 and len(looked) == 32
    assert sum(Errors(127).wants(step) for step in range(127)) == 32
    sent = torch.tensor([3.0, 4.0])
    errors.add(Leg.FORWARD, sent, sent)
    errors.add(Leg.FORWARD, sent, torch.tensor([3.0, 0.0]))  # off by 4 of 5
    errors.add(Leg.BACKWARD, torch.zeros(2), torch.zeros(2))  # of nothing nothing is lost
    assert errors.mean(Leg.FORWARD) == pytest.approx(0.4)
    assert errors.mean(Leg.BACKWARD) == 0
    assert [step for step in range(3) if Errors(3).wants(step)] == [1, 2]
    assert Errors(3).mean(Leg.FORWARD) is None


# --- tiny studies ---


def options(**values: Any) -> list[str]:
    return [
        part
        for place, value in values.items()
        for part in ("--set", f"{place.replace('__', '.')}={value}")
    ]


def test_a_study_of_language(in_this_process, text_folder, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text("\n".join(f"the {n}th line says {n * n % 97} and no more" for n in range(400)))
    main(["lab", "codecs", "--task", "lm", "--quick", "--steps", "2", "--epochs", "2",
          "--base-steps", "3", "--tune-on", str(other), "--device", "cpu", "--out", str(tmp_path),
          "--arms", "scratch/topk10,tune/topk10+aqsgd,tune/topk10", "--json",
          *options(model__layers=2, model__dim=32, model__heads=4, model__kv_heads=2,
                   model__ffn=48, model__vocab=300, model__context=16, run__threads=1,
                   pipeline__stages=2, train__batch=32, train__eval_batches=1, data__source="text",
                   data__path=text_folder, data__valid_fraction=0.1)])  # fmt: skip
    plain = json.loads(capsys.readouterr().out)
    assert in_this_process == [
        *("scratch/dense  seed 0", "scratch/dense  seed 1", "scratch/topk10  seed 0"),
        "base/dense  seed 0",
        *("tune/dense  seed 0", "tune/dense  seed 1"),
        *("tune/topk10+aqsgd  seed 0", "tune/topk10  seed 0"),
    ]
    assert [(r["finding"], r["ground"]) for r in plain["rows"]] == [
        *((n, "scratch") for n in (1, 3, 4, 7)),
        *((n, "tune") for n in (1, 3, 4, 5, 6, 7)),
    ]
    tested = {(r["finding"], r["ground"]): r["verdict"] for r in plain["rows"]}
    assert {place for place, verdict in tested.items() if verdict != OPEN} == {
        (3, "scratch"),
        (3, "tune"),
    }
    assert tested[3, "scratch"] == SMALL, "after two steps"
    assert plain["holds"] is None and "scratch: 2 steps, where at least" in plain["too_small"]
    arms = {(r["ground"], r["arm"]): r for r in plain["figures"]}
    # AQ-SGD pays for the whole of every first visit, which is half of them here.
    assert arms["tune", "topk10+aqsgd"]["ratio"] < arms["tune", "topk10"]["ratio"] / 2
    with (tmp_path / "codecs-lm" / "figures.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(arms) == 5
    report = (tmp_path / "codecs-lm" / "report.md").read_text()
    assert "2 epochs from a dense model of 3 steps" in report
    assert "a model trained with TopK must be tested with TopK" in report


def test_a_text_that_is_not_there_is_refused_before_anything_trains(
    in_this_process, text_folder, tmp_path
):
    with pytest.raises(SystemExit) as caught:
        main(["lab", "codecs", "--task", "lm", "--quick", "--device", "cpu", "--out", str(tmp_path),
              "--tune-on", str(tmp_path / "nowhere.txt"),
              *options(data__source="text", data__path=text_folder, model__vocab=300,
                       model__context=16, data__valid_fraction=0.1)])  # fmt: skip
    assert caught.value.code == 3 and in_this_process == []


def test_a_study_of_images(in_this_process, tmp_path, capsys):
    generator = np.random.default_rng(0)
    labels = np.arange(96) % 3
    images = generator.integers(0, 60, (96, 8, 8, 3)) + 80 * (labels[:, None, None, None] == 1)
    images[labels == 2, :4] += 90
    sides = {"x_train": images[:64], "x_test": images[64:]}
    np.savez(tmp_path / "set.npz", **{k: v.astype(np.uint8) for k, v in sides.items()},
             y_train=labels[:64], y_test=labels[64:])  # fmt: skip
    main(["lab", "codecs", "--task", "cifar", "--epochs", "3", "--device", "cpu", "--json",
          "--out", str(tmp_path), "--arms", "topk10,fw2-bw8,fw8-bw2",
          *options(data__path=tmp_path / "set.npz", model__dim=4, model__side=8, model__classes=3,
                   train__batch=16, run__threads=1, optim__lr=0.05)])  # fmt: skip
    plain = json.loads(capsys.readouterr().out)
    assert sorted(r["finding"] for r in plain["rows"]) == [1, 2, 3, 4, 5]
    arms = {r["arm"]: r for r in plain["figures"]}
    assert 0.3 < arms["dense"]["accuracy"] <= 1 and arms["dense"]["seeds"] == 2
    widths = [4 * 64, 8 * 16, 16 * 4]  # numbers of an image at the three cuts
    dense = sum(2 * width for width in widths) / 3 + 64 / 16
    assert arms["dense"]["bytes per image forward"] == pytest.approx(dense)
    fewer = sum(2 * width / 8 + 8 / 16 for width in widths) / 3 + 64 / 16
    assert arms["fw2-bw8"]["bytes per image forward"] == pytest.approx(fewer)
    assert (tmp_path / "codecs-cifar" / "plot.png").stat().st_size > 10_000
