"""Which parameter is updated by what, and the state of that by name.

Torch keeps optimizer state by position; a run that is split anew needs it by name. The
StageOptimizer does that translation and nothing else.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import CheckpointError
from thinwire.optim.config import OptimConfig
from thinwire.optim.subspace import SubspaceAdamW

BETAS = (0.9, 0.95)
LEARNED_BASIS = ".basis"  # how the global name of a cut's learned basis ends


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
        self._keeps_state = config.name != "sgd" or config.momentum > 0

    def step(self, lr: float) -> None:
        """One update at this learning rate; gradients are cleared afterwards."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_share", 1.0)
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

    def remembered(self) -> list[str]:
        """The parameters of which something is kept from one update to the next."""
        return list(self._parameters) if self._keeps_state else []

    def state_tensors(self) -> dict[str, Tensor]:
        """The whole state as `parameter name/state name`, ready for a checkpoint."""
        return {
            f"{self._names[parameter]}/{key}": value
            for optimizer in self._optimizers
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `state_tensors` gave, for the parameters that this stage holds.

        State of another kind of optimizer, or of another shape, is a CheckpointError.
        """
        loaded: dict[str, dict[str, Tensor]] = {}
        for full_name, value in tensors.items():
            name, _, key = full_name.rpartition("/")
            loaded.setdefault(name, {})[key] = value
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = self._names[parameter]
                    if name in loaded:
                        _check_state(name, loaded[name], _state_shapes(optimizer, group, parameter))
                        # A step counter stays on the CPU, unless one kernel reads it too.
                        counter = parameter.device if group.get("fused") else torch.device("cpu")
                        optimizer.state[parameter] = {
                            key: value.to(
                                counter if value.ndim == 0 else parameter.device, copy=True
                            )
                            for key, value in loaded[name].items()
                        }


def _state_shapes(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor
) -> dict[str, tuple[int, ...]]:
    """What each kind of optimizer keeps of a parameter."""
    shape = tuple(parameter.shape)
    if isinstance(optimizer, torch.optim.Muon | torch.optim.SGD):
        return {"momentum_buffer": shape}
    second = shape
    if isinstance(optimizer, SubspaceAdamW):
        second = tuple(1 if axis == group["axis"] else n for axis, n in enumerate(shape))
    return {"step": (), "exp_avg": shape, "exp_avg_sq": second}


def _check_state(name: str, state: dict[str, Tensor], expected: dict[str, tuple[int, ...]]) -> None:
    found = {key: tuple(value.shape) for key, value in state.items()}
    if found != expected:
        raise CheckpointError(
            f"the optimizer's state of {name} in the checkpoint is {found}, this optimizer keeps "
            f"{expected}: resume with the optimizer and the model that wrote it"
        )


def _build(
    parameters: dict[str, nn.Parameter], config: OptimConfig, axes: dict[str, int]
) -> list[torch.optim.Optimizer]:
    if config.name == "sgd":
        return [_sgd(parameters, config)]
    # Entries of an orthonormal basis are small: at the rate of weights it would turn too fast for
    # the layers on either side to follow.
    bases = {n: p for n, p in parameters.items() if n.endswith(LEARNED_BASIS)}
    matrices = {
        n: p for n, p in parameters.items() if p.ndim >= 2 and n not in axes and n not in bases
    }
    gains = [p for p in parameters.values() if p.ndim < 2]
    by_muon = {}
    if config.name == "muon":
        # Orthogonalised updates are for hidden matrices; tables and heads keep AdamW.
        by_muon = {n: p for n, p in matrices.items() if n.startswith("model.layers.")}
    by_adamw = [p for n, p in matrices.items() if n not in by_muon]
    groups = [
        {"params": by_adamw, "weight_decay": config.weight_decay},
        {"params": gains, "weight_decay": 0.0},
        {"params": [*bases.values()], "weight_decay": 0.0, "lr_share": config.basis_lr},
    ]
    optimizers: list[torch.optim.Optimizer] = []
    if by_adamw or gains or bases:
        fused = all(p.is_cuda for p in parameters.values())
        chosen = [g for g in groups if g["params"]]
        optimizers.append(torch.optim.AdamW(chosen, lr=config.lr, betas=BETAS, fused=fused))
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


def _sgd(parameters: dict[str, nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """Torch's own, with decay as a part of the gradient: what studies of images are made with."""
    bases = [p for n, p in parameters.items() if n.endswith(LEARNED_BASIS)]
    others = [p for n, p in parameters.items() if not n.endswith(LEARNED_BASIS)]
    groups = [
        {"params": others, "weight_decay": config.weight_decay},
        {"params": bases, "weight_decay": 0.0, "lr_share": config.basis_lr},
    ]
    chosen = [group for group in groups if group["params"]]
    return torch.optim.SGD(chosen, lr=config.lr, momentum=config.momentum)
