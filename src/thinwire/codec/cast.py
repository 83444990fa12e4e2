"""Plain casts: the elements in a float format, in row order, little-endian."""

import torch
from torch import Tensor

from thinwire.codec.base import (
    Codec,
    Layout,
    Part,
    Parts,
    Place,
    Shape,
    Surroundings,
    TensorSpec,
    elements,
)
from thinwire.errors import ConfigError

FORMATS = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Cast(Codec):
    """Round to a float format and send the elements as they are.

    NaN and infinity travel unchanged. fp16 turns magnitudes above 65504 into infinity, which
    the step's verdict then sees: prefer bf16 for gradients.
    """

    def __init__(self, name: str):
        self._name = name
        self._format = FORMATS[name]

    @property
    def name(self) -> str:
        """The format's name."""
        return self._name

    @property
    def by_token(self) -> bool:
        """Elements are rounded one by one."""
        return True

    def prepare(self, spec: TensorSpec, surroundings: Surroundings) -> None:
        """Refuse a device that has no such format."""
        if self._format == torch.float64 and spec.device.type == "mps":
            raise ConfigError(
                "fp64 needs a device with float64, and Apple's MPS has none: choose fp32, or "
                'run.device = "cpu"'
            )

    def layout(self, shape: Shape, place: Place) -> Layout:
        """The elements and nothing else."""
        return (Part(self._format, elements(shape)),)

    def encode(self, tensor: Tensor, place: Place) -> Parts:
        """The rounded elements; shares memory with the tensor when no cast is needed."""
        return (tensor.to(self._format).contiguous().reshape(-1),)

    def decode(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        """The elements in the receiver's type."""
        return parts[0].reshape(spec.shape).to(spec.dtype)
