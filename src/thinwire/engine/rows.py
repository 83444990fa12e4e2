"""The embedding as a table that every stage has a copy of, updated row by row.

With `boundary.anchor = "embedding"` the stream at a cut is the embedding of its token plus what
blocks have written into the subspace, so every stage must know the embedding, and all of them find
gradients for it. A row is due once its token was seen `boundary.row_tokens` times since its last
update, and after `boundary.row_steps` steps if it was seen at all: all stages know the ids. At the
end of a step the gradients of due rows ride down the pipeline ahead of the tallies, and each stage
adds its own. The first one turns the sum into changes (`RowAdamW`), which ride up behind the
verdict. Everybody adds what arrives there, the first stage too, so copies stay equal to the bit.

Shapes: V vocabulary, D model width, R rows that are due.
"""

import hashlib
import math

import torch
from torch import Tensor

from thinwire.codec import Leg, Place, TensorSpec, parse_codec
from thinwire.engine.checkpoint import Source, is_finite
from thinwire.errors import StageError, WireError
from thinwire.model import Stage, StageOptimizer
from thinwire.schedule.simulator import ROW_FRAME_BYTES
from thinwire.settings import Settings

ROWS = "rows/"  # gradients that are not due yet are in a checkpoint as rows/FIRST LAYER OF A STAGE
SEEN = ROWS + "seen"
FROM_ABOVE, FROM_BELOW = 0, 1  # the two ways of rows in a step
_DOWN, _UP = 1, 2  # salts of the rounding, which is stochastic both ways


def row_number(frame: int, way: int) -> int:
    """The number of a message with rows: one for each frame of them and way."""
    return 2 * frame + way


class SharedRows:
    """One stage's copy of the embedding between two steps and at the end of one."""

    def __init__(self, settings: Settings, index: int, stage: Stage, optimizer: StageOptimizer):
        table_VD = stage.embedding_copy()
        assert table_VD is not None, "every stage has the embedding, or a copy"
        self.table_VD = table_VD
        self.index = index
        self.rows_R = torch.zeros(0, dtype=torch.int64, device=table_VD.device)
        """The rows that are due in the step under way, once `choose` has looked."""
        self.codec = parse_codec(settings.codec.rows)
        row = self.codec.payload_limit((1, table_VD.shape[1]))
        self._rows_per_frame = max(1, ROW_FRAME_BYTES // row)
        self._seed = settings.run.seed
        self._boundary = settings.boundary
        self._name = ROWS + stage.names[0]
        self._optimizer = optimizer
        size = table_VD.shape[0]
        self._seen_V = torch.zeros(size, dtype=torch.int64, device=table_VD.device)
        self._pending_VD = torch.zeros_like(table_VD)
        self._seen_now_V = torch.zeros_like(self._seen_V)  # in the step under way
        self._found_VD: Tensor | None = None  # the gradient of the step under way
        self._sum_RD: Tensor | None = None  # of the due rows' gradients, here and above

    def see(self, ids: Tensor) -> None:
        """Count the tokens of a microbatch."""
        self._seen_now_V += torch.bincount(ids.flatten(), minlength=len(self._seen_V))

    @torch.no_grad()
    def choose(self, step: int) -> None:
        """Which rows are due at the end of this step. Its gradient leaves the table, into what is
        this stage's so far: neither the norm nor clipping knows it.
        """
        seen_V = self._seen_V + self._seen_now_V
        latest = self._boundary.row_steps
        turn_V = (torch.arange(len(seen_V), device=seen_V.device) + step + 1) % latest == 0
        due_V = (seen_V >= self._boundary.row_tokens) | (turn_V & (seen_V > 0))
        self.rows_R = due_V.nonzero()[:, 0]
        self._found_VD = self.table_VD.grad
        self.table_VD.grad = None
        self._sum_RD = self._pending_VD[self.rows_R]
        if self._found_VD is not None:
            self._sum_RD += self._found_VD[self.rows_R]

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
        found = (self._found_VD, self._sum_RD)
        return all(tensor is None or is_finite(tensor) for tensor in found)

    def changes(self, step: int, update: int) -> list[bytes]:
        """On the first stage, once the step is committed: what goes up to all, frame by frame."""
        assert self._sum_RD is not None, "rows are chosen first"
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
        if self._found_VD is not None:
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
        self._found_VD = self._sum_RD = None

    def state_tensors(self) -> dict[str, Tensor]:
        """What waits between two steps; the counts are the same on all stages."""
        return {self._name: self._pending_VD, SEEN: self._seen_V}

    def load(self, source: Source) -> None:
        """Go on where the source stopped: cuts that share an embedding stay where they are."""
        self._seen_V.copy_(source.tensor(SEEN))
        self._pending_VD.copy_(source.tensor(self._name))

    def _sum(self, frame: int) -> Tensor:
        """A view of the rows of one frame."""
        assert self._sum_RD is not None, "rows are chosen first"
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
