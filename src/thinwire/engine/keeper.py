"""Keeps one stage true to the shared space: projections, moves of the basis, and their measures.

A move is proposed by the last stage, which alone sees the whole gradient of the stream. It rides
down the pipeline ahead of the tallies, so that every stage has it when the verdict comes, and all
stages switch after the same update.
"""

import functools
import math

import torch
from torch import Tensor

from thinwire.boundary import BoundaryConfig, ProjectedBoundary
from thinwire.engine.build import BASIS
from thinwire.engine.checkpoint import Checkpoint
from thinwire.model import Stage
from thinwire.optim import StageOptimizer
from thinwire.subspace import (
    BasisMove,
    Constraint,
    Space,
    grassmann_step,
    orthonormality_error,
    project,
    retract,
)

COVARIANCE = "space/covariance"
GATHER_SHARE = 200  # a covariance is gathered in the last 1/200 of the steps between two moves
REPROJECT_EVERY = 50  # steps between projections of weights against the drift of rounding
MEASURE_EVERY = 10  # steps between measurements of the drift


class Keeper:
    """The space's side of a stage's training step."""

    def __init__(
        self,
        config: BoundaryConfig,
        stage: Stage,
        optimizer: StageOptimizer,
        space: Space,
        constraint: Constraint | None,
        steps: int,
        is_first: bool,
        is_last: bool,
    ):
        self.space = space
        self._config = config
        self._stage = stage
        self._optimizer = optimizer
        self._constraint = constraint
        self._steps = steps
        self._is_first, self._is_last = is_first, is_last
        self._covariance_DD: Tensor | None = None
        self._gathering = False
        self._proposed: BasisMove | None = None
        self._move: BasisMove | None = None
        if is_last and config.basis_update_every:
            stage.watch_gradient(self._watched_layer(), self._gather)

    def begin_step(self, step: int) -> None:
        """Gather gradients only where a move is near: it costs D^2 operations per token."""
        every = self._config.basis_update_every
        window = math.ceil(every / GATHER_SHARE)
        self._gathering = every > 0 and (step % every) >= every - window

    def moves_after(self, step: int) -> bool:
        """Whether the basis moves after this step, on all stages.

        Not after the last one: nothing would be left to learn the new coordinates.
        """
        every = self._config.basis_update_every
        return every > 0 and (step + 1) % every == 0 and step + 1 < self._steps

    def project_gradients(self) -> None:
        """Before clipping and before the moments: only what stays in S counts."""
        if self._constraint is not None:
            self._constraint.project_gradients()

    def propose(self) -> Tensor:
        """On the last stage: the next basis, from the gradients gathered."""
        covariance_DD, self._covariance_DD = self._covariance_DD, None
        basis_DK = self.space.basis_DK
        if covariance_DD is None or not bool(torch.isfinite(covariance_DD).all()):
            return basis_DK.clone()
        self._proposed = grassmann_step(covariance_DD, basis_DK, self._config.basis_rate)
        return self._proposed.basis_DK.to(basis_DK.dtype)

    @torch.no_grad()
    def switch(self, basis_DK: Tensor) -> None:
        """Take the new basis, now that the step is committed; weights and momentum follow it."""
        self._move, self._proposed = self._proposed, None
        old_DK = self.space.basis_DK.clone()
        new_DK = basis_DK.to(old_DK)
        self.space.move(new_DK)
        if self._constraint is not None:
            self._constraint.project_weights()
            for held in self._constraint.held:
                follow = functools.partial(project, basis_DK=new_DK, axis=held.axis)
                self._optimizer.change_momentum(held.name, follow)
        turn_KK = new_DK.T @ old_DK  # from coordinates in the old basis to those in the new one
        for name, layer in self._stage.reparametrised().items():
            follow = functools.partial(_turned, turn_KK=turn_KK, axis=layer.coordinate_axis)
            layer.weight.copy_(follow(layer.weight))
            self._optimizer.change_momentum(name, follow)

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        """Learned bases back to orthonormal; weights back into S now and then."""
        learned = self.learned_outgoing()
        if learned is not None:
            learned.copy_(retract(learned))
        if self._constraint is not None and (step + 1) % REPROJECT_EVERY == 0:
            self._constraint.project_weights()

    def learned_outgoing(self) -> torch.nn.Parameter | None:
        """The learned basis of the cut above, which this stage owns."""
        end = self._stage.outgoing
        return end.basis if isinstance(end, ProjectedBoundary) else None

    def learned_incoming(self) -> torch.nn.Parameter | None:
        """The copy of the basis of the cut below, which the stage below owns."""
        end = self._stage.incoming
        return end.basis if isinstance(end, ProjectedBoundary) else None

    def measures(self, step: int) -> dict[str, float]:
        """Drift now and then; energy, angle and orthonormality when the basis has moved."""
        found: dict[str, float] = {}
        if self._constraint is not None and step % MEASURE_EVERY == 0:
            found["drift"] = self._constraint.drift()
        if self._move is not None:
            found["energy_before"] = self._move.energy_before
            found["energy_after"] = self._move.energy_after
            found["largest_angle"] = self._move.largest_angle
            found["orthonormality_error"] = orthonormality_error(self.space.basis_DK.double())
            self._move = None
        return found

    def state_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold beyond weights: the basis, and gradients half gathered."""
        tensors = {}
        if self._is_first and self._config.basis == "shared":
            tensors[BASIS] = self.space.basis_DK
        if self._covariance_DD is not None:
            tensors[COVARIANCE] = self._covariance_DD
        return tensors

    def load(self, checkpoint: Checkpoint) -> None:
        """Go on gathering where the checkpoint stopped."""
        if self._is_last and checkpoint.has(COVARIANCE):
            loaded = checkpoint.tensors([COVARIANCE])[COVARIANCE]
            self._covariance_DD = loaded.to(self.space.basis_DK.device)

    def _watched_layer(self) -> str:
        """Where the stream has left the constrained layers, or enters the last stage."""
        if not self._config.is_constrained:
            return self._stage.names[0]
        free = self._config.free_layers
        return self._stage.names[-2 - free]  # names end with the free blocks, norm and head

    def _gather(self, gradient_BTD: Tensor) -> None:
        if not self._gathering:
            return
        flat_ND = gradient_BTD.detach().flatten(0, 1).to(self.space.basis_DK.dtype)
        square_DD = flat_ND.T @ flat_ND
        total = self._covariance_DD
        self._covariance_DD = square_DD if total is None else total.add_(square_DD)


def _turned(coordinates: Tensor, turn_KK: Tensor, axis: int) -> Tensor:
    return turn_KK @ coordinates if axis == 0 else coordinates @ turn_KK.T
