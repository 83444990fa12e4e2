"""Bases, tables, projections and moves of the subspace, against independent formulas."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.model import Space, fixed_table, random_basis, subspace


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(dim=st.integers(1, 40), share=st.floats(0, 1), seed=st.integers(0, 2**40))
def test_a_basis_is_orthonormal(dim, share, seed):
    rank = max(1, round(dim * share))
    assert subspace.orthonormality_error(random_basis(dim, rank, seed)) < 1e-12


def test_basis_and_table_are_the_same_bits_everywhere():
    """Values written down once: another machine, library or version must give them too."""
    basis = Space(random_basis(48, 5, 7)).fingerprints()["basis"]
    with_table = Space(random_basis(4, 1, 0), fixed_table(100, 24, 7, std=0.02))
    table = with_table.fingerprints()["token_table"]
    assert (basis, table) == ("f753a08129f8e802", "02f154ff2f71c3fb")


def test_coordinates_of_the_table_have_the_precision_of_the_basis_also_under_autocast():
    space = Space(random_basis(24, 5, 7).float(), fixed_table(100, 24, 7, std=0.02))
    with torch.autocast("cpu", torch.bfloat16):
        coordinates = space.anchor_coordinates()
    assert torch.equal(coordinates, space.table_VD.float() @ space.basis_DK)


def test_the_fixed_table_is_exact_in_bfloat16_and_full_rank():
    table = fixed_table(512, 64, 0, std=0.02)
    assert table.dtype == torch.bfloat16
    steps = table.double() * 4096
    assert torch.equal(steps, steps.round()) and steps.abs().max() <= 127
    assert torch.linalg.matrix_rank(table.double()) == 64
    assert 0.015 < table.double().std() < 0.021


def test_riemannian_gradient_is_the_derivative_of_captured_energy():
    samples = random(50, 10)
    covariance, basis = samples.T @ samples, random_basis(10, 3, 0)
    direction = random(10, 3, seed=2)
    direction -= basis @ (basis.T @ direction)
    gradient = subspace.riemannian_gradient(covariance, basis)
    slope = float((gradient * direction).sum() / covariance.trace())
    moved = (subspace.retract(basis + h * direction) for h in (1e-6, -1e-6))
    ahead, behind = (subspace.captured_energy(covariance, end) for end in moved)
    assert (ahead - behind) / 2e-6 == pytest.approx(slope, rel=1e-5)


def test_moves_climb_to_the_leading_subspace():
    samples = random(200, 12) * torch.logspace(0, -1.5, 12, dtype=torch.float64)
    covariance, basis = samples.T @ samples, random_basis(12, 3, 0)
    energies = []
    for _ in range(60):
        move = subspace.grassmann_step(covariance, basis, rate=0.5)
        assert move.energy_after >= move.energy_before - 1e-12
        assert subspace.orthonormality_error(move.basis_DK) < 1e-12
        basis = move.basis_DK
        energies.append(move.energy_after)
    best = torch.linalg.eigvalsh(covariance)[-3:].sum() / covariance.trace()
    assert energies[-1] == pytest.approx(float(best), rel=1e-3)
    assert energies[0] < 0.9 * energies[-1]
