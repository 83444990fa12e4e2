"""Small codecs that remember, for the tests of what the engine does with them."""

import hashlib

import torch

from thinwire.codec import Part, Stateful, elements


class Delta(Stateful):
    """Sends in bf16 by how much a tensor differs from the last one; both ends add that up."""

    name = "delta"

    def __init__(self):
        self.last = None
        self.places = []
        self.prepared = None

    def prepare(self, spec, surroundings):
        self.prepared = spec, surroundings

    def layout(self, shape, place):
        return (Part(torch.bfloat16, elements(shape)),)

    def encode(self, tensor, place):
        last = torch.zeros_like(tensor) if self.last is None else self.last
        change = (tensor - last).bfloat16()
        self._move(last + change, place)
        return (change.reshape(-1),)

    def decode(self, parts, spec, place):
        last = torch.zeros(spec.shape, dtype=spec.dtype) if self.last is None else self.last
        now = last + parts[0].reshape(spec.shape)
        self._move(now, place)
        return now.clone()

    def _move(self, now, place):
        self.places.append(place)
        if place.training:
            self.last = now

    def fingerprint(self):
        if self.last is None:
            return ""
        return hashlib.sha256(self.last.numpy().tobytes()).hexdigest()[:12]

    def own_state(self):
        return {} if self.last is None else {"last": self.last}

    def load_own_state(self, tensors):
        assert self.prepared is not None
        wanted, found = self.prepared[0].shape, tuple(tensors["last"].shape)
        if found != wanted:
            raise ValueError(f"last has shape {found}, not {wanted}")
        self.last = tensors["last"]


class ByExample(Delta):
    """As Delta, but it wants to know the examples."""

    name = "by-example"
    remembers_examples = True
