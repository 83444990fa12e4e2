"""What a neighbour may send: everything else is its error, before memory is allocated for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from thinwire.wire import FrameKind

FROM_ABOVE, FROM_BELOW = 0, 1  # the two ways a BASIS message may take within a step, its number


@dataclass(frozen=True)
class Due:
    """Who sends, which kinds, how many steps ahead, how much of each, and who has to sign it.

    A stage below may be a step ahead, while this one still saves the step before; the stage above
    cannot be, for it needs this stage's activations.
    """

    sender: int
    kinds: frozenset[FrameKind]
    steps_ahead: int
    basis_way: int
    signers: Mapping[FrameKind, range] = field(default_factory=dict)  # one part of each stage
    first_step: int = 0
    validation_batches: int = 0
    basis_bytes: frozenset[int] = frozenset()

    @classmethod
    def from_below(
        cls, stage: int, first_step: int, validation_batches: int, basis_bytes: set[int]
    ) -> "Due":
        """What the stage below sends: activations, of validations too, and verdicts.

        The first stage has signed verdicts; a basis comes from the stage below itself.
        """
        kinds = {FrameKind.FORWARD, FrameKind.VERDICT, FrameKind.BASIS}
        kinds |= {FrameKind.EVALUATE, FrameKind.VALIDATED}
        kinds |= {FrameKind.PROBE} if basis_bytes else set()
        first, below = range(1), range(stage - 1, stage)
        return cls(
            sender=stage - 1,
            kinds=frozenset(kinds),
            steps_ahead=1,
            basis_way=FROM_BELOW,
            signers={
                FrameKind.VERDICT: first,
                FrameKind.VALIDATED: first,
                FrameKind.BASIS: below,
            },
            first_step=first_step,
            validation_batches=validation_batches,
            basis_bytes=frozenset(basis_bytes),
        )

    @classmethod
    def from_above(
        cls, stage: int, stages: int, first_step: int, basis_bytes: set[int], basis_is_shared: bool
    ) -> "Due":
        """What the stage above sends: gradients and tallies, to which each stage adds its own.

        A shared basis moves as the last stage says; otherwise the stage above has signed a basis.
        """
        above = range(stage + 1, stages)
        return cls(
            sender=stage + 1,
            kinds=frozenset({FrameKind.BACKWARD, FrameKind.TALLY, FrameKind.BASIS}),
            steps_ahead=0,
            basis_way=FROM_ABOVE,
            signers={
                FrameKind.TALLY: above,
                FrameKind.BASIS: above[-1:] if basis_is_shared else above[:1],
            },
            first_step=first_step,
            basis_bytes=frozenset(basis_bytes),
        )
