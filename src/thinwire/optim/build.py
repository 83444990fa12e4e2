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
from thinwire.optim.muon import Muon
from thinwire.optim.roles import Role, role_of
from thinwire.optim.subspace import SubspaceAdamW
from thinwire.subspace import Constraint

BETAS = (0.9, 0.95)


class StageOptimizer:
    """The optimizers of one stage behind one face, with state addressed by parameter name."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        config: OptimConfig,
        constraint: Constraint | None = None,
    ):
        """`constraint` holds some of the parameters in a subspace; their updates stay there."""
        self._names: dict[Tensor, str] = {p: name for name, p in parameters.items()}
        self._parameters = parameters
        self._optimizers = _build(parameters, config.with_shares(), constraint)
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
    if isinstance(optimizer, Muon | torch.optim.SGD):
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
    parameters: dict[str, nn.Parameter], config: OptimConfig, constraint: Constraint | None
) -> list[torch.optim.Optimizer]:
    groups = [_group(name, parameter, config) for name, parameter in parameters.items()]
    if config.name == "sgd":
        # Decay as a part of the gradient: what studies of images are made with.
        for group in groups:
            group["weight_decay"] = 0.0 if group["role"] is Role.BASIS else config.weight_decay
        return [torch.optim.SGD(_merged(groups), lr=config.lr, momentum=config.momentum)]
    held = {entry.name: entry.axis for entry in constraint.held} if constraint else {}
    by_muon, in_space, others = [], [], []
    for name, group in zip(parameters, groups, strict=True):
        if config.name == "muon" and group["role"] is Role.MATRIX:
            basis_DK = constraint.basis_DK if constraint and name in held else None
            by_muon.append({**group, "basis": basis_DK})
        elif name in held:
            in_space.append({**group, "axis": held[name]})
        else:
            others.append(group)
    optimizers: list[torch.optim.Optimizer] = []
    if others:
        fused = all(p.is_cuda for p in parameters.values())
        optimizers.append(torch.optim.AdamW(_merged(others), betas=BETAS, fused=fused))
    if in_space:
        optimizers.append(SubspaceAdamW(_merged(in_space), betas=BETAS))
    if by_muon:
        optimizers.append(Muon(_merged(by_muon)))
    return optimizers


def _group(name: str, parameter: nn.Parameter, config: OptimConfig) -> dict[str, Any]:
    """One parameter with its rate and decay."""
    role = role_of(name, parameter)
    shares = {
        Role.MATRIX: config.matrix_lr if config.name == "muon" else 1.0,
        Role.TABLE: config.table_lr,
        Role.HEAD: config.head_lr,
        # Entries of an orthonormal basis are small: at the rate of weights it would turn too fast
        # for the layers on either side to follow.
        Role.BASIS: config.basis_lr,
    }
    decays = role not in (Role.GAIN, Role.BASIS)
    return {
        "params": [parameter],
        "role": role,
        "lr_share": shares.get(role, 1.0),
        "weight_decay": config.weight_decay if decays else 0.0,
    }


def _merged(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups that differ in their parameters alone as one, for the sake of speed."""
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in groups:
        alike = (
            group["lr_share"],
            group["weight_decay"],
            group.get("axis"),
            id(group.get("basis")),
        )
        known = merged.setdefault(alike, {**group, "params": []})
        known["params"] += group["params"]
    return list(merged.values())
