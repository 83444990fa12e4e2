"""A checkpoint in one process: numbers that JSON can hold, errors that name the checkpoint."""

import json
import math
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
import torch

from thinwire.data import Corpus
from thinwire.engine import Settings
from thinwire.engine.build import StageBuilder
from thinwire.engine.checkpoint import commit, partial_folder, write_shard
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


def test_a_loss_too_high_for_a_perplexity_is_still_a_loss(save: Callable) -> None:
    found = Model(save(1e5), "cpu").evaluate(PlainDisplay(StringIO()))
    assert 710 < found["valid_loss"] < math.inf
    assert found["perplexity"] == math.inf
    assert json.loads(json.dumps(without_nan(found), allow_nan=False))["perplexity"] is None


def test_settings_that_no_longer_parse_name_the_checkpoint(save: Callable) -> None:
    folder = save(1.0)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["settings"]["model"]["wings"] = 2
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"step-00000001.manifest\.json cannot be used"):
        Model(folder, "cpu")
