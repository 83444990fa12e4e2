"""A tiny grid trained in processes, logs of before, and what tables make of rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thinwire.data import Corpus
from thinwire.lab import convergence as lab
from thinwire.lab.arms import Session, Values, gap_to_dense, noise_of
from thinwire.lab.experiment import write_outcome
from thinwire.settings import Settings

BEFORE: Values = {
    "model": {"preset": "160m", "context": 512},
    "pipeline": {"stages": 4, "microbatches": 1, "schedule": "gpipe"},
    "run": {"precision": "bf16", "device": "cuda", "threads": 2, "compile": True},
    "train": {"batch": 32, "eval_batches": 8, "eval_every": 0, "checkpoint_every": -1},
}
LOGGED = {
    "mode": "projected", "rank": 24, "lr": 0.0003, "stages": 4, "seed": 0, "steps": 400,
    "anchor": "auto", "learn": False, "update_every": 0, "base": "00ff5c0a729e",
    "curve": [[0, 10.98], [655360, 7.4]], "loss": 6.0055, "seconds": 101.3,
}  # fmt: skip


@pytest.fixture
def base(make_settings: Callable[..., Settings]) -> Values:
    values = make_settings(pipeline__microbatches=1, pipeline__schedule="gpipe").to_plain()
    return {key: values[key] for key in ("model", "data", "pipeline", "codec", "train", "run")}


def test_logs_of_before_are_recognised(corpus: Corpus, tmp_path: Path) -> None:
    log = tmp_path / "convergence.jsonl"
    log.write_text(json.dumps({**LOGGED, "corpus": corpus.fingerprint}) + "\n")
    arms = lab.grid(["projected"], [24], [3e-4], [4], [0], 400)[1:]
    said: list[str] = []
    session = Session(log, 0, said.append)
    (row,) = lab.train_grid(arms, BEFORE, corpus, session)
    assert row["loss"] == 6.0055 and said[0].startswith("1 arms, 1 of them")
    for change in ({"optim": {"weight_decay": 0.2}}, {"codec": {"forward": "int8"}}):
        assert lab.train_grid(arms, {**BEFORE, **change}, corpus, session) == []


def test_a_grid_is_trained_and_reported(base: Values, corpus: Corpus, tmp_path: Path) -> None:
    arms = lab.grid(["projected"], [4], [1e-2], [2], [0], 3)
    rows = lab.train_grid(arms, base, corpus, Session(tmp_path / "log.jsonl", 2, print))
    assert {row["mode"] for row in rows} == {"dense", "projected"}
    assert all(len(row["curve"]) == 4 and row["loss"] == row["curve"][-1][1] for row in rows)
    found = lab.outcome(rows, base, 1e12)
    dense, narrow = found.rows
    assert dense["gap"] == 0 and narrow["ratio"] > dense["ratio"]
    assert "projected k=4" in found.verdict
    assert found.holds is None and found.too_small == "3 steps, where at least 200 are needed"
    assert write_outcome(found, tmp_path).joinpath("report.md").exists()


def row(**changes: Any) -> dict[str, Any]:
    return {**LOGGED, "corpus": "c", **changes}


def test_the_best_rate_over_seeds_counts_and_what_diverged_does_not() -> None:
    rows = [
        row(lr=1e-3, seed=0, loss=5.0),
        row(lr=1e-3, seed=1, loss=6.0),
        row(lr=2e-3, seed=0, loss=5.2),
        row(lr=4e-3, seed=0, loss=None),
    ]
    ((place, found),) = lab.best_by_method(rows).items()
    assert place == (4, 400, "projected k=24")
    assert (found["lr"], found["loss"], found["seeds"]) == (2e-3, 5.2, 1)


@pytest.mark.parametrize(
    ("steps", "dense", "narrow", "holds", "reason"),
    [
        (400, [4.0, 4.004], 4.02, True, ""),
        (400, [4.0, 4.004], 4.4, False, ""),
        (400, [4.0, 4.1], 4.06, None, "the largest gap is 1.5%, and two seeds of dense differ by"),
        (400, [4.0], 4.4, None, "dense has one seed"),
        (20, [4.0, 4.004], 4.4, None, "20 steps, where at least 200 are needed"),
        (400, [4.0, 4.004], None, None, "no narrow arm"),
    ],
)
def test_a_verdict_needs_steps_and_more_than_noise(
    base: Values,
    steps: int,
    dense: list[float],
    narrow: float | None,
    holds: bool | None,
    reason: str,
) -> None:
    usual = {"mode": "dense", "rank": 0, "stages": 2, "steps": steps}
    rows = [row(**usual, loss=loss, seed=seed) for seed, loss in enumerate(dense)]
    if narrow is not None:
        rows.append(row(mode="projected", rank=4, stages=2, steps=steps, loss=narrow, seed=0))
    found = lab.outcome(rows, base, 1e12)
    assert found.holds is holds and found.too_small.startswith(reason)
    assert found.conclusion.startswith(
        {True: "Holds. ", False: "Does not hold. ", None: "Too small to decide: "}[holds]
    )
    assert any(
        "wire's cast moved a loss after 400 steps by up to 0.8%" in note for note in found.notes
    )


def test_gaps_are_against_dense_of_the_same_seed() -> None:
    dense = [{"seed": 0, "loss": 4.0}, {"seed": 1, "loss": 5.0}]
    assert gap_to_dense([{"seed": 1, "loss": 5.5}], dense) == pytest.approx(0.1)
    assert gap_to_dense([{"seed": 7, "loss": 5.4}], dense) == pytest.approx(0.2)
    assert noise_of(dense) == pytest.approx(1 / 4.5) and noise_of(dense[:1]) is None
