"""What a log holds, and what tables and verdicts make of runs."""

import math
from types import SimpleNamespace

import pytest
import torch

from thinwire.errors import ConfigError
from thinwire_lab import convergence as lab
from thinwire_lab.arms import Arm
from thinwire_lab.decide import compared, gap_to_dense, noise_of
from thinwire_lab.measure import copying
from thinwire_lab.pool import Trained


@pytest.fixture
def base(make_settings):
    values = make_settings(pipeline__microbatches=1, pipeline__schedule="gpipe").to_plain()
    return {key: values[key] for key in ("model", "data", "pipeline", "codec", "train", "run")}


def test_variants_of_modes():
    dense, moved, fixed = lab.grid(
        ["subspace+moved500", "subspace+fixed"], [8], [1e-3], [4], [0], 50
    )
    assert dense.label == "dense" and moved.label == "subspace k=8 moved500"
    assert moved.get("boundary.basis_update_every") == 500
    assert fixed.get("boundary.anchor") == "fixed" and moved.get("boundary.anchor") == "auto"
    for wrong in ("subspace+moved", "subspace+movedx", "subspace+fast"):
        with pytest.raises(ConfigError, match=r"--modes .*: a variant is one of fixed, per-stage"):
            lab.grid([wrong], [8], [1e-3], [4], [0], 50)


BYTES = {"bytes_forward": 9.0, "bytes_backward": 9.0, "ratio": 8.0}


def trained(
    mode: str, rank: int, loss: float | None, lr: float = 1e-3, seed: int = 0, steps: int = 400
) -> Trained:
    narrow = lab.grid([mode], [rank], [lr], [2], [seed], steps)
    return Trained(narrow[mode != "dense"], {**BYTES, "loss": loss, "curve": [[0, 9], [8, 7]]})


def test_the_best_rate_over_seeds_counts_and_what_diverged_does_not():
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
def test_a_verdict_needs_steps_and_more_than_noise(base, steps, dense, narrow, holds, reason):
    runs = [trained("dense", 0, loss, seed=n, steps=steps) for n, loss in enumerate(dense)]
    if narrow is not None:
        runs.append(trained("projected", 4, narrow, steps=steps))
    found = lab.outcome(runs, base)
    assert found.holds is holds and found.too_small.startswith(reason)
    assert found.conclusion.startswith(
        {True: "Holds. ", False: "Does not hold. ", None: "Too small to decide: "}[holds]
    )
    assert any(
        "wire's cast moved a loss after 400 steps by up to 0.8%" in note for note in found.notes
    )


def test_gaps_are_against_dense_of_the_same_seed():
    def run(seed, loss):
        return Trained(Arm("", seed, 1), {**BYTES, "loss": loss})

    dense = [run(0, 4.0), run(1, 5.0)]
    assert gap_to_dense([run(1, 5.5)], dense) == pytest.approx(0.1)
    assert gap_to_dense([run(7, 5.4)], dense) == pytest.approx(0.2)
    assert noise_of(compared(dense, dense)) == pytest.approx(1 / 4.5)
    assert noise_of(compared(dense[:1], dense)) is None and noise_of(None) is None


def test_copying_is_what_a_second_saying_gains():
    text = torch.arange(2 * 32).reshape(2, 32)  # no token twice

    def copier(tokens):
        """Knows what followed a token before, and nothing else."""
        logits = torch.zeros(*tokens.shape, text.numel())
        for row, said in enumerate(tokens.tolist()):
            for place, token in enumerate(said):
                for before in (p for p in range(place) if said[p] == token):
                    logits[row, place, said[before + 1]] = 100.0
        return logits

    feed = SimpleNamespace(validation=lambda number: SimpleNamespace(inputs=text))
    chain = SimpleNamespace(feed=feed, done=0, go_to=lambda *place: None, logits=copier)
    assert copying(chain) == pytest.approx(math.log(text.numel()))
    chain.logits = lambda tokens: torch.zeros(*tokens.shape, text.numel())
    assert copying(chain) == 0
