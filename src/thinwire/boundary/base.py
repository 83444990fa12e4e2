"""What a boundary is: the narrow place between two stages, inside autograd.

The sender encodes its output x into z; z crosses; the receiver decodes z into x. The gradient
that comes back has z's shape: the receiver sends dL/dz and the sender backpropagates it through
its encode. So whatever encode and decode do is differentiated as part of the model.

Shapes: B sequences, T positions, D model width.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from thinwire.optim.roles import Role


class Boundary(nn.Module, ABC):
    """Both ends of one cut. A stage holds one for each neighbour and uses its own side of it."""

    needs_ids = False
    """Whether encode and decode read the token ids of the microbatch."""

    computes: ClassVar[bool] = False
    """Whether its ends are worth compiling, with the layer beside them."""

    own_tables = False
    """Whether each stage has a token table of its own (`known`): it is added where the stream
    enters the stage and taken off where it leaves. The first stage's is the embedding.
    """

    roles: ClassVar[dict[str, Role]] = {}
    """What its parameters are to an optimizer, by their names here."""

    @abstractmethod
    def encode(self, x_BTD: Tensor, ids_BT: Tensor | None) -> Tensor:
        """What the sender puts on the wire, as a differentiable function of its output."""

    @abstractmethod
    def decode(self, z: Tensor, ids_BT: Tensor | None) -> Tensor:
        """What the receiver's first layer reads, as a differentiable function of z."""

    def known(self, ids_BT: Tensor | None) -> Tensor | None:
        """What the receiving stage knows of each token by itself, where stages have own tables."""
        return None

    def copy_of_embedding(self) -> nn.Parameter | None:
        """The receiver's copy of the model's embedding, where stages share that."""
        return None

    def shared(self) -> list[nn.Parameter]:
        """What both ends hold: the sender updates it, with the gradients of both ends, and sends
        it to the receiver.
        """
        return []

    def copied(self) -> list[nn.Parameter]:
        """What both ends hold and the sender saves: all that is shared, and what never changes."""
        return self.shared()

    def after_update(self) -> None:
        """What the sender does to its parameters after each update, before it sends them."""

    def prepare(self) -> None:
        """Bring up to date what encode reads: compiled code does not see that a basis moved."""
