"""The parts of a pipeline of torch.distributed.pipelining: what crosses a cut, and a stage.

PyTorch sends the output of one module to the next, and its gradient back: tensors of floats, of one
shape. So a module ends by packing: its output is a *carrier*, a flat tensor of float32 whose bits
are the bytes of the codec, with which nobody computes. The next module unpacks it. The gradient of
a carrier is a carrier too. There is room in it for the longer of both legs; `ThinStage` sends what
a leg needs.
"""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from thinwire.cluster.grid import check_size
from thinwire.codec import Leg
from thinwire.engine.cut import CutEnd
from thinwire.engine.trace import BACKWARD, FORWARD, GRADIENT, INPUT, Sightings, StepTrace
from thinwire.errors import WireError

CARRIER = torch.float32


class Crossing:
    """One end of a cut between two modules of a pipeline: packs what leaves, unpacks what comes.

    `step` is that under way; `training` is off in a validation. `device` is where carriers are:
    that of the stage for NCCL, the CPU for gloo. `floats`: how much of one each leg uses.
    """

    def __init__(
        self, end: CutEnd, device: torch.device | str, sightings: Sightings | None = None
    ) -> None:
        self.end, self.step, self.training = end, 0, True
        self.sent: Counter[str] = Counter()  # tensors by kind, of this end
        self.floats: dict[Leg, int] = {}
        for leg, codec in end.codecs.items():
            check_size(codec)
            self.floats[leg] = -(-codec.payload_limit(end.spec.shape) // CARRIER.itemsize)
        self._device = torch.device(device)
        self._sightings = sightings or Sightings()

    def send(self, z: Tensor, microbatch: int) -> Tensor:
        """The carrier of an activation; its gradient is what the other end sent back."""
        return _Send.apply(z, self, microbatch)

    def receive(self, carrier: Tensor, microbatch: int) -> Tensor:
        """The activation that a carrier brings; its gradient leaves as another carrier."""
        return _Receive.apply(carrier, self, microbatch)

    def carrier(self) -> Tensor:
        """What every carrier of this cut looks like, without memory."""
        size = max(self.floats.values())
        return torch.empty(size, dtype=CARRIER, device="meta", requires_grad=True)

    def pack(self, leg: Leg, tensor: Tensor, microbatch: int) -> Tensor:
        """What the codec makes of a tensor, in a carrier."""
        if self.training:
            self._sightings.look(self.step, FORWARD if leg is Leg.FORWARD else BACKWARD, tensor)
        self.sent[leg.name if self.training else "EVALUATE"] += 1
        codec, spec = self.end.codecs[leg], self.end.spec
        if tuple(tensor.shape) != spec.shape:
            raise WireError(
                f"a tensor of shape {tuple(tensor.shape)} cannot cross cut {self.end.cut}: "
                f"{spec.shape} was agreed, and every microbatch must have it"
            )
        place = self.end.place(leg, self.step, microbatch, self.training)
        parts = [_as_bytes(part) for part in codec.encode(tensor.detach().to(spec.dtype), place)]
        made, wanted = list(map(len, parts)), [p.bytes for p in codec.layout(spec.shape, place)]
        if made != wanted:  # a carrier has one size, so the receiver could not tell
            raise WireError(
                f"{codec.name} made parts of {made} bytes for shape {spec.shape}, but its layout "
                f"says {wanted}"
            )
        carrier = torch.zeros(max(self.floats.values()), dtype=CARRIER, device=self._device)
        carrier.view(torch.uint8)[: sum(made)] = torch.cat(parts)
        return carrier

    def unpack(self, leg: Leg, carrier: Tensor, microbatch: int) -> Tensor:
        """The tensor in a carrier."""
        codec, spec = self.end.codecs[leg], self.end.spec
        place = self.end.place(leg, self.step, microbatch, self.training)
        layout = codec.layout(spec.shape, place)
        sizes = [part.bytes for part in layout]
        pieces = carrier.detach().view(torch.uint8)[: sum(sizes)].split(sizes)
        parts = (  # each in memory of its own, as its type may ask for
            piece.clone().view(part.dtype).to(spec.device)
            for part, piece in zip(layout, pieces, strict=True)
        )
        tensor = codec.decode(tuple(parts), spec, place)
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


def _as_bytes(part: Tensor) -> Tensor:
    """The memory of a flat tensor; one element counts as contiguous whatever its stride."""
    flat = part.contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


class ThinStage(PipelineStage):
    """A PipelineStage between crossings: it sends of a carrier only what a leg needs, and notes
    what it did with its time.

    Every stage of a pipeline must be one: both ends of a cut then expect the same sizes.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        stages: int,
        below: Crossing | None,
        above: Crossing | None,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
    ):
        """`device` is where carriers are; the module may compute elsewhere."""
        self.trace = StepTrace()
        self._below, self._above = below, above
        first = torch.empty(1, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        sizes = below.carrier() if below else first, above.carrier() if above else loss
        super().__init__(module, index, stages, torch.device(device), *sizes, group=group)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return _shortened(super().get_fwd_recv_ops(fwd_chunk_id), self._below, Leg.FORWARD)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return _shortened(super().get_fwd_send_ops(fwd_chunk_id), self._above, Leg.FORWARD)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return _shortened(super().get_bwd_recv_ops(bwd_chunk_id), self._above, Leg.BACKWARD)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return _shortened(super().get_bwd_send_ops(bwd_chunk_id), self._below, Leg.BACKWARD)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.trace.span("compute", f"F{fwd_chunk_id}"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self.trace.span("compute", f"B{bwd_chunk_id}"):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The gradients of weights, where a schedule computes those of inputs first."""
        with self.trace.span("compute", f"B{bwd_chunk_id}"):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


def _shortened(ops: list[dist.P2POp], crossing: Crossing | None, leg: Leg) -> list[dist.P2POp]:
    """The same operations on the part of each carrier that a leg needs."""
    for op in ops:
        assert crossing is not None, "what is sent or received crosses a cut"
        op.tensor = op.tensor[: crossing.floats[leg]]
    return ops
