"""Checkpoints that the tests of inference open."""

import functools
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire.data import Corpus, Tokenizer
from thinwire.data.chat import CHATML_TOKENS
from thinwire.engine.build import StageBuilder
from thinwire.engine.checkpoint import partial_folder, write_shard
from thinwire.report import PlainDisplay
from thinwire.run.checkpoints import commit
from thinwire.run.start import prepare_data
from thinwire.settings import Settings


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A place to keep the run of each set of changes: tests may alter their own copies."""
    return functools.cache(lambda changes: tmp_path_factory.mktemp("kept") / "run")


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
        corpus: Corpus = prepare_data(settings, PlainDisplay(StringIO()))
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


@pytest.fixture
def trained(
    make_settings: Callable[..., Settings],
    run_in_threads: Callable,
    corpus: Corpus,
    tmp_path: Path,
    runs: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[Path, float]]:
    """A run in three stages: its last checkpoint, and the loss that it measured then."""
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))

    def make(**changes: Any) -> tuple[Path, float]:
        kept, run = runs(str(changes)), tmp_path / "run"
        if kept.is_dir():
            shutil.copytree(kept, run)
            (folder,) = (run / "checkpoints").glob("step-*")
            return folder, float((run / "loss").read_text())
        settings = make_settings(pipeline__stages=3, train__steps=2, **changes)
        prepare_data(settings, PlainDisplay(StringIO()))
        outcome = run_in_threads(settings)
        reports = outcome.shards()[2]
        facts = {
            "settings": settings.to_plain(),
            "corpus": corpus.fingerprint,
            **vars(reports[0].versions),
        }
        shards = [report.shard for report in reports]
        folder, loss = commit(run, 2, shards, facts, corpus.tokenizer()), outcome.valid_losses()[-1]
        (run / "loss").write_text(repr(loss))
        shutil.copytree(run, kept)
        return folder, loss

    return make


@pytest.fixture
def chatting(
    make_settings: Callable[..., Settings],
    tmp_path: Path,
    text_folder: Path,
    runs: Callable[[str], Path],
) -> Callable[..., Path]:
    """A checkpoint of a fresh model whose tokenizer has ChatML's tokens; its answers are noise."""

    def make(special: tuple[str, ...] = CHATML_TOKENS, **changes: Any) -> Path:
        kept, run = runs(f"chatting {special} {changes}"), tmp_path / "chat"
        if kept.is_dir():
            shutil.copytree(kept, run)
            return next((run / "checkpoints").glob("step-*"))
        settings = make_settings(**{"pipeline__stages": 1, "model__context": 128, **changes})
        builder = StageBuilder(settings, torch.device("cpu"))
        shards = []
        for index in range(settings.pipeline.stages):
            stage = builder.build(index)
            builder.initialise(stage)
            tensors = {name: p.detach() for name, p in stage.global_parameters().items()}
            shards.append(write_shard(partial_folder(run, 0), index, tensors))
        texts = [path.read_text() for path in sorted(text_folder.iterdir())]
        tokenizer = Tokenizer.train(texts, settings.model.vocab, special)
        facts = {"settings": settings.to_plain(), "corpus": "", "weight_version": 0,
                 "basis_version": 0}  # fmt: skip
        folder = commit(run, 0, shards, facts, tokenizer)
        shutil.copytree(run, kept)
        return folder

    return make
