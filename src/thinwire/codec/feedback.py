"""Wrappers that remember what a lossy codec left out, and send it later.

Written for a tensor x, the inner codec C and what it delivers, c. Buffers have the tensor's shape,
in float32 (float64 if the tensor is), and start at zero. There is one at each end of one direction
of a boundary: all microbatches share it, in the order in which they travel.

In evaluation a wrapper is its inner codec and remembers nothing. Where something is not finite,
what arrives is not either, and buffers stay as they were, on both ends alike.
"""

import hashlib
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from thinwire.codec.base import (
    Budgeted,
    Codec,
    Layout,
    Part,
    Parts,
    Payload,
    Place,
    Shape,
    Surroundings,
    TensorSpec,
    bytes_of,
    elements,
    spec_of,
    working,
)
from thinwire.codec.memory import ROWS, ExampleMemory
from thinwire.codec.sparse import Sparse, remember_whole
from thinwire.codec.wrapper import Buffered, Feedback
from thinwire.errors import ConfigError


class ErrorFeedback(Buffered):
    """EF: send c = C(x + e), then e += x - c. Only the sender remembers.

    All that arrived adds up to all that was meant, but for the last e.

    Payload: the inner codec's.
    """

    suffix = "ef"

    def encode_training(self, tensor: Tensor, place: Place) -> Parts:
        """What is meant now and what is owed."""
        spec = spec_of(tensor)
        error = self.buffer(spec)
        wanted = tensor.to(error.dtype) + error
        parts = self.inner.encode(wanted, place)
        sent = self.inner.decode(parts, spec, place)
        self.replace_buffer(error, wanted - sent.to(error.dtype))
        return parts

    def hand_over_training(self, tensor: Tensor, receiver: Self, place: Place) -> Tensor:
        """Decoded once, for the sender remembers the difference and the receiver nothing."""
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

    def __init__(self, inner: Codec):
        super().__init__(inner)
        if not isinstance(inner, Budgeted):
            raise ConfigError(
                f"{self.name}: ef-mixed spends half of the budget on the tensor and half on the "
                f"error, but {inner.name} has no budget to halve; topk, randk and lowrank have"
            )
        self._on_tensor = inner.halved()
        self._on_error = inner.halved()

    def remembering(self) -> dict[str, Codec]:
        """The halves; the inner codec as it is serves evaluation alone."""
        return {"tensor": self._on_tensor, "error": self._on_error}

    def kept(self, shape: Shape) -> int:
        """How many elements travel if the inner codec is sparse."""
        return sum(half.kept(shape) for half in self._sparse_halves())

    def encode_training(self, tensor: Tensor, place: Place) -> Parts:
        """One half after the other."""
        spec = spec_of(tensor)
        error = self.buffer(spec)
        parts = self._on_tensor.encode(tensor, place)
        parts += self._on_error.encode(error, _elsewhere(place))
        sent = self.decode_training(parts, spec, place)
        self.replace_buffer(error, error + (tensor.to(error.dtype) - sent.to(error.dtype)))
        return parts

    def decode_training(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        """The sum of both halves."""
        first = len(self._on_tensor.layout(spec.shape, place))
        sent = self._on_tensor.decode(parts[:first], spec, place)
        sent = sent + self._on_error.decode(parts[first:], spec, _elsewhere(place))
        if isinstance(self.inner, Sparse) and self.inner.masks is not None:
            both = [half.last_positions for half in self._sparse_halves()]
            self.inner.remember(place, torch.cat([p for p in both if p is not None]))
        return sent

    def hand_over_training(self, tensor: Tensor, receiver: Self, place: Place) -> Tensor:
        """One half after the other, each decoded once."""
        error = self.buffer(spec_of(tensor))
        is_masked = isinstance(self.inner, Sparse) and self.inner.masks is not None
        if is_masked or tensor.dtype != error.dtype:
            return super().hand_over_training(tensor, receiver, place)
        sent = self._on_tensor.hand_over(tensor, receiver._on_tensor, place)
        sent = sent + self._on_error.hand_over(error, receiver._on_error, _elsewhere(place))
        self.replace_buffer(error, error + (tensor - sent))
        return sent

    def layout(self, shape: Shape, place: Place) -> Layout:
        """One half after the other; in evaluation the inner codec's."""
        if not place.training:
            return self.inner.layout(shape, place)
        return self._on_tensor.layout(shape, place) + self._on_error.layout(shape, place)

    @property
    def size_varies(self) -> bool:
        """Between training and evaluation."""
        return True

    @property
    def content_decides_size(self) -> bool:
        """Not here: the parts of both halves follow each other as they are."""
        return False

    def to_bytes(self, parts: Parts) -> Payload:
        """One part after the other."""
        return Codec.to_bytes(self, parts)

    def from_bytes(self, payload: Payload, spec: TensorSpec, place: Place) -> Parts:
        """As the layout says."""
        return Codec.from_bytes(self, payload, spec, place)

    def payload_limit(self, shape: Shape) -> int:
        """The larger of training and evaluation."""
        halves = self._on_tensor.payload_limit(shape) + self._on_error.payload_limit(shape)
        return max(halves, self.inner.payload_limit(shape))

    def _sparse_halves(self) -> list[Sparse]:
        return [half for half in (self._on_tensor, self._on_error) if isinstance(half, Sparse)]


class EF21(Buffered):
    """EF21: send C(x - a), then a += c on both ends; a is what arrives.

    Payload: the inner codec's.
    """

    suffix = "ef21"

    def encode_training(self, tensor: Tensor, place: Place) -> Parts:
        """How the tensor differs from what the receiver has."""
        spec = spec_of(tensor)
        known = self.buffer(spec)
        parts = self.inner.encode(tensor.to(known.dtype) - known, place)
        self._correct(parts, spec, place)
        return parts

    def decode_training(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        """What is known after the correction."""
        return self._correct(parts, spec, place).to(spec.dtype)

    def hand_over_training(self, tensor: Tensor, receiver: Self, place: Place) -> Tensor:
        """Corrected once, for both ends."""
        known = self.buffer(spec_of(tensor))
        change = self.inner.hand_over(tensor.to(known.dtype) - known, receiver.inner, place)
        better = known + change
        self.replace_buffer(known, better)
        receiver.replace_buffer(known, better)
        return better.to(tensor.dtype)

    def agreement(self) -> str:
        """A hash of the buffer."""
        if self._buffer is None:
            return self.inner.agreement()
        numbers = bytes(bytes_of(self._buffer.cpu().contiguous()))
        return hashlib.sha256(numbers + self.inner.agreement().encode()).hexdigest()

    def _correct(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        known = self.buffer(spec)
        better = known + self.inner.decode(parts, replace(spec, dtype=known.dtype), place)
        self.replace_buffer(known, better)
        return better


class AQSGD(Feedback):
    """AQ-SGD: EF21 with a buffer for every training example, in bf16.

    A microbatch with an example that was not seen before travels whole, in bf16; the others send
    C(x - a) for the rows a that both ends remember of its examples. `place.examples` says which
    examples the entries of the first dimension are, and `prepare` makes room for all of them. If
    one comes twice in a microbatch, the later row is remembered.

    Payload: 2 N bytes for N elements at a first visit, then the inner codec's.
    """

    suffix = "aqsgd"

    def __init__(self, inner: Codec):
        super().__init__(inner)
        self._memory: ExampleMemory | None = None
        self._last_was_whole = False

    def prepare(self, spec: TensorSpec, surroundings: Surroundings) -> None:
        """Make room for a row of each example; ConfigError when it is not to be had."""
        super().prepare(spec, surroundings)
        if not spec.shape:
            raise ConfigError(f"{self.name} needs tensors with one row for each example")
        self._memory = ExampleMemory(spec.shape[1:], surroundings, spec.device)

    @property
    def remembers_examples(self) -> bool:
        """That is what it does."""
        return True

    @property
    def size_varies(self) -> bool:
        """Between a first visit and later ones."""
        return True

    @property
    def content_decides_size(self) -> bool:
        """Only where it decides the inner codec's."""
        return self.inner.content_decides_size

    def kept(self, shape: Shape) -> int:
        """All elements travel at a first visit."""
        return elements(shape)

    def encode(self, tensor: Tensor, place: Place) -> Parts:
        """With memory in training, without in evaluation."""
        self._last_was_whole = self._travels_whole(place)
        return super().encode(tensor, place)

    def encode_training(self, tensor: Tensor, place: Place) -> Parts:
        """The tensor, or how it differs from what the receiver has."""
        spec = spec_of(tensor)
        if self._travels_whole(place):
            parts: Parts = (tensor.to(ROWS).reshape(-1),)
        else:
            known = self._known(spec, place)
            parts = self.inner.encode(tensor.to(known.dtype) - known, place)
        self._correct(parts, spec, place)
        return parts

    def decode_training(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        """What is known of these examples after the correction."""
        return self._correct(parts, spec, place).to(spec.dtype)

    def hand_over_training(self, tensor: Tensor, receiver: Self, place: Place) -> Tensor:
        """Corrected once, for both ends."""
        if self._travels_whole(place):
            return super().hand_over_training(tensor, receiver, place)
        known = self._known(spec_of(tensor), place)
        change = self.inner.hand_over(tensor.to(known.dtype) - known, receiver.inner, place)
        better = (known + change).to(ROWS)
        if better.isfinite().all():
            self._remember(better, place)
            receiver._remember(better, place)
        return better.to(tensor.dtype)

    def layout(self, shape: Shape, place: Place) -> Layout:
        """All elements at a first visit, then the inner codec's."""
        if self._travels_whole(place):
            return (Part(ROWS, elements(shape)),)
        return self.inner.layout(shape, place)

    def to_bytes(self, parts: Parts) -> Payload:
        """What travels whole is no affair of the inner codec."""
        return Codec.to_bytes(self, parts) if self._last_was_whole else self.inner.to_bytes(parts)

    def from_bytes(self, payload: Payload, spec: TensorSpec, place: Place) -> Parts:
        """What travels whole is no affair of the inner codec."""
        if self._travels_whole(place):
            return Codec.from_bytes(self, payload, spec, place)
        return self.inner.from_bytes(payload, spec, place)

    def payload_limit(self, shape: Shape) -> int:
        """The larger of a first visit and later ones."""
        return max(elements(shape) * ROWS.itemsize, self.inner.payload_limit(shape))

    def agreement(self) -> str:
        """A hash over the checksums of all rows."""
        if self._memory is None:
            return self.inner.agreement()
        text = self._memory.fingerprint() + self.inner.agreement()
        return hashlib.sha256(text.encode()).hexdigest()

    def own_state(self) -> dict[str, Tensor]:
        """The whole memory, not copied."""
        return {} if self._memory is None else self._memory.state_tensors()

    def load_own_state(self, tensors: dict[str, Tensor]) -> None:
        """Copy into the memory that `prepare` made."""
        if tensors or self._memory is not None:
            self._room().load_state_tensors(tensors)

    def _room(self) -> ExampleMemory:
        if self._memory is None:
            raise ConfigError(
                f"{self.name} needs the number of training examples: call prepare first"
            )
        return self._memory

    def _examples(self, place: Place) -> tuple[int, ...]:
        if place.examples is None:
            raise ConfigError(
                f"{self.name} remembers every training example, but is not told which examples "
                f"a microbatch holds: it needs training data whose examples come back"
            )
        return place.examples

    def _travels_whole(self, place: Place) -> bool:
        return place.training and not self._room().seen(self._examples(place))

    def _known(self, spec: TensorSpec, place: Place) -> Tensor:
        rows = self._room().read(self._examples(place), spec.device)
        return rows.to(working(spec.dtype)).view(spec.shape)

    def _correct(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        """What is known of a microbatch after its parts; remembered if it is finite."""
        examples = self._examples(place)
        if len(examples) != spec.shape[0]:
            raise ValueError(f"{len(examples)} examples were named for {spec.shape[0]} rows")
        if self._travels_whole(place):
            better = parts[0].view(spec.shape)
            remember_whole(self.inner, place)
        else:
            known = self._known(spec, place)
            change = self.inner.decode(parts, replace(spec, dtype=known.dtype), place)
            better = (known + change).to(ROWS)
        if better.isfinite().all():
            self._remember(better, place)
        return better

    def _remember(self, rows: Tensor, place: Place) -> None:
        examples = self._examples(place)
        row_elements = elements(tuple(rows.shape[1:]))
        self._room().write(examples, rows.reshape(len(examples), row_elements))


def _elsewhere(place: Place) -> Place:
    """A place with another key, so that the second half does not draw what the first drew."""
    return replace(place, salt=1)
