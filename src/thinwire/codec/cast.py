"""Plain casts: the elements in a float format, in row order, little-endian."""

import math

import torch
from torch import Tensor

from thinwire.codec.base import Codec, Payload, Place, TensorSpec
from thinwire.errors import WireError

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

    def payload_limit(self, shape: tuple[int, ...]) -> int:
        """Exactly the elements' bytes: a cast adds nothing."""
        return math.prod(shape) * self._format.itemsize

    def pack(self, tensor: Tensor, place: Place) -> Payload:
        """The elements' bytes; shares memory with the tensor when no cast is needed."""
        flat = tensor.detach().to(self._format).cpu().contiguous().reshape(-1)
        return _bytes_of(flat)

    def round_trip(self, tensor: Tensor, spec: TensorSpec, place: Place) -> Tensor:
        """The rounding alone, without leaving the device."""
        return tensor.detach().to(self._format).to(device=spec.device, dtype=spec.dtype)

    def unpack(self, payload: Payload, spec: TensorSpec, place: Place) -> Tensor:
        """The elements in the receiver's type, on its device."""
        wanted = self.payload_limit(spec.shape)
        if len(payload) != wanted:
            raise WireError(
                f"a {self.name} payload for shape {spec.shape} has {wanted} bytes, "
                f"but {len(payload)} arrived"
            )
        flat = torch.empty(math.prod(spec.shape), dtype=self._format)
        if wanted:
            _bytes_of(flat)[:] = payload
        return flat.reshape(spec.shape).to(device=spec.device, dtype=spec.dtype)


def _bytes_of(flat: Tensor) -> memoryview:
    """The memory of a flat CPU tensor, writable, without a copy."""
    return flat.view(torch.uint8).numpy().data
