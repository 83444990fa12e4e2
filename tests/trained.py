"""Chains that are trained in this process; and checkpoints for tests, of such and of one tensor."""

import torch

from thinwire.engine.build import choose_device
from thinwire.engine.checkpoint import partial_folder, write_shard
from thinwire.engine.feed import Feed
from thinwire.engine.state import StageState
from thinwire.run.checkpoints import commit
from thinwire_lab.chain import Chain


def trained_chain(settings, corpus, steps=None):
    """A chain after some of its steps, or all."""
    chain = Chain(settings, Feed(corpus, settings, choose_device(settings.run.device, 0)))
    for step in range(settings.train.steps if steps is None else steps):
        chain.train_step(step)
    return chain


def saved_chain(chain, folder, tokenizer=None, corpus=""):
    """The checkpoint of a chain; of the corpus that it was trained on, its fingerprint."""
    shards = []
    for index, update in enumerate(chain.updates):
        state = StageState(update)
        shards.append(write_shard(partial_folder(folder, chain.done), index, state.shard()))
    facts = {"settings": chain.settings.to_plain(), "corpus": corpus,
             "weight_version": chain.done, "basis_version": 0}  # fmt: skip
    return commit(folder, chain.done, shards, facts, tokenizer)


def trained(settings, corpus, folder, steps=None):
    """A checkpoint of a run in this process, at its end or after so many steps."""
    chain = trained_chain(settings, corpus, steps)
    return saved_chain(chain, folder, corpus.tokenizer(), corpus.fingerprint)


def save_tensor(run, step, value=0.0, settings=None, tokenizer=None, others=()):
    """A complete checkpoint of one tensor, which ends with this value, and of others like it."""
    tensors = {name: torch.tensor([0.0, value]) for name in ("w", *others)}
    shard = write_shard(partial_folder(run, step), 0, tensors)
    facts = {"settings": settings or {}, "corpus": "c", "weight_version": 1, "basis_version": 0}
    return commit(run, step, [shard], facts, tokenizer)
