"""A low-rank codec: a tensor as a matrix, the matrix as a product of two thin ones.

Shapes: a matrix of R rows and C columns; r the rank.
"""

import torch
from torch import Tensor

from thinwire.codec.base import (
    Layout,
    Part,
    Parts,
    Place,
    Shape,
    Stateful,
    Surroundings,
    TensorSpec,
    elements,
    working,
)
from thinwire.errors import ConfigError

FACTORS = torch.bfloat16
_COLD_ROUNDS = 3
_SEED = 0


class LowRank(Stateful):
    """M is sent as P (R x r, orthonormal) and Q = M^T P, both in bf16, and arrives as P Q^T.

    The last dimension gives the columns and all others the rows: a row is what is known of one
    token.

    P spans M Q for the last Q (PowerSGD's single power iteration with a warm start), so the
    sending end remembers Q and follows a subspace that moves slowly. Without a memory, that is at
    the first tensor and in evaluation, it starts from random numbers of a fixed seed and takes
    three iterations; evaluation remembers nothing.

    The numbers of P, and those of Q, are whole multiples (up to 2^22) of one power of two, so that
    P Q^T is exact in float64 in whatever order it is summed: every machine computes the same bits,
    which EF21 and AQSGD rely on. What is not finite makes all of the tensor NaN; so may magnitudes
    within a factor sqrt(R) of the largest float.

    Payload: 2 r (R + C) bytes; where that is not less than the matrix itself (always for
    r >= min(R, C)), the elements in bf16, 2 R C bytes.
    """

    def __init__(self, rank: int):
        if rank != int(rank) or rank < 1:
            raise ConfigError(f"lowrank({rank}): the rank must be an integer, 1 or more")
        self.rank = int(rank)
        self._last_Q: Tensor | None = None
        self._columns: int | None = None  # of the tensors to come, where they are known

    @property
    def name(self) -> str:
        return f"lowrank({self.rank})"

    def halved(self) -> "LowRank":
        if self.rank < 2:
            raise ConfigError("lowrank(1) cannot be halved: choose lowrank(2) or more")
        return LowRank(self.rank // 2)

    def layout(self, shape: Shape, place: Place) -> Layout:
        if self._whole(shape):
            return (Part(FACTORS, elements(shape)),)
        rows, columns = _matrix_shape(shape)
        return (Part(FACTORS, rows * self.rank), Part(FACTORS, columns * self.rank))

    def encode(self, tensor: Tensor, place: Place) -> Parts:
        if self._whole(tuple(tensor.shape)):
            return (tensor.to(FACTORS).reshape(-1),)
        M = tensor.reshape(_matrix_shape(tuple(tensor.shape))).to(
            _machine(tensor.device), working(tensor.dtype)
        )
        largest = M.abs().amax()
        finite, scale = largest.isfinite(), _power_of_two(largest)
        M = torch.where(finite, M / scale, 0)
        warm = self._warm(M) if place.training else None
        if warm is None:
            generator = torch.Generator().manual_seed(_SEED)
            start_Q = torch.randn((M.shape[1], self.rank), generator=generator).to(M)
        else:
            start_Q = warm
        Q = start_Q
        for _ in range(_COLD_ROUNDS if warm is None else 1):
            P = _on_grid(torch.linalg.qr(M @ Q).Q)
            Q = M.T @ P
        if place.training and finite and largest > 0:
            # Columns of one size keep M @ Q well conditioned.
            size = Q.abs().amax(0)
            self._last_Q = torch.where(size > 0, Q / size, start_Q)
        Q = torch.where(finite, _on_grid(Q) * scale, torch.nan)
        P, Q = (factor.to(tensor.device, FACTORS) for factor in (P, Q))
        return P.reshape(-1), Q.reshape(-1)

    def decode(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        if self._whole(spec.shape):
            return parts[0].reshape(spec.shape).to(spec.dtype)
        factors = (part.view(-1, self.rank).to(_machine(spec.device)) for part in parts)
        P, Q = (factor.to(torch.float64) for factor in factors)
        return (P @ Q.T).to(spec.dtype).view(spec.shape).to(spec.device)

    def prepare(self, spec: TensorSpec, surroundings: Surroundings) -> None:
        super().prepare(spec, surroundings)
        self._columns = _matrix_shape(spec.shape)[1]

    def own_state(self) -> dict[str, Tensor]:
        return {} if self._last_Q is None else {"q": self._last_Q}

    def load_own_state(self, tensors: dict[str, Tensor]) -> None:
        if tensors.keys() - {"q"}:
            raise ValueError(f"{self.name} remembers Q, but was given {sorted(tensors)}")
        Q = tensors.get("q")
        if Q is not None and self._columns is not None and Q.shape != (self._columns, self.rank):
            raise ValueError(
                f"{self.name} needs a Q of shape {(self._columns, self.rank)}, but was given one "
                f"of {tuple(Q.shape)}: tensors must keep their width"
            )
        self._last_Q = Q

    def _whole(self, shape: Shape) -> bool:
        rows, columns = _matrix_shape(shape)
        return self.rank * (rows + columns) >= rows * columns

    def _warm(self, M: Tensor) -> Tensor | None:
        if self._last_Q is None:
            return None
        if self._last_Q.shape != (M.shape[1], self.rank):
            raise ConfigError(
                f"{self.name} remembers a Q of shape {tuple(self._last_Q.shape)}, which does not "
                f"fit a matrix of {M.shape[1]} columns: tensors must keep their width"
            )
        return self._last_Q.to(M)


def _matrix_shape(shape: Shape) -> tuple[int, int]:
    if len(shape) < 2:
        return elements(shape), 1
    return elements(shape) // max(1, shape[-1]), shape[-1]


def _machine(device: torch.device) -> torch.device:
    """Where matrices are computed: Apple's MPS has neither float64 nor this decomposition."""
    return torch.device("cpu") if device.type == "mps" else device


def _power_of_two(x: Tensor) -> Tensor:
    """The largest power of two up to x, exactly; 1 where there is none."""
    positive = torch.where((x > 0) & x.isfinite(), x, 1)
    return positive / (2 * positive.frexp().mantissa)


def _on_grid(x: Tensor) -> Tensor:
    """Rounded to what bf16 can hold, and to multiples, up to 2^22, of one power of two."""
    step = _power_of_two(x.abs().amax()) * 2.0**-21
    return ((x / step).round() * step).to(FACTORS).to(x.dtype)
