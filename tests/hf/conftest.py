"""Checkpoints of small runs in stages, to export."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from settings_values import EXACT
from thinwire.engine.checkpoint import partial_folder, write_shard


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No hub is asked, and no cache of this machine is read."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def trained(make_settings, run_in_threads, corpus, tmp_path, keep):
    """The checkpoint of a run in four stages, after three steps in float32."""

    def make(with_tokenizer=True, is_ruined=False, **changes):
        settings = make_settings(**{"pipeline__stages": 4, "train__steps": 3, **EXACT, **changes})

        def train(run):
            outcome = run_in_threads(settings, folder=run)
            if is_ruined:
                last, partial = outcome.shards()[3][-1], partial_folder(run, 3)
                tensors = load_file(partial / last.shard.file)
                tensors["lm_head.weight"][5, 3] = torch.nan
                spoilt = replace(last, shard=write_shard(partial, 3, tensors))
                outcome.reports[-1][outcome.reports[-1].index(last)] = spoilt
            outcome.commit(run, 3, corpus, with_tokenizer)

        run = keep(f"hf {with_tokenizer} {is_ruined} {changes}", tmp_path / "run", train)
        return next((run / "checkpoints").glob("step-*"))

    return make
