"""What a codec is: a tensor to bytes and back, outside autograd.

A codec sees the tensor that a boundary has encoded (forward leg) or the gradient of that
tensor (backward leg). It knows nothing of frames or links; it owns the payload's bytes.
"""

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

Payload = bytes | bytearray | memoryview


class Leg(Enum):
    """The direction of a crossing: activations go forward, gradients come backward."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Place:
    """Where in the run a tensor is packed, the same on both ends.

    Codecs with state or with random rounding key it by this, so that runs repeat exactly.
    """

    leg: Leg
    step: int
    microbatch: int


@dataclass(frozen=True)
class TensorSpec:
    """What the receiver expects: checked before anything is allocated."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Codec(ABC):
    """One way to turn a tensor into bytes. Implementations are small and keep no globals."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The text that `parse_codec` reads back to an equal codec."""

    @abstractmethod
    def pack(self, tensor: Tensor, place: Place) -> Payload:
        """The payload for `tensor`. May be called off the compute thread."""

    @abstractmethod
    def unpack(self, payload: Payload, spec: TensorSpec, place: Place) -> Tensor:
        """The tensor of `spec` from a payload; WireError when the payload cannot be one."""

    @abstractmethod
    def payload_limit(self, shape: tuple[int, ...]) -> int:
        """The most bytes `pack` may need for this shape: a receiver refuses anything larger."""

    def round_trip(self, tensor: Tensor, spec: TensorSpec, place: Place) -> Tensor:
        """What the other end would unpack, for experiments that need no link."""
        return self.unpack(self.pack(tensor, place), spec, place)

    @property
    def tag(self) -> int:
        """Four bytes that name the codec in every frame, so that ends cannot disagree unseen."""
        return zlib.crc32(self.name.encode())
