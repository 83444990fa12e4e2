"""Which parameter is updated by what, and the state of that by name.

Torch keeps optimizer state by position; a run that is split anew needs it by name. The
StageOptimizer does that translation and nothing else.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from thinwire.optim.config import OptimConfig
from thinwire.optim.subspace import SubspaceAdamW

BETAS = (0.9, 0.95)


class StageOptimizer:
    """The optimizers of one stage behind one face, with state addressed by parameter name."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        config: OptimConfig,
        axes: dict[str, int] | None = None,
    ):
        """`axes` names the parameters held in a subspace, with their model dimension."""
        self._names: dict[Tensor, str] = {p: name for name, p in parameters.items()}
        self._parameters = parameters
        self._optimizers = _build(parameters, config, axes or {})

    def step(self, lr: float) -> None:
        """One update at this learning rate; gradients are cleared afterwards."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forget the gradients: after an update, or when a step is not committed."""
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def change_momentum(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Carry a parameter's momentum over into other coordinates, if it has one."""
        for optimizer in self._optimizers:
            state = optimizer.state.get(self._parameters[name], {})
            for key in ("exp_avg", "momentum_buffer"):
                if key in state:
                    state[key].copy_(change(state[key]))

    def state_tensors(self) -> dict[str, Tensor]:
        """The whole state as `parameter name/state name`, ready for a checkpoint."""
        return {
            f"{self._names[parameter]}/{key}": value
            for optimizer in self._optimizers
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `state_tensors` gave, for the parameters that this stage holds."""
        loaded: dict[str, dict[str, Tensor]] = {}
        for full_name, value in tensors.items():
            name, key = full_name.rsplit("/", 1)
            loaded.setdefault(name, {})[key] = value
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = loaded.get(self._names[parameter])
                    if state is not None:
                        optimizer.state[parameter] = {
                            # a step counter stays on the CPU, as torch itself keeps it
                            key: value.clone()
                            if value.ndim == 0
                            else value.to(parameter.device, copy=True)
                            for key, value in state.items()
                        }


def _build(
    parameters: dict[str, nn.Parameter], config: OptimConfig, axes: dict[str, int]
) -> list[torch.optim.Optimizer]:
    matrices = {n: p for n, p in parameters.items() if p.ndim >= 2 and n not in axes}
    gains = [p for p in parameters.values() if p.ndim < 2]
    by_muon = {}
    if config.name == "muon":
        # Orthogonalised updates are for hidden matrices; tables and heads keep AdamW.
        by_muon = {n: p for n, p in matrices.items() if n.startswith("model.layers.")}
    by_adamw = [p for n, p in matrices.items() if n not in by_muon]
    groups = [
        {"params": by_adamw, "weight_decay": config.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = []
    if by_adamw or gains:
        optimizers.append(
            torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=BETAS)
        )
    held = [
        {"params": [p for n, p in parameters.items() if axes.get(n) == axis], "axis": axis}
        for axis in sorted(set(axes.values()))
    ]
    if held:
        optimizers.append(
            SubspaceAdamW(held, lr=config.lr, betas=BETAS, weight_decay=config.weight_decay)
        )
    if by_muon:
        # match_rms_adamw scales the update so that one learning rate serves both optimizers.
        optimizers.append(
            torch.optim.Muon(
                by_muon.values(),
                lr=config.lr,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return optimizers
