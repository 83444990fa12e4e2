"""A checkpoint in one process: numbers that JSON can hold, errors that name the checkpoint."""

import json
import math
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire.data import Corpus
from thinwire.engine import Settings
from thinwire.engine.build import StageBuilder
from thinwire.engine.checkpoint import Shard, commit, partial_folder, sealed, write_shard
from thinwire.errors import CheckpointError
from thinwire.inference import Model
from thinwire.report import PlainDisplay
from thinwire.report.metrics import without_nan
from thinwire.train import prepare_corpus


@pytest.fixture
def save(
    make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[float], Path]:
    """A checkpoint of a fresh model whose logits are scaled by a factor."""
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))

    def make(factor: float) -> Path:
        settings = make_settings(pipeline__stages=1)
        builder = StageBuilder(settings, torch.device("cpu"))
        stage = builder.build(0)
        builder.initialise(stage)
        tensors = {name: p.detach() for name, p in stage.global_parameters().items()}
        tensors["lm_head.weight"] *= factor
        corpus: Corpus = prepare_corpus(settings, PlainDisplay(StringIO()))
        facts = {
            "settings": settings.to_plain(),
            "corpus": corpus.fingerprint,
            "weight_version": 0,
            "basis_version": 0,
        }
        run = tmp_path / "run"
        shard = write_shard(partial_folder(run, 1), 0, tensors)
        return commit(run, 1, [shard], facts, corpus.tokenizer())

    return make


def test_perplexity_is_e_to_the_loss(save: Callable) -> None:
    found = Model(save(1.0), "cpu").evaluate(PlainDisplay(StringIO()))
    assert found["perplexity"] == math.exp(found["valid_loss"])
    assert without_nan(found) == found


@pytest.fixture
def trained(
    make_settings: Callable[..., Settings],
    run_in_threads: Callable,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[Path, float]]:
    """A run in three stages: its last checkpoint, and the loss that it measured then."""
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))

    def make(**changes: Any) -> tuple[Path, float]:
        settings = make_settings(pipeline__stages=3, train__steps=2, **changes)
        prepare_corpus(settings, PlainDisplay(StringIO()))
        outcome = run_in_threads(settings)
        reports = outcome.shards()[2]
        facts = {
            "settings": settings.to_plain(),
            "corpus": corpus.fingerprint,
            **reports[0]["versions"],
        }
        shards = [Shard(**report["shard"]) for report in reports]
        folder = commit(tmp_path / "run", 2, shards, facts, corpus.tokenizer())
        return folder, outcome.valid_losses()[-1]

    return make


def measured(folder: Path, compression: bool) -> float:
    found = Model(folder, "cpu", compression).evaluate(PlainDisplay(StringIO()))
    assert found["compression"] == ("on" if compression else "off")
    return found["valid_loss"]


def test_compression_on_is_what_training_measured(trained: Callable) -> None:
    folder, loss = trained(codec__forward="randk(0.5)+ef21", codec__cuts=["1: forward=int4"])
    assert measured(folder, True) == pytest.approx(loss, abs=1e-12)
    assert abs(measured(folder, False) - loss) > 1e-7
    text = Model(folder, "cpu").generate("stage ", 5, temperature=0, top_k=0, seed=0)
    assert text.startswith("stage ") and len(text) > len("stage ")


def test_a_narrow_boundary_stays_with_compression_off(trained: Callable) -> None:
    folder, loss = trained(codec__forward="fp64", boundary__mode="projected", boundary__rank=4)
    assert measured(folder, True) == measured(folder, False) == pytest.approx(loss, abs=1e-12)


def test_a_loss_too_high_for_a_perplexity_is_still_a_loss(save: Callable) -> None:
    found = Model(save(1e5), "cpu").evaluate(PlainDisplay(StringIO()))
    assert 710 < found["valid_loss"] < math.inf
    assert found["perplexity"] == math.inf
    assert json.loads(json.dumps(without_nan(found), allow_nan=False))["perplexity"] is None


def test_settings_that_no_longer_parse_name_the_checkpoint(save: Callable) -> None:
    folder = save(1.0)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["settings"]["model"]["wings"] = 2
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))
    with pytest.raises(CheckpointError, match=r"step-00000001.manifest\.json cannot be used"):
        Model(folder, "cpu")
