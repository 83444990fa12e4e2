"""Boundaries: the narrow place between two stages, inside autograd.

The sender encodes its output x into z; z crosses; the receiver decodes z into x, and sends dL/dz.
So whatever encode and decode do is differentiated as part of the model.

Shapes: B sequences, T positions, D model width, K rank, V vocabulary.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.model.subspace import Space, fixed_table


class Boundary(nn.Module, ABC):
    """Both ends of one cut. A stage holds one for each neighbour and uses its own side of it."""

    needs_ids = False  # whether encode and decode read the token ids of the microbatch
    own_tables = False  # whether stages add a table of tokens, and take it off again (`known`)

    @abstractmethod
    def encode(self, x_BTD: Tensor, ids_BT: Tensor | None) -> Tensor:
        """What the sender puts on the wire, as a differentiable function of its output."""

    @abstractmethod
    def decode(self, z: Tensor, ids_BT: Tensor | None) -> Tensor:
        """What the receiver's first layer reads, as a differentiable function of z."""

    def known(self, ids_BT: Tensor | None) -> Tensor | None:
        """What the receiving stage knows of each token by itself, where stages have own tables."""
        return None


class DenseBoundary(Boundary):
    """The activation crosses as it is: the baseline of every comparison."""

    def encode(self, x_BTD: Tensor, ids_BT: Tensor | None) -> Tensor:
        return x_BTD

    def decode(self, z: Tensor, ids_BT: Tensor | None) -> Tensor:
        return z


class SubspaceBoundary(Boundary):
    """The paper's cut: take off what is known of the token, send coordinates in the shared basis,
    in the weights' own precision: a basis rounded to bfloat16 is not orthonormal.
    """

    def __init__(self, space: Space, anchored: bool = True):
        super().__init__()
        self.space = space
        self.anchored = self.needs_ids = anchored
        self.basis: nn.Parameter | None = None  # set where a model holds it among its tensors

    @property
    def basis_DK(self) -> Tensor:
        """The basis of this cut."""
        return self.space.basis_DK if self.basis is None else self.basis

    def encode(self, x_BTD: Tensor, ids_BT: Tensor | None) -> Tensor:
        """U^T x, less the coordinates of what is known of each token."""
        with torch.autocast(x_BTD.device.type, enabled=False):
            z_BTK = x_BTD @ self.basis_DK
            if not self.anchored:
                return z_BTK
            return z_BTK - _rows(self.space.anchor_coordinates(), ids_BT)

    def decode(self, z: Tensor, ids_BT: Tensor | None) -> Tensor:
        """U z, plus what is known of each token."""
        with torch.autocast(z.device.type, enabled=False):
            x_BTD = z @ self.basis_DK.T
            return x_BTD + _rows(self.space.table_VD, ids_BT) if self.anchored else x_BTD


class ProjectedBoundary(SubspaceBoundary):
    """A narrow cut between free weights: what lies outside the basis is lost here.

    With `own_tables` every stage has a trainable token table, taken off again where it sends;
    `table`, of (vocab, width), gives the receiver its own, widened by a matrix where it is narrower
    than the stream. With `shared` tables are copies of the model's own embedding (engine/shared.py
    keeps them equal), and nothing is lost where blocks write into the subspace.
    """

    def __init__(
        self,
        space: Space,
        own_tables: bool = False,
        table: tuple[int, int] | None = None,
        shared: bool = False,
    ):
        super().__init__(space, anchored=False)
        self.shared = shared
        self.own_tables = self.needs_ids = own_tables
        self.table: nn.Parameter | None = None
        self.widen: nn.Parameter | None = None
        if table is not None:
            (vocab, width), dim = table, space.basis_DK.shape[0]
            self.table = nn.Parameter(space.basis_DK.new_zeros(vocab, width))
            if width < dim:
                # The same bits on every machine, and columns of length about 1.
                columns = fixed_table(dim, width, seed=0, std=width**-0.5)
                self.widen = nn.Parameter(columns.to(space.basis_DK))

    def known(self, ids_BT: Tensor | None) -> Tensor | None:
        """Rows of the receiver's table, as wide as the stream."""
        if self.table is None:
            return None
        rows = _rows(self.table, ids_BT)
        return rows if self.widen is None else F.linear(rows, self.widen)


def _rows(table: Tensor | None, ids_BT: Tensor | None) -> Tensor:
    assert table is not None and ids_BT is not None, "what is known follows from token ids"
    return F.embedding(ids_BT, table)
