"""The space that all stages share: the basis U with its version, and the fixed token table.

Both come from a seed on every stage, so neither has to travel at the start; their fingerprint is
compared in the handshake. A stage holds one Space, whatever number of boundaries and layers read it.
"""

import hashlib

import torch
from torch import Tensor

from thinwire.subspace.random import fixed_table, random_basis


class Space:
    """U (dim, rank) in the weights' type, T_fixed (vocab, dim) in bfloat16, on one device."""

    def __init__(
        self,
        dim: int,
        rank: int,
        seed: int,
        vocab: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.version = 0
        basis_DK = random_basis(dim, rank, seed)
        self.table_VD = fixed_table(vocab, dim, seed) if vocab else None
        self.seed_fingerprint = self._fingerprint(basis_DK)
        self.basis_DK = basis_DK.to(device=device, dtype=dtype)
        if self.table_VD is not None:
            self.table_VD = self.table_VD.to(device)

    def anchors(self, ids_BT: Tensor) -> Tensor:
        """T_fixed[ids] in the basis' type: what every stage can add back by itself."""
        assert self.table_VD is not None, "this space was made without a token table"
        return self.table_VD[ids_BT].to(self.basis_DK.dtype)

    def move(self, basis_DK: Tensor) -> None:
        """Take a new basis; everything that reads this space sees it from now on."""
        self.basis_DK.copy_(basis_DK)
        self.version += 1

    def _fingerprint(self, basis_DK: Tensor) -> dict[str, str]:
        prints = {"basis": _digest(basis_DK)}
        if self.table_VD is not None:
            prints["token table"] = _digest(self.table_VD.view(torch.int16))
        return prints


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]
