"""The pipeline computes what one process computes, whatever the split, schedule and window."""

import pytest
from engine_runs import assert_same_course, furthest
from plain import TOLERANCE, plain_loop

from settings_values import EXACT, narrow


@pytest.mark.parametrize(
    ("stages", "schedule", "window"),
    [(1, "gpipe", 0), (1, "1f1b", 0), (2, "gpipe", 0), (2, "1f1b", 0), (2, "1f1b", 1),
     (2, "1f1b", 4), (4, "gpipe", 0), (4, "1f1b", 0), (4, "1f1b", 2), (4, "1f1b", 3)],
)  # fmt: skip
def test_pipeline_equals_plain_loop(
    stages, schedule, window, make_settings, run_in_threads, corpus
):
    settings = make_settings(
        pipeline__stages=stages, pipeline__schedule=schedule, pipeline__window=window
    )
    losses, weights = plain_loop(settings, corpus)
    outcome = run_in_threads(settings)
    assert outcome.losses() == pytest.approx(losses, abs=TOLERANCE)
    assert furthest(outcome.weights(), weights) < TOLERANCE


def test_a_narrower_codec_is_not_exact(make_settings, run_in_threads, corpus):
    """The failing side: the tolerance would notice if a tensor were rounded on the wire."""
    losses, _ = plain_loop(make_settings(), corpus)
    rounded = run_in_threads(make_settings(codec__forward="bf16", codec__backward="bf16"))
    assert abs(rounded.losses()[0] - losses[0]) > TOLERANCE
    assert rounded.losses()[0] == pytest.approx(losses[0], rel=1e-2)


LINKS = {"link__emulate": True, "link__latency_ms": 3, "link__jitter_ms": 2}


@pytest.mark.parametrize("changes", [{"pipeline__recompute": True}, LINKS])
def test_recomputation_and_emulated_links_change_times_not_numbers(
    changes, make_settings, run_in_threads
):
    plain = run_in_threads(make_settings(pipeline__stages=4))
    assert_same_course(run_in_threads(make_settings(pipeline__stages=4, **changes)), plain)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_split_does_not_change_a_bit(optimizer, make_settings, run_in_threads):
    """With tensors sent as they are, 1 to 4 stages, also uneven, give the same float32 weights."""
    changes = {**EXACT, "optim__name": optimizer}
    first = run_in_threads(make_settings(pipeline__stages=1, **changes))
    for split in ([2, 2], [1, 3], [3, 1], [1, 2, 1], [1, 1, 1, 1]):
        own = {"pipeline__stages": len(split), "pipeline__split": split}
        other = run_in_threads(make_settings(**own, **changes))
        assert_same_course(other, first)
        assert other.valid_losses() == first.valid_losses()


@pytest.mark.parametrize("kind", ["own tables and memory", "a moving basis", "shared rows"])
def test_the_window_does_not_change_a_bit(kind, make_settings, run_in_threads):
    """One, two or all microbatches in flight: the same losses and float32 weights, also where
    codecs remember what crossed, a basis moves, or rows of an embedding are shared.
    """
    changes = {
        "own tables and memory": {**narrow("projected"), "codec__forward": "int8+ef21",
                                  "codec__backward": "int4+ef21"},
        "a moving basis": {**narrow("subspace", basis_update_every=2), "codec__forward": "int8",
                           "codec__backward": "int8"},
        "shared rows": {**narrow("subspace", anchor="embedding", row_tokens=20, row_steps=2),
                        "optim__name": "adamw"},
    }[kind]  # fmt: skip
    own = {**EXACT, "pipeline__stages": 4, **changes}
    first, *others = [run_in_threads(make_settings(pipeline__window=w, **own)) for w in (1, 2, -1)]
    for other in others:
        assert_same_course(other, first)
        assert other.valid_losses() == first.valid_losses()


SHAPE = {"model__head_dim": 12, "model__qkv_bias": True, "model__qk_norm": True,
         "model__rope_scaling": "llama3(factor=4, low=1, high=4, context=8)"}  # fmt: skip


def test_biases_norms_of_heads_wide_heads_and_stretched_positions_train_alike(
    make_settings, run_in_threads, corpus
):
    settings = make_settings(**SHAPE, train__steps=3, train__eval_every=0)
    losses, weights = plain_loop(settings, corpus)
    outcome = run_in_threads(settings)
    assert outcome.losses() == pytest.approx(losses, abs=TOLERANCE)
    assert furthest(outcome.weights(), weights) < TOLERANCE
    assert any(name.endswith("q_proj.bias") and w.any() for name, w in weights.items())


def test_bf16_autocast_stays_near(make_settings, run_in_threads):
    exact = run_in_threads(make_settings())
    codecs = {"codec__forward": "bf16", "codec__backward": "bf16"}
    half = run_in_threads(make_settings(run__precision="bf16", **codecs))
    assert half.losses() == pytest.approx(exact.losses(), rel=0.02)
    assert half.losses() != exact.losses()
