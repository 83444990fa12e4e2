"""A corpus of which only some tokens are learned."""

import numpy as np

from thinwire.data import Corpus
from thinwire.data.corpus import TokenChunk, write_corpus


def with_masks(corpus, folder, learned):
    sides = (("train", corpus.train, None), ("valid", corpus.valid, corpus.valid_sizes))
    chunks = [TokenChunk(side, ids, sizes, learned(len(ids))) for side, ids, sizes in sides]
    write_corpus(folder, "chat", corpus.vocab, chunks, corpus.tokenizer())
    return Corpus.open(folder)


def answers(count):
    """Answers of uneven length, far apart: many windows hold none of them."""
    rng = np.random.default_rng(count)
    return np.repeat(rng.random(count // 5 + 1) < 0.15, 5)[:count]
