"""Boundaries through which only `rank` coordinates per token cross.

Shapes: B sequences, T positions, D model width, K rank, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.boundary.base import Boundary
from thinwire.subspace import Space


class SubspaceBoundary(Boundary):
    """The paper's cut: take off what is known of the token, send coordinates in the shared basis.

    Exact when everything that was added to the stream below lies in the subspace: then
    x - T_fixed[ids] has no part outside it, and the part of the gradient that is dropped on the
    way back could not have changed a constrained weight.
    """

    def __init__(self, space: Space, anchored: bool = True):
        super().__init__()
        self.space = space
        self.anchored = anchored
        self.needs_ids = anchored

    @property
    def basis_DK(self) -> Tensor:
        """The basis of this cut."""
        return self.space.basis_DK

    # Coordinates are computed in the weights' own precision: a basis rounded to bfloat16 is not
    # orthonormal, and the error would be the same for every token.

    def encode(self, x_BTD: Tensor, ids_BT: Tensor | None) -> Tensor:
        """Coordinates of x - T_fixed[ids] in the basis."""
        with torch.autocast(x_BTD.device.type, enabled=False):
            z_BTK = x_BTD @ self.basis_DK
            if self.anchored:
                assert ids_BT is not None, "an anchored boundary reads token ids"
                z_BTK = z_BTK - self._anchor_coordinates(ids_BT)
            return z_BTK

    def decode(self, z: Tensor, ids_BT: Tensor | None) -> Tensor:
        """The stream from its coordinates."""
        with torch.autocast(z.device.type, enabled=False):
            x_BTD = z @ self.basis_DK.T
            if self.anchored:
                assert ids_BT is not None, "an anchored boundary reads token ids"
                x_BTD = x_BTD + self.space.anchors(ids_BT)
            return x_BTD

    def _anchor_coordinates(self, ids_BT: Tensor) -> Tensor:
        return self.space.anchor_coordinates(ids_BT)

    def wire_shape(self, batch: int, context: int) -> tuple[int, ...]:
        """Coordinates only."""
        return (batch, context, self.basis_DK.shape[1])


class ProjectedBoundary(SubspaceBoundary):
    """A narrow cut between free weights: what lies outside the basis is lost here.

    With `learn`, each end holds the basis as a parameter; the sender's is the one that is
    updated, with both ends' gradients, and sent to the receiver. A trainable anchor is a token
    table on the receiver's side alone: taking it off at the sender too would only shift the
    coordinates by something the receiver knows.
    """

    def __init__(self, space: Space, anchor: str, vocab: int, learn: bool, receives: bool):
        super().__init__(space, anchored=anchor == "fixed")
        self.basis = nn.Parameter(space.basis_DK.clone()) if learn else None
        self.table = None
        if anchor == "trainable" and receives:
            dim = space.basis_DK.shape[0]
            self.table = nn.Parameter(space.basis_DK.new_zeros(vocab, dim))
            self.needs_ids = True

    @property
    def basis_DK(self) -> Tensor:
        """The learned basis of this cut, or the one it was given."""
        return self.space.basis_DK if self.basis is None else self.basis

    def _anchor_coordinates(self, ids_BT: Tensor) -> Tensor:
        if self.basis is None:
            return super()._anchor_coordinates(ids_BT)
        # the basis learns from this too
        return self.space.anchors(ids_BT).to(self.basis.dtype) @ self.basis

    def decode(self, z: Tensor, ids_BT: Tensor | None) -> Tensor:
        """The stream from its coordinates, plus what the receiver has learned of the token."""
        x_BTD = super().decode(z, ids_BT)
        if self.table is not None:
            assert ids_BT is not None, "an anchored boundary reads token ids"
            x_BTD = x_BTD + F.embedding(ids_BT, self.table)
        return x_BTD
