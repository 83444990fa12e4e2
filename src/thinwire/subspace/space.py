"""The space that all stages share: the basis U with its version, and the fixed token table.

Both come from a seed on every stage, so neither has to travel at the start; their fingerprints are
compared in the handshake. A stage holds them once, whatever number of boundaries and layers read
them.
"""

import hashlib

import torch
from torch import Tensor
from torch.nn import functional as F

TABLE_ROWS = 8192  # of the token table that are widened at a time


class Space:
    """U (dim, rank) in the weights' type, and T_fixed (vocab, dim) in bfloat16 if anchors need it.

    `basis_DK` keeps its identity when the basis moves, so that all who hold it see the move.
    """

    def __init__(self, basis_DK: Tensor, table_VD: Tensor | None = None):
        self.basis_DK = basis_DK
        self.table_VD = table_VD
        self.version = 0
        self._table_VK: Tensor | None = None
        self._table_made_at = -1

    def anchors(self, ids_BT: Tensor) -> Tensor:
        """T_fixed[ids], still in bfloat16: what every stage can add back by itself."""
        assert self.table_VD is not None, "this space was made without a token table"
        return F.embedding(ids_BT, self.table_VD)

    def anchor_coordinates(self) -> Tensor:
        """T_fixed U (V, K), made anew whenever the basis has moved.

        With it a sender reads K numbers per token, not D.
        """
        assert self.table_VD is not None, "this space was made without a token table"
        if self._table_VK is not None and torch.compiler.is_compiling():
            return self._table_VK  # the caller has had it made
        if self._table_VK is None or self._table_made_at != self.basis_DK._version:
            with torch.no_grad():
                rows = self.table_VD.split(TABLE_ROWS)
                parts = [part.to(self.basis_DK.dtype) @ self.basis_DK for part in rows]
            self._table_VK, self._table_made_at = torch.cat(parts), self.basis_DK._version
        return self._table_VK

    def move(self, basis_DK: Tensor) -> None:
        """Take a new basis; everything that reads this space sees it from now on."""
        self.basis_DK.copy_(basis_DK)
        self.version += 1

    def fingerprints(self) -> dict[str, str]:
        """What both ends of a link compare: a difference names the part that differs."""
        prints = {"basis": _digest(self.basis_DK), "basis_version": str(self.version)}
        if self.table_VD is not None:
            prints["token_table"] = _digest(self.table_VD.view(torch.int16))
        return prints


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().numpy().tobytes()).hexdigest()[:16]
