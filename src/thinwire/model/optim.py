"""Optimizers: which parameter is updated by what, and the state of that by name: torch keeps it by
position, but a run may be split anew.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import CheckpointError
from thinwire.model.config import OptimConfig
from thinwire.model.subspace import Constraint

BETAS = (0.9, 0.95)
_ADAM = {"betas": BETAS, "eps": 1e-8}
MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x^3 and x^5: steep at 0, near 1 around 1
ITERATIONS = 5
RMS = 0.2  # of an update at rate 1, about AdamW's own: one learning rate then serves both
STACK_NUMBERS = 2**28  # in matrices that are orthogonalised together, for the memory's sake


State = dict[str, tuple[tuple[int, ...], torch.dtype]]  # what is kept of a parameter, by name


class Role(Enum):
    """What a parameter is to an optimizer, as models and boundaries say. Most have no role."""

    MATRIX = "matrix"  # between hidden states, in blocks and at cuts: what Muon is for
    TABLE = "table"  # a row per token: the embedding, and the tables of stages' own
    HEAD = "head"


class Optimizer(torch.optim.Optimizer, ABC):
    """Torch's own, without its compiler: to stay out of what that compiles, methods import it when
    they are first called, which takes two seconds of a core in every process.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of all parameters, with the gradients of the closure if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss

    @abstractmethod
    def update(self) -> None:
        """What a step does, gradients given."""

    def kept(self, weight: Tensor, group: dict[str, Any]) -> State:
        """What is kept of a parameter, by name; of most as by AdamW."""
        shape, dtype = tuple(weight.shape), weight.dtype
        second = tuple(1 if axis == group.get("axis") else n for axis, n in enumerate(shape))
        step = (), torch.float32
        return {"step": step, "exp_avg": (shape, dtype), "exp_avg_sq": (second, dtype)}

    def state_of(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter, zeros before its first update; counters are on the CPU."""
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            for name, (shape, dtype) in self.kept(weight, group).items():
                device = "cpu" if name == "step" else weight.device
                state[name] = torch.zeros(shape, dtype=dtype, device=device)
        return state


class AdamW(Optimizer, torch.optim.AdamW):
    """Torch's own, in the same way."""

    update = inspect.unwrap(torch.optim.AdamW.step)


class SubspaceAdamW(Optimizer):
    """AdamW whose second moment is one number per input unit of held parameters, the mean over the
    model dimension: an update stays in S if the gradient is in it, which Adam's own would not.

    With a constraint `step` first projects the gradients of what it holds (clip after
    `constraint.project_gradients()`). Or give groups an `axis` and project yourself.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        constraint: Constraint | None = None,
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "axis": None, **_ADAM})
        self._constraint = constraint
        held = constraint.held if constraint is not None else []
        self._axes: dict[Tensor, int] = {entry.parameter: entry.axis for entry in held}

    def update(self) -> None:
        if self._constraint is not None:
            self._constraint.project_gradients()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    own = group | {"axis": self._axes.get(weight, group["axis"])}
                    self._update(weight, weight.grad, own)

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, axis = self.state_of(weight, group), group["axis"]
        if axis is None:
            square = gradient.square()
        else:  # one pass over the gradient, and nothing of its size is written
            norm = torch.linalg.vector_norm(gradient, dim=axis, keepdim=True)
            square = norm.square_().div_(gradient.shape[axis])
        state["step"] += 1
        count, (beta1, beta2) = float(state["step"]), group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].lerp_(square, 1 - beta2)
        scale = (state["exp_avg_sq"] / (1 - beta2**count)).sqrt_().add_(group["eps"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.addcdiv_(state["exp_avg"], scale, value=-group["lr"] / (1 - beta1**count))


class RowAdamW(Optimizer):
    """AdamW for a table of which a few rows are updated at a time, by what AdamW would have done
    since the last time: moments fade, and a step is as long as those of fading moments together.
    `changes` gives the changes of rows; whoever holds the table adds them, and `step` changes none.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **_ADAM})

    def update(self) -> None:
        for group in self.param_groups:
            for table_VD in group["params"]:
                self.state_of(table_VD, group)  # for a checkpoint, whether or not a row was due

    def kept(self, weight: Tensor, group: dict[str, Any]) -> State:
        shape, dtype = tuple(weight.shape), weight.dtype
        updated = shape[:1], torch.int64
        return {"exp_avg": (shape, dtype), "exp_avg_sq": (shape, dtype), "updated": updated}

    @torch.no_grad()
    def changes(
        self, table_VD: nn.Parameter, rows_R: Tensor, gradient_RD: Tensor, update: int
    ) -> Tensor:
        """What to add to these rows in update number `update` (from 1) of the run."""
        (group,) = (g for g in self.param_groups if any(p is table_VD for p in g["params"]))
        (beta1, beta2), lr, state = group["betas"], group["lr"], self.state_of(table_VD, group)
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


class Muon(Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay, for matrices: momentum whose
    directions all count alike, by Newton-Schulz iterations, which keep a subspace. With a group's
    `basis` they are done in its coordinates: less work, and no rounding can lead out.

    On a GPU matrices of one shape are orthogonalised together, in bfloat16; on a CPU one by one, in
    their own precision, so that a weight does not depend on which others share its stage.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "basis": None})

    def update(self) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape.setdefault(weight.shape, []).append(weight)
            for shape, alike in by_shape.items():
                most = max(1, STACK_NUMBERS // shape.numel()) if alike[0].is_cuda else 1
                for start in range(0, len(alike), most):
                    self._update(alike[start : start + most], group)

    def kept(self, weight: Tensor, group: dict[str, Any]) -> State:
        return {"momentum_buffer": (tuple(weight.shape), weight.dtype)}

    def _update(self, weights: list[Tensor], group: dict[str, Any]) -> None:
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
        momentum, gradient = self.state_of(weight, group)["momentum_buffer"], weight.grad
        assert gradient is not None
        momentum.lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM)


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


def orthogonalising_flops(shape: torch.Size) -> int:
    """Operations of the matrix products of `orthogonalised` with a matrix of such a shape."""
    short, long = sorted(shape[-2:])
    return ITERATIONS * (4 * short**2 * long + 2 * short**3)


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
        """As few optimizers and groups as there are ways to update a parameter, for speed. `roles`
        names those that have one. What `constraint` holds in a subspace stays there. `by_rows`:
        rows of token tables are updated one by one (`row_changes`).
        """
        self._names: dict[Tensor, str] = {p: name for name, p in parameters.items()}
        self._parameters = parameters
        config, is_muon = config.with_shares(), config.name == "muon"
        axes = {entry.name: entry.axis for entry in constraint.held} if constraint else {}
        shares: dict[Role | None, float] = {Role.TABLE: config.table_lr, Role.HEAD: config.head_lr}
        if is_muon:
            shares[Role.MATRIX] = config.matrix_lr
        adamw = partial(AdamW, betas=BETAS, fused=all(p.is_cuda for p in parameters.values()))
        kinds: dict[Callable[..., Optimizer], dict[tuple[Any, ...], dict[str, Any]]]
        kinds = {kind: {} for kind in (adamw, SubspaceAdamW, RowAdamW, Muon)}
        for name, parameter in parameters.items():
            role = roles.get(name)
            kind: Callable[..., Optimizer] = adamw
            options: dict[str, Any] = {
                "lr_share": shares.get(role, 1.0),
                "weight_decay": config.weight_decay if parameter.ndim > 1 else 0.0,
            }
            if by_rows and role is Role.TABLE:
                kind = RowAdamW
            elif is_muon and role is Role.MATRIX:
                kind = Muon
                options["basis"] = constraint.basis_DK if constraint and name in axes else None
            elif name in axes:
                kind = SubspaceAdamW
                options["axis"] = axes[name]
            group = kinds[kind].setdefault(tuple(options.values()), {"params": [], **options})
            group["params"].append(parameter)
        self._optimizers = [kind([*groups.values()]) for kind, groups in kinds.items() if groups]

    def step(self, lr: float) -> None:
        """One update at this learning rate; gradients are cleared afterwards."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_share", 1.0)
            optimizer.step()
        self.zero_grad()

    def take_state(self, other: "StageOptimizer") -> None:
        """Go on from the state of an optimizer of other copies, which then has none."""
        pairs = zip(self._walk(), other._walk(), strict=True)
        for (mine, _, own, _), (theirs, _, others, _) in pairs:
            mine.state.pop(own, None)
            if others in theirs.state:
                mine.state[own] = theirs.state.pop(others)

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

    def state_tensors(self) -> dict[str, Tensor]:
        """The whole state as `parameter name/state name`, ready for a checkpoint."""
        return {
            f"{name}/{key}": value
            for optimizer, _, parameter, name in self._walk()
            for key, value in optimizer.state.get(parameter, {}).items()
        }

    def state_like(self) -> dict[str, Tensor]:
        """What `state_tensors` gives after an update, as tensors without memory."""
        return {
            f"{name}/{key}": torch.empty(shape, dtype=dtype, device="meta")
            for optimizer, group, parameter, name in self._walk()
            for key, (shape, dtype) in optimizer.kept(parameter, group).items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `state_tensors` gave; a CheckpointError if it is of another optimizer."""
        split = [(*full_name.rpartition("/"), value) for full_name, value in tensors.items()]
        for optimizer, group, parameter, name in self._walk():
            optimizer.state.pop(parameter, None)
            loaded = {key: value for whose, _, key, value in split if whose == name}
            if not loaded:
                continue
            found = {key: tuple(value.shape) for key, value in loaded.items()}
            kept = {key: shape for key, (shape, _) in optimizer.kept(parameter, group).items()}
            if found != kept:
                raise CheckpointError(
                    f"the optimizer's state of {name} in the checkpoint is {found}, this optimizer "
                    f"keeps {kept}: resume with the optimizer and the model that wrote it"
                )
            # A step counter stays on the CPU, unless one kernel reads it too.
            counter = parameter.device if group.get("fused") else torch.device("cpu")
            optimizer.state[parameter] = {
                key: value.to(counter if value.ndim == 0 else parameter.device, copy=True)
                for key, value in loaded.items()
            }

    def _walk(self) -> Iterator[tuple[Optimizer, dict[str, Any], nn.Parameter, str]]:
        """Each parameter with its optimizer, its group and its name."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield optimizer, group, parameter, self._names[parameter]
