"""A subspace S = Col(U) of the stream: its basis, what is held in it, and how it moves.

U has orthonormal columns. The model dimension D is axis 0 of a writer's weight (the columns of W
lie in S) and axis 1 of an embedding table (its rows lie in S).

*Random numbers are the same bits on every machine*: they come from a counter-based generator, are
small integers times a power of two, and are summed in a fixed order by elementwise additions.

*A move* is one step up the captured gradient energy tr(U^T C U) / tr(C), where C sums g g^T over
activation gradients, brought back to orthonormal columns by QR.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

TABLE_ROWS = 8192  # of the token table that are widened at a time
_STEPS_STD = 127 / math.sqrt(3)  # of whole numbers, uniform in -127..127


def fixed_table(vocab: int, dim: int, seed: int, std: float) -> Tensor:
    """T_fixed (vocab, dim): whole numbers in -127..127 times the power of two nearest to `std`."""
    scale = 2.0 ** round(math.log2(std / _STEPS_STD))
    raw = np.frombuffer(_bits(seed, "table", vocab * dim).tobytes(), dtype=np.uint8)
    steps = np.maximum(raw[: vocab * dim].view(np.int8), -127)
    table = torch.from_numpy(steps.copy()).to(torch.bfloat16) * scale
    return table.reshape(vocab, dim)


def random_basis(dim: int, rank: int, seed: int) -> Tensor:
    """U: an orthonormal basis (dim, rank) of a random subspace, in float64 on the CPU."""
    raw = np.frombuffer(_bits(seed, "basis", 4 * dim * rank).tobytes(), dtype=np.int32)
    columns_DK = raw[: dim * rank].reshape(dim, rank).astype(np.float64) * 2.0**-31
    return torch.from_numpy(_orthonormal(_orthonormal(columns_DK)))


def _bits(seed: int, purpose: str, size: int) -> np.ndarray:
    """At least `size` bytes from a stream of its own for each seed and purpose."""
    key = hashlib.sha256(f"thinwire/{purpose}/{seed}".encode()).digest()
    generator = np.random.Philox(key=np.frombuffer(key[:16], dtype="<u8"))
    return generator.random_raw(-(-size // 8)).astype("<u8")


def _orthonormal(columns_DK: np.ndarray) -> np.ndarray:
    """Gram-Schmidt with every sum in a defined order. Twice is enough for rounding's sake."""
    basis_DK = columns_DK.copy()
    for k in range(basis_DK.shape[1]):
        column_D = basis_DK[:, k]
        column_D /= np.sqrt(_sum(column_D * column_D))
        rest_DR = basis_DK[:, k + 1 :]
        if rest_DR.shape[1]:
            rest_DR -= column_D[:, None] * _sum(column_D[:, None] * rest_DR)
    return basis_DK


def _sum(values: np.ndarray) -> np.ndarray:
    """The sum over the first axis, by halving: the same additions on every machine."""
    while len(values) > 1:
        half = len(values) // 2
        folded = values[:half] + values[half : 2 * half]
        values = np.concatenate([folded, values[2 * half :]]) if len(values) % 2 else folded
    return values[0]


class Space:
    """What all stages share, each by its seed: U (dim, rank) in the weights' type, and T_fixed
    (vocab, dim) in bfloat16 if anchors need it. `basis_DK` keeps its identity when the basis moves.
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
        """T_fixed U (V, K), made anew whenever the basis has moved."""
        assert self.table_VD is not None, "this space was made without a token table"
        if self._table_VK is not None and torch.compiler.is_compiling():
            return self._table_VK  # the caller has had it made
        if self._table_VK is None or self._table_made_at != self.basis_DK._version:
            with torch.no_grad(), torch.autocast(self.basis_DK.device.type, enabled=False):
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


def project(tensor: Tensor, basis_DK: Tensor, axis: int) -> Tensor:
    """The part of a matrix that lies in S along its model dimension."""
    if axis == 0:
        return basis_DK @ (basis_DK.T @ tensor)
    return (tensor @ basis_DK) @ basis_DK.T


def drift(tensor: Tensor, basis_DK: Tensor, axis: int) -> float:
    """How much of a matrix lies outside S: ||W - P W|| / ||W||, 0 for a zero matrix."""
    size = torch.linalg.vector_norm(tensor)
    if not size:
        return 0.0
    outside = tensor - project(tensor, basis_DK, axis)
    return float(torch.linalg.vector_norm(outside) / size)


def orthonormality_error(basis_DK: Tensor) -> float:
    """||U^T U - I||, largest entry."""
    gram_KK = basis_DK.T @ basis_DK
    identity = torch.eye(gram_KK.shape[0], dtype=gram_KK.dtype, device=gram_KK.device)
    return float((gram_KK - identity).abs().max())


@dataclass(frozen=True)
class Held:
    """One constrained parameter and the axis of it that is the model dimension."""

    name: str
    parameter: nn.Parameter
    axis: int


class Constraint:
    """Holds parameters in S = Col(U): writers by their columns, an embedding by its rows. Gradients
    must be projected before an optimizer's moments see them and before their norm is taken.
    """

    def __init__(self, basis_DK: Tensor, held: Iterable[Held]):
        self.basis_DK = basis_DK
        self.held = list(held)

    @torch.no_grad()
    def project_gradients(self) -> None:
        """Drop the part of each gradient that would lead out of S."""
        for entry in self.held:
            gradient = entry.parameter.grad
            if gradient is not None:
                gradient.copy_(project(gradient, self._basis_for(gradient), entry.axis))

    @torch.no_grad()
    def project_weights(self) -> None:
        """Put the parameters into S: at the start, after a move, or against rounding."""
        for entry in self.held:
            weight = entry.parameter
            weight.copy_(project(weight, self._basis_for(weight), entry.axis))

    @torch.no_grad()
    def drift(self) -> float:
        """The largest share of any held parameter that lies outside S."""
        weights = [(entry.parameter, entry.axis) for entry in self.held]
        return max((drift(w, self._basis_for(w), axis) for w, axis in weights), default=0.0)

    def _basis_for(self, tensor: Tensor) -> Tensor:
        return self.basis_DK.to(device=tensor.device, dtype=tensor.dtype)


class BasisMove(NamedTuple):
    """A new basis, and what the move did."""

    basis_DK: Tensor
    energy_before: float
    energy_after: float
    largest_angle: float  # radians, between the old and the new subspace


def captured_energy(covariance_DD: Tensor, basis_DK: Tensor) -> float:
    """The share of gradient energy that lies in S, from 0 to 1, computed in float64."""
    covariance_DD, basis_DK = covariance_DD.double(), basis_DK.double()
    total = covariance_DD.trace()
    if not total:
        return 0.0
    return float((basis_DK * (covariance_DD @ basis_DK)).sum() / total)


def riemannian_gradient(covariance_DD: Tensor, basis_DK: Tensor) -> Tensor:
    """The direction in which the captured energy grows fastest, tangent to the manifold."""
    push_DK = covariance_DD @ basis_DK
    return 2 * (push_DK - basis_DK @ (basis_DK.T @ push_DK))


def grassmann_step(covariance_DD: Tensor, basis_DK: Tensor, rate: float) -> BasisMove:
    """Move the basis towards more captured energy; at rate 1 by about one power iteration."""
    covariance_DD, old_DK = covariance_DD.double(), basis_DK.double()
    scale = (old_DK * (covariance_DD @ old_DK)).sum() / old_DK.shape[1]
    moved_DK = old_DK
    if scale > 0:
        moved_DK = old_DK + rate / (2 * scale) * riemannian_gradient(covariance_DD, old_DK)
    new_DK = retract(moved_DK)
    return BasisMove(
        new_DK,
        captured_energy(covariance_DD, old_DK),
        captured_energy(covariance_DD, new_DK),
        float(principal_angles(old_DK, new_DK).max()),
    )


def retract(moved_DK: Tensor) -> Tensor:
    """Orthonormal columns with the same span; signs fixed so that no column flips."""
    q_DK, r_KK = torch.linalg.qr(moved_DK)
    signs_K = torch.where(r_KK.diagonal() < 0, -1.0, 1.0).to(q_DK.dtype)
    return q_DK * signs_K


def principal_angles(first_DK: Tensor, second_DK: Tensor) -> Tensor:
    """Angles between two subspaces, in radians, smallest first; small ones from their sines."""
    first_DK, second_DK = first_DK.double(), second_DK.double()
    overlap_KK = first_DK.T @ second_DK
    cosines = torch.linalg.svdvals(overlap_KK).clamp(max=1.0)
    sines = torch.linalg.svdvals(second_DK - first_DK @ overlap_KK).flip(0).clamp(max=1.0)
    return torch.where(sines < 0.7, torch.asin(sines), torch.acos(cosines))
