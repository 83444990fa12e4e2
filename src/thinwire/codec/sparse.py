"""Sparse codecs: some elements of a tensor travel, in bf16, and the rest arrive as zero.

Shapes: B samples of n elements each, of which k are kept; N elements in all. A sample is an entry
of the first dimension; a tensor with fewer than two dimensions is one sample. Nothing is rescaled.
"""

import hashlib
import math
import threading
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from thinwire.codec.base import Codec, Layout, Leg, Part, Parts, Place, Shape, TensorSpec, elements
from thinwire.codec.quantize import pack_bits, packed_bytes, unpack_bits
from thinwire.errors import ConfigError, WireError

VALUES = torch.bfloat16
_ROUNDS = 4  # of the network that draws positions
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class PositionCode:
    """How k increasing positions below n become bits: a bitmap, or the code of Elias and Fano.

    With `low` = 0 there is one mark for each of the n positions. Otherwise the `low` lowest bits of
    every position are written as they are, and the rest in unary: the i-th position p sets mark i +
    p // 2^low. All marks are one stream of bits, all low bits another.
    """

    n: int
    k: int
    low: int

    @staticmethod
    @lru_cache(maxsize=64)
    def cheapest(n: int, k: int) -> "PositionCode":
        """The one with the fewest bits; of equals, the one with the fewest low bits."""
        codes = [PositionCode(n, k, low) for low in range(max(1, n.bit_length()))]
        return min(codes, key=lambda code: code.marks + code.k * code.low)

    @property
    def marks(self) -> int:
        """Marks of one sample, set or not."""
        return self.n if self.low == 0 else self.k + ((self.n - 1) >> self.low)

    def sizes(self, B: int) -> tuple[int, int]:
        """Bytes of the two streams for B samples."""
        return packed_bytes(B * self.marks, 1), packed_bytes(B * self.k * self.low, 1)

    def write(self, index_Bk: Tensor) -> tuple[Tensor, Tensor]:
        """The two streams for increasing positions."""
        device = index_Bk.device
        mark_Bk = (index_Bk >> self.low) + self._turns(device)
        marks = torch.zeros(len(index_Bk) * self.marks, dtype=torch.uint8, device=device)
        starts_B1 = row_starts(len(index_Bk), self.marks, device)
        marks.scatter_(0, (mark_Bk + starts_B1).view(-1), 1)
        lows = (index_Bk.to(torch.int32).unsqueeze(-1) >> self._places(device)) & 1
        return pack_bits(marks, 1), pack_bits(lows.to(torch.uint8).view(-1), 1)

    def read(self, marks: Tensor, lows: Tensor, B: int) -> Tensor:
        """The inverse of `write`; WireError when the streams are not k increasing positions."""
        device = marks.device
        ones = unpack_bits(marks, 8 * len(marks), 1).nonzero().view(-1)
        if len(ones) != B * self.k:
            raise WireError(f"{len(ones)} positions are marked, but {B * self.k} were agreed")
        mark_Bk = ones.view(B, self.k) - row_starts(B, self.marks, device)
        bits = unpack_bits(lows, 8 * len(lows), 1)
        used, unused = bits[: B * self.k * self.low], bits[B * self.k * self.low :]
        low_Bk = (used.view(B, self.k, self.low).to(torch.int32) << self._places(device)).sum(-1)
        index_Bk = ((mark_Bk - self._turns(device)) << self.low) + low_Bk
        # Where one sample has too many marks, another takes over those that are not its own.
        wrong = ((mark_Bk < 0) | (mark_Bk >= self.marks) | (index_Bk >= self.n)).any()
        wrong |= (index_Bk[:, 1:] <= index_Bk[:, :-1]).any() | (unused != 0).any()
        if wrong:
            raise WireError("the marked positions are not in order, or not within the tensor")
        return index_Bk

    def _turns(self, device: torch.device) -> Tensor | int:
        """The i of the i-th mark; a bitmap needs none."""
        return torch.arange(self.k, device=device) if self.low else 0

    def _places(self, device: torch.device) -> Tensor:
        return torch.arange(self.low, dtype=torch.int32, device=device)


def row_starts(rows: int, width: int, device: torch.device) -> Tensor:
    """The flat position at which each row begins, as a column."""
    return (torch.arange(rows, device=device) * width).view(rows, 1)


class Sparse(Codec):
    """What TopK and RandK share: a share of the elements, and masks for the way back."""

    word: str

    def __init__(self, share: float) -> None:
        if not 0 < share <= 1:
            raise ConfigError(
                f"{self.word}({share}): the share of elements to send must be above 0 and at "
                f"most 1; {self.word}(0.1) sends a tenth"
            )
        self.share = float(share)
        self.masks: SharedMask | None = None  # the one that bound itself to this codec

    @property
    def name(self) -> str:
        short = f"{self.share:g}"
        return f"{self.word}({short if float(short) == self.share else self.share})"

    def remember(self, place: Place, positions: Tensor) -> None:
        """Keep what travels for the way back, if there will be one that asks: flat positions."""
        if self.masks is not None and place.training:
            self.masks.put(place, positions)


class TopK(Sparse):
    """The max(1, round(share * n)) largest of a sample; of equal ones the first, and NaN first."""

    word = "topk"

    def layout(self, shape: Shape, place: Place) -> Layout:
        B, code = self._code(shape)
        marks, lows = code.sizes(B)
        return Part(torch.uint8, marks), Part(torch.uint8, lows), Part(VALUES, B * code.k)

    def encode(self, tensor: Tensor, place: Place) -> Parts:
        B, code = self._code(tuple(tensor.shape))
        x_Bn = tensor.reshape(B, code.n)
        positions = _largest(x_Bn, code.k).view(-1).nonzero().view(-1)
        self.remember(place, positions)
        index_Bk = positions.view(B, code.k) - row_starts(B, code.n, tensor.device)
        return *code.write(index_Bk), x_Bn.reshape(-1)[positions].to(VALUES)

    def decode(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        B, code = self._code(spec.shape)
        marks, lows, values = parts
        index_Bk = code.read(marks, lows, B)
        positions = (index_Bk + row_starts(B, code.n, index_Bk.device)).view(-1)
        self.remember(place, positions)
        return _scattered(values, positions, spec)

    def _code(self, shape: Shape) -> tuple[int, PositionCode]:
        """B, and how the positions of a sample are written."""
        B, n = (1, elements(shape)) if len(shape) < 2 else (shape[0], elements(shape[1:]))
        return B, PositionCode.cheapest(n, share_of(n, self.share))


class RandK(Sparse):
    """A share of the whole tensor, drawn by both ends; all NaN if anything in it is not finite."""

    word = "randk"

    def layout(self, shape: Shape, place: Place) -> Layout:
        return (Part(VALUES, share_of(elements(shape), self.share)),)

    def encode(self, tensor: Tensor, place: Place) -> Parts:
        return (_selected(tensor, self._drawn(tuple(tensor.shape), place, tensor.device)),)

    def decode(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        return _scattered(parts[0], self._drawn(spec.shape, place, spec.device), spec)

    def _drawn(self, shape: Shape, place: Place, device: torch.device) -> Tensor:
        count = elements(shape)
        positions = drawn(count, share_of(count, self.share), place.key, device)
        self.remember(place, positions)
        return positions


class SharedMask(Codec):
    """For the way back: the values where elements went forward; all NaN if any is not finite."""

    name = "topk(shared)"

    def __init__(self) -> None:
        self._forward: Codec | None = None
        self._lock = threading.Lock()
        self.waiting: dict[tuple[int, int], dict[int, Tensor]] = {}  # to be asked for
        self._current: tuple[tuple[int, int], Tensor] | None = None

    def put(self, place: Place, positions: Tensor) -> None:
        """Remember the positions that went forward at a place; steps long ago are forgotten."""
        with self._lock:
            for key in [key for key in self.waiting if key[0] < place.step - 1]:
                del self.waiting[key]
            self.waiting.setdefault((place.step, place.microbatch), {})[place.salt] = positions

    def bind(self, forward: Codec) -> None:
        """Use the masks of this end's forward codec, also where it is wrapped."""
        sources = sparse_in(forward)
        if not sources:
            raise ConfigError(
                f"topk(shared) sends back the elements that topk or randk sent forward, but the "
                f"forward codec is {forward.name}: choose topk or randk there, or give the "
                f"backward direction a codec of its own, such as topk(0.1)"
            )
        for source in sources:
            source.masks = self
        self._forward = forward

    @property
    def size_varies(self) -> bool:
        return self._bound().remembers_examples  # such a codec sends a tensor whole at times

    def layout(self, shape: Shape, place: Place) -> Layout:
        return (Part(VALUES, len(self._positions(place))),)

    def encode(self, tensor: Tensor, place: Place) -> Parts:
        return (_selected(tensor, self._positions(place)),)

    def decode(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        return _scattered(parts[0], self._positions(place), spec)

    def payload_limit(self, shape: Shape) -> int:
        if self.size_varies:
            return elements(shape) * VALUES.itemsize
        at = Place(Leg.FORWARD, 0, 0)
        return sum(source.layout(shape, at)[-1].bytes for source in sparse_in(self._bound()))

    def _bound(self) -> Codec:
        if self._forward is None:
            raise ConfigError("topk(shared) was not bound to a forward codec: it has no mask")
        return self._forward

    def _positions(self, place: Place) -> Tensor:
        """Taken from the masks when a place is new, then kept until the next place."""
        forward = self._bound()
        key = (place.step, place.microbatch)
        with self._lock:  # forward codecs work in other threads
            here = self.waiting.pop(key, None)
        if here:
            self._current = key, torch.cat([*here.values()])
        if self._current is None or self._current[0] != key:
            raise WireError(
                f"topk(shared) has no mask for step {place.step}, microbatch "
                f"{place.microbatch}: {forward.name} sent nothing forward there in training"
            )
        return self._current[1]


def sparse_in(codec: Codec) -> list[Sparse]:
    """The codecs in here that choose what travels in training."""
    return [inner for _, inner in codec.walk() if isinstance(inner, Sparse)]


def share_of(count: int, share: float) -> int:
    """How many of `count` elements travel: at least one, where there is one."""
    return min(count, max(1, round(share * count)))


def _largest(x_Bn: Tensor, k: int) -> Tensor:
    """Where the k largest magnitudes of every row are; of equal ones the first."""
    integer = _INTEGERS[x_Bn.element_size()]
    # Without its sign bit a float's pattern, read as an integer, orders as its magnitude does.
    size_Bn = x_Bn.contiguous().view(integer) & torch.iinfo(integer).max
    if size_Bn.numel() == 0:
        return torch.zeros_like(size_Bn, dtype=torch.bool)
    least_B1 = torch.topk(size_Bn, k, dim=1, sorted=False).values.amin(1, keepdim=True)
    kept_Bn = size_Bn >= least_B1
    surplus_B1 = kept_Bn.sum(1, keepdim=True) - k
    if not surplus_B1.any():
        return kept_Bn
    # Rounded numbers are often equal: the last ones of those at the limit have no room.
    equal_Bn = size_Bn == least_B1
    turn_Bn = equal_Bn.cumsum(1, dtype=torch.int32)
    return kept_Bn & (~equal_Bn | (turn_Bn <= turn_Bn[:, -1:] - surplus_B1))


def _selected(tensor: Tensor, positions: Tensor) -> Tensor:
    """The values that travel; all NaN when anything in the tensor is not finite."""
    values = tensor.reshape(-1)[positions.to(tensor.device)].to(VALUES)
    return torch.where(tensor.isfinite().all(), values, math.nan)


def _scattered(values: Tensor, positions: Tensor, spec: TensorSpec) -> Tensor:
    flat = torch.zeros(elements(spec.shape), dtype=spec.dtype, device=spec.device)
    return flat.scatter_(0, positions.to(spec.device), values.to(spec.dtype)).view(spec.shape)


def drawn(count: int, k: int, key: int, device: torch.device) -> Tensor:
    """The first k of the positions 0..count-1 in a random order that the key decides: that of a
    Feistel network over pairs of numbers below ceil(sqrt(count)), with tables that SHAKE-256 makes
    of the key. The few pairs past the end go through it again until they are inside.
    """
    if k == 0:
        return torch.zeros(0, dtype=torch.int64, device=device)
    side = math.isqrt(count - 1) + 1
    noise = hashlib.shake_256(key.to_bytes(8, "little")).digest(4 * _ROUNDS * side)
    numbers = (np.frombuffer(noise, dtype="<u4") % side).astype(np.int64)
    tables = torch.from_numpy(numbers).to(device).view(_ROUNDS, side)

    def shuffled(positions: Tensor) -> Tensor:
        left = positions.div(side, rounding_mode="floor")
        right = positions - left * side
        for table in tables:
            total = left + table[right]
            left, right = right, total - side * (total >= side)
        return left * side + right

    positions = shuffled(torch.arange(k, device=device))
    while len(outside := (positions >= count).nonzero().view(-1)):
        positions[outside] = shuffled(positions[outside])
    return positions
