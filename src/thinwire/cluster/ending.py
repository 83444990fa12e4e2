"""The end of a step on a cluster.

What a stage does then is that of every engine (engine/step_end.py); here ranks only tell each other
what it needs. All ranks add up one list of numbers: the squared gradient norm of each parameter,
the loss of each microbatch, and who was asked to stop. So all of them make the same decision, and
the rank that keeps the record knows the loss.
"""

import itertools
import math

import torch
from torch import Tensor

from thinwire.cluster.held import Held
from thinwire.cluster.world import World
from thinwire.engine.keeper import Keeper
from thinwire.engine.step_end import Verdict, global_norm
from thinwire.engine.trace import BACKWARD
from thinwire.engine.worker import PATIENCE
from thinwire.settings import Settings


class Ending:
    """Ends the steps of one rank's stages, together with all other ranks."""

    def __init__(self, settings: Settings, world: World, held: list[Held]):
        self.stop_requested = False  # of this rank; one is enough
        self._settings = settings
        self._world = world
        self._held = held
        self._misses = 0
        self._numbers = world.grid.numbers(world.replica)
        self._squares = self._places_of_squares()

    def end_step(self, step: int, lr: float, losses: list[Tensor]) -> tuple[Verdict, float]:
        """Commit the step on all ranks or on none; also returns its loss, which all ranks know.

        As the chain does it in one process (engine/chain.py).
        """
        updates, world = {held.index: held.update for held in self._held}, self._world
        for held in self._held:
            world.add_twins([p.grad for p in held.stage.parameters() if p.grad is not None])
            held.update.project()
        keepers = [u.keeper for u in updates.values() if u.keeper is not None]
        moves = bool(keepers) and keepers[0].moves_after(step)
        basis_DK = self._proposed(keepers) if moves else None
        squares = {index: update.squared_norms() for index, update in updates.items()}
        for held in self._held:
            if not all(map(math.isfinite, squares[held.index])):
                held.sightings.note(step, BACKWARD)
        norm, loss, stop = self._agree(squares, losses)
        verdict = self._decide(step, norm, stop)
        for held in self._held:
            with held.pipelined.trace.span("compute", "U"):
                if verdict.commit:
                    held.update.commit(step, lr, norm)
                else:
                    held.update.withdraw(step)
        if verdict.commit:
            if basis_DK is not None:
                self._move(basis_DK, keepers)
            for update in updates.values():
                update.check(step)
        return verdict, loss

    def _agree(
        self, squares: dict[int, list[float]], losses: list[Tensor]
    ) -> tuple[float, float, bool]:
        """The norm of all gradients, the loss of the step, and whether anybody asks to stop."""
        count, world = self._settings.pipeline.microbatches, self._world
        total = self._squares[-1].stop
        said = [0.0] * (total + count + 1)
        if world.replica == 0:
            for index, own in squares.items():
                start = self._squares[index].start
                said[start : start + len(own)] = own
        for number, one in zip(self._numbers, losses, strict=False):
            said[total + number] = float(one)
        said[-1] = float(self.stop_requested)
        heard = world.sum(said)
        dtype = torch.float64 if self._settings.run.precision == "fp64" else torch.float32
        loss = float(torch.tensor(heard[total:-1], dtype=dtype).sum())
        return global_norm(heard[:total]), loss, heard[-1] > 0

    def _decide(self, step: int, norm: float, stop: bool) -> Verdict:
        """What the first stage decides in a pipeline of peers (engine/worker.py)."""
        commit = math.isfinite(norm)
        self._misses = 0 if commit else self._misses + 1
        stop = stop or self._misses >= PATIENCE
        checkpoint = self._settings.is_checkpoint_step(step + 1) or stop
        return Verdict(norm, commit, checkpoint and commit, stop)

    def _proposed(self, keepers: list[Keeper]) -> Tensor:
        """The next basis, from the last stage, which alone sees the gradient of the stream."""
        last = self._settings.pipeline.stages - 1
        is_here = any(held.index == last for held in self._held)
        basis_DK = keepers[-1].propose() if is_here else keepers[0].space.basis_DK
        return self._world.spread(basis_DK, last)

    def _move(self, basis_DK: Tensor, keepers: list[Keeper]) -> None:
        """All stages of a rank share one space: it moves once, and their weights follow."""
        space = keepers[0].space
        old_DK = space.basis_DK.clone()
        space.move(basis_DK)
        for keeper in keepers:
            keeper.follow(old_DK)

    def _places_of_squares(self) -> list[range]:
        """Where the norms of each stage's parameters stand in the list that all ranks add up."""
        stages = self._settings.pipeline.stages
        counts = [0.0] * stages
        if self._world.replica == 0:
            for held in self._held:
                counts[held.index] = float(len(held.stage.trained_parameters()))
        ends = [int(end) for end in itertools.accumulate(self._world.sum(counts), initial=0.0)]
        return [range(start, end) for start, end in itertools.pairwise(ends)]
