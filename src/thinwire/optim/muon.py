"""Muon: momentum whose directions all count alike.

The momentum M = A diag(s) B^T of a matrix is replaced by a matrix near A B^T, found without a
singular value decomposition: Newton-Schulz iterations are a polynomial in M M^T times M, so they
change singular values and nothing else. That also keeps a subspace. A momentum whose columns lie in
S = Col(U) is U H, and the result is U times what the coordinates H alone would give. For a held
matrix we do just that: it costs less by rank/width, and no rounding can lead out of S.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x^3 and x^5: steep at 0, near 1 around 1
ITERATIONS = 5
RMS = 0.2  # of an update at rate 1, about AdamW's own: one learning rate then serves both
STACK_NUMBERS = 2**28  # in matrices that are orthogonalised together, for the memory's sake


def orthogonalised(matrices: Tensor) -> Tensor:
    """Each matrix (of the last two axes) with its singular values brought near 1, in its type."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay, for matrices.

    On a GPU matrices of one shape are orthogonalised together, in bfloat16: one by one, launching
    the kernels takes about as long as a training step. On a CPU each is by itself and in its own
    precision, so that a weight does not depend on which others share its stage. Groups may have a
    `basis`: their matrices' columns then stay in its span.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = MOMENTUM,
    ):
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "basis": None}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            for alike in _stacks(with_gradient):
                self._update(alike, group)
        return loss

    def _update(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """Move matrices of one shape."""
        directions = torch.stack([self._direction(weight, group) for weight in weights])
        basis_DK = group["basis"]
        if basis_DK is not None:
            directions = basis_DK.to(directions.dtype).T @ directions
        scale = RMS * max(directions.shape[-2:]) ** 0.5
        compute = torch.bfloat16 if directions.is_cuda else directions.dtype
        updates = orthogonalised(directions.to(compute)).to(directions.dtype)
        if basis_DK is not None:
            updates = basis_DK.to(updates.dtype) @ updates
        for weight, update in zip(weights, updates, strict=True):
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(update, alpha=-group["lr"] * scale)

    def _direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        """The momentum, one step ahead as Nesterov has it."""
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(state["momentum_buffer"], group["momentum"])


def _stacks(weights: list[Tensor]) -> Iterator[list[Tensor]]:
    """Matrices to orthogonalise together: of one shape on a GPU, each alone on a CPU."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for weight in weights:
        by_shape.setdefault(weight.shape, []).append(weight)
    for shape, alike in by_shape.items():
        most = max(1, STACK_NUMBERS // shape.numel()) if alike[0].is_cuda else 1
        for start in range(0, len(alike), most):
            yield alike[start : start + most]
