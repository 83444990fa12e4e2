"""A tiny grid trained in processes, and what tables and verdicts make of runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from thinwire.data import Corpus
from thinwire.errors import ConfigError
from thinwire.settings import Settings
from thinwire_lab import convergence as lab
from thinwire_lab.arms import Arm, Values, ground_of
from thinwire_lab.decide import compared, gap_to_dense, noise_of
from thinwire_lab.outcome import write_outcome
from thinwire_lab.pool import Session, Trained, train_arms


@pytest.fixture
def base(make_settings: Callable[..., Settings]) -> Values:
    values = make_settings(pipeline__microbatches=1, pipeline__schedule="gpipe").to_plain()
    return {key: values[key] for key in ("model", "data", "pipeline", "codec", "train", "run")}


def train(arms: list[Arm], base: Values, corpus: Corpus, session: Session) -> list[Trained]:
    return train_arms(arms, ground_of(arms[0], base, corpus, points=3), session)


def test_only_arms_of_the_same_ground_count_as_trained(
    base: Values, corpus: Corpus, tmp_path: Path
) -> None:
    arms = lab.grid([], [], [1e-2], [2], [0], 1)
    said: list[str] = []
    first = Session(tmp_path / "log.jsonl", 1, said.append)
    (run,) = train(arms, base, corpus, first)
    read = Session(first.log, 0, said.append)
    assert train(arms, base, corpus, read) == [run]
    assert said[-1].startswith("1 arms, 1 of them")
    for change in ({"optim": {"weight_decay": 0.2}}, {"codec": {"forward": "int8"}}):
        assert train(arms, {**base, **change}, corpus, read) == []
    lr, stages = {"optim": {"lr": 0.5}}, {"pipeline": {**base["pipeline"], "stages": 4}}
    for change in (lr, stages):  # of the arm, and so not of the ground
        assert train(arms, {**base, **change}, corpus, read) == [run]


def test_variants_of_modes() -> None:
    modes = ["subspace+moved500", "projected+per-stage", "subspace+fixed"]
    dense, moved, tables, fixed = lab.grid(modes, [8], [1e-3], [4], [0], 50)
    assert dense.label == "dense" and moved.label == "subspace k=8 moved500"
    assert moved.get("boundary.basis_update_every") == 500
    assert tables.get("boundary.anchor") == "per-stage"
    assert fixed.get("boundary.anchor") == "fixed" and moved.get("boundary.anchor") == "auto"
    for wrong in ("subspace+moved", "subspace+movedx", "subspace+fast"):
        with pytest.raises(
            ConfigError, match=r"--modes .*: a variant is one of fixed, per-stage, embedding"
        ):
            lab.grid([wrong], [8], [1e-3], [4], [0], 50)


@pytest.mark.slow  # test_recipe_arms.py trains a grid too
def test_a_grid_is_trained_and_reported(base: Values, corpus: Corpus, tmp_path: Path) -> None:
    arms = lab.grid(["projected"], [4], [1e-2], [2], [0], 3)
    rows = train(arms, base, corpus, Session(tmp_path / "log.jsonl", 2, print))
    assert {row.arm.label for row in rows} == {"dense", "projected k=4"}
    assert all(len(row.figures["curve"]) == 4 for row in rows)
    assert all(row.loss == row.figures["curve"][-1][1] for row in rows)
    found = lab.outcome(rows, base, 1e12)
    dense, narrow = found.rows
    assert dense["gap"] == 0 and narrow["ratio"] > dense["ratio"]
    assert "projected k=4" in found.verdict
    assert found.holds is None and found.too_small == "3 steps, where at least 200 are needed"
    assert write_outcome(found, tmp_path).joinpath("report.md").exists()


BYTES = {"bytes_forward": 9.0, "bytes_backward": 9.0, "ratio": 8.0}


def trained(
    mode: str, rank: int, loss: float | None, lr: float = 1e-3, seed: int = 0, steps: int = 400
) -> Trained:
    narrow = lab.grid([mode], [rank], [lr], [2], [seed], steps)
    return Trained(narrow[mode != "dense"], {**BYTES, "loss": loss, "curve": [[0, 9], [8, 7]]})


def test_the_best_rate_over_seeds_counts_and_what_diverged_does_not() -> None:
    runs = [
        trained("projected", 24, 5.0, lr=1e-3, seed=0),
        trained("projected", 24, 6.0, lr=1e-3, seed=1),
        trained("projected", 24, 5.2, lr=2e-3, seed=0),
        trained("projected", 24, None, lr=4e-3, seed=0),
    ]
    assert lab.best_by_method(runs) == {(2, 400, "projected k=24"): [runs[2]]}


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
    runs = [trained("dense", 0, loss, seed=n, steps=steps) for n, loss in enumerate(dense)]
    if narrow is not None:
        runs.append(trained("projected", 4, narrow, steps=steps))
    found = lab.outcome(runs, base, 1e12)
    assert found.holds is holds and found.too_small.startswith(reason)
    assert found.conclusion.startswith(
        {True: "Holds. ", False: "Does not hold. ", None: "Too small to decide: "}[holds]
    )
    assert any(
        "wire's cast moved a loss after 400 steps by up to 0.8%" in note for note in found.notes
    )


def test_gaps_are_against_dense_of_the_same_seed() -> None:
    def run(seed: int, loss: float) -> Trained:
        return Trained(Arm("", seed, 1), {**BYTES, "loss": loss})

    dense = [run(0, 4.0), run(1, 5.0)]
    assert gap_to_dense([run(1, 5.5)], dense) == pytest.approx(0.1)
    assert gap_to_dense([run(7, 5.4)], dense) == pytest.approx(0.2)
    assert noise_of(compared(dense, dense)) == pytest.approx(1 / 4.5)
    assert noise_of(compared(dense[:1], dense)) is None and noise_of(None) is None
