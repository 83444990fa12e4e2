"""Checkpoints of small runs in stages, to export."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from thinwire.data import Corpus
from thinwire.engine.checkpoint import partial_folder, write_shard
from thinwire.run.checkpoints import commit
from thinwire.settings import Settings


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No hub is asked, and no cache of this machine is read."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A place to keep the run of each set of changes: tests may alter their own copies."""
    return functools.cache(lambda changes: tmp_path_factory.mktemp("kept") / "run")


@pytest.fixture
def trained(
    make_settings: Callable[..., Settings],
    run_in_threads: Callable,
    corpus: Corpus,
    tmp_path: Path,
    runs: Callable[[str], Path],
) -> Callable[..., Path]:
    """The checkpoint of a run in four stages, after three steps in float32."""

    def make(with_tokenizer: bool = True, is_ruined: bool = False, **changes: Any) -> Path:
        kept, run = runs(f"{with_tokenizer} {is_ruined} {changes}"), tmp_path / "run"
        if kept.is_dir():
            shutil.copytree(kept, run)
            return next((run / "checkpoints").glob("step-*"))
        exact = {"codec__forward": "fp32", "codec__backward": "fp32", "run__precision": "fp32"}
        settings = make_settings(**{"pipeline__stages": 4, "train__steps": 3, **exact, **changes})
        reports = run_in_threads(settings).shards()[3]
        facts = {
            "settings": settings.to_plain(),
            "corpus": corpus.fingerprint,
            **vars(reports[0].versions),
        }
        shards = [report.shard for report in reports]
        if is_ruined:
            partial = partial_folder(run, 3)
            tensors = load_file(partial / shards[-1].file)
            tensors["lm_head.weight"][5, 3] = torch.nan
            shards[-1] = write_shard(partial, len(shards) - 1, tensors)
        found = commit(run, 3, shards, facts, corpus.tokenizer() if with_tokenizer else None)
        shutil.copytree(run, kept)
        return found

    return make
