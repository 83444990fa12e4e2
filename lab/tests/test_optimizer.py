"""What keeps weights in the subspace over 500 real steps in float32, and what does not."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from settings_values import with_changes
from thinwire.model import Constraint, Held, SubspaceAdamW, random_basis
from thinwire_lab import optimizer as lab
from thinwire_lab.experiment import EXPERIMENTS
from thinwire_lab.optimizer import ENGINE, LEAVES, STANDARD, STAYS, UNPROJECTED
from thinwire_lab.outcome import write_outcome


@pytest.fixture(autouse=True, scope="module")
def without_onednn() -> Iterator[None]:
    """On some CPUs oneDNN takes half a millisecond to begin a product, however small."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it speaks of Intel GPUs whenever it is switched
        before = torch.backends.mkldnn.set_flags(False)
        yield
        torch.backends.mkldnn.set_flags(*before)


def trained(way: lab.Way, steps: int) -> lab.Curve:
    values = lab.settings_of(quick=True, seed=0, device="cpu").to_plain()
    tiny = {"boundary__rank": 6, "train__batch": 2, "train__steps": steps}
    settings = with_changes(values, tiny)
    return lab.train(way, settings, lab.synthetic_tokens(settings.model.vocab, 0))


def test_the_engine_stays_in_the_subspace_over_500_steps() -> None:
    curve = trained(ENGINE, steps=500)
    assert len(curve.drifts) == 500
    assert 0 < max(curve.drifts) <= STAYS
    assert curve.cut_error < 1e-6
    assert curve.final_loss < 0.6 * curve.losses[0], "weights that do not move do not drift"


def test_standard_adamw_leaves_it_with_projected_gradients_too() -> None:
    curve = trained(STANDARD, steps=100)
    assert curve.drifts[-1] > 10 * LEAVES
    assert curve.cut_error > 1e-4


def test_without_projected_gradients_the_subspace_optimizer_leaves_it() -> None:
    assert trained(UNPROJECTED, steps=60).drifts[-1] > LEAVES


def test_the_report_is_written(tmp_path: Path) -> None:
    outcome = lab.run(EXPERIMENTS["optimizer"].parse("--quick", "--device", "cpu"), print)
    assert outcome.holds is None, "so few steps cannot show that drift stays small"
    assert outcome.conclusion.startswith("Too small to decide: 60 steps, where at least 500 are")
    bare, engine, *leaving = outcome.rows
    assert engine["last drift"] < bare["last drift"] < STAYS
    assert len(leaving) == 3 and min(row["largest drift"] for row in leaving) > LEAVES
    assert len({row["first loss"] for row in outcome.rows}) == 1, "one start for all"
    assert len(outcome.panels[0].lines) == len(lab.WAYS)
    assert (write_outcome(outcome, tmp_path) / "plot.png").stat().st_size > 10_000


class Foreign(nn.Module):
    """A model that knows nothing of thinwire: one block whose two writers feed a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.mix, self.mix_out = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)
        self.head = nn.Linear(64, 100)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.mix_out(torch.tanh(self.mix(x)))
        x = x + self.down(torch.relu(self.up(nn.functional.rms_norm(x, (64,)))))
        return self.head(x)


def learn(model: Foreign, optimizer: torch.optim.Optimizer) -> list[float]:
    """Two hundred steps of a task with an answer."""
    generator = torch.Generator().manual_seed(1)
    answers = torch.randperm(100, generator=generator)
    losses = []
    for _ in range(200):
        ids = torch.randint(100, (32,), generator=generator)
        loss = nn.functional.cross_entropy(model(ids), answers[ids])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def foreign() -> tuple[Foreign, Constraint]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Foreign()
    constraint = Constraint(
        random_basis(dim=64, rank=8, seed=0),
        [
            Held("embed", model.embed.weight, axis=1),
            Held("mix_out", model.mix_out.weight, axis=0),
            Held("down", model.down.weight, axis=0),
        ],
    )
    constraint.project_weights()
    return model, constraint


def test_public_api_on_a_foreign_model() -> None:
    """What docs/method.md shows: a constraint, an optimizer that knows it, an ordinary loop."""
    model, constraint = foreign()
    optimizer = SubspaceAdamW(model.parameters(), lr=1e-2, weight_decay=0.1, constraint=constraint)
    losses = learn(model, optimizer)
    assert losses[-1] < 0.5 * losses[0]
    assert constraint.drift() <= STAYS
