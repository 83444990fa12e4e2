"""What an arm is, what arms share, what of it a log tells apart; recipes side by side."""

from pathlib import Path

import pytest

from thinwire.errors import ConfigError
from thinwire.settings import make_recipe
from thinwire_lab import arms
from thinwire_lab.arms import Arm, recipe_grid, with_rates
from thinwire_lab.experiment import EXPERIMENTS
from thinwire_lab.pool import read_log


def test_an_arm_trains_its_changes_whatever_it_is_called():
    arm = Arm("thin", 3, 70, {"boundary": {"mode": "subspace", "rank": 8}, "optim": {"lr": 0.01}})
    settings = arm.settings({"model": {"preset": "mini"}, "boundary": {"free_layers": 1}})
    assert (settings.run.seed, settings.train.steps, settings.boundary.rank) == (3, 70, 8)
    assert settings.boundary.free_layers == 1 and settings.model.dim == 256
    assert arm.line == "thin  lr 0.01  seed 3  70 steps"
    assert Arm("x", 0, 5, {"pipeline": {"stages": 8}}).line == "8 stages  x  seed 0  5 steps"
    assert (arm.get("boundary.rank"), arm.get("codec.forward")) == (8, None)
    assert arm.is_same(Arm("other", 3, 70, arm.changes, {"colour": "red"}))
    assert not arm.is_same(Arm("thin", 3, 71, arm.changes))
    assert not arm.is_same(Arm("thin", 3, 70, {"boundary": {"mode": "subspace", "rank": 4}}))


@pytest.mark.parametrize(
    ("stages", "processes", "told", "threads"),
    [(1, 1, 0, 8), (1, 2, 0, 4), (4, 2, 0, 2), (1, 16, 0, 1), (1, 2, 3, 3)],
)
def test_arms_beside_each_other_share_the_cores(monkeypatch, stages, processes, told, threads):
    for place in ("thinwire.settings.tree", "thinwire_lab.arms"):
        monkeypatch.setattr(f"{place}.machine_cores", lambda: 8)
    arm = Arm("x", 0, 5, {"pipeline": {"stages": stages}})
    assert arm.settings_beside({"run": {"threads": told}}, processes).run.threads == threads


class NoData:
    fingerprint, folder = "none", Path("none")


def test_a_ground_is_named_by_what_matters():
    def named(**values):
        arm = Arm("x", 0, 500, {"optim": {"lr": 0.1}})
        return arms.ground_of(arm, values, NoData()).names["settings"]

    assert named() == {}
    assert named(train={"steps": 70, "keep": 9}, run={"seed": 5, "name": "x"}) == named()
    assert named(optim={"weight_decay": 0.2}) == {"optim.weight_decay": 0.2}
    assert named(model={"preset": "mini"})["model.dim"] == 256
    assert named(run={"precision": "bf16"}) == {"run.precision": "bf16"}
    assert named(codec={"forward": "int8"}) == {"codec.forward": "int8"}


def test_patterns():
    assert arms.split_patterns("a*, int4(group=64,hadamard)/int8 ,b") == [
        "a*",
        "int4(group=64,hadamard)/int8",
        "b",
    ]


BASE = {"model": {"preset": "160m"}, "pipeline": {"microbatches": 1}}


@pytest.mark.parametrize("name", ["thin32", "thin100", "exact32", "dense"])
def test_an_arm_is_what_init_writes(name):
    base = with_rates(BASE)
    grid = recipe_grid(name, base, [6e-4], [4], [0], 200)
    arm = next(a for a in grid if a.label == name)
    found, written = arm.settings(base), make_recipe(name, ["model.preset=160m"]).asked.resolved()
    assert found.boundary.rank == written.boundary.rank
    for section in ("boundary", "codec"):
        assert getattr(found, section) == getattr(written, section)
    assert found.optim == written.optim and found.optim.name == "muon"
    assert found.model == written.model


def test_rates_are_those_of_the_model_unless_set():
    tiny = with_rates({"model": {"preset": "tiny"}, "optim": {"matrix_lr": 9.0}})
    assert (tiny["optim"]["lr"], tiny["optim"]["matrix_lr"]) == (0.02, 9.0)
    adamw = {"model": {"preset": "tiny"}, "optim": {"name": "adamw"}}
    assert with_rates(adamw) == adamw, "rates of Muon are for Muon alone"
    spread = [
        arm.get("model.embed_std")
        for base in ({"model": {"preset": "160m"}}, adamw | {"model": {"preset": "160m"}})
        for arm in recipe_grid("exact32", base, [1e-3], [4], [0], 20)
        if arm.label == "exact32"
    ]
    assert spread == [0.3, None], "as is what goes with them"


def test_settings_behind_a_name_change_that_arm_alone():
    lines = "thin32,thin32 boundary.table=128 codec.backward=int4(group=64,hadamard),thin300"
    dense, plain, changed, thin300 = recipe_grid(lines, BASE, [6e-4], [4], [0], 200)
    assert dense.label == "dense" and plain.get("codec.backward") == "int4"
    assert changed.get("boundary.table") == 128
    assert changed.get("codec.backward") == "int4(group=64,hadamard)"
    assert changed.settings(BASE).boundary.rank == plain.settings(BASE).boundary.rank == 61
    assert thin300.settings(BASE).boundary.rank == 6
    with pytest.raises(ConfigError, match=r"a recipe is one of thin32, .*, dense\+tables"):
        recipe_grid("thin33", BASE, [6e-4], [4], [0], 200)


def test_dense_is_trained_once_and_its_control_with_every_number_of_stages():
    arms = recipe_grid("dense,dense+tables", BASE, [1e-3], [4, 8], [0], 20, dense_seeds=[0, 1])
    assert [(a.label, a.get("pipeline.stages"), a.seed) for a in arms] == [
        ("dense", 4, 0), ("dense", 4, 1), ("dense+tables", 4, 0), ("dense+tables", 8, 0),
    ]  # fmt: skip


def test_recipes_are_compared(text_folder, tmp_path, in_this_process):
    small = ["model.layers=2", "model.dim=32", "model.heads=2", "model.kv_heads=1", "model.ffn=48"]
    small += ["model.vocab=300", "model.context=32", "data.source=text", f"data.path={text_folder}"]
    small += ["data.valid_fraction=0.1", "train.eval_batches=1"]
    delayed = "thin32 pipeline.schedule=1f1b pipeline.delay=1"
    line = "--stages 2 --steps 10 --device cpu --parallel 2"
    sets = [part for one in small for part in ("--set", one)]
    experiment = EXPERIMENTS["convergence"]
    recipes = ["--recipes", f"dense+tables,thin32,{delayed}", "--out", str(tmp_path)]
    options = experiment.parse(*line.split(), *recipes, *sets)
    found = experiment.run(options, print)
    rows = {row["method"]: row for row in found.rows}
    assert list(rows) == ["dense", "dense+tables", "thin32", delayed]
    assert rows[delayed]["ratio"] == rows["thin32"]["ratio"]
    assert rows[delayed]["gap"] != rows["thin32"]["gap"], "it learned from older weights"
    assert rows["dense+tables"]["ratio"] == rows["dense"]["ratio"] < 1 < rows["thin32"]["ratio"]
    assert rows["dense+tables"]["gap to control"] == 0 != rows["thin32"]["gap to control"]
    assert rows["dense"]["seeds"] == 2 and any("gap to control" in note for note in found.notes)
    log = read_log(tmp_path / "convergence.jsonl")
    assert len(log) == 5 and all(len(run.figures["curve"]) == 11 for run in log)
    options = experiment.parse("--recipes", "thin32", "--ranks", "8")
    with pytest.raises(ConfigError, match="leave --modes and --ranks out"):
        experiment.run(options, print)
