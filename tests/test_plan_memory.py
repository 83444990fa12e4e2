"""What `thinwire plan` says of memory: weights, state, tables and what is in flight."""

from collections.abc import Callable

import pytest

from thinwire.engine.build import Weights, stage_weights
from thinwire.plan import stage_memory
from thinwire.settings import Settings

MakeSettings = Callable[..., Settings]
NARROW = {"boundary__mode": "projected", "boundary__rank": 5}


def test_memory_counts_weights_state_and_what_is_in_flight(make_settings: MakeSettings) -> None:
    settings = make_settings()
    parameters = stage_weights(settings, 0).count
    weight_bytes = parameters * 8  # float64

    def memory(in_flight: int, **changes: object) -> int:
        changed = make_settings(**changes)
        return stage_memory(changed, 0, stage_weights(changed, 0), in_flight)

    assert memory(0) == 4 * weight_bytes, "weight, gradient and AdamW's two moments"
    assert memory(0, optim__name="muon") == 3 * weight_bytes
    rounded = memory(0, run__precision="bf16", codec__forward="bf16", codec__backward="bf16")
    assert rounded == parameters * (4 * 4 + 2), "float32, and one copy of the weights in bfloat16"
    one = memory(1) - memory(0)
    assert one > 0 and memory(3) - memory(0) == 3 * one
    kept = settings.microbatch_size * settings.model.context * settings.model.dim * 8
    with_recompute = memory(1, pipeline__recompute=True) - memory(0, pipeline__recompute=True)
    assert with_recompute == 2 * kept, "the input of each of the two blocks"


@pytest.mark.parametrize(
    "kept",
    # The first stage's rows are its stream, the last one's are not taken off again, and a block
    # between two cuts finds its rows again.
    [[1, 3, 1], [1, 1, 1, 1]],
)
def test_recomputing_keeps_the_rows_of_a_table_from_the_first_layer_to_the_last(
    make_settings: MakeSettings, kept: list[int]
) -> None:
    settings = make_settings(
        **NARROW,
        boundary__anchor="per-stage",
        pipeline__recompute=True,
        pipeline__stages=len(kept),
        pipeline__split=[1, 2, 1] if len(kept) == 3 else [],
    )
    stream = settings.microbatch_size * settings.model.context * settings.model.dim * 8
    for stage, streams in enumerate(kept):
        weights = stage_weights(settings, stage)
        empty, one = (stage_memory(settings, stage, weights, count) for count in (0, 1))
        assert one - empty == streams * stream


def test_a_narrow_run_holds_the_fixed_token_table_on_every_stage(
    make_settings: MakeSettings,
) -> None:
    for mode, anchor, held in (
        ("subspace", "fixed", True),
        ("projected", "none", False),
        ("projected", "per-stage", False),
    ):
        narrow = make_settings(boundary__mode=mode, boundary__rank=4, boundary__anchor=anchor)
        table = narrow.model.vocab * narrow.model.dim * 2  # bf16
        for stage in range(2):
            weights = stage_weights(narrow, stage)
            head = stage_memory(make_settings(), stage, Weights(), 0)  # not of any parameter
            expected = 4 * 8 * weights.count + head + (table if held else 0)
            assert stage_memory(narrow, stage, weights, 0) == expected
