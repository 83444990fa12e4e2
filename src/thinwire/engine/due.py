"""What a neighbour may send: everything else is its error, before memory is allocated for it."""

from dataclasses import dataclass

from thinwire.engine.verdict import TALLY_BYTES, VERDICT_BYTES
from thinwire.schedule import Kind, Schedule
from thinwire.wire import FrameKind

FROM_ABOVE, FROM_BELOW = 0, 1  # the two ways of a BASIS message in a step, its number


def row_number(frame: int, way: int) -> int:
    """The number of a ROWS message: one for each frame of rows and way."""
    return 2 * frame + way


@dataclass(frozen=True)
class Due:
    """Who sends, which kinds, how many steps ahead, and how much of each.

    A stage below may be a step ahead, while this one still saves the step before; the stage above
    cannot be, for it needs this stage's activations.
    """

    sender: int
    kinds: frozenset[FrameKind]
    steps_ahead: int
    way: int  # of a basis or of rows
    first_step: int = 0
    validation_batches: int = 0
    basis_bytes: frozenset[int] = frozenset()
    rows: tuple[int, int] = (0, 0)  # frames in a step and bytes of one, at most; 0 = none cross
    answers_before: tuple[int, ...] | None = None  # for each forward, gradients sent back before

    def has_number(self, kind: FrameKind, number: int) -> bool:
        """Whether there is a message of this kind and number, of those that no codec packs."""
        if kind is FrameKind.ROWS:
            frame, way = divmod(number, 2)
            return way == self.way and frame < self.rows[0]
        return number == (self.way if kind is FrameKind.BASIS else 0)

    def most_bytes(self, kind: FrameKind) -> int:
        """The largest message of a kind."""
        return {
            FrameKind.BASIS: max(self.basis_bytes, default=0),
            FrameKind.ROWS: self.rows[1],
            FrameKind.TALLY: TALLY_BYTES,
        }.get(kind, VERDICT_BYTES)

    @classmethod
    def from_below(
        cls,
        stage: int,
        first_step: int,
        validation_batches: int,
        basis_bytes: set[int],
        schedule: Schedule | None = None,
        rows: tuple[int, int] = (0, 0),
    ) -> "Due":
        """What the stage below sends: activations, of validations too, and verdicts.

        By the schedule it keeps a window: it sends another activation only after so many gradients.
        """
        kinds = {FrameKind.FORWARD, FrameKind.VERDICT, FrameKind.BASIS}
        kinds |= {FrameKind.EVALUATE, FrameKind.VALIDATED}
        kinds |= {FrameKind.PROBE} if basis_bytes else set()
        kinds |= {FrameKind.ROWS} if rows[0] else set()
        return cls(
            sender=stage - 1,
            kinds=frozenset(kinds),
            steps_ahead=1,
            way=FROM_BELOW,
            first_step=first_step,
            validation_batches=validation_batches,
            basis_bytes=frozenset(basis_bytes),
            rows=rows,
            answers_before=_answers_before(schedule, stage - 1) if schedule else None,
        )

    @classmethod
    def from_above(
        cls,
        stage: int,
        first_step: int,
        basis_bytes: set[int],
        rows: tuple[int, int] = (0, 0),
    ) -> "Due":
        """What the stage above sends: gradients and tallies, to which each stage adds its own."""
        kinds = {FrameKind.BACKWARD, FrameKind.TALLY, FrameKind.BASIS}
        kinds |= {FrameKind.ROWS} if rows[0] else set()
        return cls(
            sender=stage + 1,
            kinds=frozenset(kinds),
            steps_ahead=0,
            way=FROM_ABOVE,
            first_step=first_step,
            basis_bytes=frozenset(basis_bytes),
            rows=rows,
        )


def _answers_before(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """How many backwards a stage has done before its forward of each microbatch."""
    done, before = 0, [0] * schedule.microbatches
    for action in schedule.rows[stage]:
        if action.kind is Kind.F:
            before[action.microbatch] = done
        done += action.kind is Kind.B
    return tuple(before)
