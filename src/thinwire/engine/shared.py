"""What stages hold alike: the space of narrow cuts, and copies of the embedding.

A move of the space's basis is proposed by the last stage, which alone sees the whole gradient of
the stream. It rides down ahead of the tallies, and all stages switch after the same update. A run
that ends where a move is due saves it, and leaves its weights as they were trained: whoever goes on
from there makes it.

With `boundary.anchor = "embedding"` the stream at a cut is the embedding of its token plus what
blocks have written into the subspace, so every stage has the embedding and finds gradients for it.
A row is due once its token was seen `boundary.row_tokens` times since its last update, and after
`boundary.row_steps` steps if it was seen at all: all stages know the ids. Gradients of due rows
ride down the pipeline ahead of the tallies, and each stage adds its own. The first one turns the
sum into changes (`RowAdamW`), which ride up behind the verdict. Everybody adds what arrives there,
the first stage too, so copies stay equal to the bit.

Shapes: V vocabulary, D model width, R rows that are due.
"""

import functools
import hashlib
import math

import torch
from torch import Tensor

from thinwire.codec import Leg, Place, TensorSpec, parse_codec
from thinwire.engine.build import StageBuilder
from thinwire.engine.checkpoint import BASIS, COVARIANCE, NEXT_BASIS, NEXT_MEASURES, Source
from thinwire.engine.trace import is_finite
from thinwire.errors import StageError, WireError
from thinwire.model import Stage, StageOptimizer, project
from thinwire.model.subspace import BasisMove, grassmann_step, orthonormality_error
from thinwire.schedule.simulator import ROW_FRAME_BYTES
from thinwire.settings import Settings

GATHER_SHARE = 200  # a covariance is gathered in the last 1/200 of the steps between two moves
REPROJECT_EVERY = 50  # steps between projections of weights against the drift of rounding
MEASURE_EVERY = 10  # steps between measurements of the drift
ROWS = "rows/"  # gradients that are not due yet are in a checkpoint as rows/FIRST LAYER OF A STAGE
SEEN = ROWS + "seen"
FROM_ABOVE, FROM_BELOW = 0, 1  # the two ways of rows in a step
_DOWN, _UP = 1, 2  # salts of the rounding, which is stochastic both ways


class Keeper:
    """The space's side of a stage's training step."""

    def __init__(self, builder: StageBuilder, stage: Stage, optimizer: StageOptimizer):
        assert builder.space is not None, "there is a space to keep to"
        self.space = builder.space
        self._config, self._steps = builder.settings.boundary, builder.settings.train.steps
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


def row_number(frame: int, way: int) -> int:
    """The number of a message with rows: one for each frame of them and way."""
    return 2 * frame + way


class SharedRows:
    """One stage's copy of the embedding between two steps and at the end of one."""

    def __init__(self, settings: Settings, index: int, stage: Stage, optimizer: StageOptimizer):
        table_VD = stage.embedding_copy()
        assert table_VD is not None, "every stage has the embedding, or a copy"
        self.table_VD, self.index = table_VD, index
        self.rows_R = torch.zeros(0, dtype=torch.int64, device=table_VD.device)
        """The rows that are due in the step under way, once `choose` has looked."""
        self.codec = parse_codec(settings.codec.rows)
        row = self.codec.payload_limit((1, table_VD.shape[1]))
        self._rows_per_frame = max(1, ROW_FRAME_BYTES // row)
        self._seed, self._boundary = settings.run.seed, settings.boundary
        self._name, self._optimizer = ROWS + stage.names[0], optimizer
        self._seen_V = torch.zeros(len(table_VD), dtype=torch.int64, device=table_VD.device)
        self._pending_VD = torch.zeros_like(table_VD)
        self._seen_now_V = torch.zeros_like(self._seen_V)  # in the step under way
        self._found_VD = torch.zeros(0)  # the gradient of the step under way
        self._sum_RD = torch.zeros(0)  # of the due rows' gradients, here and above

    def see(self, ids: Tensor) -> None:
        """Count the tokens of a microbatch."""
        self._seen_now_V += torch.bincount(ids.flatten(), minlength=len(self._seen_V))

    @torch.no_grad()
    def choose(self, step: int) -> None:
        """Which rows are due at the end of this step. Its gradient leaves the table, so neither the
        norm nor clipping knows it.
        """
        seen_V = self._seen_V + self._seen_now_V
        latest = self._boundary.row_steps
        turn_V = (torch.arange(len(seen_V), device=seen_V.device) + step + 1) % latest == 0
        due_V = (seen_V >= self._boundary.row_tokens) | (turn_V & (seen_V > 0))
        self.rows_R = due_V.nonzero()[:, 0]
        gradient_VD, self.table_VD.grad = self.table_VD.grad, None
        self._found_VD = torch.zeros_like(self.table_VD) if gradient_VD is None else gradient_VD
        self._sum_RD = self._pending_VD[self.rows_R] + self._found_VD[self.rows_R]

    def fingerprint(self) -> str:
        """Of the copy: neighbours compare theirs before the first step."""
        digest = hashlib.sha256(self.table_VD.detach().cpu().contiguous().numpy().data)
        return digest.hexdigest()[:16]

    @property
    def frames(self) -> int:
        """In how many frames the rows that are due travel: a stage hands on what it has so far."""
        return math.ceil(len(self.rows_R) / self._rows_per_frame)

    def limits(self) -> tuple[int, int]:
        """The most frames in a step, if all rows were due at once, and the most bytes of one."""
        rows, width = self.table_VD.shape
        largest = self.codec.payload_limit((self._rows_per_frame, width))
        return math.ceil(rows / self._rows_per_frame), largest

    def gradients(self, step: int, frame: int) -> bytes:
        """What goes down: the sum so far."""
        return bytes(self.codec.pack(self._sum(frame), self._at(step, frame, _DOWN, self.index)))

    def add(self, step: int, frame: int, payload: bytes) -> Tensor:
        """Add what the stage above sent, and return that."""
        sum_RD = self._sum(frame)
        found_RD = self._unpack(payload, len(sum_RD), self._at(step, frame, _DOWN, self.index + 1))
        sum_RD += found_RD
        return found_RD

    def is_finite(self) -> bool:
        """Whether what this step found and the sum are; if not, all stages refuse the step."""
        return is_finite(self._found_VD) and is_finite(self._sum_RD)

    def changes(self, step: int, update: int) -> list[bytes]:
        """On the first stage, once the step is committed: what goes up to all, frame by frame."""
        change_RD = self._optimizer.row_changes(self.table_VD, self.rows_R, self._sum_RD, update)
        if not is_finite(change_RD):
            raise StageError(
                f"rows of the embedding are not finite after step {step + 1}: the update "
                "overflowed. No checkpoint contains it. Resume with a lower optim.lr"
            )
        parts = change_RD.split(self._rows_per_frame)
        return [
            bytes(self.codec.pack(part, self._at(step, frame, _UP, 0)))
            for frame, part in enumerate(parts)
        ]

    @torch.no_grad()
    def follow(self, step: int, frame: int, payload: bytes) -> None:
        """Add the changes to the rows: the same on all stages."""
        rows_R = self.rows_R[self._of(frame)]
        change_RD = self._unpack(payload, len(rows_R), self._at(step, frame, _UP, 0))
        if not is_finite(change_RD):
            raise WireError(
                f"stage 0 sent changes of the embedding that are not finite after step {step + 1}"
            )
        self.table_VD[rows_R] += change_RD

    @torch.no_grad()
    def commit(self) -> None:
        """The step counts: what is not due yet waits, what was due begins anew."""
        self._pending_VD += self._found_VD
        self._seen_V += self._seen_now_V
        self._pending_VD[self.rows_R] = 0
        self._seen_V[self.rows_R] = 0
        self._end()

    def withdraw(self) -> None:
        """The step is refused: nothing of it was seen."""
        self.table_VD.grad = None
        self._end()

    def _end(self) -> None:
        self._seen_now_V.zero_()
        self._found_VD = self._sum_RD = torch.zeros(0)

    def state_tensors(self) -> dict[str, Tensor]:
        """What waits between two steps; the counts are the same on all stages."""
        return {self._name: self._pending_VD, SEEN: self._seen_V}

    def load(self, source: Source) -> None:
        """Go on where the source stopped: cuts that share an embedding stay where they are."""
        self._seen_V.copy_(source.tensor(SEEN))
        self._pending_VD.copy_(source.tensor(self._name))

    def _sum(self, frame: int) -> Tensor:
        """A view of the rows of one frame."""
        return self._sum_RD[self._of(frame)]

    def _of(self, frame: int) -> slice:
        return slice(frame * self._rows_per_frame, (frame + 1) * self._rows_per_frame)

    def _unpack(self, payload: bytes, rows: int, place: Place) -> Tensor:
        table_VD = self.table_VD
        spec = TensorSpec((rows, table_VD.shape[1]), table_VD.dtype, table_VD.device)
        try:
            return self.codec.unpack(payload, spec, place)
        except WireError as error:
            raise WireError(
                f"stage {place.cut} sent rows of the embedding that are not those that are due in "
                f"step {place.step + 1}: {error}"
            ) from None

    def _at(self, step: int, frame: int, salt: int, stage: int) -> Place:
        return Place(Leg.BACKWARD, step, frame, cut=stage, seed=self._seed, salt=salt)
