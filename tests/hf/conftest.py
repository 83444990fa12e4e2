"""Checkpoints of small runs in stages, to export."""

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


@pytest.fixture
def trained(
    make_settings: Callable[..., Settings],
    run_in_threads: Callable,
    corpus: Corpus,
    tmp_path: Path,
) -> Callable[..., Path]:
    """The checkpoint of a run in four stages, after three steps in float32."""

    def make(with_tokenizer: bool = True, is_ruined: bool = False, **changes: Any) -> Path:
        exact = {"codec__forward": "fp32", "codec__backward": "fp32", "run__precision": "fp32"}
        values = {"pipeline__stages": 4, "train__steps": 3, **exact, **changes}
        settings = make_settings(**values)
        reports = run_in_threads(settings).shards()[3]
        facts = {
            "settings": settings.to_plain(),
            "corpus": corpus.fingerprint,
            **vars(reports[0].versions),
        }
        tokenizer = corpus.tokenizer() if with_tokenizer else None
        shards = [report.shard for report in reports]
        if is_ruined:
            partial = partial_folder(tmp_path / "run", 3)
            tensors = load_file(partial / shards[-1].file)
            tensors["lm_head.weight"][5, 3] = torch.nan
            shards[-1] = write_shard(partial, len(shards) - 1, tensors)
        return commit(tmp_path / "run", 3, shards, facts, tokenizer)

    return make
