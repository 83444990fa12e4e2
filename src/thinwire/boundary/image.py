"""The dense boundary of an image model: each pixel crosses as a token does, with its channels.

So a codec that has a scale per token, rotates tokens or takes them for rows of a matrix finds in
images what it finds in text, whatever number of pixels and channels a cut has.

Shapes: B images, C channels, S pixels a side, P = S * S.
"""

from torch import Tensor

from thinwire.boundary.base import Boundary


class ImageBoundary(Boundary):
    """Encode and decode read planes as rows of pixels and rows as planes, and lose nothing.

    Image models keep the channels of a pixel side by side in memory (torch's channels_last), so
    neither end copies anything. On either side, and on the way back too, layers find that layout as
    they make it themselves: another one is added up in another order, and a cut must not change a
    bit.
    """

    def __init__(self, channels: int, side: int):
        super().__init__()
        self.channels = channels
        self.side = side

    def encode(self, x_BCSS: Tensor, ids_BT: Tensor | None) -> Tensor:
        """Planes (B, C, S, S) as pixels (B, P, C)."""
        return x_BCSS.permute(0, 2, 3, 1).flatten(1, 2).contiguous()

    def decode(self, z: Tensor, ids_BT: Tensor | None) -> Tensor:
        """Pixels (B, P, C) as planes (B, C, S, S)."""
        return z.unflatten(1, (self.side, self.side)).permute(0, 3, 1, 2)

    def wire_shape(self, batch: int, context: int) -> tuple[int, ...]:
        """All pixels with all their channels."""
        return (batch, self.side * self.side, self.channels)
