"""Keeps one stage true to the shared space: projections, moves of the basis, and their measures.

A move is proposed by the last stage, which alone sees the whole gradient of the stream. It rides
down ahead of the tallies, and all stages switch after the same update. A run that ends where a move
is due saves it, and leaves its weights as they were trained: whoever goes on from there makes it.
"""

import functools
import math

import torch
from torch import Tensor

from thinwire.engine.build import StageBuilder
from thinwire.engine.checkpoint import BASIS, COVARIANCE, NEXT_BASIS, NEXT_MEASURES, Source
from thinwire.model import Stage, StageOptimizer, project
from thinwire.model.subspace import BasisMove, grassmann_step, orthonormality_error

GATHER_SHARE = 200  # a covariance is gathered in the last 1/200 of the steps between two moves
REPROJECT_EVERY = 50  # steps between projections of weights against the drift of rounding
MEASURE_EVERY = 10  # steps between measurements of the drift


class Keeper:
    """The space's side of a stage's training step."""

    def __init__(self, builder: StageBuilder, stage: Stage, optimizer: StageOptimizer):
        assert builder.space is not None, "there is a space to keep to"
        self.space = builder.space
        self._config = builder.settings.boundary
        self._steps = builder.settings.train.steps
        self._stage, self._optimizer = stage, optimizer
        self._constraint = builder.constraint(stage, in_training=True)
        self._is_last = stage.outgoing is None
        self._covariance_DD: Tensor | None = None  # of the window's committed steps
        self._of_step_DD: Tensor | None = None  # of the step under way
        self._gathering = False
        self._proposed: BasisMove | None = None
        self._postponed_DK: Tensor | None = None  # the basis of a move left to the next run
        self._move: BasisMove | None = None
        self.loss_jump: float | None = None  # of the move, where its loss was measured
        if self._is_last and self._config.basis_update_every:
            stage.watch_gradient(stage.first_free_layer(), self._gather)

    def begin_step(self, step: int) -> None:
        """Gather gradients only where a move is near: it costs D^2 operations per token."""
        every = self._config.basis_update_every
        window = math.ceil(every / GATHER_SHARE)
        self._gathering = every > 0 and (step % every) >= every - window
        self._of_step_DD = None

    def moves_after(self, step: int) -> bool:
        """Whether the basis moves after this step, on all stages; not after the last one."""
        return self._ends_window(step) and step + 1 < self._steps

    def _ends_window(self, step: int) -> bool:
        every = self._config.basis_update_every
        return every > 0 and (step + 1) % every == 0

    def propose(self) -> Tensor:
        """On the last stage: the next basis, from the gradients gathered."""
        covariance_DD = _sum(self._covariance_DD, self._of_step_DD)
        basis_DK = self.space.basis_DK
        self._proposed = None
        if covariance_DD is None or not bool(torch.isfinite(covariance_DD).all()):
            return basis_DK.clone()
        self._proposed = grassmann_step(covariance_DD, basis_DK, self._config.basis_rate)
        return self._proposed.basis_DK.to(basis_DK.dtype)

    @torch.no_grad()
    def follow(self, old_DK: Tensor) -> None:
        """Weights and momentum into the basis that the space has moved to."""
        self._move, self._proposed = self._proposed, None
        new_DK = self.space.basis_DK
        if self._constraint is not None:
            self._constraint.project_weights()
            for held in self._constraint.held:
                follow = functools.partial(project, basis_DK=new_DK, axis=held.axis)
                self._optimizer.change_momentum(held.name, follow)
        turn_KK = new_DK.T @ old_DK  # from coordinates in the old basis to those in the new one
        for name, layer in self._stage.reparametrised().items():
            follow = functools.partial(_turned, turn_KK=turn_KK, axis=layer.axis)
            layer.weight.copy_(follow(layer.weight))
            self._optimizer.change_momentum(name, follow)

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        """Weights back into S now and then. What the step gathered counts, or a window ends."""
        if self._constraint is not None and (step + 1) % REPROJECT_EVERY == 0:
            self._constraint.project_weights()
        if self._is_last and self._ends_window(step) and not self.moves_after(step):
            self._postponed_DK = self.propose()
        gathered = _sum(self._covariance_DD, self._of_step_DD)
        self._covariance_DD = None if self._ends_window(step) else gathered
        self._of_step_DD = None

    def withdraw(self, step: int) -> None:
        """Forget what a refused step gathered and proposed; a window that it ends has no move."""
        self._proposed = self._of_step_DD = None
        if self._ends_window(step):
            self._covariance_DD = None

    @property
    def most_basis_bytes(self) -> int:
        """The size of a basis that crosses a cut; 0 where none moves."""
        return self.space.basis_DK.nbytes if self._config.basis_update_every else 0

    def measures(self, step: int) -> dict[str, float]:
        """Drift now and then; after a move of the basis what it did, and to the loss of a batch."""
        found: dict[str, float] = {}
        if self._constraint is not None and step % MEASURE_EVERY == 0:
            found["drift"] = self._constraint.drift()
        if self._move is not None:
            found |= dict(zip(BasisMove._fields[1:], self._move[1:], strict=True))
            found["orthonormality_error"] = orthonormality_error(self.space.basis_DK.double())
            if self.loss_jump is not None:
                found["loss_jump"] = self.loss_jump
        self._move = self.loss_jump = None
        return found

    def state_tensors(self) -> dict[str, Tensor]:
        """What a state holds beyond weights: the basis, gradients so far, a move."""
        tensors = {BASIS: self.space.basis_DK}
        if self._covariance_DD is not None:
            tensors[COVARIANCE] = self._covariance_DD
        if self._postponed_DK is not None:
            tensors[NEXT_BASIS] = self._postponed_DK
            if self._proposed is not None:
                tensors[NEXT_MEASURES] = torch.tensor(self._proposed[1:], dtype=torch.float64)
        return tensors

    def load(self, source: Source) -> None:
        """Go on gathering where the source stopped, or make the move that its run left."""
        names, self._covariance_DD, self._postponed_DK = source.names(), None, None
        if NEXT_BASIS in names:
            basis_DK = source.tensor(NEXT_BASIS)
            if self._is_last and NEXT_MEASURES in names:
                measured = source.tensor(NEXT_MEASURES).tolist()
                self._proposed = BasisMove(basis_DK, *measured)
            old_DK = self.space.basis_DK.clone()
            self.space.move(basis_DK)
            self.follow(old_DK)
        elif self._is_last and COVARIANCE in names:
            loaded = source.tensor(COVARIANCE)
            self._covariance_DD = loaded.to(self.space.basis_DK.device)

    def _gather(self, gradient_BTD: Tensor) -> None:
        if not self._gathering:
            return
        flat_ND = gradient_BTD.detach().flatten(0, 1).to(self.space.basis_DK.dtype)
        square_DD = flat_ND.T @ flat_ND
        total = self._of_step_DD
        self._of_step_DD = square_DD if total is None else total.add_(square_DD)


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _turned(coordinates: Tensor, turn_KK: Tensor, axis: int) -> Tensor:
    return turn_KK @ coordinates if axis == 0 else coordinates @ turn_KK.T
