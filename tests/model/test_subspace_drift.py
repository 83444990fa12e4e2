"""What keeps weights in the subspace while they learn in float32, and what does not."""

import pytest
import torch
from torch import nn

from thinwire.engine.shared import REPROJECT_EVERY
from thinwire.model import Constraint, Held, SubspaceAdamW, random_basis

STAYS, LEAVES = 1e-6, 1e-2


class Foreign(nn.Module):
    """A model that knows nothing of thinwire: one block whose two writers feed a stream."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.mix, self.mix_out = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)
        self.head = nn.Linear(64, 100)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.mix_out(torch.tanh(self.mix(x)))
        x = x + self.down(torch.relu(self.up(nn.functional.rms_norm(x, (64,)))))
        return self.head(x)


@pytest.fixture
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Foreign()


@pytest.fixture
def constraint(model):
    writers = [("embed", model.embed, 1), ("mix_out", model.mix_out, 0), ("down", model.down, 0)]
    held = [Held(name, writer.weight, axis) for name, writer, axis in writers]
    found = Constraint(random_basis(dim=64, rank=8, seed=0), held)
    found.project_weights()
    return found


def largest_drift(model, constraint, optimizer, steps=500, prepare=None, reproject_every=0):
    """Learn a task with an answer; the worst share of weights outside, before any re-projection."""
    generator = torch.Generator().manual_seed(1)
    answers = torch.randperm(100, generator=generator)
    losses, drifts = [], []
    for step in range(1, steps + 1):
        ids = torch.randint(100, (32,), generator=generator)
        loss = nn.functional.cross_entropy(model(ids), answers[ids])
        loss.backward()
        if prepare is not None:
            prepare()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        drifts.append(constraint.drift())
        if reproject_every and step % reproject_every == 0:
            constraint.project_weights()
    assert losses[-1] < 0.5 * losses[0], "weights that do not move do not drift"
    return max(drifts)


@pytest.mark.parametrize("every", [0, REPROJECT_EVERY])
def test_an_optimizer_that_knows_the_constraint_stays(every, model, constraint):
    """With an ordinary loop, as docs/method.md shows it, and as the engine does it."""
    adam = SubspaceAdamW(model.parameters(), lr=1e-2, weight_decay=0.1, constraint=constraint)
    drift = largest_drift(model, constraint, adam, reproject_every=every)
    assert 0 < drift <= STAYS * (1 if every else 10)


@pytest.mark.parametrize("is_ours", [False, True], ids=["AdamW", "SubspaceAdamW"])
def test_neither_projected_gradients_nor_its_moments_keep_them_there_alone(
    is_ours, model, constraint
):
    if is_ours:  # which is given the axes alone, and gradients as they are
        axes = {entry.parameter: entry.axis for entry in constraint.held}
        groups = [{"params": [p], "axis": axes.get(p)} for p in model.parameters()]
        drift = largest_drift(model, constraint, SubspaceAdamW(groups, lr=1e-2), 100)
    else:
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
        drift = largest_drift(model, constraint, adam, 100, constraint.project_gradients)
    assert drift > 10 * LEAVES
