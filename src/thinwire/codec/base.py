"""What a codec is: a tensor to bytes and back, outside autograd.

A codec sees what a boundary has encoded (forward leg) or the gradient of that (backward leg), and
owns the payload's bytes. One codec object is one end of one direction of one cut: it either only
encodes or only decodes, so what it remembers is its own. docs/codecs.md says how to write one.
"""

import hashlib
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

from thinwire.errors import WireError

Payload = bytes | bytearray | memoryview
Shape = tuple[int, ...]


class Leg(Enum):
    """The direction of a crossing: activations go forward, gradients come backward."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Place:
    """Where in the run a tensor is packed, the same on both ends: the key of all that is random."""

    leg: Leg
    step: int
    microbatch: int
    cut: int = 0
    seed: int = 0
    training: bool = True  # else nothing is remembered: in a validation, or when text is generated
    examples: tuple[int, ...] | None = None  # which training examples the rows are
    salt: int = 0  # for a codec that needs more than one key at a place

    @property
    def key(self) -> int:
        """63 bits that differ from place to place: the key of everything random here."""
        where = self.seed, self.cut, self.leg.value, self.step, self.microbatch, self.salt
        text = "/".join(map(str, where))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


@dataclass(frozen=True)
class TensorSpec:
    """What the receiver expects: checked before anything is allocated."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Part:
    """A run of elements of one type within a payload."""

    dtype: torch.dtype
    count: int

    @property
    def bytes(self) -> int:
        """Its size on the wire."""
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Surroundings:
    """What a codec that remembers examples may use, given to it before the first tensor."""

    examples: int  # to train on: places name them by 0..examples-1
    limit_bytes: int  # the most that one end may keep
    folder: Path | None = None  # for files of its own; None = in the memory of the tensor's device


Parts = tuple[Tensor, ...]
Layout = tuple[Part, ...]


class Codec(ABC):
    """One way to turn a tensor into bytes. Implementations are small and keep no globals."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The text that `parse_codec` reads back to an equal codec."""

    @abstractmethod
    def layout(self, shape: Shape, place: Place) -> Layout:
        """What the payload of such a tensor consists of, known to both ends beforehand."""

    @abstractmethod
    def encode(self, tensor: Tensor, place: Place) -> Parts:
        """The parts of the payload as flat tensors, on the tensor's device."""

    @abstractmethod
    def decode(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        """The tensor of `spec` from parts on its device; WireError when they cannot be one."""

    # Facts. A codec declares its own as a class attribute, such as `by_token = True`.

    @property
    def by_token(self) -> bool:
        """Whether, in evaluation, each token crosses by itself: others beside it change nothing."""
        return False

    @property
    def content_decides_size(self) -> bool:
        """Whether the size is known only once a tensor is packed: where `to_bytes` is its own."""
        return False

    @property
    def size_varies(self) -> bool:
        """Whether payloads of one shape differ in size: `payload_limit` is then only a bound."""
        return self.content_decides_size

    @property
    def remembers_examples(self) -> bool:
        """Whether it remembers training examples: places then name those that the rows are."""
        return any(codec.remembers_examples for codec in self.inside().values())

    # What a codec may do in a way of its own.

    def inside(self) -> dict[str, "Codec"]:
        """The codecs in here that see the tensors of a training, by name; most have none."""
        return {}

    def prepare(self, spec: TensorSpec, surroundings: Surroundings) -> None:
        """Called once before the first tensor; ConfigError when there is not enough room."""
        for codec in self.inside().values():
            codec.prepare(spec, surroundings)

    def to_bytes(self, parts: Parts) -> Payload:
        """The parts one after the other, little-endian; shares memory where there is only one."""
        views = [bytes_of(part.cpu().contiguous()) for part in parts]
        return views[0] if len(views) == 1 else b"".join(views)

    def from_bytes(self, payload: Payload, spec: TensorSpec, place: Place) -> Parts:
        """The inverse of `to_bytes`, in memory of its own; WireError when the size is another."""
        layout = self.layout(spec.shape, place)
        wanted = sum(part.bytes for part in layout)
        if len(payload) != wanted:
            raise WireError(
                f"a {self.name} payload for shape {spec.shape} has {wanted} bytes, "
                f"but {len(payload)} arrived"
            )
        parts, start, view = [], 0, memoryview(payload)
        for part in layout:
            flat = torch.empty(part.count, dtype=part.dtype)
            if part.count:
                bytes_of(flat)[:] = view[start : start + part.bytes]
            start += part.bytes
            parts.append(flat)
        return tuple(parts)

    def payload_limit(self, shape: Shape) -> int:
        """The most bytes `pack` may need for this shape: a receiver refuses anything larger."""
        return sum(part.bytes for part in self.layout(shape, Place(Leg.FORWARD, 0, 0)))

    def expected_bytes(self, shape: Shape, coded: bool = False) -> int:
        """Bytes to plan with; `coded`: those that an entropy coder is expected to leave of them."""
        return self.payload_limit(shape)

    # What users of codecs call.

    def pack(self, tensor: Tensor, place: Place) -> Payload:
        """The payload for `tensor`. May be called off the compute thread."""
        return self.to_bytes(self.encode(tensor.detach(), place))

    def unpack(self, payload: Payload, spec: TensorSpec, place: Place) -> Tensor:
        """The tensor of `spec` from a payload; WireError when the payload cannot be one."""
        parts = self.from_bytes(payload, spec, place)
        return self.decode(tuple(part.to(spec.device) for part in parts), spec, place)

    @property
    def tag(self) -> int:
        """Four bytes that name the codec in every frame, so that ends cannot disagree unseen."""
        return zlib.crc32(self.name.encode())

    def walk(self, prefix: str = "") -> Iterator[tuple[str, "Codec"]]:
        """This codec and all inside it, outermost first, each with the prefix of its state."""
        yield prefix, self
        for name, codec in self.inside().items():
            yield from codec.walk(f"{prefix}{name}.")

    def stateful(self) -> "dict[str, Stateful]":
        """All that remembers in here, by the prefix of its tensors' names in a checkpoint."""
        return {prefix: codec for prefix, codec in self.walk() if isinstance(codec, Stateful)}

    @property
    def remembers(self) -> bool:
        """Whether anything in here is kept from one tensor to the next, and so in checkpoints."""
        return bool(self.stateful())

    def agreement(self) -> str:
        """The fingerprints of all that both ends must remember alike."""
        return "".join(codec.fingerprint() for codec in self.stateful().values())

    def state_tensors(self) -> dict[str, Tensor]:
        """What this end remembers from one tensor to the next, for checkpoints; often nothing."""
        return {
            prefix + name: tensor
            for prefix, codec in self.stateful().items()
            for name, tensor in codec.own_state().items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `state_tensors` gave; ValueError when it is another codec's."""
        rest = dict(tensors)
        for prefix, codec in reversed(self.stateful().items()):  # the longest prefixes first
            own = [name for name in rest if name.startswith(prefix)]
            codec.load_own_state({name.removeprefix(prefix): rest.pop(name) for name in own})
        if rest:
            raise ValueError(f"{self.name} does not remember {sorted(rest)}")


class Stateful(Codec):
    """A codec that remembers something from one tensor of a training to the next."""

    @abstractmethod
    def own_state(self) -> dict[str, Tensor]:
        """What it remembers itself, without what codecs inside it remember."""

    @abstractmethod
    def load_own_state(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `own_state` gave; ValueError when it cannot be that."""

    def fingerprint(self) -> str:
        """A hash of what both ends must remember alike; empty where only one end remembers."""
        return ""


class Wrapper(Codec):
    """As the codec inside, but for what a subclass overrides; `by_token` it has to declare."""

    def __init__(self, inner: Codec):
        self.inner = inner

    def inside(self) -> dict[str, Codec]:
        return {"inner": self.inner}

    def layout(self, shape: Shape, place: Place) -> Layout:
        return self.inner.layout(shape, place)

    def encode(self, tensor: Tensor, place: Place) -> Parts:
        return self.inner.encode(tensor, place)

    def decode(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        return self.inner.decode(parts, spec, place)

    def to_bytes(self, parts: Parts) -> Payload:
        return self.inner.to_bytes(parts)

    def from_bytes(self, payload: Payload, spec: TensorSpec, place: Place) -> Parts:
        return self.inner.from_bytes(payload, spec, place)

    def payload_limit(self, shape: Shape) -> int:
        return self.inner.payload_limit(shape)

    def expected_bytes(self, shape: Shape, coded: bool = False) -> int:
        return self.inner.expected_bytes(shape, coded)

    @property
    def content_decides_size(self) -> bool:
        return self.inner.content_decides_size

    @property
    def size_varies(self) -> bool:
        return self.content_decides_size or self.inner.size_varies


def cross(sender: Codec, receiver: Codec, tensor: Tensor, place: Place) -> Tensor:
    """What the receiver would unpack, without bytes: for one process that holds both ends."""
    return receiver.decode(sender.encode(tensor.detach(), place), spec_of(tensor), place)


def elements(shape: Shape) -> int:
    """How many elements a tensor of this shape has."""
    return math.prod(shape)


def spec_of(tensor: Tensor) -> TensorSpec:
    """What a receiver of this tensor expects."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.device)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable, without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data
