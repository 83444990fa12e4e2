"""Codecs around codecs: what every wrapper leaves to the codec inside, and what feedback shares."""

from abc import abstractmethod
from typing import Self

import torch
from torch import Tensor

from thinwire.codec.base import (
    Codec,
    Layout,
    Parts,
    Payload,
    Place,
    Shape,
    Surroundings,
    TensorSpec,
    layers,
    working,
)
from thinwire.errors import ConfigError


class Wrapper(Codec):
    """A codec around another. What a wrapper does not say itself is the inner codec's affair."""

    inner: Codec

    def __init__(self, inner: Codec):
        self.inner = inner

    def remembering(self) -> dict[str, Codec]:
        """The codecs inside that may remember something in training, by name."""
        return {"inner": self.inner}

    def own_state(self) -> dict[str, Tensor]:
        """What the wrapper itself remembers."""
        return {}

    def load_own_state(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `own_state` gave."""
        super().load_state_tensors(tensors)

    def layout(self, shape: Shape, place: Place) -> Layout:
        """The inner codec's."""
        return self.inner.layout(shape, place)

    def encode(self, tensor: Tensor, place: Place) -> Parts:
        """As the inner codec does."""
        return self.inner.encode(tensor, place)

    def decode(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        """As the inner codec does."""
        return self.inner.decode(parts, spec, place)

    def to_bytes(self, parts: Parts) -> Payload:
        """The inner codec's."""
        return self.inner.to_bytes(parts)

    def from_bytes(self, payload: Payload, spec: TensorSpec, place: Place) -> Parts:
        """The inner codec's."""
        return self.inner.from_bytes(payload, spec, place)

    def payload_limit(self, shape: Shape) -> int:
        """The inner codec's."""
        return self.inner.payload_limit(shape)

    @property
    def size_varies(self) -> bool:
        """Whether the inner codec's does, or content decides it here."""
        return self.content_decides_size or self.inner.size_varies

    @property
    def content_decides_size(self) -> bool:
        """Whether it decides the inner codec's, or the wrapper writes bytes of its own."""
        writes_bytes = type(self).to_bytes is not Wrapper.to_bytes
        return writes_bytes or self.inner.content_decides_size

    def prepare(self, spec: TensorSpec, surroundings: Surroundings) -> None:
        """The codecs inside may want room."""
        for codec in self.remembering().values():
            codec.prepare(spec, surroundings)

    @property
    def remembers(self) -> bool:
        """Whether a codec inside does."""
        return any(codec.remembers for codec in self.remembering().values())

    @property
    def remembers_examples(self) -> bool:
        """Whether a codec inside does."""
        return any(codec.remembers_examples for codec in self.remembering().values())

    def agreement(self) -> str:
        """The inner codec's; of a wrapper's own only where both ends remember."""
        return self.inner.agreement()

    def state_tensors(self) -> dict[str, Tensor]:
        """The wrapper's own, and those of the codecs inside behind their names."""
        return self.own_state() | {
            f"{name}.{key}": tensor
            for name, codec in self.remembering().items()
            for key, tensor in codec.state_tensors().items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `state_tensors` gave."""
        rest = dict(tensors)
        for name, codec in self.remembering().items():
            start = f"{name}."
            inside = [key for key in rest if key.startswith(start)]
            codec.load_state_tensors({key.removeprefix(start): rest.pop(key) for key in inside})
        self.load_own_state(rest)


class Feedback(Wrapper):
    """A wrapper that remembers in training what it sent; in evaluation it is its inner codec."""

    suffix: str

    def __init__(self, inner: Codec):
        if any(isinstance(codec, Feedback) for codec in layers(inner)):
            raise ConfigError(
                f"{inner.name}+{self.suffix}: a codec can have one kind of feedback only, since "
                f"each would take the other's corrections for errors"
            )
        super().__init__(inner)

    @property
    def name(self) -> str:
        """The inner codec's, and what is added to it."""
        return f"{self.inner.name}+{self.suffix}"

    @property
    def by_token(self) -> bool:
        """The inner codec's, which is all that there is in evaluation."""
        return self.inner.by_token

    @property
    def remembers(self) -> bool:
        """That is what it is for."""
        return True

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
        """With memory in training, without in evaluation."""
        assert isinstance(receiver, type(self)), "both ends have the same codec"
        if not place.training:
            return self.inner.hand_over(tensor, receiver.inner, place)
        return self.hand_over_training(tensor, receiver, place)

    def encode(self, tensor: Tensor, place: Place) -> Parts:
        """With memory in training, without in evaluation."""
        encode = self.encode_training if place.training else self.inner.encode
        return encode(tensor, place)

    def decode(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        """With memory in training, without in evaluation."""
        decode = self.decode_training if place.training else self.inner.decode
        return decode(parts, spec, place)


class Buffered(Feedback):
    """Feedback with one buffer, made at the first tensor in training."""

    def __init__(self, inner: Codec):
        super().__init__(inner)
        self._buffer: Tensor | None = None
        self._expected: TensorSpec | None = None

    def prepare(self, spec: TensorSpec, surroundings: Surroundings) -> None:
        """From here on it is known which buffer can be loaded."""
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
                f"{spec.shape} arrived: with feedback all microbatches must have one shape"
            )
        return self._buffer.to(spec.device)

    def replace_buffer(self, old: Tensor, new: Tensor) -> None:
        """Take the new one if all of it is finite."""
        self._buffer = torch.where(new.isfinite().all(), new, old)

    def own_state(self) -> dict[str, Tensor]:
        """The buffer, once there is one."""
        return {} if self._buffer is None else {"buffer": self._buffer}

    def load_own_state(self, tensors: dict[str, Tensor]) -> None:
        """The buffer, or none."""
        if not tensors.keys() <= {"buffer"}:
            raise ValueError(f"{self.name} remembers a buffer, but was given {sorted(tensors)}")
        buffer, expected = tensors.get("buffer"), self._expected
        if buffer is not None and expected is not None and buffer.shape != expected.shape:
            raise ValueError(
                f"{self.name} needs a buffer of shape {expected.shape}, but was given one of "
                f"{tuple(buffer.shape)}: with feedback the size of microbatches cannot change"
            )
        self._buffer = buffer
