"""Which parameter is updated by what, and the state of that by name.

Torch keeps optimizer state by position; a run that is split anew needs it by name. The
StageOptimizer does that translation and nothing else.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import CheckpointError
from thinwire.optim.config import OptimConfig
from thinwire.optim.muon import Muon
from thinwire.optim.roles import Role
from thinwire.optim.rows import RowAdamW
from thinwire.optim.subspace import SubspaceAdamW
from thinwire.subspace import Constraint

BETAS = (0.9, 0.95)


class StageOptimizer:
    """The optimizers of one stage behind one face, with state addressed by parameter name."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        roles: Mapping[str, Role],
        config: OptimConfig,
        constraint: Constraint | None = None,
        by_rows: bool = False,
    ):
        """`roles` names the parameters that have one. `constraint` holds some in a subspace; their
        updates stay there. `by_rows`: rows of token tables are updated one by one (`row_changes`).
        """
        self._names: dict[Tensor, str] = {p: name for name, p in parameters.items()}
        self._parameters = parameters
        self._optimizers = _build(parameters, roles, config.with_shares(), constraint, by_rows)

    def step(self, lr: float) -> None:
        """One update at this learning rate; gradients are cleared afterwards."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_share", 1.0)
            optimizer.step()
        self.zero_grad()

    def row_changes(
        self, table_VD: nn.Parameter, rows_R: Tensor, gradient_RD: Tensor, update: int
    ) -> Tensor:
        """What to add to rows of a token table, at the learning rate of the last `step`."""
        (optimizer,) = (found for found in self._optimizers if isinstance(found, RowAdamW))
        return optimizer.changes(table_VD, rows_R, gradient_RD, update)

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
        return list(self._parameters)

    def state_tensors(self) -> dict[str, Tensor]:
        """The whole state as `parameter name/state name`, ready for a checkpoint."""
        return {
            f"{self._names[parameter]}/{key}": value
            for optimizer in self._optimizers
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `state_tensors` gave, in place of what there is.

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
                    optimizer.state.pop(parameter, None)
                    if name in loaded:
                        _check_state(
                            name, loaded[name], _state_like(type(optimizer), group, parameter)
                        )
                        # A step counter stays on the CPU, unless one kernel reads it too.
                        counter = parameter.device if group.get("fused") else torch.device("cpu")
                        optimizer.state[parameter] = {
                            key: value.to(
                                counter if value.ndim == 0 else parameter.device, copy=True
                            )
                            for key, value in loaded[name].items()
                        }


def state_like(
    parameters: dict[str, nn.Parameter],
    roles: Mapping[str, Role],
    config: OptimConfig,
    constraint: Constraint | None = None,
    by_rows: bool = False,
) -> dict[str, Tensor]:
    """What `StageOptimizer.state_tensors` gives after an update, as tensors without memory.

    Without an optimizer: what torch imports to make the first one takes seconds.
    """
    names = {p: name for name, p in parameters.items()}
    kinds = _grouped(parameters, roles, config.with_shares(), constraint, by_rows)
    return {
        f"{names[parameter]}/{key}": value
        for kind, groups in kinds.items()
        for group in groups
        for parameter in group["params"]
        for key, value in _state_like(kind, group, parameter).items()
    }


def _state_like(
    kind: type[torch.optim.Optimizer], group: dict[str, Any], parameter: Tensor
) -> dict[str, Tensor]:
    """What each kind of optimizer keeps of a parameter, as tensors without memory."""

    def like(shape: tuple[int, ...], dtype: torch.dtype = parameter.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    shape = tuple(parameter.shape)
    if issubclass(kind, Muon):
        return {"momentum_buffer": like(shape)}
    if issubclass(kind, RowAdamW):
        updated = like(shape[:1], torch.int64)
        return {"exp_avg": like(shape), "exp_avg_sq": like(shape), "updated": updated}
    second = shape
    if issubclass(kind, SubspaceAdamW):
        second = tuple(1 if axis == group["axis"] else n for axis, n in enumerate(shape))
    step = like((), torch.float32)
    return {"step": step, "exp_avg": like(shape), "exp_avg_sq": like(second)}


def _check_state(name: str, state: dict[str, Tensor], like: dict[str, Tensor]) -> None:
    found, expected = (
        {key: tuple(value.shape) for key, value in tensors.items()} for tensors in (state, like)
    )
    if found != expected:
        raise CheckpointError(
            f"the optimizer's state of {name} in the checkpoint is {found}, this optimizer keeps "
            f"{expected}: resume with the optimizer and the model that wrote it"
        )


def _build(
    parameters: dict[str, nn.Parameter],
    roles: Mapping[str, Role],
    config: OptimConfig,
    constraint: Constraint | None,
    by_rows: bool,
) -> list[torch.optim.Optimizer]:
    """As few optimizers and groups as there are ways to update a parameter, for speed."""
    kinds = _grouped(parameters, roles, config, constraint, by_rows)
    fused = all(p.is_cuda for p in parameters.values())
    common: dict[type[torch.optim.Optimizer], dict[str, Any]] = {
        torch.optim.AdamW: {"betas": BETAS, "fused": fused},
        SubspaceAdamW: {"betas": BETAS},
        RowAdamW: {"betas": BETAS},
        Muon: {},
    }
    return [kind(kinds[kind], **common[kind]) for kind in common if kind in kinds]


def _grouped(
    parameters: dict[str, nn.Parameter],
    roles: Mapping[str, Role],
    config: OptimConfig,
    constraint: Constraint | None,
    by_rows: bool,
) -> dict[type[torch.optim.Optimizer], list[dict[str, Any]]]:
    """Which kind of optimizer updates which parameters, in groups with the same options."""
    axes = {entry.name: entry.axis for entry in constraint.held} if constraint else {}
    kinds: dict[type[torch.optim.Optimizer], dict[tuple[Any, ...], dict[str, Any]]] = {}
    for name, parameter in parameters.items():
        role = roles.get(name)
        kind: type[torch.optim.Optimizer] = torch.optim.AdamW
        options: dict[str, Any] = {
            "lr_share": _share(role, config),
            "weight_decay": config.weight_decay if parameter.ndim > 1 else 0.0,
        }
        if by_rows and role is Role.TABLE:
            kind = RowAdamW
        elif config.name == "muon" and role is Role.MATRIX:
            kind = Muon
            options["basis"] = constraint.basis_DK if constraint and name in axes else None
        elif name in axes:
            kind = SubspaceAdamW
            options["axis"] = axes[name]
        groups = kinds.setdefault(kind, {})
        group = groups.setdefault(tuple(options.values()), {"params": [], **options})
        group["params"].append(parameter)
    return {kind: [*groups.values()] for kind, groups in kinds.items()}


def _share(role: Role | None, config: OptimConfig) -> float:
    """The learning rate of a parameter as a share of the run's."""
    shares = {
        Role.MATRIX: config.matrix_lr if config.name == "muon" else 1.0,
        Role.TABLE: config.table_lr,
        Role.HEAD: config.head_lr,
    }
    return 1.0 if role is None else shares[role]
