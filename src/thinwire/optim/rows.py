"""AdamW for a table of which only some rows are updated at a time.

A row whose token is rare has no gradient for many updates. AdamW moves it all the same: momentum
fades while the row goes on in its direction, and decay goes on too. Here a row is updated when its
gradient comes, by what AdamW would have done to it since the last time: moments fade by as many
updates as have passed, and the step is as long as the steps would be together that AdamW makes with
fading moments. A row that is updated every time is updated as by AdamW.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class RowAdamW(torch.optim.Optimizer):
    """Gives the changes of rows; whoever holds the table adds them, so that copies stay equal.

    `step` changes no table.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for table_VD in group["params"]:
                self._state_of(table_VD)  # which a checkpoint has, whether or not a row was due
        return None if closure is None else closure()

    def _state_of(self, table_VD: nn.Parameter) -> dict[str, Tensor]:
        state = self.state[table_VD]
        if not state:
            state["exp_avg"] = torch.zeros_like(table_VD)
            state["exp_avg_sq"] = torch.zeros_like(table_VD)
            state["updated"] = torch.zeros(len(table_VD), dtype=torch.int64, device=table_VD.device)
        return state

    @torch.no_grad()
    def changes(
        self, table_VD: nn.Parameter, rows_R: Tensor, gradient_RD: Tensor, update: int
    ) -> Tensor:
        """What to add to these rows in update number `update` (from 1) of the run."""
        (group,) = (g for g in self.param_groups if any(p is table_VD for p in g["params"]))
        (beta1, beta2), lr, state = group["betas"], group["lr"], self._state_of(table_VD)
        passed_R1 = (update - state["updated"][rows_R])[:, None].to(gradient_RD.dtype)
        first_RD = state["exp_avg"][rows_R].mul_(beta1**passed_R1)
        first_RD.add_(gradient_RD, alpha=1 - beta1)
        second_RD = state["exp_avg_sq"][rows_R].mul_(beta2**passed_R1)
        second_RD.addcmul_(gradient_RD, gradient_RD, value=1 - beta2)
        state["exp_avg"][rows_R] = first_RD
        state["exp_avg_sq"][rows_R] = second_RD
        state["updated"][rows_R] = update
        fading = beta1 / math.sqrt(beta2)  # of a step of AdamW whose gradient is zero
        steps_R1 = (1 - fading**passed_R1) / (1 - fading)
        scale_RD = (second_RD / (1 - beta2**update)).sqrt_().add_(group["eps"])
        move_RD = (first_RD / scale_RD).mul_(steps_R1 * (lr / (1 - beta1**update)))
        kept_R1 = (1 - lr * group["weight_decay"]) ** passed_R1
        return table_VD[rows_R].mul_(kept_R1 - 1).sub_(move_RD)
