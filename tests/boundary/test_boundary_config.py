"""`[boundary]`: what cannot work is refused, with the reason."""

from collections.abc import Callable

import pytest

from thinwire.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "subspace", "rank": 32}, "nothing is saved"),
        ({"mode": "subspace", "rank": 0}, "between 1 and"),
        ({"mode": "dense", "learn": True}, "no basis"),
        ({"mode": "subspace", "rank": 4, "anchor": "trainable"}, 'set it to "auto" or "embedding"'),
        ({"mode": "reparam", "rank": 4, "anchor": "per-stage"}, 'set it to "auto" or "embedding"'),
        (
            {"mode": "projected", "rank": 4, "basis": "calibrated", "anchor": "per-stage"},
            "a model that takes nothing off",
        ),
        ({"mode": "reparam", "rank": 4, "learn": True}, "all stages in one basis"),
        ({"mode": "subspace", "rank": 4, "free_layers": 3}, "only the 2 blocks of the last"),
        ({"mode": "projected", "rank": 4, "free_layers": 1}, "all its weights are free"),
        ({"mode": "projected", "rank": 4, "learn": True}, "per-cut"),
        ({"mode": "projected", "rank": 4, "table": 8}, "no meaning without boundary.anchor"),
        ({"mode": "dense", "table": 8}, "no meaning without boundary.anchor"),
        (
            {"mode": "projected", "rank": 4, "anchor": "trainable", "table": 4096},
            "must lie between 1 and model.dim",
        ),
        (
            {"mode": "projected", "rank": 4, "basis": "per-cut", "basis_update_every": 5},
            "could not follow",
        ),
        ({"mode": "subspace", "rank": 4, "ranks": ["0: 3"]}, "all stages share one basis"),
        ({"mode": "reparam", "rank": 4, "ranks": ["0: 3"]}, "all stages share one basis"),
        ({"mode": "dense", "ranks": ["0: 3"]}, "all channels cross"),
        ({"mode": "projected", "rank": 4, "ranks": ["1: 3"]}, "the cuts here are 0..0"),
        ({"mode": "projected", "rank": 4, "ranks": ["0: 32"]}, r"ranks\[0\] .* between 1 and"),
        ({"mode": "projected", "rank": 4, "ranks": ["0: 0"]}, r"ranks\[0\] .* between 1 and"),
        ({"mode": "projected", "rank": 4, "ranks": ["0: wide"]}, 'must look like "2: 96"'),
        ({"mode": "projected", "rank": 4, "ranks": ["3"]}, 'must look like "2: 96"'),
        ({"mode": "projected", "rank": 4, "ranks": ["0: 3", "0: 2"]}, "listed twice"),
        (
            {"mode": "projected", "rank": 4, "ranks": ["0: 3"], "basis_update_every": 5},
            "leave one of them out",
        ),
        ({"mode": "projected", "ratio": 1.0}, "nothing is saved"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    changes: dict, words: str, make_settings: Callable
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_settings(**{f"boundary__{k}": v for k, v in changes.items()})
