"""The measures of rank against plain definitions, the images, and a short run of all models."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from thinwire.data import DataConfig, prepare
from thinwire.model.llama import WRITERS
from thinwire.settings import Settings
from thinwire_lab import rank_collapse as lab
from thinwire_lab.experiment import EXPERIMENTS
from thinwire_lab.outcome import write_outcome
from thinwire_lab.vision import (
    character_batch,
    classifier,
)


def gaussian(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def test_stable_rank_is_frobenius_over_spectral() -> None:
    matrix = gaussian(12, 30)
    singular = torch.linalg.svdvals(matrix)
    expected = matrix.norm() ** 2 / torch.linalg.matrix_norm(matrix, 2) ** 2
    assert lab.stable_rank(singular) == pytest.approx(float(expected), rel=1e-12)
    assert lab.stable_rank(torch.ones(7)) == 7
    assert lab.stable_rank(torch.tensor([3.0, 0, 0])) == 1
    assert lab.stable_rank(torch.zeros(3)) == 0


@pytest.mark.parametrize(("kind", "count"), [("vit", 4), ("mixer", 4), ("cnn", 2)])
def test_classifiers_start_alike_and_learn(kind: str, count: int) -> None:
    torch.set_num_threads(1)
    model = classifier(kind, 16, 2, 32, seed=0)
    writers = {n: p for n, p in model.named_parameters() if n.endswith(WRITERS)}
    assert len(writers) == count
    for writer in writers.values():
        assert float(writer.detach().std()) == pytest.approx(0.01, rel=0.2)  # 0.02 / sqrt(2 * 2)
    twin = classifier(kind, 16, 2, 32, seed=0)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )
    images, classes = character_batch(24, 0, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        losses.append(nn.functional.cross_entropy(model(images), classes))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.6 * losses[0]


class OneWriter(nn.Module):
    """A model whose only writer gets a gradient of rank one, however it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Linear(24, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(x)


def test_a_low_rank_gradient_is_recognised(make_settings: Callable[..., Settings]) -> None:
    torch.manual_seed(0)
    model = OneWriter()
    one = torch.ones(1, 24)
    task = lab.Task("one", model, lambda step: (one, torch.tensor([3])), model)
    trail = lab.follow(task, make_settings(train__steps=8, optim__warmup=1), print)
    ranks = trail.course("gradient", "stable rank")
    assert list(ranks) == [0, 1, 2, 4, 8]
    assert list(ranks.values()) == [pytest.approx(1)] * 5
    assert trail.rows[-1]["loss"] < trail.rows[0]["loss"]


def trail_of(start: float, end: float) -> lab.Trail:
    shares = {0: start, 8: end}
    return lab.Trail(
        [
            {"what": "weight", "step": step, lab.SHARE: share, "accuracy": 0.5}
            for step, share in shares.items()
        ]
    )


def test_the_verdict_says_whose_collapse_it_is() -> None:
    down, stays = trail_of(0.3, 0.05), trail_of(0.3, 0.25)
    names = [lab.LANGUAGE, *lab.IMAGE_MODELS]
    holds, text = lab.judge(dict(zip(names, [down, down, stays, stays], strict=True)))
    assert holds and "in transformer LM, ViT. As a share" in text and "30% to 5%" in text
    holds, text = lab.judge(dict(zip(names, [down] * 4, strict=True)))
    assert not holds and "in every model. As a share" in text
    holds, text = lab.judge(dict(zip(names, [stays] * 4, strict=True)))
    assert not holds and "in no model" in text


@pytest.mark.slow
def test_all_models_are_followed_and_reported(
    text_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = DataConfig(source="text", path=str(text_folder), valid_fraction=0.3)
    corpus = prepare(text, 300, tmp_path / "cache")
    monkeypatch.setattr(lab, "prepare", lambda *_: corpus)
    monkeypatch.setattr(lab, "IMAGES", 6)
    monkeypatch.setattr(lab, "PROBE", 1)
    options = EXPERIMENTS["rank-collapse"].parse("--steps", "2", "--device", "cpu")
    outcome = lab.run(options, print)
    assert outcome.conclusion.startswith("Too small to decide: 2 steps, where at least 200 are")
    assert outcome.notes[3] == "gradients, loss and accuracy: over 1 batches that no step trains on"
    rows = outcome.rows
    assert list(dict.fromkeys(row["model"] for row in rows)) == [lab.LANGUAGE, *lab.IMAGE_MODELS]
    assert len(rows) == 4 * 2 * 3  # models, weights and gradients, looks at 0, 1 and 2 updates
    for row in rows:
        assert 0 < row["share of full rank"] <= 1
    place = write_outcome(outcome, tmp_path)
    assert (place / "plot.png").stat().st_size > 10_000
    assert json.loads((place / "result.json").read_text())["rows"] == rows
