"""Tensors for codecs, and the way there and back as bytes."""

import torch

from thinwire.codec import Leg, Place, spec_of

CPU = torch.device("cpu")
PLACE = Place(Leg.FORWARD, step=3, microbatch=1, seed=5)


def sent(sender, receiver, tensor, place):
    """What the receiving end makes of the bytes, of which there are no more than agreed."""
    payload = bytes(sender.pack(tensor, place))
    assert len(payload) <= receiver.payload_limit(tuple(tensor.shape))
    return receiver.unpack(payload, spec_of(tensor), place)


class Ends:
    """The sending and the receiving end of one direction."""

    def __init__(self, make):
        self.sender, self.receiver = make(), make()

    def send(self, tensor, place):
        return sent(self.sender, self.receiver, tensor, place)


def round_trip(codec, tensor, place=PLACE):
    return sent(codec, codec, tensor, place)


def normal(shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
