"""Checkpoints that the tests of inference open."""

from io import StringIO

import pytest
import torch

from thinwire.data import Tokenizer
from thinwire.data.chat import CHATML_TOKENS
from thinwire.engine.build import StageBuilder
from thinwire.engine.checkpoint import partial_folder, write_shard
from thinwire.report import PlainDisplay
from thinwire.run.checkpoints import commit
from thinwire.run.start import prepare_data


@pytest.fixture
def trained(make_settings, run_in_threads, corpus, tmp_path, keep, monkeypatch):
    """A run in three stages: its last checkpoint, and the loss that it measured then."""
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))

    def make(**changes):
        settings = make_settings(pipeline__stages=3, train__steps=2, **changes)

        def train(run):
            prepare_data(settings, PlainDisplay(StringIO()))
            outcome = run_in_threads(settings, folder=run)
            outcome.commit(run, 2, corpus)
            (run / "loss").write_text(repr(outcome.valid_losses()[-1]))

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
            builder = StageBuilder(settings, torch.device("cpu"))
            stage = builder.build(0)
            builder.initialise(stage)
            tensors = {name: p.detach() for name, p in stage.global_parameters().items()}
            tensors["lm_head.weight"] *= factor
            shard = write_shard(partial_folder(run, 0), 0, tensors)
            texts = [path.read_text() for path in sorted(text_folder.iterdir())]
            tokenizer = Tokenizer.train(texts, settings.model.vocab, special)
            facts = {"settings": settings.to_plain(), "corpus": "", "weight_version": 0,
                     "basis_version": 0}  # fmt: skip
            commit(run, 0, [shard], facts, tokenizer)

        run = keep(f"chatting {special} {factor} {changes}", tmp_path / "chat", write)
        return next((run / "checkpoints").glob("step-*"))

    return make
