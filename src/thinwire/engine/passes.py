"""The forward and the backward of one microbatch on one stage: as torch launches them, kernel by
kernel, or replayed as CUDA graphs, which launch all kernels of a pass at once.

With small microbatches on a fast GPU launching takes longer than computing. What a graph reads and
writes stays where it was, so each microbatch in flight has a pair of graphs, with own tensors.
"""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from thinwire.engine.feed import DeviceBatch
from thinwire.errors import StageError
from thinwire.model import Stage

Autocast = Callable[[], AbstractContextManager[None]]

_WARM_UPS = 3  # before a capture: libraries choose kernels then, and compilers compile
_CAPTURING = threading.Lock()  # stages of one process capture one after the other


def autocast_for(precision: str, device: torch.device) -> Autocast:
    """The context in which a stage computes."""
    if precision == "bf16":
        return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext


@contextlib.contextmanager
def weights_rounded_once() -> Iterator[None]:
    """While this lasts, autocast rounds each weight once: it forgets its copies when its outermost
    block ends, and this is one more. Weights must not change.
    """
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


class Pass:
    """A microbatch between its forward and its backward. `output` is the loss on the last stage."""

    def __init__(self, received: Tensor | None, output: Tensor):
        self._received, self.output = received, output

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """Add to the gradients of the weights; returns that of what the stage received, if any."""
        torch.autograd.backward(self.output, gradient)
        return None if self._received is None else self._received.grad


class Passes:
    """The passes of a stage as torch launches them."""

    def __init__(self, stage: Stage, autocast: Autocast):
        self.stage, self.autocast = stage, autocast

    def forward(self, received: Tensor | None, batch: DeviceBatch, microbatches: int) -> Pass:
        """Compute a microbatch: of what was received, or of its token ids on the first stage."""
        received = None if received is None else received.requires_grad_()
        with self.autocast():
            output = self.run_layers(received, batch)
            if self.stage.outgoing is None:
                output = batch.loss(self.stage, output, microbatches)
        return Pass(received, output)

    def run_layers(self, received: Tensor | None, batch: DeviceBatch) -> Tensor:
        """What the stage makes of what it received, or of token ids."""
        x = batch.inputs if received is None else received
        return self.stage(x, batch.inputs if self.stage.needs_ids else None)


class GraphPasses(Passes):
    """The same, replayed: the same kernels in the same order, so the same bits.

    Weights that autocast rounds are rounded by the first graphs, for all others. Those go first
    whenever weights have changed: nothing is in flight then, and the first free ones are taken.
    """

    def __init__(self, stage: Stage, autocast: Autocast):
        super().__init__(stage, autocast)
        self.graphs: list[_Graphs] = []
        self._trained = [p for p in stage.parameters() if p.requires_grad]
        self._sums: list[Tensor | None] = []  # of their gradients in the step under way
        self.device = next(stage.parameters()).device
        self.stream = torch.cuda.Stream(self.device)  # on which all are captured

    def forward(self, received: Tensor | None, batch: DeviceBatch, microbatches: int) -> Pass:
        free = next((graphs for graphs in self.graphs if graphs.is_free), None)
        if free is None:
            try:
                with _CAPTURING:
                    free = _Graphs(self, received, batch)
            except RuntimeError as error:
                raise StageError(
                    f"a microbatch cannot be captured as CUDA graphs ({error}): set "
                    "run.graphs = false"
                ) from error
            self.graphs.append(free)
        free.replay(received, batch, microbatches)
        return free

    def differentiate(
        self, output: Tensor, gradient: Tensor, received: Tensor | None
    ) -> list[Tensor | None]:
        """The gradients of the weights, and behind them that of what was received."""
        wanted = [*self._trained, *([] if received is None else [received])]
        found = torch.autograd.grad(output, wanted, gradient, allow_unused=True)
        if not self._sums:
            pairs = zip(self._trained, found, strict=False)
            self._sums = [None if one is None else torch.zeros_like(p) for p, one in pairs]
        return [*found]

    def add(self, found: list[Tensor | None]) -> None:
        """Add the gradients of a microbatch to those of its step."""
        for total, gradient in zip(self._sums, found, strict=False):
            if total is not None and gradient is not None:
                total.add_(gradient)

    def forget_rounded(self) -> None:
        """Before the first capture: a graph could not round again what is rounded already."""
        torch.clear_autocast_cache()

    def begin_sums(self) -> None:
        """Where an update has cleared gradients, have the sums take their place, from zero."""
        pairs = zip(self._trained, self._sums, strict=True)
        cleared = [(p, total) for p, total in pairs if total is not None and p.grad is None]
        if cleared:
            torch._foreach_zero_([total for _, total in cleared])
        for parameter, total in cleared:
            parameter.grad = total


class _Graphs(Pass):
    """A forward and a backward, captured, with the tensors that they read and write."""

    def __init__(self, passes: GraphPasses, received: Tensor | None, batch: DeviceBatch):
        self.is_free = True
        self._passes, self._is_last = passes, passes.stage.outgoing is None
        self._received = None if received is None else received.detach().clone().requires_grad_()
        self._batch = own = copy.copy(batch)
        self._reads_ids = received is None or passes.stage.needs_ids
        if self._reads_ids:
            own.inputs = batch.inputs.clone()
        if self._is_last:
            own.targets = batch.targets.clone()
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        loss, _ = batch.loss_of(passes.stage, 1)

        def forward() -> Tensor:
            """What is sent on, or on the last stage the loss before it is divided."""
            with passes.autocast():
                output = passes.run_layers(self._received, own)
                return loss(output, own.targets) if self._is_last else output

        current = torch.cuda.current_stream(passes.device)
        passes.stream.wait_stream(current)
        with torch.cuda.stream(passes.stream):
            if not passes.graphs:
                for _ in range(_WARM_UPS):
                    made = forward()
                    passes.differentiate(made, torch.ones_like(made), self._received)
                passes.forget_rounded()
                torch.cuda.empty_cache()  # no capture could have what the warm-ups leave
            # In its thread alone: those of links go on using the GPU meanwhile.
            self._forward.capture_begin(capture_error_mode="thread_local")
            self._made = forward()
            self._forward.capture_end()
            self._gradient = torch.empty_like(self._made)
            self._backward.capture_begin(self._forward.pool(), capture_error_mode="thread_local")
            found = passes.differentiate(self._made, self._gradient, self._received)
            passes.add(found)
            self._backward.capture_end()
        current.wait_stream(passes.stream)
        self._made = self._made.detach()
        self._sent_back = found[-1] if self._received is not None else None

    @torch.no_grad()
    def replay(self, received: Tensor | None, batch: DeviceBatch, microbatches: int) -> None:
        """Compute another microbatch."""
        self.is_free = False
        if self._received is not None and received is not None:
            self._received.copy_(received)
        if self._reads_ids:
            self._batch.inputs.copy_(batch.inputs)
        if self._is_last:
            self._batch.targets.copy_(batch.targets)
        self._forward.replay()
        self.output = self._made.clone()  # a link packs it later, perhaps behind the next forward
        if self._is_last:
            _, parts = batch.loss_of(self._passes.stage, microbatches)
            self.output = self._made / parts
            self._gradient.copy_(torch.ones_like(self._made) / parts)

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is not None:
            self._gradient.copy_(gradient)
        self._passes.begin_sums()
        self._backward.replay()
        self.is_free = True
        return None if self._sent_back is None else self._sent_back.clone()  # packed later too
