"""Where in a run a tensor crosses; without torch, since settings read it."""

import hashlib
from dataclasses import dataclass
from enum import Enum


class Leg(Enum):
    """The direction of a crossing: activations go forward, gradients come backward."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Place:
    """Where in the run a tensor is packed, the same on both ends.

    Codecs with state or with random rounding key it by this, so that runs repeat exactly.
    """

    leg: Leg
    step: int
    microbatch: int
    cut: int = 0
    seed: int = 0
    training: bool = True
    """False in a validation or when text is generated: then nothing is remembered."""
    examples: tuple[int, ...] | None = None
    """Which training examples the rows are, for codecs that remember examples."""
    salt: int = 0
    """For a codec that needs more than one key at a place."""

    @property
    def key(self) -> int:
        """63 bits that differ from place to place: the key of everything random here."""
        where = f"{self.cut}/{self.leg.value}/{self.step}/{self.microbatch}"
        text = f"{self.seed}/{where}/{self.salt}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
