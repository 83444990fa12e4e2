"""The end of a stage's step: what becomes of the gradients that its backwards have left.

    begin, forwards and backwards, project, squared_norms, then commit or withdraw

The norm and the decision belong to all stages together. Whoever drives a stage brings them: the
runner of a pipeline over its ports, the chain in one process by itself. What a stage then does is
written here alone, so both train the same weights.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from thinwire.engine.build import StageBuilder
from thinwire.engine.keeper import Keeper
from thinwire.engine.rows import SharedRows
from thinwire.engine.source import Versions
from thinwire.errors import StageError
from thinwire.model import Stage
from thinwire.optim import StageOptimizer


class StageUpdate:
    """One stage's weights, with all that changes them or takes the change back."""

    def __init__(
        self,
        stage: Stage,
        optimizer: StageOptimizer,
        clip: float,
        keeper: Keeper | None = None,
        rows: SharedRows | None = None,
    ):
        self.optimizer = optimizer
        self.keeper = keeper
        self.rows = rows
        self.version = 0  # updates committed
        self._stage = stage
        self._clip = clip

    @classmethod
    def build(
        cls,
        builder: StageBuilder,
        stage: Stage,
        index: int,
        make_optimizer: Callable[..., StageOptimizer] = StageOptimizer,
    ) -> "StageUpdate":
        """With the optimizer that the settings name, a keeper where stages share a space, and rows
        where they share the embedding.
        """
        settings, constraint = builder.settings, builder.constraint_in_training(stage)
        by_rows = settings.boundary.shares_embedding
        optimizer = make_optimizer(
            stage.trained_parameters(), stage.roles(), settings.optim, constraint, by_rows
        )
        rows = SharedRows(settings, index, stage, optimizer) if by_rows else None
        keeper = None
        if builder.space is not None:
            keeper = Keeper(
                settings.boundary,
                stage,
                optimizer,
                builder.space,
                constraint,
                settings.train.steps,
            )
        return cls(stage, optimizer, settings.optim.clip, keeper, rows)

    @property
    def versions(self) -> Versions:
        """Of the weights, and of the shared basis."""
        return Versions(self.version, self.keeper.space.version if self.keeper else 0)

    def begin(self, step: int) -> None:
        """Before the first forward: note what a refused step must leave as it was."""
        if self.keeper is not None:
            self.keeper.begin_step(step)

    def project(self) -> None:
        """Drop what leads out of the shared space: before the norm, clipping and the moments."""
        if self.keeper is not None:
            self.keeper.project_gradients()

    def squared_norms(self) -> list[float]:
        """The squared gradient norm of each parameter, in float64; rows of a shared embedding only
        count where they are not finite.
        """
        gradients = [p.grad for p in self._stage.owned_parameters().values() if p.grad is not None]
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
        squares = [norm * norm for norm in torch.stack(norms).tolist()] if norms else []
        is_bad = self.rows is not None and not self.rows.is_finite()
        return [*squares, math.inf] if is_bad else squares

    def commit(self, step: int, lr: float, norm: float) -> None:
        """Change the weights; `norm` is that of the gradients of all stages.

        A move of the basis follows by itself (`Keeper.switch`): losses are measured in between.
        """
        self._clip_gradients(norm)
        self.optimizer.step(lr)
        self.version += 1
        if self.keeper is not None:
            self.keeper.after_update(step)

    @torch.no_grad()
    def withdraw(self, step: int) -> None:
        """Leave everything as it was before the step."""
        self.optimizer.zero_grad()
        if self.keeper is not None:
            self.keeper.withdraw(step)
        if self.rows is not None:
            self.rows.withdraw()

    @torch.no_grad()
    def check(self, step: int) -> None:
        """End the run before weights or moments that are not finite reach a checkpoint.

        An infinite second moment does no visible harm: its weight just never changes again.
        """
        name = not_finite(self._stage.trained_parameters())
        if name is not None:
            raise StageError(
                f"weights of {name} are not finite after step {step + 1}: the update overflowed. "
                "No checkpoint contains it. Resume with a lower optim.lr"
            )
        state = not_finite(self.optimizer.state_tensors())
        if state is None and self.rows is not None:
            state = not_finite(self.rows.state_tensors())
        if state is not None:
            raise StageError(
                f"the optimizer's state {state} is not finite after step {step + 1}: a gradient "
                "was too large, and its weights would stop learning. No checkpoint contains it. "
                "Resume with a lower optim.lr, or with optim.clip"
            )

    def _clip_gradients(self, norm: float) -> None:
        scale = self._clip / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ has it
        if self._clip <= 0 or scale >= 1:
            return
        for parameter in self._stage.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The first of these whose entries are not all finite: as `is_finite`, all sums at once."""
    named = {name: tensor for name, tensor in tensors.items() if tensor.ndim}
    sums = torch.stack([tensor.sum() for tensor in named.values()]).tolist() if named else []
    for (name, tensor), total in zip(named.items(), sums, strict=True):
        if not math.isfinite(total) and not bool(torch.isfinite(tensor).all()):
            return name
    return None
