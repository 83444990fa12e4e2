"""A stage as a module of PyTorch's pipelining, and the PipelineStage around it.

A module gets the number of its microbatch and computes what it reads of the batch by itself, token
ids and targets: only carriers travel between ranks (carry.py). The last module ends with the loss.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from thinwire.cluster.carry import Crossing
from thinwire.codec import Leg
from thinwire.engine.feed import DeviceBatch, Feed
from thinwire.engine.trace import StepTrace
from thinwire.model import Score, Stage


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
