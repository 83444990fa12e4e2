"""Boundaries through which only `rank` coordinates per token cross.

Shapes: B sequences, T positions, D model width, K rank, V vocabulary.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.boundary.base import Boundary
from thinwire.optim.roles import Role
from thinwire.subspace import Space, fixed_table, retract

# Coordinates are computed in the weights' own precision: a basis rounded to bfloat16 is not
# orthonormal, and the error would be the same for every token.


def to_coordinates(
    x_BTD: Tensor, basis_DK: Tensor, ids_BT: Tensor | None, table_VK: Tensor | None
) -> Tensor:
    """U^T x, less the coordinates of what is known of each token."""
    with torch.autocast(x_BTD.device.type, enabled=False):
        z_BTK = x_BTD @ basis_DK
        if table_VK is not None:
            assert ids_BT is not None, "an anchored boundary reads token ids"
            z_BTK = z_BTK - F.embedding(ids_BT, table_VK)
        return z_BTK


def from_coordinates(
    z_BTK: Tensor, basis_DK: Tensor, ids_BT: Tensor | None, table_VD: Tensor | None
) -> Tensor:
    """U z, plus what is known of each token."""
    with torch.autocast(z_BTK.device.type, enabled=False):
        x_BTD = z_BTK @ basis_DK.T
        if table_VD is not None:
            assert ids_BT is not None, "an anchored boundary reads token ids"
            x_BTD = x_BTD + F.embedding(ids_BT, table_VD)
        return x_BTD


class SubspaceBoundary(Boundary):
    """The paper's cut: take off what is known of the token, send coordinates in the shared basis.

    Exact when everything that was added to the stream below lies in the subspace: then
    x - T_fixed[ids] has no part outside it, and the part of the gradient that is dropped on the
    way back could not have changed a constrained weight.
    """

    computes: ClassVar = True

    def __init__(self, space: Space, anchored: bool = True):
        super().__init__()
        self.space = space
        self.anchored = anchored
        self.needs_ids = anchored

    @property
    def basis_DK(self) -> Tensor:
        """The basis of this cut."""
        return self.space.basis_DK

    def encode(self, x_BTD: Tensor, ids_BT: Tensor | None) -> Tensor:
        table_VK = self.space.anchor_coordinates() if self.anchored else None
        return to_coordinates(x_BTD, self.basis_DK, ids_BT, table_VK)

    def decode(self, z: Tensor, ids_BT: Tensor | None) -> Tensor:
        table_VD = self.space.table_VD if self.anchored else None
        return from_coordinates(z, self.basis_DK, ids_BT, table_VD)

    def prepare(self) -> None:
        if self.anchored:
            self.space.anchor_coordinates()


class EmbeddedBoundary(SubspaceBoundary):
    """The exact cut around the model's own embedding, of which every stage has a copy.

    A copy is added where the stream enters a stage and taken off where it leaves, so what crosses
    is what blocks have written. As these write into the subspace, nothing is lost, and as copies
    stay equal (engine/rows.py), the model is a plain one whose embedding is trained whole.
    """

    own_tables = True

    def __init__(self, space: Space, copy: tuple[int, int] | None):
        """`copy` is the shape of the receiver's copy; a sender needs none here."""
        super().__init__(space, anchored=False)
        self.needs_ids = True
        self.copy = None
        if copy is not None:
            self.copy = nn.Parameter(space.basis_DK.new_zeros(copy))

    def known(self, ids_BT: Tensor | None) -> Tensor | None:
        if self.copy is None:
            return None
        assert ids_BT is not None, "an anchored boundary reads token ids"
        return F.embedding(ids_BT, self.copy)

    def copy_of_embedding(self) -> nn.Parameter | None:
        return self.copy

    def copied(self) -> list[nn.Parameter]:
        return [] if self.copy is None else [self.copy]


class ProjectedBoundary(SubspaceBoundary):
    """A narrow cut between free weights: what lies outside the basis is lost here.

    With `learn`, each end holds the basis as a parameter; the sender's is the one that is
    updated, with both ends' gradients, and sent to the receiver. With `calibrated` alone it is a
    parameter that stays as it was saved. `table` gives the receiver a
    trainable token table of (vocab, width). Where it is narrower than the stream, which saves
    memory with large vocabularies, a matrix widens its rows.

    With `own_tables` that table is the receiving stage's own: it is taken off again where that
    stage sends, so coordinates carry what context has added and nothing that all stages know. Left
    in, it would only shift them by what the next receiver could learn to take off; but tables learn
    fast, and every shift would reach all stages above.
    """

    roles: ClassVar = {"basis": Role.BASIS, "table": Role.TABLE, "widen": Role.MATRIX}

    def __init__(
        self,
        space: Space,
        anchored: bool,
        learn: bool,
        table: tuple[int, int] | None = None,
        calibrated: bool = False,
        own_tables: bool = False,
    ):
        super().__init__(space, anchored)
        self.basis = None
        if learn or calibrated:
            self.basis = nn.Parameter(space.basis_DK.clone(), requires_grad=learn)
        self.own_tables = own_tables
        if own_tables:
            self.needs_ids = True
        self.table = self.widen = None
        if table is not None:
            (vocab, width), dim = table, space.basis_DK.shape[0]
            self.table = nn.Parameter(space.basis_DK.new_zeros(vocab, width))
            if width < dim:
                self.widen = nn.Parameter(_widening(dim, width).to(space.basis_DK))
            self.needs_ids = True

    @property
    def basis_DK(self) -> Tensor:
        """The learned basis of this cut, or the one it was given."""
        return self.space.basis_DK if self.basis is None else self.basis

    def encode(self, x_BTD: Tensor, ids_BT: Tensor | None) -> Tensor:
        """Coordinates in the basis; a learned one learns from the anchors' coordinates too."""
        if self.basis is None or not self.anchored:
            return super().encode(x_BTD, ids_BT)
        assert ids_BT is not None, "an anchored boundary reads token ids"
        return to_coordinates(x_BTD - self.space.anchors(ids_BT), self.basis, None, None)

    def decode(self, z: Tensor, ids_BT: Tensor | None) -> Tensor:
        """The stream from its coordinates, plus what the receiver has learned of the token, if
        that is not the stage's to add.
        """
        x_BTD = super().decode(z, ids_BT)
        if self.table is None or self.own_tables:
            return x_BTD
        return x_BTD + self._rows(self.table, ids_BT)

    def known(self, ids_BT: Tensor | None) -> Tensor | None:
        if self.table is None or not self.own_tables:
            return None
        return self._rows(self.table, ids_BT)

    def _rows(self, table: Tensor, ids_BT: Tensor | None) -> Tensor:
        """Rows of the receiver's table, as wide as the stream."""
        assert ids_BT is not None, "an anchored boundary reads token ids"
        rows = F.embedding(ids_BT, table)
        return rows if self.widen is None else F.linear(rows, self.widen)

    def shared(self) -> list[nn.Parameter]:
        return [basis for basis in self.copied() if basis.requires_grad]

    def copied(self) -> list[nn.Parameter]:
        return [] if self.basis is None else [self.basis]

    @torch.no_grad()
    def after_update(self) -> None:
        """A learned basis becomes orthonormal again."""
        if self.basis is not None and self.basis.requires_grad:
            self.basis.copy_(retract(self.basis))


def _widening(dim: int, width: int) -> Tensor:
    """Where a widening matrix starts: the same bits on every machine, columns of length about 1.

    The table itself starts at zero, so the cut starts as one without a table.
    """
    return fixed_table(dim, width, seed=0, std=width**-0.5)
