"""Moving the subspace: one step up the captured gradient energy on the Grassmann manifold.

C = sum of g g^T over activation gradients. The energy that S captures is tr(U^T C U) / tr(C); its
Riemannian gradient is 2 (I - U U^T) C U. A step along it is brought back to orthonormal columns
by QR.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BasisMove:
    """A new basis, and what the move did."""

    basis_DK: Tensor
    energy_before: float
    energy_after: float
    largest_angle: float  # radians, between the old and the new subspace

    def measures(self) -> tuple[float, float, float]:
        """All but the basis, in the order of the fields."""
        return self.energy_before, self.energy_after, self.largest_angle


def captured_energy(covariance_DD: Tensor, basis_DK: Tensor) -> float:
    """The share of gradient energy that lies in S, from 0 to 1, computed in float64."""
    covariance_DD, basis_DK = covariance_DD.double(), basis_DK.double()
    total = covariance_DD.trace()
    if not total:
        return 0.0
    return float((basis_DK * (covariance_DD @ basis_DK)).sum() / total)


def riemannian_gradient(covariance_DD: Tensor, basis_DK: Tensor) -> Tensor:
    """The direction in which the captured energy grows fastest, tangent to the manifold."""
    push_DK = covariance_DD @ basis_DK
    return 2 * (push_DK - basis_DK @ (basis_DK.T @ push_DK))


def grassmann_step(covariance_DD: Tensor, basis_DK: Tensor, rate: float) -> BasisMove:
    """Move the basis towards more captured energy, in float64.

    The gradient is scaled by the mean captured eigenvalue, so `rate` has no unit: at 1 the step
    is about one power iteration.
    """
    covariance_DD, old_DK = covariance_DD.double(), basis_DK.double()
    scale = (old_DK * (covariance_DD @ old_DK)).sum() / old_DK.shape[1]
    moved_DK = old_DK
    if scale > 0:
        moved_DK = old_DK + rate / (2 * scale) * riemannian_gradient(covariance_DD, old_DK)
    new_DK = retract(moved_DK)
    return BasisMove(
        new_DK,
        captured_energy(covariance_DD, old_DK),
        captured_energy(covariance_DD, new_DK),
        float(principal_angles(old_DK, new_DK).max()),
    )


def retract(moved_DK: Tensor) -> Tensor:
    """Orthonormal columns with the same span; signs fixed so that no column flips."""
    q_DK, r_KK = torch.linalg.qr(moved_DK)
    signs_K = torch.where(r_KK.diagonal() < 0, -1.0, 1.0).to(q_DK.dtype)
    return q_DK * signs_K


def principal_angles(first_DK: Tensor, second_DK: Tensor) -> Tensor:
    """Angles between two subspaces, in radians, smallest first.

    Small angles come from their sines: a cosine near 1 has lost them to rounding.
    """
    first_DK, second_DK = first_DK.double(), second_DK.double()
    overlap_KK = first_DK.T @ second_DK
    cosines = torch.linalg.svdvals(overlap_KK).clamp(max=1.0)
    sines = torch.linalg.svdvals(second_DK - first_DK @ overlap_KK).flip(0).clamp(max=1.0)
    return torch.where(sines < 0.7, torch.asin(sines), torch.acos(cosines))
