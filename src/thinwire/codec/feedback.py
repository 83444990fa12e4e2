"""Wrappers that remember what a lossy codec left out, and send it later.

Written for a tensor x, the inner codec C and what it delivers, c. Buffers have the tensor's shape,
in float32 (float64 if the tensor is), and start at zero. There is one at each end of one direction
of a cut: all microbatches share it, in the order in which they travel.

In evaluation a wrapper is its inner codec and remembers nothing. Where something is not finite,
what arrives is not either, and buffers stay as they were, on both ends alike.
"""

import hashlib
from abc import abstractmethod
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from thinwire.codec.base import (
    Codec,
    Layout,
    Parts,
    Place,
    Shape,
    Stateful,
    Surroundings,
    TensorSpec,
    bytes_of,
    spec_of,
    working,
)
from thinwire.codec.wrapper import Wrapper
from thinwire.errors import ConfigError


class Feedback(Wrapper, Stateful):
    """A wrapper that remembers in training what it sent; in evaluation it is its inner codec."""

    suffix: str

    def __init__(self, inner: Codec):
        if any(isinstance(codec, Feedback) for _, codec in inner.walk()):
            raise ConfigError(
                f"{inner.name}+{self.suffix}: a codec can have only one kind of feedback: each "
                "would treat the other's corrections as errors"
            )
        super().__init__(inner)

    @property
    def name(self) -> str:
        return f"{self.inner.name}+{self.suffix}"

    @property
    def by_token(self) -> bool:
        return self.inner.by_token

    @abstractmethod
    def encode_training(self, tensor: Tensor, place: Place) -> Parts:
        """Encode and remember."""

    def decode_training(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        """Decode and remember; where only the sender remembers, decode."""
        return self.inner.decode(parts, spec, place)

    def hand_over_training(self, tensor: Tensor, receiver: Self, place: Place) -> Tensor:
        """Hand over and remember, on both ends."""
        return super().hand_over(tensor, receiver, place)

    def hand_over(self, tensor: Tensor, receiver: Codec, place: Place) -> Tensor:
        assert isinstance(receiver, type(self)), "both ends have the same codec"
        if not place.training:
            return self.inner.hand_over(tensor, receiver.inner, place)
        return self.hand_over_training(tensor, receiver, place)

    def encode(self, tensor: Tensor, place: Place) -> Parts:
        encode = self.encode_training if place.training else self.inner.encode
        return encode(tensor, place)

    def decode(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        decode = self.decode_training if place.training else self.inner.decode
        return decode(parts, spec, place)


class Buffered(Feedback):
    """Feedback with one buffer, made at the first tensor in training."""

    def __init__(self, inner: Codec):
        super().__init__(inner)
        self._buffer: Tensor | None = None
        self._expected: TensorSpec | None = None

    def prepare(self, spec: TensorSpec, surroundings: Surroundings) -> None:
        super().prepare(spec, surroundings)
        self._expected = spec

    def buffer(self, spec: TensorSpec) -> Tensor:
        """The buffer, on the tensor's device; never changed in place."""
        dtype = working(spec.dtype)
        if self._buffer is None:
            return torch.zeros(spec.shape, dtype=dtype, device=spec.device)
        if self._buffer.shape != spec.shape or self._buffer.dtype != dtype:
            raise ConfigError(
                f"{self.name} keeps a buffer of {self._buffer.dtype} and shape "
                f"{tuple(self._buffer.shape)}, but a tensor of {spec.dtype} and shape "
                f"{spec.shape} arrived: with feedback all microbatches must have the same shape"
            )
        return self._buffer.to(spec.device)

    def replace_buffer(self, old: Tensor, new: Tensor) -> None:
        """Take the new one if all of it is finite."""
        self._buffer = torch.where(new.isfinite().all(), new, old)

    def own_state(self) -> dict[str, Tensor]:
        return {} if self._buffer is None else {"buffer": self._buffer}

    def load_own_state(self, tensors: dict[str, Tensor]) -> None:
        if tensors.keys() - {"buffer"}:
            raise ValueError(f"{self.name} remembers a buffer, but was given {sorted(tensors)}")
        buffer, expected = tensors.get("buffer"), self._expected
        if buffer is not None and expected is not None and buffer.shape != expected.shape:
            raise ValueError(
                f"{self.name} needs a buffer of shape {expected.shape}, but was given one of "
                f"{tuple(buffer.shape)}: with feedback the size of microbatches cannot change"
            )
        if buffer is not None and expected is not None and buffer.dtype != working(expected.dtype):
            raise ValueError(
                f"{self.name} needs a buffer of {working(expected.dtype)}, but was given one of "
                f"{buffer.dtype}: with feedback the precision cannot change"
            )
        self._buffer = buffer


class ErrorFeedback(Buffered):
    """EF: send c = C(x + e), then e += x - c. Only the sender remembers.

    All that arrived adds up to all that was meant, but for the last e.

    Payload: the inner codec's.
    """

    suffix = "ef"

    def encode_training(self, tensor: Tensor, place: Place) -> Parts:
        spec = spec_of(tensor)
        error = self.buffer(spec)
        wanted = tensor.to(error.dtype) + error
        parts = self.inner.encode(wanted, place)
        sent = self.inner.decode(parts, spec, place)
        self.replace_buffer(error, wanted - sent.to(error.dtype))
        return parts

    def hand_over_training(self, tensor: Tensor, receiver: Self, place: Place) -> Tensor:
        error = self.buffer(spec_of(tensor))
        if tensor.dtype != error.dtype:
            return super().hand_over_training(tensor, receiver, place)
        wanted = tensor + error
        sent = self.inner.hand_over(wanted, receiver.inner, place)
        self.replace_buffer(error, wanted - sent)
        return sent


class MixedErrorFeedback(Buffered):
    """EF-mixed: send c = H(x) + H(e), then e += x - c; H is the inner codec at half its budget.

    Only the sender remembers. The halves are codecs of their own: two warm starts, two draws.

    Payload: in training twice that of the inner codec with half its share, or half its rank
    rounded down; in evaluation the inner codec's.
    """

    suffix = "ef-mixed"
    size_varies = True  # between training and evaluation
    content_decides_size = False  # the parts of both halves follow each other as they are
    to_bytes = Codec.to_bytes
    from_bytes = Codec.from_bytes

    def __init__(self, inner: Codec):
        super().__init__(inner)
        self._on_tensor = inner.halved()
        self._on_error = inner.halved()

    def inside(self) -> dict[str, Codec]:
        return {"tensor": self._on_tensor, "error": self._on_error}

    def encode_training(self, tensor: Tensor, place: Place) -> Parts:
        spec = spec_of(tensor)
        error = self.buffer(spec)
        parts = self._on_tensor.encode(tensor, place)
        parts += self._on_error.encode(error, _elsewhere(place))
        sent = self.decode_training(parts, spec, place)
        self.replace_buffer(error, error + (tensor.to(error.dtype) - sent.to(error.dtype)))
        return parts

    def decode_training(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        first = len(self._on_tensor.layout(spec.shape, place))
        sent = self._on_tensor.decode(parts[:first], spec, place)
        return sent + self._on_error.decode(parts[first:], spec, _elsewhere(place))

    def hand_over_training(self, tensor: Tensor, receiver: Self, place: Place) -> Tensor:
        error = self.buffer(spec_of(tensor))
        if tensor.dtype != error.dtype:
            return super().hand_over_training(tensor, receiver, place)
        sent = self._on_tensor.hand_over(tensor, receiver._on_tensor, place)
        sent = sent + self._on_error.hand_over(error, receiver._on_error, _elsewhere(place))
        self.replace_buffer(error, error + (tensor - sent))
        return sent

    def layout(self, shape: Shape, place: Place) -> Layout:
        if not place.training:
            return self.inner.layout(shape, place)
        return self._on_tensor.layout(shape, place) + self._on_error.layout(shape, place)

    def payload_limit(self, shape: Shape) -> int:
        halves = self._on_tensor.payload_limit(shape) + self._on_error.payload_limit(shape)
        return max(halves, self.inner.payload_limit(shape))

    def expected_bytes(self, shape: Shape) -> int:
        return self.payload_limit(shape)

    def coded_bytes(self, shape: Shape) -> int:
        return self.payload_limit(shape)


class Mirrored(Feedback):
    """Both ends know the same of a tensor, a: send C(x - a), then a += c; a is what arrives."""

    @abstractmethod
    def known(self, spec: TensorSpec, place: Place) -> Tensor:
        """What both ends know of the tensor at a place."""

    @abstractmethod
    def learn(self, known: Tensor, better: Tensor, place: Place) -> Tensor:
        """Know better from now on, if it is finite; returns what arrives."""

    def encode_training(self, tensor: Tensor, place: Place) -> Parts:
        spec = spec_of(tensor)
        known = self.known(spec, place)
        parts = self.inner.encode(tensor.to(known.dtype) - known, place)
        self.decode_training(parts, spec, place)
        return parts

    def decode_training(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        known = self.known(spec, place)
        change = self.inner.decode(parts, replace(spec, dtype=known.dtype), place)
        return self.learn(known, known + change, place).to(spec.dtype)

    def hand_over_training(self, tensor: Tensor, receiver: Self, place: Place) -> Tensor:
        known = self.known(spec_of(tensor), place)
        change = self.inner.hand_over(tensor.to(known.dtype) - known, receiver.inner, place)
        better = known + change
        receiver.learn(known, better, place)
        return self.learn(known, better, place).to(tensor.dtype)


class EF21(Mirrored, Buffered):
    """EF21: what both ends know is one buffer.

    Payload: the inner codec's.
    """

    suffix = "ef21"

    def known(self, spec: TensorSpec, place: Place) -> Tensor:
        return self.buffer(spec)

    def learn(self, known: Tensor, better: Tensor, place: Place) -> Tensor:
        self.replace_buffer(known, better)
        return better

    def fingerprint(self) -> str:
        if self._buffer is None:
            return ""
        return hashlib.sha256(bytes_of(self._buffer.cpu().contiguous())).hexdigest()


def _elsewhere(place: Place) -> Place:
    """A place with another key, so that the second half does not draw what the first drew."""
    return replace(place, salt=1)
