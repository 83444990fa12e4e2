"""Checkpoints for tests: of runs that were trained in this process, and of a single tensor."""

import torch

from thinwire.engine.checkpoint import partial_folder, write_shard
from thinwire.engine.feed import Feed
from thinwire.engine.state import StageState
from thinwire.run.checkpoints import commit
from thinwire_lab.chain import Chain


def trained(settings, corpus, folder, steps=None):
    """A checkpoint of a run in this process, at its end or after so many steps."""
    chain = Chain(settings, Feed(corpus, settings, torch.device("cpu")))
    for step in range(settings.train.steps if steps is None else steps):
        chain.train_step(step)
    shards = []
    for index, update in enumerate(chain.updates):
        state = StageState(settings, update)
        shards.append(write_shard(partial_folder(folder, chain.done), index, state.shard()))
    facts = {"settings": settings.to_plain(), "corpus": corpus.fingerprint,
             "weight_version": chain.done, "basis_version": 0}  # fmt: skip
    return commit(folder, chain.done, shards, facts, corpus.tokenizer())


def save_tensor(run, step, value=0.0, settings=None, tokenizer=None):
    """A complete checkpoint of one tensor, which ends with this value."""
    shard = write_shard(partial_folder(run, step), 0, {"w": torch.tensor([0.0, value])})
    facts = {"settings": settings or {}, "corpus": "c", "weight_version": 1, "basis_version": 0}
    return commit(run, step, [shard], facts, tokenizer)
