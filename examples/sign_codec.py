"""A codec of your own: one sign per element, and one magnitude per token.

    PYTHONPATH=examples thinwire train run.toml \
        --set codec.plugins=sign_codec --set codec.forward=int4 --set codec.backward=sign+ef

Shapes: R tokens (the last dimension is one token), D wide.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.codec import (
    Codec,
    Layout,
    Part,
    Parts,
    Place,
    Shape,
    TensorSpec,
    elements,
    register_codec,
)

PLACES = torch.arange(8, dtype=torch.uint8)


class Sign(Codec):
    """Every element becomes plus or minus the mean magnitude of its token (zero counts as plus).

    Payload: 2 R + ceil(R D / 8) bytes. A token that is not finite stays so.
    """

    @property
    def name(self) -> str:
        """As users write it."""
        return "sign"

    def layout(self, shape: Shape, place: Place) -> Layout:
        """The magnitudes in bf16, then eight signs to a byte."""
        tokens = elements(shape[:-1]) if elements(shape) else 0
        return Part(torch.bfloat16, tokens), Part(torch.uint8, -(-elements(shape) // 8))

    def encode(self, tensor: Tensor, place: Place) -> Parts:
        """Flat tensors on the tensor's device, as the layout says."""
        x = tensor.float()
        magnitude = x.abs().mean(-1) if x.dim() and x.numel() else x.abs()
        negative = F.pad((x < 0).reshape(-1), (0, -x.numel() % 8)).view(-1, 8)
        signs = (negative << PLACES.to(x.device)).sum(-1, dtype=torch.uint8)
        return magnitude.to(torch.bfloat16).reshape(-1), signs

    def decode(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        """The tensor of `spec`, in its type and on its device."""
        magnitudes, signs = parts
        negative = (signs[:, None] >> PLACES.to(spec.device)) & 1
        x = 1.0 - 2.0 * negative.reshape(-1)[: elements(spec.shape)].float()
        token = spec.shape[-1] if spec.shape else 1
        return (x * magnitudes.float().repeat_interleave(token)).reshape(spec.shape).to(spec.dtype)


register_codec("sign", Sign)
