"""Tensors for codecs, and the way there and back as bytes."""

import torch
from torch import Tensor

from thinwire.codec import Codec, Leg, Place, spec_of

CPU = torch.device("cpu")
PLACE = Place(Leg.FORWARD, step=3, microbatch=1, seed=5)


def sent(sender: Codec, receiver: Codec, tensor: Tensor, place: Place) -> Tensor:
    """What the receiving end makes of the bytes, of which there are no more than agreed."""
    payload = bytes(sender.pack(tensor, place))
    assert len(payload) <= receiver.payload_limit(tuple(tensor.shape))
    return receiver.unpack(payload, spec_of(tensor), place)


def round_trip(codec: Codec, tensor: Tensor, place: Place = PLACE) -> Tensor:
    return sent(codec, codec, tensor, place)


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
