"""AdamW for weights that live in a subspace.

Adam divides each coordinate of the momentum by its own second moment, which turns an update out
of any subspace that is not axis-aligned. Here the second moment is one number per input unit: the
mean over the model dimension. Scaling by it keeps momentum in S, and so do decoupled decay and
the sum. What must be in S beforehand is the gradient: give the optimizer the constraint, or
project before you clip.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from thinwire.subspace import Constraint


class SubspaceAdamW(torch.optim.Optimizer):
    """AdamW whose second moment is constant along the model dimension of held parameters.

    Give it a constraint: then `step` first projects the gradients of the parameters it holds, and
    updates all others as AdamW does. (Clip after `constraint.project_gradients()`: the part that is
    projected away must not count.) Or give groups an `axis` and project yourself.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        axis: int | None = None,
        constraint: Constraint | None = None,
    ):
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "axis": axis,
        }
        super().__init__(params, defaults)
        self._constraint = constraint
        held = constraint.held if constraint is not None else []
        self._axes: dict[Tensor, int] = {entry.parameter: entry.axis for entry in held}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._constraint is not None:
            self._constraint.project_gradients()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, axis = self.state[weight], self._axes.get(weight, group["axis"])
        if axis is None:
            square = gradient.square()
        else:  # one pass over the gradient, and nothing of its size is written
            norm = torch.linalg.vector_norm(gradient, dim=axis, keepdim=True)
            square = norm.square_().div_(gradient.shape[axis])
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(square)
        state["step"] += 1
        count, (beta1, beta2) = float(state["step"]), group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].lerp_(square, 1 - beta2)
        scale = (state["exp_avg_sq"] / (1 - beta2**count)).sqrt_().add_(group["eps"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.addcdiv_(state["exp_avg"], scale, value=-group["lr"] / (1 - beta1**count))
