"""Whole numbers rounded as on the other leg: `exchanged(2)` is `int2` with its gradients rounded to
the nearest and its activations stochastically. It shows what rounding does to a training:

    PYTHONPATH=examples thinwire train run.toml --set codec.plugins=exchanged_rounding \\
        --set "codec.forward=exchanged(8)" --set "codec.backward=exchanged(2)"
"""

import dataclasses

from torch import Tensor

from thinwire.codec import (
    Leg,
    Parts,
    Place,
    TensorSpec,
    Wrapper,
    parse_codec,
    register_codec,
)


class Exchanged(Wrapper):
    """An integer codec that believes to be on the other leg."""

    def __init__(self, bits: int):
        super().__init__(parse_codec(f"int{bits}"))
        self._bits = bits

    @property
    def name(self) -> str:
        """With its bits."""
        return f"exchanged({self._bits})"

    def encode(self, tensor: Tensor, place: Place) -> Parts:
        """With the other leg's rounding."""
        return self.inner.encode(tensor, _exchanged(place))

    def decode(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        """The inverse."""
        return self.inner.decode(parts, spec, _exchanged(place))


def _exchanged(place: Place) -> Place:
    other = Leg.BACKWARD if place.leg is Leg.FORWARD else Leg.FORWARD
    return dataclasses.replace(place, leg=other)


register_codec("exchanged", Exchanged)
