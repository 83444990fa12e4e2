"""Recipes: each keeps what its name promises, can be planned and trained, and says its cost."""

import math
import re
from pathlib import Path

import pytest

from thinwire.cli import main
from thinwire.plan import make_plan, plan_text
from thinwire.recipes import BEST, RATES, RECIPES
from thinwire.settings import load_settings, make_recipe
from thinwire.settings.file import remarks
from trained import trained, trained_chain

FROM_SEED = [name for name in RECIPES if name != "finetune"]
NARROW = [name for name in FROM_SEED if name != "dense"]
SHORT = (
    *("train.steps=2", "train.eval_batches=1", "run.threads=1", "model.vocab=300"),
    *("model.context=16", "pipeline.microbatches=4", "train.batch=4"),
)


def planned_ratio(name, preset):
    """What `thinwire plan` says of every cut, rows of a shared embedding included."""
    settings = make_recipe(name, [f"model.preset={preset}"]).asked.resolved()
    *_, line = re.findall("each cut, per .*", plan_text(make_plan(settings, 1e12)))
    return float(re.search(r"([\d.]+)x fewer", line)[1])


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("preset", ["160m", "400m", "8b"])
def test_the_plan_keeps_what_the_name_promises(name, preset):
    promised = int(re.sub(r"\D", "", name))
    asked = make_recipe(name, []).asked
    # What zstd leaves is planned as of Gaussian numbers, and rows by Zipf's law; less was sent.
    is_estimate = "zstd" in asked.codec.forward or asked.boundary.shares_embedding
    least = 0.9 if is_estimate else 1.0
    assert least * promised <= planned_ratio(name, preset) < 1.2 * promised


@pytest.mark.parametrize("name", NARROW)
def test_a_recipe_says_what_it_is_at_the_smallest_size(name):
    about = " ".join(make_recipe(name, []).about)
    assert f"(tiny: {math.floor(planned_ratio(name, 'tiny') + 0.5)} times" in about


@pytest.mark.parametrize("name", FROM_SEED)
def test_a_recipe_is_written_planned_and_trained(name, corpus, tmp_path, capsys, monkeypatch):
    """Here; the README trains exact32 and dense in processes."""
    monkeypatch.chdir(tmp_path)
    main(["init", "--recipe", name])
    main(["plan", "run.toml", "--tflops", "1"])
    assert f"recipe {name}" in (shown := capsys.readouterr().out) and "note:" not in shown
    settings = load_settings(Path("run.toml"), list(SHORT))
    chain = trained_chain(settings, corpus, 0)
    before = chain.evaluate()
    losses = [chain.train_step(step) for step in range(settings.train.steps)]
    assert all(map(math.isfinite, losses)) and chain.evaluate() != before


@pytest.mark.parametrize("name", FROM_SEED)
def test_the_file_begins_with_its_cost_and_means_the_recipe(name, tmp_path):
    path = tmp_path / "run.toml"
    main(["init", str(path), "--recipe", name, "--set", "model.preset=160m"])
    head, _, _ = path.read_text().partition("\n[run]")
    assert all(line.startswith("#") for line in head.splitlines() if line)
    assert f"# Recipe {name}:" in head and "seed" in head
    recipe = make_recipe(name, ["model.preset=160m"])
    assert load_settings(path, []) == recipe.asked.resolved()
    optim = recipe.asked.resolved().optim
    assert (optim.name, optim.lr, optim.matrix_lr) == ("muon", 6e-4, 3.0)
    shares = [load_settings(path, [f"train.steps={n}"]).optim.table_lr for n in (1000, 1001)]
    assert shares == [100, 30], "long runs want slower tables"


def test_the_rank_follows_a_model_that_is_chosen_later(tmp_path):
    path = tmp_path / "run.toml"
    main(["init", str(path)])
    assert load_settings(path, []).boundary.rank == 10
    later = load_settings(path, ["model.preset=160m"])
    assert later.boundary.rank == 61
    (stale,) = (remark for remark in remarks(later) if "rates of a recipe" in remark)
    assert 'for model.preset = "tiny", not "160m"' in stale
    assert not remarks(make_recipe(BEST, ["model.preset=160m"]).asked.resolved())


def test_what_goes_with_the_rates_of_a_size_gives_way_to_a_change():
    def spread(*overrides):
        return make_recipe("exact32", list(overrides)).asked.resolved().model.embed_std

    larger = "model.preset=160m"
    assert (spread(larger), spread("model.preset=8b"), spread()) == (0.3, 0.3, 1.0)
    assert spread(larger, "model.embed_std=0.7") == 0.7
    assert spread(larger, "optim.name=adamw") == 0.02, "it was measured with Muon"
    recipe = make_recipe("exact32", [larger, "model.embed_std=0.7", "model.context=64"])
    measured_with = "learning rates and model.qk_norm and model.embed_std are for 160m."
    assert measured_with in " ".join(recipe.about)
    assert recipe.about[-1].endswith("do not apply: model.embed_std=0.7")
    assert "do not apply" not in " ".join(make_recipe("exact32", ["model.embed_std=0.7"]).about)


def test_rates_that_were_not_tuned_for_a_size_are_named_as_such():
    for preset in ("mini", "8b"):
        recipe = make_recipe(BEST, [f"model.preset={preset}"])
        assert recipe.asked.optim.lr == RATES["160m"]["lr"]
        assert "not tuned at this size" in " ".join(recipe.about)
    assert "not tuned at this size" not in " ".join(make_recipe(BEST, []).about)


def test_changes_of_a_recipe_are_named_and_another_optimizer_keeps_its_defaults():
    recipe = make_recipe(BEST, ["optim.name=adamw", "codec.backward=int8", "train.steps=9"])
    assert (recipe.asked.optim.lr, recipe.asked.optim.table_lr) == (3e-3, -1)
    assert recipe.about[-1].endswith("apply: optim.name=adamw, codec.backward=int8")


def test_fine_tuning_starts_from_weights_of_the_same_shape(make_settings, corpus, tmp_path):
    """init takes the shape from the checkpoint."""
    source = trained(make_settings(train__steps=2), corpus, tmp_path / "source")
    path = tmp_path / "tune.toml"
    main(["init", str(path), "--recipe", "finetune", "--init-from", str(source)])
    settings = load_settings(path, [])
    assert settings.train.init_from == str(source)
    assert (settings.boundary.mode, settings.codec.forward) == ("dense", "int8")
    shape = ("layers", "dim", "heads", "kv_heads", "ffn", "vocab", "context")
    of_source = make_settings().model
    assert [getattr(settings.model, k) for k in shape] == [getattr(of_source, k) for k in shape]
    assert settings.optim.name == "adamw" and "Recipe finetune" in path.read_text()
