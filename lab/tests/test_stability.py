"""Oscillation on constructed bases, the probe against the keeper, and a short run of all arms."""

import math
from collections.abc import Callable

import pytest
import torch

from thinwire.data import Corpus
from thinwire.engine.feed import Feed
from thinwire.model.subspace import captured_energy
from thinwire.settings import Settings
from thinwire_lab import stability as lab
from thinwire_lab.chain import Chain
from thinwire_lab.experiment import EXPERIMENTS


def line(degrees: float, tilt: float = 0.0) -> torch.Tensor:
    """A line in three dimensions, turned in a plane, and out of it."""
    angle, out = math.radians(degrees), math.radians(tilt)
    flat = torch.tensor([math.cos(angle), math.sin(angle), 0.0], dtype=torch.float64)
    up = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    return (flat * math.cos(out) + up * math.sin(out)).unsqueeze(1)


def test_oscillation_tells_return_from_drift() -> None:
    assert lab.straightness([line(0), line(10), line(0)]) == pytest.approx(0, abs=1e-9)
    assert lab.straightness([line(0), line(10), line(20)]) == pytest.approx(1)
    assert lab.straightness([line(0), line(10), line(5)]) == pytest.approx(1 / 3)
    sideways = lab.straightness([line(0), line(2), line(2, tilt=2)])
    assert sideways == pytest.approx(math.sqrt(0.5), rel=1e-3)
    assert lab.straightness([line(7), line(7), line(7)]) is None


def track_of(bases: list[torch.Tensor], valid: float, name: str = "4") -> lab.Track:
    """A run of twelve steps with a constant gradient along the first axis, and made-up losses."""
    covariance = torch.diag(torch.tensor([1.0, 0, 0], dtype=torch.float64))
    moves = [(3 + 3 * n, {"largest_angle": 0.1}) for n in range(len(bases) - 1)]
    return lab.Track(
        name,
        1,
        losses=[3.0] * 12,
        covariances=[covariance] * 12,
        bases=bases,
        moves=moves,
        jumps=[0.01 * n for n in range(len(moves))],
        valid={5: 4.0, 11: valid},
    )


def test_energy_follows_the_basis_that_was_in_use() -> None:
    track = track_of([line(90), line(0)], 3.0)  # moves after step 3
    assert track.energy(0, 4)[0] == pytest.approx(0, abs=1e-12)
    assert track.energy(4, 12) == (pytest.approx(1), pytest.approx(1))
    assert track.energy(2, 6)[0] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("moving", "helps", "is_clear"),
    [(2.8, True, True), (2.95, True, False), (3.05, False, False), (3.2, False, True)],
)
def test_the_verdict_weighs_a_gain_against_the_chance_in_a_basis(
    moving: float, helps: bool, is_clear: bool
) -> None:
    tracks = [
        track_of([line(60), line(50), line(60)], moving),
        track_of([line(60)], 3.0, lab.NEVER),
        track_of([line(80)], 3.1, lab.OTHER_BASIS),
    ]
    found, unclear, text = lab.judge(tracks, 1 / 3)
    assert found is helps and bool(unclear) != is_clear
    assert "33.3% by chance. A move changes the validation loss by +0.0050 (median)" in text
    assert len(text) < 400 and text.count(". ") <= 2, "two or three short sentences"
    assert "two fixed bases end 0.1000 apart" in (text if is_clear else unclear)


ARMS = {
    "boundary__mode": "subspace",
    "boundary__rank": 4,
    "pipeline__stages": 4,
    "pipeline__microbatches": 2,
    "pipeline__schedule": "gpipe",
}


def test_the_probe_sees_what_the_keeper_gathers(
    corpus: Corpus, make_settings: Callable[..., Settings]
) -> None:
    settings = make_settings(**ARMS, boundary__basis_update_every=2)
    chain = Chain(settings, Feed(corpus, settings, torch.device("cpu")))
    probe = lab.StreamProbe(chain)
    before_DK = chain.builder.space.basis_DK.clone()
    chain.train_step(0)
    first_DD = probe.take()
    chain.train_step(1)  # the keeper gathers in this step alone, then moves
    second_DD = probe.take()
    measures = chain.keepers[-1].measures(1)
    assert captured_energy(second_DD, before_DK) == pytest.approx(
        measures["energy_before"], rel=1e-4
    )
    assert captured_energy(first_DD, before_DK) != pytest.approx(
        measures["energy_before"], rel=1e-4
    )
    assert float(second_DD.trace()) == pytest.approx(1, rel=1e-5)
    assert not probe.take().any(), "what was taken is not counted again"


def test_a_jump_is_the_move_alone_on_the_same_batches(
    corpus: Corpus, make_settings: Callable[..., Settings]
) -> None:
    settings = make_settings(**ARMS, boundary__basis_update_every=3)
    chain = Chain(settings, Feed(corpus, settings, torch.device("cpu")))
    chain.move_jumps = []
    for step in range(2):
        chain.train_step(step)
    assert chain.move_jumps == [], "nothing has moved"
    scored: list[float] = []
    evaluate = chain.evaluate

    def noted(compressed: bool = True) -> float:
        scored.append(evaluate(compressed))
        return scored[-1]

    chain.evaluate = noted  # type: ignore[method-assign]
    chain.train_step(2)
    before, after = scored
    assert chain.move_jumps == [after - before] and before != after == evaluate()


@pytest.fixture
def tracks(corpus: Corpus, make_settings: Callable[..., Settings]) -> list[lab.Track]:
    arms = lab.arms_of((3, 6), seed=0, steps=19)  # no move follows the last update
    base = make_settings(**ARMS).to_plain()
    return [lab.follow(arm.label, arm.settings(base), corpus, print) for arm in arms]


def test_all_arms_are_followed(tracks: list[lab.Track]) -> None:
    three, six, never, other = tracks
    assert [step for step, _ in three.moves] == [2, 5, 8, 11, 14, 17]
    assert len(three.bases) == 7 and len(six.bases) == 4 and len(never.bases) == 1
    assert three.losses[:3] == never.losses[:3], "arms differ only from the first move on"
    assert three.losses[4] != never.losses[4] and six.losses[:6] == never.losses[:6]
    assert other.losses[0] != never.losses[0]
    summary = three.summary()
    assert 0 <= summary["oscillation"] <= 1 + 1e-9 and summary["moves"] == 6
    assert summary["captured"] <= summary["best possible"] + 1e-9
    assert summary["validation loss"] != summary["after the last step"]
    assert never.summary()["oscillation"] is None


def test_the_whole_experiment_runs(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "prepare", lambda *_: corpus)
    options = EXPERIMENTS["subspace"].parse("--steps", "2", "--device", "cpu")
    outcome = lab.run(options, print)
    assert outcome.conclusion.startswith("Too small to decide: 2 steps, where at least 500 are")
    assert len(outcome.rows) == 5 and len(outcome.panels) == 2 and outcome.name == "subspace"
    assert outcome.notes[-1].endswith("steps before it: 1 at 20, 1 at 40, 1 at 60")
