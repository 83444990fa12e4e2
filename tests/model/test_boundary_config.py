"""`[boundary]`: what cannot work is refused, with the reason."""

from collections.abc import Callable

import pytest

from thinwire.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "subspace", "rank": 32}, "nothing is saved"),
        ({"mode": "subspace", "rank": 0}, "between 1 and"),
        ({"mode": "dense", "anchor": "per-stage"}, "no basis"),
        ({"mode": "dense", "rank": 7}, "7 .*32 channels.*leave it at 0"),
        ({"mode": "reparam", "rank": 4, "anchor": "per-stage"}, 'set it to "auto" or "embedding"'),
        ({"mode": "subspace", "rank": 4, "free_layers": 3}, "only the 2 blocks of the last"),
        ({"mode": "projected", "rank": 4, "free_layers": 1}, "all its weights are free"),
        ({"mode": "projected", "rank": 4, "anchor": "embedding"}, "write outside the basis too"),
        ({"mode": "projected", "rank": 4, "table": 8}, "no meaning without boundary.anchor"),
        ({"mode": "dense", "table": 8}, "no meaning without boundary.anchor"),
        (
            {"mode": "projected", "rank": 4, "anchor": "per-stage", "table": 4096},
            "must lie between 1 and model.dim",
        ),
        ({"mode": "projected", "ratio": 1.0}, "nothing is saved"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    changes: dict, words: str, make_settings: Callable
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_settings(**{f"boundary__{k}": v for k, v in changes.items()})
