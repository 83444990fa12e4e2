"""What a plan expects of the rows of a shared embedding."""

import pytest

from test_plan import RATE, MakeSettings, slow_link
from thinwire.plan import make_plan, plan_text, plan_to_plain
from thinwire.settings.crossing import bytes_per_token, frame_bytes, row_bytes


def test_rows_of_a_shared_embedding_are_counted(make_settings: MakeSettings) -> None:
    shared = {"boundary__mode": "subspace", "boundary__rank": 5, "boundary__anchor": "embedding"}
    settings = slow_link(make_settings, **shared, codec__rows="fp64", boundary__row_steps=10)
    size = row_bytes(settings)
    rows = (size - 64) // (8 * 32)
    assert size == 64 + 8 * 32 * rows and 300 / 10 < rows < 60  # all take turns, few come often
    plan = make_plan(settings, RATE)
    assert plan.costs.row_bytes == [size]
    told = plan_to_plain(plan)["cuts"][0]
    assert told["row_bytes"] == size
    per_token = size / settings.tokens_per_step
    assert f"for rows of the embedding ({per_token:,.1f} bytes per token)" in plan_text(plan)
    fixed = slow_link(make_settings, **{**shared, "boundary__anchor": "fixed"})
    assert row_bytes(fixed) == 0 and "embedding" not in plan_text(make_plan(fixed, RATE))
    frames = sum(frame_bytes(settings)) / settings.tokens_per_microbatch
    assert bytes_per_token(settings) == pytest.approx(frames + 2 * per_token)
    assert bytes_per_token(fixed) == pytest.approx(frames)


@pytest.mark.parametrize(
    "finer", [{"row_tokens": 1}, {"row_steps": 1}, {"row_tokens": 4}, {"row_steps": 20}]
)
def test_finer_choices_of_rows_cost_more(finer: dict, make_settings: MakeSettings) -> None:
    changes = {f"boundary__{key}": value for key, value in finer.items()}
    shared = {"boundary__mode": "subspace", "boundary__rank": 5, "boundary__anchor": "embedding"}
    usual = slow_link(make_settings, **shared)
    chosen = slow_link(make_settings, **shared, **changes)
    assert row_bytes(usual) < row_bytes(chosen) <= 64 + 300 * (32 // 2 + 2)  # all rows, in int4
