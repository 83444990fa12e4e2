"""Muon against a singular value decomposition, against torch's own, and inside a subspace."""

import pytest
import torch
from torch import nn

from thinwire.model import Muon, project, random_basis
from thinwire.model.optim import COEFFICIENTS, ITERATIONS, orthogonalised
from thinwire.model.subspace import drift

DIM, RANK, INPUTS = 24, 6, 16


def normal(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_singular_values(matrix):
    """What the iterations do, by the definition of a matrix function."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / torch.linalg.matrix_norm(matrix)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        values = a * values + b * values**3 + c * values**5
    return left * values @ right


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5), (1, 7)])
def test_only_singular_values_change(shape):
    matrices = normal(0, 3, *shape)
    together = orthogonalised(matrices)
    for matrix, result in zip(matrices, together, strict=True):
        torch.testing.assert_close(result, by_singular_values(matrix), rtol=1e-9, atol=1e-10)
    spread = torch.linalg.svdvals(together)
    assert spread.min() > 0.3 and spread.max() < 1.3


def trained(weight, gradients, **options):
    optimizer = Muon([{"params": [weight], **options}], lr=0.02, weight_decay=0.1)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


def test_it_is_torchs_own_up_to_bfloat16():
    gradients = [normal(step, DIM, INPUTS, dtype=torch.float32) for step in range(5)]
    ours = trained(nn.Parameter(torch.zeros(DIM, INPUTS)), gradients)
    theirs = nn.Parameter(torch.zeros(DIM, INPUTS))
    optimizer = torch.optim.Muon(
        [theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for gradient in gradients:
        theirs.grad = gradient.clone()
        optimizer.step()
    assert torch.linalg.vector_norm(ours - theirs) < 0.02 * torch.linalg.vector_norm(theirs)


def test_a_held_matrix_moves_as_its_coordinates_would():
    basis_DK = random_basis(DIM, RANK, seed=0)
    coordinates = normal(1, RANK, INPUTS)
    gradients = [normal(10 + step, DIM, INPUTS) for step in range(6)]
    held = trained(
        nn.Parameter(basis_DK @ coordinates),
        [project(gradient, basis_DK, 0) for gradient in gradients],
        basis=basis_DK,
    )
    alone = trained(nn.Parameter(coordinates), [basis_DK.T @ gradient for gradient in gradients])
    torch.testing.assert_close(held, basis_DK @ alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("in_coordinates", [True, False])
def test_only_in_coordinates_weights_stay_in_the_subspace(in_coordinates):
    """The failing side: the whole matrix in bfloat16, as on a GPU, is rounded out of S."""
    basis_DK = random_basis(DIM, RANK, seed=0).float()
    weight = basis_DK @ normal(1, RANK, INPUTS, dtype=torch.float32)
    for step in range(40):
        gradient = project(normal(step, DIM, INPUTS, dtype=torch.float32), basis_DK, 0)
        if in_coordinates:
            update = basis_DK @ orthogonalised((basis_DK.T @ gradient).bfloat16()).float()
        else:
            update = orthogonalised(gradient.bfloat16()).float()
        weight = weight - 0.02 * update
    found = drift(weight, basis_DK, 0)
    assert found < 1e-6 if in_coordinates else found > 1e-3
