"""What whoever writes a text says to the stages of its model, beside what starts a pipeline."""

from dataclasses import dataclass

from thinwire.inference.choice import Sampling
from thinwire.run.messages import CONTROL, FromCoordinator, FromPeer
from thinwire.typed import Exact, Finite


@dataclass(frozen=True)
class Read:
    """Token ids that come next in the window; none: no more will come.

    The first of a text, number 0, says how its tokens are to be chosen.
    """

    ids: list[int]
    number: int = 0  # of this message within the text
    with_empty_past: bool = False
    temperature: Finite = 0.0
    top_k: int = 0
    top_p: Finite = 1.0
    seed: Exact = "0"  # as text, for it may be negative

    @classmethod
    def first(cls, ids: list[int], sampling: Sampling) -> "Read":
        """The beginning of a text."""
        return cls(
            ids,
            with_empty_past=True,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=str(sampling.seed),
        )

    def sampling(self) -> Sampling:
        """How tokens are to be chosen."""
        return Sampling(self.temperature, self.top_k, self.top_p, int(self.seed))


@dataclass(frozen=True)
class Chosen:
    """The token that the last stage has chosen to follow what was read."""

    token: int


ToStage = FromCoordinator | Read
FromStage = FromPeer | Chosen
WORDS = CONTROL.extended({"read": Read, "chosen": Chosen})
