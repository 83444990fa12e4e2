"""Wrappers: entropy coding, and feedback, which sends later what a lossy codec left out.

Of feedback: written for a tensor x, the inner codec C and what it delivers, c. Buffers are float32
at least and start at zero; all microbatches of one direction of a cut share one at each end. In
evaluation a wrapper is its inner codec. Where something is not finite, buffers stay as they were.
"""

import hashlib
import os
import shutil
import sys
import tempfile
import zlib
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import zstandard
from torch import Tensor

from thinwire.codec.base import (
    Codec,
    Layout,
    Leg,
    Parts,
    Payload,
    Place,
    Shape,
    Stateful,
    Surroundings,
    TensorSpec,
    Wrapper,
    bytes_of,
    elements,
    spec_of,
)
from thinwire.codec.quantize import Cast
from thinwire.codec.sparse import Sparse, sparse_in
from thinwire.errors import ConfigError, WireError

_LEVEL = 1  # of Zstandard, unless another is asked for
ROWS = torch.bfloat16
_BOOKKEEPING = 5  # bytes per example: whether it was seen, and the checksum of its row


class Zstd(Wrapper):
    """`+zstd`: what the inner codec would send, as one Zstandard frame with size and checksum."""

    content_decides_size = True

    def __init__(self, inner: Codec, level: int = _LEVEL):
        most = zstandard.MAX_COMPRESSION_LEVEL
        if not 1 <= level <= most:
            raise ConfigError(
                f"zstd({level}): the level must lie between 1 (fast) and {most} (small)"
            )
        if any(codec.content_decides_size for _, codec in inner.walk()):
            raise ConfigError(f"{inner.name}+zstd: compressing twice saves nothing")
        super().__init__(inner)
        self._level = level
        self._compressor = zstandard.ZstdCompressor(level=level, write_checksum=True)
        self._decompressor = zstandard.ZstdDecompressor()

    @property
    def name(self) -> str:
        return f"{self.inner.name}+zstd" + (f"({self._level})" if self._level != _LEVEL else "")

    @property
    def by_token(self) -> bool:
        return self.inner.by_token

    def to_bytes(self, parts: Parts) -> Payload:
        return self._compressor.compress(self.inner.to_bytes(parts))

    def from_bytes(self, payload: Payload, spec: TensorSpec, place: Place) -> Parts:
        wanted = sum(part.bytes for part in self.inner.layout(spec.shape, place))
        try:
            size = zstandard.frame_content_size(payload)
            if size != wanted:
                said = f"{size} bytes" if size >= 0 else "an unknown size"
                raise WireError(
                    f"a {self.name} payload for shape {spec.shape} holds {wanted} bytes, "
                    f"but one of {said} arrived"
                )
            plain = self._decompressor.decompress(payload, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise WireError(f"a {self.name} payload cannot be read: {error}") from None
        return self.inner.from_bytes(plain, spec, place)

    def payload_limit(self, shape: Shape) -> int:
        size = self.inner.payload_limit(shape)
        # What cannot be compressed: blocks of 128 KiB as they are, each with a header of 3 bytes,
        # and magic (4), descriptor (1), window (1), size (8) and checksum (4) of the frame.
        return size + 3 * (size // 2**17 + 1) + 18

    def expected_bytes(self, shape: Shape, coded: bool = False) -> int:
        left = self.inner.expected_bytes(shape, coded=True)
        return left if left < self.inner.payload_limit(shape) else self.payload_limit(shape)


class Buffer:
    """What feedback remembers: one tensor, made at the first one in training."""

    def __init__(self) -> None:
        self._tensor: Tensor | None = None
        self._expected: TensorSpec | None = None

    def prepare(self, spec: TensorSpec, surroundings: Surroundings) -> None:
        """Know which tensors come."""
        self._expected = spec

    def read(self, spec: TensorSpec, place: Place) -> Tensor:
        """What is remembered, on the tensor's device; ValueError when it is of other tensors."""
        wanted = spec.shape, _working(spec.dtype)
        if self._tensor is None:
            return torch.zeros(wanted[0], dtype=wanted[1], device=spec.device)
        given = tuple(self._tensor.shape), self._tensor.dtype
        if given != wanted:
            raise ValueError(
                f"feedback needs a buffer of {wanted}, but has one of {given}: neither the size of "
                "microbatches nor the precision can change"
            )
        return self._tensor.to(spec.device)

    def write(self, known: Tensor, better: Tensor, place: Place) -> Tensor:
        """Know better from now on, if all of that is finite; returns it."""
        self._tensor = torch.where(better.isfinite().all(), better, known)
        return better

    def state_tensors(self) -> dict[str, Tensor]:
        """All of it, for a checkpoint."""
        return {} if self._tensor is None else {"buffer": self._tensor}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `state_tensors` gave; ValueError when it cannot be that."""
        if tensors.keys() - {"buffer"}:
            raise ValueError(f"feedback remembers a buffer, but was given {sorted(tensors)}")
        self._tensor = tensors.get("buffer")
        if self._expected is not None:
            self.read(self._expected, Place(Leg.FORWARD, 0, 0))

    def fingerprint(self) -> str:
        """Equal for two that remember the same."""
        if self._tensor is None:
            return ""
        return hashlib.sha256(bytes_of(self._tensor.cpu().contiguous())).hexdigest()


class ExampleMemory:
    """The same with a row of bf16 for each example; in a folder, in a file without a name."""

    def prepare(self, spec: TensorSpec, surroundings: Surroundings) -> None:
        """Make room for all examples; ConfigError when there is not enough."""
        if not spec.shape:
            raise ConfigError("aqsgd needs tensors with one row for each example")
        count, row = surroundings.examples, elements(spec.shape[1:])
        need = count * (row * ROWS.itemsize + _BOOKKEEPING)
        if need > surroundings.limit_bytes:
            raise ConfigError(
                f"storing {row:,} numbers for each of {count:,} training examples takes "
                f"{need:,} bytes at each end, and the limit is {surroundings.limit_bytes:,}: raise "
                f"codec.memory_mb, train on fewer examples, or choose ef21, which keeps one buffer"
            )
        self._seen = np.zeros(count, dtype=np.bool_)
        self._checksums = np.zeros(count, dtype=np.uint32)
        if surroundings.folder is None:
            self._rows = torch.zeros((count, row), dtype=ROWS, device=spec.device)
        else:
            self._rows = _mapped(count * row, surroundings.folder).view(count, row)

    def seen(self, place: Place) -> bool:
        """Whether all examples of a place were written before."""
        return bool(self._seen[_examples(place)].all())

    def read(self, spec: TensorSpec, place: Place) -> Tensor:
        """The rows of a place, on the tensor's device; zeros where one of them is not known."""
        dtype = _working(spec.dtype)
        if not self.seen(place):
            return torch.zeros(spec.shape, dtype=dtype, device=spec.device)
        return self._rows[_examples(place)].to(spec.device).to(dtype).view(spec.shape)

    def write(self, known: Tensor, better: Tensor, place: Place) -> Tensor:
        """As of a buffer; returns what is kept. Of one example in two rows the last counts."""
        rows = better.to(ROWS)
        if rows.isfinite().all():
            for example, row in zip(_examples(place), rows, strict=True):
                kept = row.reshape(-1)
                self._rows[example] = kept
                self._seen[example] = True
                self._checksums[example] = zlib.crc32(bytes_of(kept.cpu()))
        return rows

    def state_tensors(self) -> dict[str, Tensor]:
        """All of it, not copied: to be written before the next tensor comes."""
        return {
            "rows": self._rows,
            "seen": torch.from_numpy(self._seen),
            "checksums": torch.from_numpy(self._checksums.view(np.int32)),
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `state_tensors` gave; nothing at all empties the memory."""
        if not tensors:
            self._seen[:] = False
            self._checksums[:] = 0
            return
        mine = self.state_tensors()
        shapes, wanted = (
            {name: tuple(tensor.shape) for name, tensor in of.items()} for of in (tensors, mine)
        )
        if shapes != wanted:
            raise ValueError(f"a memory of examples has {wanted}, but was given {shapes}")
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])

    def fingerprint(self) -> str:
        """Equal for two memories that hold the same rows."""
        return hashlib.sha256(self._seen.tobytes() + self._checksums.tobytes()).hexdigest()


class Feedback(Wrapper, Stateful):
    """A wrapper that remembers in training what it sent; in evaluation it is its inner codec."""

    suffix: str
    memory_kind: type[Buffer | ExampleMemory] = Buffer

    def __init__(self, inner: Codec):
        if any(isinstance(codec, Feedback) for _, codec in inner.walk()):
            raise ConfigError(
                f"{inner.name}+{self.suffix}: a codec can have only one kind of feedback: each "
                "would treat the other's corrections as errors"
            )
        super().__init__(inner)
        self.memory = self.memory_kind()

    @property
    def name(self) -> str:
        return f"{self.inner.name}+{self.suffix}"

    @property
    def by_token(self) -> bool:
        return self.inner.by_token

    def prepare(self, spec: TensorSpec, surroundings: Surroundings) -> None:
        super().prepare(spec, surroundings)
        self.memory.prepare(spec, surroundings)

    @abstractmethod
    def encode_training(self, tensor: Tensor, place: Place) -> Parts:
        """Encode and remember."""

    def decode_training(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        """Decode and remember; where only the sender remembers, decode."""
        return self.inner.decode(parts, spec, place)

    def encode(self, tensor: Tensor, place: Place) -> Parts:
        return (self.encode_training if place.training else self.inner.encode)(tensor, place)

    def decode(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        return (self.decode_training if place.training else self.inner.decode)(parts, spec, place)

    def own_state(self) -> dict[str, Tensor]:
        return self.memory.state_tensors()

    def load_own_state(self, tensors: dict[str, Tensor]) -> None:
        self.memory.load_state_tensors(tensors)


class ErrorFeedback(Feedback):
    """EF: send c = C(x + e), then e += x - c. Only the sender remembers."""

    suffix = "ef"

    def encode_training(self, tensor: Tensor, place: Place) -> Parts:
        spec = spec_of(tensor)
        error = self.memory.read(spec, place)
        wanted = tensor.to(error.dtype) + error
        parts = self.inner.encode(wanted, place)
        sent = self.inner.decode(parts, spec, place)
        self.memory.write(error, wanted - sent.to(error.dtype), place)
        return parts


class MixedErrorFeedback(Feedback):
    """EF-mixed: send c = H(x) + H(e), then e += x - c; H is the codec with half its share."""

    suffix = "ef-mixed"
    size_varies = True  # between training and evaluation
    from_bytes, expected_bytes = Codec.from_bytes, Codec.expected_bytes

    def __init__(self, inner: Codec):
        super().__init__(inner)
        if not isinstance(inner, Sparse):
            raise ConfigError(
                f"ef-mixed spends half of a share on the tensor and half on the error, but "
                f"{inner.name} has no share to halve; topk and randk have"
            )
        self._half = type(inner)(inner.share / 2)

    def inside(self) -> dict[str, Codec]:
        """One codec for both, since it remembers nothing: both send as much, each its own mask."""
        return {"tensor": self._half, "error": self._half}

    def encode_training(self, tensor: Tensor, place: Place) -> Parts:
        spec = spec_of(tensor)
        error = self.memory.read(spec, place)
        parts = self._half.encode(tensor, place)
        parts += self._half.encode(error, replace(place, salt=1))  # so it draws others
        sent = self.decode_training(parts, spec, place)
        self.memory.write(error, error + (tensor.to(error.dtype) - sent.to(error.dtype)), place)
        return parts

    def decode_training(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        first = len(parts) // 2
        sent = self._half.decode(parts[:first], spec, place)
        return sent + self._half.decode(parts[first:], spec, replace(place, salt=1))

    def layout(self, shape: Shape, place: Place) -> Layout:
        if not place.training:
            return self.inner.layout(shape, place)
        return 2 * self._half.layout(shape, place)

    def payload_limit(self, shape: Shape) -> int:
        return max(2 * self._half.payload_limit(shape), self.inner.payload_limit(shape))


class EF21(Feedback):
    """EF21: both ends know the same, a: send C(x - a), then a += c; a is what arrives."""

    suffix = "ef21"

    def used_at(self, place: Place) -> Codec:
        """The codec whose parts travel."""
        return self.inner

    def encode_training(self, tensor: Tensor, place: Place) -> Parts:
        spec = spec_of(tensor)
        known = self.memory.read(spec, place)
        parts = self.used_at(place).encode(tensor.to(known.dtype) - known, place)
        self.decode_training(parts, spec, place)
        return parts

    def decode_training(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        known = self.memory.read(spec, place)
        change = self.used_at(place).decode(parts, replace(spec, dtype=known.dtype), place)
        return self.memory.write(known, known + change, place).to(spec.dtype)

    def fingerprint(self) -> str:
        return self.memory.fingerprint()


class AQSGD(EF21):
    """AQ-SGD: EF21 with a row for each example, in bf16, in which a new one travels whole."""

    suffix = "aqsgd"
    remembers_examples = True
    size_varies = True  # between a first visit and later ones
    expected_bytes = Codec.expected_bytes
    memory_kind = ExampleMemory
    memory: ExampleMemory

    def __init__(self, inner: Codec):
        super().__init__(inner)
        self._whole = Cast("bf16")
        self._last: Codec = inner  # the one that encoded the parts to be written next

    def used_at(self, place: Place) -> Codec:
        is_known = not place.training or self.memory.seen(place)
        return self.inner if is_known else self._whole

    def encode(self, tensor: Tensor, place: Place) -> Parts:
        self._last = self.used_at(place)
        return super().encode(tensor, place)

    def decode_training(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        if self.used_at(place) is self._whole:  # past a sparse codec, whose mask is all then
            for source in sparse_in(self.inner):
                source.remember(place, torch.arange(elements(spec.shape), device=spec.device))
        return super().decode_training(parts, spec, place)

    def layout(self, shape: Shape, place: Place) -> Layout:
        return self.used_at(place).layout(shape, place)

    def to_bytes(self, parts: Parts) -> Payload:
        return self._last.to_bytes(parts)

    def from_bytes(self, payload: Payload, spec: TensorSpec, place: Place) -> Parts:
        return self.used_at(place).from_bytes(payload, spec, place)

    def payload_limit(self, shape: Shape) -> int:
        return max(codec.payload_limit(shape) for codec in (self._whole, self.inner))


def _examples(place: Place) -> list[int]:
    if place.examples is None:
        raise ConfigError(
            "aqsgd remembers every training example, but microbatches do not name the examples "
            "that they hold: use training data whose examples repeat"
        )
    return list(place.examples)


def _mapped(count: int, folder: Path) -> Tensor:
    """Zeros in a file; its blocks are taken now, since a write to a map cannot report a lack."""
    if count == 0:
        return torch.zeros(0, dtype=ROWS)
    size = count * ROWS.itemsize
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if size > (free := shutil.disk_usage(folder).free):
            raise OSError(f"only {free:,} bytes are free")
        with tempfile.TemporaryFile(dir=folder) as file:
            if sys.platform == "linux":
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            numbers = np.memmap(file, dtype=np.int16, mode="r+", shape=(count,))
    except OSError as error:
        raise ConfigError(f"{size:,} bytes cannot be kept in {folder}: {error}") from error
    return torch.from_numpy(numbers).view(ROWS)


def _working(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
