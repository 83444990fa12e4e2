"""The dense boundary: the activation crosses as it is. The baseline of every comparison."""

from torch import Tensor

from thinwire.boundary.base import Boundary


class DenseBoundary(Boundary):
    """Encode and decode are the identity."""

    def encode(self, x_BTD: Tensor, ids_BT: Tensor | None) -> Tensor:
        return x_BTD

    def decode(self, z: Tensor, ids_BT: Tensor | None) -> Tensor:
        return z
