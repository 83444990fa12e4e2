"""What crosses a cut as PyTorch can send it: a tensor that holds the payload's bytes.

PyTorch's pipelining sends the output of one stage's module to the next one, and the gradient of
that output back. Both are tensors of one shape and type, and a gradient needs a type of floats. So
the module of a stage ends by packing: its output is a *carrier*, a flat tensor of float32 whose
bits are the bytes that the codec makes. Nobody computes with these floats. The next module begins
by unpacking. In the backward pass the gradient of a carrier is a carrier too.

A carrier has room for the longer of both legs. `ThinStage` sends of it only what a leg needs.
"""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from thinwire.codec import Codec, Leg, Part
from thinwire.engine.cut import CutEnd
from thinwire.engine.trace import BACKWARD, FORWARD, GRADIENT, INPUT, Sightings
from thinwire.errors import ConfigError

CARRIER = torch.float32


class Crossing:
    """One end of a cut between two modules of a pipeline: packs what leaves, unpacks what comes.

    `step` is the number of the training step under way. `device` is where carriers are: that of
    the stage for NCCL, the CPU for gloo. `training` is off in a validation.
    """

    def __init__(
        self, end: CutEnd, device: torch.device | str, sightings: Sightings | None = None
    ) -> None:
        for codec in end.codecs.values():
            _refuse_unknown_sizes(codec)
        self.end = end
        self.step = 0
        self.training = True
        self.sent: Counter[str] = Counter()  # tensors by kind, of this end
        self._device = torch.device(device)
        self._sightings = sightings or Sightings()
        self._floats = {leg: _floats_for(codec, end) for leg, codec in end.codecs.items()}

    def send(self, z: Tensor, microbatch: int) -> Tensor:
        """The carrier of an activation; its gradient is what the other end sent back."""
        return _Send.apply(z, self, microbatch)

    def receive(self, carrier: Tensor, microbatch: int) -> Tensor:
        """The activation that a carrier brings; its gradient leaves as another carrier."""
        return _Receive.apply(carrier, self, microbatch)

    def carrier(self) -> Tensor:
        """What every carrier of this cut looks like, without memory."""
        return torch.empty(
            max(self._floats.values()), dtype=CARRIER, device="meta", requires_grad=True
        )

    def floats(self, leg: Leg) -> int:
        """How much of a carrier a leg uses."""
        return self._floats[leg]

    def bytes_sent(self, leg: Leg) -> int:
        """Size of one message of this leg."""
        return self._floats[leg] * CARRIER.itemsize

    def pack(self, leg: Leg, tensor: Tensor, microbatch: int) -> Tensor:
        """What the codec makes of a tensor, in a carrier."""
        if self.training:
            self._sightings.look(self.step, FORWARD if leg is Leg.FORWARD else BACKWARD, tensor)
        self.sent[leg.name if self.training else "EVALUATE"] += 1
        place = self.end.place(leg, self.step, microbatch, self.training)
        parts = self.end.codecs[leg].encode(tensor.detach().to(self.end.spec.dtype), place)
        carrier = torch.zeros(max(self._floats.values()), dtype=CARRIER, device=self._device)
        room, start = carrier.view(torch.uint8), 0
        for part in parts:
            bytes_ = _as_bytes(part)
            room[start : start + len(bytes_)] = bytes_
            start += len(bytes_)
        return carrier

    def unpack(self, leg: Leg, carrier: Tensor, microbatch: int) -> Tensor:
        """The tensor in a carrier."""
        codec, spec = self.end.codecs[leg], self.end.spec
        place = self.end.place(leg, self.step, microbatch, self.training)
        parts = _split(carrier.detach(), codec.layout(spec.shape, place))
        tensor = codec.decode(tuple(part.to(spec.device) for part in parts), spec, place)
        if self.training:
            self._sightings.look(self.step, INPUT if leg is Leg.FORWARD else GRADIENT, tensor)
        return tensor


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z: Tensor, crossing: Crossing, microbatch: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.crossing, ctx.microbatch, ctx.dtype = crossing, microbatch, z.dtype
        return crossing.pack(Leg.FORWARD, z, microbatch)

    @staticmethod
    def backward(ctx, carrier: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        gradient = ctx.crossing.unpack(Leg.BACKWARD, carrier, ctx.microbatch)
        return gradient.to(ctx.dtype), None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, carrier: Tensor, crossing: Crossing, microbatch: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.crossing, ctx.microbatch = crossing, microbatch
        return crossing.unpack(Leg.FORWARD, carrier, microbatch)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        return ctx.crossing.pack(Leg.BACKWARD, gradient, ctx.microbatch), None, None


def _refuse_unknown_sizes(codec: Codec) -> None:
    """A receiver's memory is taken before anything arrives, so sizes must be known by then."""
    if codec.content_decides_size or codec.remembers_examples:
        raise ConfigError(
            f"{codec.name} makes payloads of different sizes, but a stage of PyTorch's pipelining "
            "always receives the same number of bytes: padded to the largest they would save "
            "nothing. Choose a codec without +zstd and +aqsgd, or train with thinwire train"
        )


def _floats_for(codec: Codec, end: CutEnd) -> int:
    return -(-codec.payload_limit(end.spec.shape) // CARRIER.itemsize)


def _as_bytes(part: Tensor) -> Tensor:
    """The memory of a flat tensor; one element counts as contiguous whatever its stride."""
    flat = part.contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def _split(carrier: Tensor, layout: Iterable[Part]) -> list[Tensor]:
    """The parts of a payload, each in memory of its own, as its type may ask for."""
    room, start, parts = carrier.view(torch.uint8), 0, []
    for part in layout:
        parts.append(room[start : start + part.bytes].clone().view(part.dtype))
        start += part.bytes
    return parts
