"""What stages tell each other at the end of a step: tallies on the way down, the verdict up.

Both are checked where they arrive, before anything is computed with them: a payload that is no
tally or no verdict is the error of the stage that sent it.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.errors import WireError

_VERDICT = struct.Struct("<dBBB")
VERDICT_BYTES = _VERDICT.size
TALLY_BYTES = 8 << 14  # of all stages together: more tensors than any model of ours has


@dataclass(frozen=True)
class Verdict:
    """What the first stage decides for all at the end of a step."""

    grad_norm: float
    commit: bool
    checkpoint: bool
    stop: bool

    def to_bytes(self) -> bytes:
        """Eleven bytes: the norm and three flags."""
        return _VERDICT.pack(self.grad_norm, self.commit, self.checkpoint, self.stop)

    @classmethod
    def from_bytes(cls, payload: bytes) -> "Verdict":
        """The inverse of `to_bytes`; WireError when the payload is not a verdict."""
        if len(payload) != _VERDICT.size:
            raise WireError(f"a verdict has {_VERDICT.size} bytes, but {len(payload)} arrived")
        norm, *flags = _VERDICT.unpack(payload)
        if not {*flags} <= {0, 1}:
            raise WireError(f"the flags of a verdict are 0 or 1, but {flags} arrived")
        commit, checkpoint, stop = map(bool, flags)
        if norm < 0 or (commit and not math.isfinite(norm)):
            raise WireError(f"a verdict cannot {'commit' if commit else 'have'} a norm of {norm}")
        return cls(norm, commit, checkpoint, stop)


def pack_tally(squares: Sequence[float]) -> bytes:
    """Squared gradient norms, one for each parameter, in float64."""
    return struct.pack(f"<{len(squares)}d", *squares)


def unpack_tally(payload: bytes) -> list[float]:
    """The inverse of `pack_tally`; WireError when the payload is not a tally.

    A norm may be infinite or NaN, which refuses the step; a square cannot be below zero.
    """
    if len(payload) % 8:
        raise WireError(f"a tally has 8 bytes for each parameter, but {len(payload)} arrived")
    squares = list(struct.unpack(f"<{len(payload) // 8}d", payload))
    if any(square < 0 for square in squares):
        raise WireError("a tally holds a squared norm below zero")
    return squares


def global_norm(squares: Sequence[float]) -> float:
    """The norm of all gradients together; infinite if any is not finite, or the sum is not.

    The sum is exactly rounded: the norm, and with it every weight, is the same bit for bit however
    the layers are split into stages.
    """
    if not all(map(math.isfinite, squares)):
        return math.inf
    try:
        return math.sqrt(math.fsum(squares))
    except OverflowError:
        return math.inf
