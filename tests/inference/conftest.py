"""Checkpoints that the tests of inference open."""

import pytest

from thinwire.data import Tokenizer
from thinwire.data.chat import CHATML_TOKENS
from thinwire_lab.chain import Chain
from trained import saved_chain, trained_chain


@pytest.fixture
def trained(make_settings, corpus, tmp_path, keep, monkeypatch):
    """A run in three stages: its last checkpoint, and the loss that it measured then."""
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))

    def make(**changes):
        def train(run):
            settings = make_settings(pipeline__stages=3, train__steps=2, **changes)
            chain = trained_chain(settings, corpus)
            saved_chain(chain, run, corpus.tokenizer(), corpus.fingerprint)
            (run / "loss").write_text(repr(chain.evaluate()))

        run = keep(f"trained {changes}", tmp_path / "run", train)
        return next((run / "checkpoints").glob("step-*")), float((run / "loss").read_text())

    return make


@pytest.fixture
def chatting(make_settings, tmp_path, text_folder, keep):
    """A checkpoint of a fresh model whose tokenizer has ChatML's tokens; its answers are noise.

    Its logits are scaled by `factor`.
    """

    def make(special=CHATML_TOKENS, factor=1.0, **changes):
        settings = make_settings(**{"pipeline__stages": 1, "model__context": 128, **changes})

        def write(run):
            chain = Chain(settings)
            chain.stages[0].global_parameters()["lm_head.weight"].data *= factor
            texts = [path.read_text() for path in sorted(text_folder.iterdir())]
            saved_chain(chain, run, Tokenizer.train(texts, settings.model.vocab, special))

        run = keep(f"chatting {special} {factor} {changes}", tmp_path / "chat", write)
        return next((run / "checkpoints").glob("step-*"))

    return make
