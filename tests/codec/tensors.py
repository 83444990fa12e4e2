"""Tensors for codecs, and the way there and back as bytes."""

import torch
from torch import Tensor

from thinwire.codec import Codec, Leg, Place, spec_of

PLACE = Place(Leg.FORWARD, step=3, microbatch=1, seed=5)


def round_trip(codec: Codec, tensor: Tensor, place: Place = PLACE) -> Tensor:
    return codec.unpack(bytes(codec.pack(tensor, place)), spec_of(tensor), place)


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
