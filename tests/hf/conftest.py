"""Checkpoints of small runs in stages, to export."""

import pytest
import torch

from settings_values import EXACT
from trained import saved_chain, trained_chain


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No hub is asked, and no cache of this machine is read."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def trained(make_settings, corpus, tmp_path, keep):
    """The checkpoint of a run in four stages, after three steps in float32."""

    def make(with_tokenizer=True, is_ruined=False, **changes):
        settings = make_settings(**{"pipeline__stages": 4, "train__steps": 3, **EXACT, **changes})

        def train(run):
            chain = trained_chain(settings, corpus)
            if is_ruined:
                head = chain.stages[-1].global_parameters()["lm_head.weight"]
                head.data[5, 3] = torch.nan
            tokenizer = corpus.tokenizer() if with_tokenizer else None
            saved_chain(chain, run, tokenizer, corpus.fingerprint)

        run = keep(f"hf {with_tokenizer} {is_ruined} {changes}", tmp_path / "run", train)
        return next((run / "checkpoints").glob("step-*"))

    return make
