"""The parts of a pipeline of torch.distributed.pipelining: what crosses a cut as PyTorch can send
it, and a stage between two cuts.

PyTorch sends the output of one stage's module to the next one, and the gradient of that output
back. Both are tensors of one shape and type, and a gradient needs a type of floats. So the module
of a stage ends by packing: its output is a *carrier*, a flat tensor of float32 whose bits are the
bytes that the codec makes. Nobody computes with these floats. The next module begins by unpacking.
In the backward pass the gradient of a carrier is a carrier too. It has room for the longer of both
legs; `ThinStage` sends of it only what a leg needs.

A module gets the number of its microbatch and computes what it reads of the batch by itself, token
ids and targets: only carriers travel between ranks. The last module ends with the loss.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from thinwire.cluster.grid import check_size
from thinwire.codec import Leg, Part
from thinwire.engine.cut import CutEnd
from thinwire.engine.feed import DeviceBatch, Feed
from thinwire.engine.trace import BACKWARD, FORWARD, GRADIENT, INPUT, Sightings, StepTrace
from thinwire.errors import WireError
from thinwire.model import Score, Stage

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
            check_size(codec)
        self.end = end
        self.step = 0
        self.training = True
        self.sent: Counter[str] = Counter()  # tensors by kind, of this end
        self._device = torch.device(device)
        self._sightings = sightings or Sightings()
        self._floats = {
            leg: -(-codec.payload_limit(end.spec.shape) // CARRIER.itemsize)
            for leg, codec in end.codecs.items()
        }

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
        parts = codec.encode(tensor.detach().to(spec.dtype), place)
        made = [part.numel() * part.element_size() for part in parts]
        wanted = [part.bytes for part in codec.layout(spec.shape, place)]
        if made != wanted:  # a carrier has one size, so the receiver could not tell
            raise WireError(
                f"{codec.name} made parts of {made} bytes for shape {spec.shape}, but its layout "
                f"says {wanted}"
            )
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


class Chunk(nn.Module):
    """Layers of the model between two cuts: from a carrier, or the model's inputs, to a carrier,
    or the loss.
    """

    def __init__(
        self,
        stage: Stage,
        feed: Feed,
        below: Crossing | None,
        above: Crossing | None,
        microbatches: int,
        autocast: Callable[[], AbstractContextManager[None]],
    ):
        """`microbatches` are those of a whole step, over which the loss is a mean."""
        super().__init__()
        self.stage = stage
        self.below, self.above = below, above
        self.score = Score()  # of the validation under way, on the last stage
        self._feed = feed
        self._microbatches = microbatches
        self._autocast = autocast
        self._step = 0

    def begin(self, step: int, training: bool) -> None:
        """Before the first forward of a step, or of the validation after so many steps."""
        self._step = step
        self.train(training)
        for crossing in (self.below, self.above):
            if crossing is not None:
                crossing.step, crossing.training = step, training
        if not training:
            self.score = Score()

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        """`x` is a carrier; the first stage has no use for it."""
        at = int(number)
        batch = self._feed.training(self._step, at) if self.training else self._feed.validation(at)
        received = batch.inputs if self.below is None else self.below.receive(x, at)
        with self._autocast():
            output = self.stage(received, batch.inputs if self.stage.needs_ids else None)
            if self.above is None:
                return self._loss(output, batch)
        return self.above.send(output, at)

    def _loss(self, output: Tensor, batch: DeviceBatch) -> Tensor:
        """A microbatch's share of the step's loss; in a validation its loss, which is scored."""
        if self.training:
            return batch.loss(self.stage, output, self._microbatches)
        loss = self.stage.loss(output, batch.targets)
        self.score.add(loss, batch.targets)
        return loss


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
        super().__init__(
            module,
            index,
            stages,
            torch.device(device),
            input_args=first if below is None else below.carrier(),
            output_args=loss if above is None else above.carrier(),
            group=group,
        )

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
        op.tensor = op.tensor[: crossing.floats(leg)]
    return ops
