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

    name = ""
    by_token = True

    def __init__(self, name: str):
        self.name = name
        self._format = FORMATS[name]

    def prepare(self, spec: TensorSpec, surroundings: Surroundings) -> None:
        if self._format == torch.float64 and spec.device.type == "mps":
            raise ConfigError(
                "fp64 needs a device with float64, and Apple's MPS has none: choose fp32, or "
                'run.device = "cpu"'
            )

    def layout(self, shape: Shape, place: Place) -> Layout:
        return (Part(self._format, elements(shape)),)

    def encode(self, tensor: Tensor, place: Place) -> Parts:
        return (tensor.to(self._format).contiguous().reshape(-1),)

    def decode(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        return parts[0].reshape(spec.shape).to(spec.dtype)
