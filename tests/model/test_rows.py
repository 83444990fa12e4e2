"""Rows of a table, updated when their gradient comes, move as AdamW would have moved them."""

import pytest
import torch
from torch import nn

from thinwire.model import RowAdamW

LR, DECAY = 0.01, 0.1


def row_updates(table_VD, gradients):
    optimizer = RowAdamW([table_VD], lr=LR, weight_decay=DECAY)
    rows_R = torch.arange(len(table_VD))
    for update, gradient_VD in enumerate(gradients, start=1):
        if gradient_VD is not None:
            table_VD.data += optimizer.changes(table_VD, rows_R, gradient_VD, update)


def adamw_updates(table_VD, gradients):
    optimizer = torch.optim.AdamW([table_VD], lr=LR, betas=(0.9, 0.95), weight_decay=DECAY)
    for gradient_VD in gradients:
        table_VD.grad = torch.zeros_like(table_VD) if gradient_VD is None else gradient_VD
        optimizer.step()


def both(gradients):
    torch.manual_seed(0)
    start = torch.randn(5, 8, dtype=torch.float64)
    ours, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    row_updates(ours, gradients)
    adamw_updates(theirs, gradients)
    return start, ours.detach(), theirs.detach()


def test_rows_updated_every_time_are_updated_as_by_adamw():
    torch.manual_seed(1)
    gradients = [torch.randn(5, 8, dtype=torch.float64) for _ in range(20)]
    _, ours, theirs = both(gradients)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("pause", [1, 4, 9])
def test_a_row_that_waits_goes_as_far_as_adamw_takes_it(pause):
    """A gradient now and then, late in a run: as far as with AdamW, which goes on in between."""
    torch.manual_seed(1)
    warm: list[torch.Tensor | None] = [torch.randn(5, 8, dtype=torch.float64) for _ in range(100)]
    gradient_VD = torch.randn(5, 8, dtype=torch.float64)
    start, ours, theirs = both([*warm, *(([None] * pause + [gradient_VD]) * 40)])
    _, far, _ = both([*warm, *([gradient_VD] * 40)])
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.2 * moved
    assert (far - theirs).norm() > 2 * (ours - theirs).norm() or pause == 1
