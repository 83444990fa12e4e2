"""Recipes side by side: what their arms set, and a small comparison from start to end."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from thinwire.errors import ConfigError
from thinwire.model import ProjectedBoundary, Space, random_basis
from thinwire.settings import Settings, make_recipe
from thinwire_lab.experiment import EXPERIMENTS
from thinwire_lab.pool import read_log
from thinwire_lab.recipe_arms import recipe_grid, with_rates

BASE = {"model": {"preset": "160m"}, "pipeline": {"microbatches": 1}}


@pytest.mark.parametrize("name", ["thin32", "thin100", "exact32", "dense"])
def test_an_arm_is_what_init_writes(name: str) -> None:
    base = with_rates(BASE)
    grid = recipe_grid(name, base, [6e-4], [4], [0], 200)
    arm = next(a for a in grid if a.label == name)
    found, written = arm.settings(base), make_recipe(name, ["model.preset=160m"]).asked.resolved()
    assert found.boundary.rank == written.boundary.rank
    for section in ("boundary", "codec"):
        assert getattr(found, section) == getattr(written, section)
    assert found.optim == written.optim and found.optim.name == "muon"
    assert found.model == written.model


def test_rates_are_those_of_the_model_unless_set() -> None:
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


def test_settings_behind_a_name_change_that_arm_alone() -> None:
    lines = "thin32,thin32 boundary.table=128 codec.backward=int4(group=64,hadamard),thin300"
    dense, plain, changed, thin300 = recipe_grid(lines, BASE, [6e-4], [4], [0], 200)
    assert dense.label == "dense" and plain.get("codec.backward") == "int4"
    assert changed.get("boundary.table") == 128
    assert changed.get("codec.backward") == "int4(group=64,hadamard)"
    assert changed.settings(BASE).boundary.rank == plain.settings(BASE).boundary.rank == 61
    assert thin300.settings(BASE).boundary.rank == 6
    with pytest.raises(ConfigError, match=r"a recipe is one of thin32, .*, dense\+tables"):
        recipe_grid("thin33", BASE, [6e-4], [4], [0], 200)


def test_dense_is_trained_once_and_its_control_with_every_number_of_stages() -> None:
    arms = recipe_grid("dense,dense+tables", BASE, [1e-3], [4, 8], [0], 20, dense_seeds=[0, 1])
    assert [(a.label, a.get("pipeline.stages"), a.seed) for a in arms] == [
        ("dense", 4, 0), ("dense", 4, 1), ("dense+tables", 4, 0), ("dense+tables", 8, 0),
    ]  # fmt: skip


def test_a_cut_of_full_rank_adds_its_table_and_nothing_else(
    make_settings: Callable[..., Settings],
) -> None:
    cut = ProjectedBoundary(Space(random_basis(16, 16, 0), None), True, (30, 16))
    assert cut.table is not None
    cut.table.data.normal_()
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(30, (2, 5))
    out = cut.decode(cut.encode(x, ids), ids) + cut.known(ids)
    torch.testing.assert_close(out, x + F.embedding(ids, cut.table), rtol=0, atol=1e-12)
    gradient = torch.randn_like(x)
    out.backward(gradient)
    torch.testing.assert_close(x.grad, gradient, rtol=0, atol=1e-12)
    full = {"boundary__mode": "projected", "boundary__rank": 32}
    assert make_settings(**full, boundary__anchor="per-stage").boundary.table == 32
    with pytest.raises(ConfigError, match=r"between 1 and model\.dim - 1 = 31"):
        make_settings(**full)


def test_recipes_are_compared(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    small = ["model.layers=2", "model.dim=32", "model.heads=2", "model.kv_heads=1", "model.ffn=48"]
    small += ["model.vocab=300", "model.context=32", "data.source=text", f"data.path={text_folder}"]
    small += ["data.valid_fraction=0.1", "train.eval_batches=1"]
    line = "--recipes dense+tables,thin32 --stages 2 --steps 10 --device cpu --parallel 2"
    sets = [part for one in small for part in ("--set", one)]
    experiment = EXPERIMENTS["convergence"]
    options = experiment.parse(*line.split(), "--out", str(tmp_path), *sets)
    found = experiment.run(options, print)
    rows = {row["method"]: row for row in found.rows}
    assert list(rows) == ["dense", "dense+tables", "thin32"]
    assert rows["dense+tables"]["ratio"] == rows["dense"]["ratio"] < 1 < rows["thin32"]["ratio"]
    assert rows["dense+tables"]["gap to control"] == 0 != rows["thin32"]["gap to control"]
    assert rows["dense"]["seeds"] == 2 and any("gap to control" in note for note in found.notes)
    log = read_log(tmp_path / "convergence.jsonl")
    assert len(log) == 4 and all(len(run.figures["curve"]) == 11 for run in log)
    options = experiment.parse("--recipes", "thin32", "--ranks", "8")
    with pytest.raises(ConfigError, match="leave --modes and --ranks out"):
        experiment.run(options, print)
