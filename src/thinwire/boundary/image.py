"""The dense boundary of an image model: each pixel crosses as a token does, with its channels.

So a codec that has a scale per token, rotates tokens or takes them for rows of a matrix finds in
images what it finds in text, whatever number of pixels and channels a cut has.

Shapes: B images, C channels, S pixels a side, P = S * S.
"""

import math

from torch import Tensor

from thinwire.boundary.base import Boundary


def to_pixels(x_BCSS: Tensor) -> Tensor:
    """Planes (B, C, S, S) as pixels (B, P, C), without a copy where channels lie side by side."""
    return x_BCSS.permute(0, 2, 3, 1).flatten(1, 2).contiguous()


def to_planes(z_BPC: Tensor, side: int) -> Tensor:
    """The inverse, never with a copy: channels stay side by side."""
    return z_BPC.unflatten(1, (side, side)).permute(0, 3, 1, 2)


def as_from_a_cut(x_BCSS: Tensor) -> Tensor:
    """Planes laid out as a boundary delivers them.

    Convolutions on another layout add up in another order. A model that lays out what each block
    reads in this way computes the same bits wherever it is cut. (torch's own channels_last leaves
    planes of one channel or one pixel as they are, and convolutions tell the difference.)
    """
    return to_planes(to_pixels(x_BCSS), x_BCSS.shape[2])


class ImageBoundary(Boundary):
    """Encode and decode read planes as rows of pixels and rows as planes, and lose nothing.

    Image models keep the channels of a pixel side by side in memory: neither end copies anything.
    """

    def encode(self, x_BCSS: Tensor, ids_BT: Tensor | None) -> Tensor:
        return to_pixels(x_BCSS)

    def decode(self, z: Tensor, ids_BT: Tensor | None) -> Tensor:
        return to_planes(z, math.isqrt(z.shape[1]))
