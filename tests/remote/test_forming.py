"""The split of a hosted run that goes on from weights: by measures, or as the model learned it."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from thinwire.remote.forming import form
from thinwire.remote.host import host
from thinwire.remote.lobby import Guest
from thinwire.remote.messages import Arrive
from thinwire.remote.opening import HostOptions
from thinwire.remote.seats import Formation, write_formation

import thinwire
from thinwire.data import Corpus
from thinwire.remote import host as host_module
from thinwire.report import PlainDisplay
from thinwire.run.machine import Machine
from thinwire.settings import Settings
from trained import trained

NARROW = {"boundary__mode": "projected", "boundary__rank": 6, "boundary__anchor": "per-stage"}
REMEMBERS = {"codec__forward": "int8+ef"}


def guest(name: str, tflops: float, bf16: float = 0.0, memory_gb: float = 8.0) -> Guest:
    machine = Machine("", tflops, memory_gb, 50.0, 100.0, 5.0, bf16_tflops=bf16)
    return Guest(
        name, arrived=Arrive({"thinwire": thinwire.__version__}, machine, "", "", 0, 0, False)
    )


@pytest.mark.parametrize(
    ("changes", "before", "kept"),
    [
        (NARROW, {}, [2, 2]),
        (NARROW, {"pipeline__split": [3, 1]}, [3, 1]),
        (REMEMBERS, {}, [2, 2]),
        ({}, {"pipeline__split": [3, 1]}, [1, 3]),
    ],
    ids=["narrow", "narrow and uneven", "codecs with memory", "dense: the fast peer gets more"],
)
def test_cuts_stay_where_the_model_learned_them_whoever_comes(
    changes: dict[str, Any], before: dict[str, Any], kept: list[int], corpus: Corpus,
    make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One of these peers is fifty times as fast as the other, and the split is left open."""
    trained(make_settings(**changes, **before, train__steps=2), corpus, tmp_path / "test")
    write_formation(tmp_path / "test", Formation(epoch=1))
    splits = []

    class Formed:
        def __init__(self, settings: Settings, *arguments: Any) -> None:
            here = [guest("ana", 1e-6), guest("ben", 5e-5)]
            formed = form(settings, here, "run", str, arguments[-1])
            assert formed.split is not None, formed.lacking
            splits.append(formed.split.counts)

        def run(self) -> dict[str, Any]:
            return {}

    monkeypatch.setattr(host_module, "_Hosting", Formed)
    monkeypatch.setattr(host_module, "prepare_data", lambda *_: corpus)
    host(make_settings(**changes), HostOptions(), PlainDisplay(io.StringIO()))
    assert splits == [kept]


def test_seats_follow_the_rate_in_which_a_run_computes(
    make_settings: Callable[..., Settings],
) -> None:
    here = [guest("ana", 1e-4, 1e-3), guest("ben", 1e-3, 1e-4)]
    for precision, fast in (("fp32", "ben"), ("bf16", "ana")):
        settings = make_settings(
            model__layers=8, run__precision=precision, codec__forward="bf16", codec__backward="bf16"
        )
        split = form(settings, here, "run", str, False).split
        assert split is not None
        blocks = dict(zip([peer.name for peer in split.peers], split.counts, strict=True))
        assert max(blocks, key=lambda name: blocks[name]) == fast
        assert split.settings.pipeline.split == split.counts
        assert [crossing.is_relayed for crossing in split.crossings] == [True], "no door was found"


def test_peers_without_figures_count_as_equal(make_settings: Callable[..., Settings]) -> None:
    settings = make_settings()
    split = form(
        settings, [guest("ana", 0.0, memory_gb=0.0), guest("ben", 5.0)], "run", str, False
    ).split
    assert split is not None and split.settings == settings.with_window()


def test_what_is_lacking_is_said(make_settings: Callable[..., Settings]) -> None:
    forming = form(
        make_settings(), [guest("a", 1, 1, 1e-5), guest("b", 1, 1, 1e-5)], "run", str, False
    )
    assert forming.split is None and "no split fits" in forming.lacking
