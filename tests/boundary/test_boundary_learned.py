"""What a boundary learns is its own affair: what it shares, and what follows an update."""

import torch

from thinwire.boundary import DenseBoundary, ProjectedBoundary, SubspaceBoundary
from thinwire.subspace import Space, orthonormality_error, random_basis

SPACE = Space(random_basis(8, 3, seed=0))


def test_only_a_learned_basis_is_shared() -> None:
    fixed = (DenseBoundary(), SubspaceBoundary(SPACE), ProjectedBoundary(SPACE, False, False))
    assert [boundary.shared() for boundary in fixed] == [[], [], []]
    learned = ProjectedBoundary(SPACE, False, True, (5, 8))
    assert [parameter is learned.basis for parameter in learned.shared()] == [True]


def test_a_basis_is_orthonormal_again_after_an_update() -> None:
    boundary = ProjectedBoundary(SPACE, False, True)
    with torch.no_grad():
        boundary.basis += 0.1 * torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    moved = boundary.basis.detach().clone()
    assert orthonormality_error(moved) > 1e-2
    boundary.after_update()
    assert orthonormality_error(boundary.basis.detach()) < 1e-12
    inside = boundary.basis @ (boundary.basis.T @ moved)
    torch.testing.assert_close(inside, moved, msg="the span is that of the updated basis")
