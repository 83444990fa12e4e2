"""With tokens that are not learned the loss of a step is its mean over all that are."""

import numpy as np
import pytest
from engine_runs import furthest
from plain import TOLERANCE, plain_loop
from torch.nn import functional as F

from masks import with_masks
from thinwire.data import Corpus, Order, Validation
from thinwire.errors import DataError
from trained import trained_chain


@pytest.mark.parametrize(
    ("stages", "schedule"), [(1, "gpipe"), (2, "1f1b"), (3, "gpipe"), (4, "1f1b")]
)
def test_a_masked_run_equals_a_plain_loop(stages, schedule, make_settings, run_in_threads, masked):
    settings = make_settings(pipeline__stages=stages, pipeline__schedule=schedule)
    losses, weights = plain_loop(settings, masked)
    outcome = run_in_threads(settings, data=masked)
    assert outcome.losses() == pytest.approx(losses, abs=TOLERANCE)
    assert furthest(outcome.weights(), weights) < TOLERANCE
    if stages == 2:
        chain = trained_chain(settings, masked, 0)
        assert [chain.train_step(step) for step in range(4)] == outcome.losses()
        assert chain.evaluate() == outcome.valid_losses()[-1]


def test_the_mean_of_microbatch_means_is_another_number(make_settings, masked):
    """The failing side: what a step's loss would be if every microbatch weighed the same."""
    chain = trained_chain(make_settings(), masked, 0)
    batches = [chain.feed.training(0, number) for number in range(4)]
    means = [chain.loss(chain.logits(b.inputs), b.targets).item() for b in batches]
    counts = [int((batch.targets != -100).sum()) for batch in batches]
    assert len(set(counts)) > 1
    loss = chain.train_step(0)
    assert loss == pytest.approx(np.average(means, weights=counts), abs=TOLERANCE)
    assert abs(loss - np.mean(means)) > 1e-4


def test_a_validation_scores_learned_tokens_alone(make_settings, masked):
    chain = trained_chain(make_settings(train__eval_batches=0), masked, 0)
    feed = chain.feed
    total = count = 0.0
    for number in range(feed.validation_count):
        batch = feed.validation(number)
        logits = chain.logits(batch.inputs).flatten(0, 1).detach()
        total += float(F.cross_entropy(logits, batch.targets.flatten(), reduction="sum"))
        count += int((batch.targets != -100).sum())
    score = chain.score()
    assert score.loss == pytest.approx(total / count, abs=TOLERANCE)
    tokens, size = feed.validation_text
    assert score.count == tokens == count
    assert 0 < size < int(masked.valid_sizes.sum())


def test_every_step_has_something_to_learn(masked):
    """Windows without a learned token are left out, so that no step or microbatch is empty."""
    plain = Order(masked.train, 16, 8, 4, seed=3)
    order = Order(masked.train, 16, 8, 4, seed=3, learned=masked.train_learned)
    assert order.count < plain.count
    for step in range(2 * order.count // 8):
        batches = [order.microbatch(step, number) for number in range(4)]
        assert all((batch.targets_BT != -100).any(axis=1).all() for batch in batches)
        counted = sum(int((batch.targets_BT != -100).sum()) for batch in batches)
        assert order.learned_count(step) == counted > 0
    seen = {int(i) for step in range(order.count // 8) for m in range(4)
            for i in order.examples(step, m)}  # fmt: skip
    assert len(seen) == order.count // 8 * 8, "each of them once in an epoch"


def test_a_corpus_that_teaches_nothing_is_refused(masked):
    nothing = np.zeros(len(masked.train), np.uint8)
    with pytest.raises(DataError, match=r"0 with a token to learn, 8 are needed"):
        Order(masked.train, 16, 8, 4, seed=3, learned=nothing)
    with pytest.raises(DataError, match=r"nothing to validate on: .*0 with a token to learn"):
        Validation(masked.valid, 16, 2, 0, nothing[: len(masked.valid)])


def test_masks_are_part_of_the_fingerprint_and_checked(corpus, masked, tmp_path):
    other = with_masks(corpus, tmp_path / "other", lambda n: np.arange(n) % 2)
    assert len({corpus.fingerprint, masked.fingerprint, other.fingerprint}) == 3
    assert "50.00% of the training tokens learned" in other.summary()
    path = other.folder / "train.loss"
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    with pytest.raises(DataError, match=r"train.loss was altered"):
        Corpus.open(other.folder)
