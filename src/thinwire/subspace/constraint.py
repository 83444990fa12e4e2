"""The constraint: which parameters must stay in the subspace, and how they are kept there."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.subspace.projection import drift, project


@dataclass(frozen=True)
class Held:
    """One constrained parameter and the axis of it that is the model dimension."""

    name: str
    parameter: nn.Parameter
    axis: int


class Constraint:
    """Holds parameters in S = Col(U): writers by their columns, an embedding by its rows.

    The gradient of a writer is not in S by itself (it also comes back through the norm and the
    feed-forward of the same block), so `project_gradients` must run before an optimizer's moments
    see it and before the gradient norm is taken. Everything after that stays in S up to rounding,
    if the second moment is constant along the model dimension (SubspaceAdamW).
    """

    def __init__(self, basis_DK: Tensor, held: Iterable[Held]):
        self.basis_DK = basis_DK
        self.held = list(held)

    @torch.no_grad()
    def project_gradients(self) -> None:
        """Drop the part of each gradient that would lead out of S."""
        for entry in self.held:
            gradient = entry.parameter.grad
            if gradient is not None:
                gradient.copy_(project(gradient, self._basis_for(gradient), entry.axis))

    @torch.no_grad()
    def project_weights(self) -> None:
        """Put the parameters into S: at the start, after a move, or against rounding."""
        for entry in self.held:
            weight = entry.parameter
            weight.copy_(project(weight, self._basis_for(weight), entry.axis))

    @torch.no_grad()
    def drift(self) -> float:
        """The largest share of any held parameter that lies outside S."""
        drifts = [
            drift(entry.parameter, self._basis_for(entry.parameter), entry.axis)
            for entry in self.held
        ]
        return max(drifts, default=0.0)

    def _basis_for(self, tensor: Tensor) -> Tensor:
        return self.basis_DK.to(device=tensor.device, dtype=tensor.dtype)
