"""What the process of a stage is told when it starts, and what its streams are called."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from thinwire.run.messages import Assign
from thinwire.wire import Identity, Routes


@dataclass(frozen=True)
class Order:
    """Which stage a process is, where it reports, and who it is.

    Whoever starts the process writes this to its standard input, for it holds a private key. A run
    whose peers are on other machines is formed again when one of them is lost. Each time is an
    epoch, counted from 1, and streams bear its number, so that nothing of an earlier one is taken
    for one of this. A run on one machine has no epochs: 0.
    """

    stage: int
    coordinator: Routes  # where it is dialed
    identity: Identity
    epoch: int = 0
    outage: float = 0.0  # seconds for which the control stream may be down
    own: Assign | None = None  # decided on this machine; the coordinator's word on it is not asked
    has_corpus: bool = True  # else token ids come from the coordinator

    def to_plain(self) -> dict[str, Any]:
        """For the standard input of the process; contains the private key."""
        return dataclasses.asdict(self) | {"coordinator": self.coordinator.to_plain()}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Order":
        """The inverse of `to_plain`, from whoever started this process."""
        own = plain.pop("own")
        plain["identity"] = Identity(**plain["identity"])
        plain["coordinator"] = Routes.from_plain(plain["coordinator"])
        return cls(**plain, own=Assign(**own) if own else None)


def control_name(stage: int, epoch: int) -> str:
    """What the control stream of a stage is called."""
    return _in_epoch(f"control-{stage}", epoch)


def tokens_name(stage: int, epoch: int) -> str:
    """What the stream of a stage's token ids is called."""
    return _in_epoch(f"tokens-{stage}", epoch)


def cut_name(cut: int, epoch: int) -> str:
    """What the stream over a cut is called."""
    return _in_epoch(f"cut-{cut}", epoch)


def _in_epoch(name: str, epoch: int) -> str:
    return f"{name}@{epoch}" if epoch else name
