"""What codecs are told, one codec per cut, and one process that computes the same."""

import pytest
from engine_runs import CPU, trained_chain
from stopping import stop_in_the_first_step

from thinwire.codec import Leg
from thinwire.data import Order
from thinwire.engine.feed import Feed
from thinwire.errors import ConfigError

# --- places ---


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


# --- one process computes the same ---


@pytest.mark.parametrize(
    ("schedule", "forward", "backward"),
    [("gpipe", "delta", "int8+ef21"), ("1f1b", "int4+ef21+zstd", "delta")],
)
def test_a_chain_remembers_as_the_pipeline_does(
    schedule, forward, backward, settings_with, run_in_threads, corpus
):
    """Losses, validations and bytes."""
    settings = settings_with(run__precision="fp64", pipeline__schedule=schedule, pipeline__stages=3,
                             codec__forward=forward, codec__backward=backward,
                             codec__cuts=["1: forward=bf16"], train__steps=4,
                             train__eval_every=2)  # fmt: skip
    outcome = run_in_threads(settings)
    chain, losses = trained_chain(settings, corpus, 0), []
    valid = [chain.evaluate()]
    for step in range(4):
        losses.append(chain.train_step(step))
        if step % 2:
            valid.append(chain.evaluate())
    assert losses == pytest.approx(outcome.losses(), abs=1e-9)
    assert valid == pytest.approx(outcome.valid_losses(), abs=1e-9)
    assert abs(chain.evaluate(compressed=False) - chain.evaluate()) > 1e-7
    for cut, leg, stage in [(c, leg, c + (leg is Leg.BACKWARD)) for c in (0, 1) for leg in Leg]:
        last = outcome.steps(stage)[-1]
        sent = last.meters[f"cut-{cut}"]["sent"][leg.name]["payload_bytes"]
        per_token = sent / (4 * settings.tokens_per_step)
        assert chain.cuts[cut].payload_bytes_per_token(leg) == pytest.approx(per_token, rel=1e-3)
