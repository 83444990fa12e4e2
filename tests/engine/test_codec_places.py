"""What codecs are told, with one codec per cut."""

import pytest
from engine_runs import CPU, stop_in_the_first_step

from thinwire.codec import Leg
from thinwire.data import Order
from thinwire.engine.feed import Feed
from thinwire.errors import ConfigError


def test_places_name_the_cut_the_seed_the_examples_and_whether_it_is_training(
    settings_with, run_in_threads, corpus
):
    settings = settings_with(pipeline__stages=3, run__seed=7, codec__forward="by-example",
                             codec__cuts=["1: forward=delta"], train__steps=400,
                             train__eval_every=0)  # fmt: skip
    outcome = run_in_threads(settings, prepare_worker=stop_in_the_first_step)
    order = Order(corpus.train, settings.model.context, 8, 4, 7)
    below, middle, above = outcome.workers
    pairs = [(below.above, middle.below), (middle.above, above.below)]
    for cut, (lower, upper) in enumerate(pairs):
        for leg in Leg:
            seen = lower.codecs[leg].places
            assert upper.codecs[leg].places == seen
            assert {(p.leg, p.cut, p.seed) for p in seen} == {(leg, cut, 7)}
            trained = [p for p in seen if p.training]
            assert sorted((p.step, p.microbatch) for p in trained) == [(0, m) for m in range(4)]
            for place in trained:
                examples = tuple(order.microbatch(0, place.microbatch).examples_B.tolist())
                assert place.examples == (examples if cut == 0 else None)
            validated = [p for p in seen if not p.training]
            assert {p.step for p in validated} == ({0} if leg is Leg.FORWARD else set())
            assert all(p.examples is None for p in validated)


def test_examples_that_never_come_back_are_not_remembered(settings_with, corpus):
    windows = Feed(corpus, settings_with(), CPU).example_count
    once = windows // 8
    for leg in ("forward", "backward"):
        changes = {f"codec__{leg}": "by-example"}
        Feed(corpus, settings_with(train__steps=once + 1, **changes), CPU)
        with pytest.raises(ConfigError, match=rf"none does: train.steps = {once} .* each once"):
            Feed(corpus, settings_with(train__steps=once, **changes), CPU)
        Feed(corpus, settings_with(train__steps=once, pipeline__stages=1, **changes), CPU)
    one_cut = {"pipeline__stages": 3, "codec__cuts": ["1: backward=by-example"]}
    with pytest.raises(ConfigError, match="by-example remembers each training example"):
        Feed(corpus, settings_with(train__steps=once, **one_cut), CPU)
