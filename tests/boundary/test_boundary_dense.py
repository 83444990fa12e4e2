"""The dense boundary: everything crosses, nothing changes, gradients included."""

import pytest
import torch

from thinwire.boundary import BoundaryConfig, DenseBoundary
from thinwire.errors import ConfigError


def test_what_is_encoded_decodes_to_itself() -> None:
    boundary = DenseBoundary()
    x_BTD = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    z = boundary.encode(x_BTD, None)
    assert z.shape == x_BTD.shape
    assert torch.equal(boundary.decode(z, None), x_BTD)


def test_the_gradient_crosses_unchanged() -> None:
    boundary = DenseBoundary()
    x_BTD = torch.zeros(2, 3, 6, requires_grad=True)
    gradient = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1))
    boundary.decode(boundary.encode(x_BTD, None), None).backward(gradient)
    assert x_BTD.grad is not None and torch.equal(x_BTD.grad, gradient)


def test_it_has_no_parameters_and_reads_no_ids() -> None:
    boundary = DenseBoundary()
    assert list(boundary.parameters()) == []
    assert not boundary.needs_ids


@pytest.mark.parametrize("rank", [0, 8])
def test_a_rank_that_says_the_same_is_accepted(rank: int) -> None:
    assert BoundaryConfig(rank=rank).resolved(8, [range(1)]).rank == rank


@pytest.mark.parametrize("rank", [-1, 1, 7, 9])
def test_dense_with_another_rank_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match=rf"boundary.rank = {rank} .*8 channels.*leave it at 0"):
        BoundaryConfig(rank=rank).resolved(8, [range(1)])
