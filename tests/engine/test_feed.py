"""What a stage computes of a batch: as much as asked for, and only what it reads."""

import torch

from thinwire.engine.feed import Feed
from thinwire.settings import TrainConfig


def test_a_validation_left_open_scores_64k_tokens_or_all(corpus, make_settings):
    """By tokens, so that a loss means the same with small and large microbatches."""
    for batch, count in ((8, 2048), (16, 1024)):
        settings = make_settings(train__eval_batches=-1, train__batch=batch)
        assert settings.train.eval_batches == count
        assert count * settings.tokens_per_microbatch == 65_536
        assert settings.relaxed().train.eval_batches == -1
    cpu = torch.device("cpu")
    whole = Feed(corpus, make_settings(train__eval_batches=0), cpu).validation_count
    assert Feed(corpus, make_settings(train__eval_batches=-1), cpu).validation_count == whole
    assert TrainConfig().eval_batches == -1


def test_bytes_are_those_of_the_tokens_that_a_validation_predicts(make_settings, corpus):
    feed = Feed(corpus, make_settings(), torch.device("cpu"), 3)
    tokens, size = feed.validation_text
    tokenizer = corpus.tokenizer()
    assert tokenizer is not None
    targets = [row for i in range(3) for row in feed.validation(i).targets.tolist()]
    assert tokens == sum(map(len, targets)) < len(corpus.valid) / 2
    text = "".join(
        tokenizer.decode([i for i in row if i != tokenizer.end_of_text]) for row in targets
    )
    assert size == len(text.encode()) < corpus.valid_bytes / 2
