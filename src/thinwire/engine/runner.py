"""The runner: executes one schedule on one stage.

Compute never waits for a send (links queue), receives are posted early (link threads fill the
mailbox), and the only things the compute thread waits for are the tensors it needs next.

The end of a step needs one decision for all stages: commit the update or not, with which global
gradient norm, and whether to checkpoint or stop. It travels with the pipeline's own traffic:
tallies of squared gradient norms ride down behind the last gradients, so the first stage knows
the total as soon as it has finished its own backward, and the verdict rides up ahead of the next
step's first activation. Nobody waits an extra round trip for it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from thinwire.engine.build import weights_rounded_once
from thinwire.engine.due import FROM_ABOVE, FROM_BELOW, row_number
from thinwire.engine.feed import DeviceBatch, Feed
from thinwire.engine.finite import BACKWARD, FORWARD, GRADIENT, Sightings, is_finite
from thinwire.engine.keeper import Keeper
from thinwire.engine.port import Port
from thinwire.engine.progress import Progress
from thinwire.engine.reports import StageCosts
from thinwire.engine.rows import SharedRows
from thinwire.engine.trace import StepTrace
from thinwire.engine.update import StageUpdate
from thinwire.engine.verdict import Verdict, global_norm, pack_tally, unpack_tally
from thinwire.errors import StageError, WireError
from thinwire.model import Score, Stage
from thinwire.schedule import Kind, Schedule, forward_only
from thinwire.wire import FrameKind

Decide = Callable[[int, bool], tuple[bool, bool]]
"""On the first stage: (step, commit) -> (checkpoint?, stop?)."""


class Runner:
    """Runs training steps and validations of one stage, in the order its schedule gives."""

    def __init__(
        self,
        stage: Stage,
        feed: Feed,
        update: StageUpdate,
        below: Port | None,
        above: Port | None,
        schedule: Schedule,
        index: int,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
        progress: Progress | None = None,
        sightings: Sightings | None = None,
    ):
        self.stage = stage
        self.trace = StepTrace()
        self._progress = progress or Progress()
        self._sightings = sightings or Sightings()
        self._feed = feed
        self._update = update
        self._below, self._above = below, above
        self._schedule, self._index = schedule, index
        *self._actions, last = schedule.rows[index]
        assert last.kind is Kind.U, "a validated training schedule ends with an update"
        self._autocast = autocast
        self._device = next(stage.parameters()).device
        self._in_flight: dict[int, tuple[Tensor | None, Tensor]] = {}  # received, output
        self._losses: list[Tensor] = []

    def train_step(self, step: int, lr: float, decide: Decide) -> tuple[Verdict, float | None]:
        """All of this stage's actions of one step; the loss is known on the last stage only."""
        verbs = {"wait": "waits for", "compute": "computes"}

        def on_begin(lane: str, label: str) -> None:
            self._progress.begin(f"{verbs[lane]} {label} of step {step + 1}")

        self.trace = StepTrace(on_begin=on_begin)
        self._losses = []
        self._update.begin(step)
        with weights_rounded_once():
            for action in self._actions:
                work = self._forward if action.kind is Kind.F else self._backward
                work(step, action.microbatch)
        verdict = self._end_step(step, lr, decide)
        loss = float(torch.stack(self._losses).sum()) if self._losses else None
        if loss is not None and not math.isfinite(loss):
            self._sightings.note(step, FORWARD)
        return verdict, loss

    @torch.no_grad()
    def evaluate(
        self, step: int, batches: int, leaves: Callable[[], bool] = lambda: False
    ) -> tuple[Score | None, bool]:
        """The score of `batches` validation microbatches, and whether the run ends here.

        Once `leaves` says so, a stage computes no more of them. The first stage then sends no more
        either, and its verdict behind the last one tells the others. The score is known on the
        last stage only, and None if the validation was cut short.
        """
        score, done = Score(), 0
        self.stage.eval()
        for action in forward_only(self._schedule.stages, batches).rows[self._index]:
            number, received = action.microbatch, None
            if self._below is not None:
                self._progress.begin(f"waits for validation batch {number} after step {step}")
                received = self._below.take_evaluated(step, number, self._update.versions)
                if received is None:
                    break
            if not leaves():
                batch = self._feed.validation(number)
                if batch.wait is not None:
                    self._progress.begin(f"waits for ids of validation batch {number}")
                    batch.wait()
                self._progress.begin(f"validates with batch {number} after step {step}")
                self._score(FrameKind.EVALUATE, step, number, batch, received, score)
                done += 1
            elif self._below is None:
                break
        self.stage.train()
        stop = self._end_evaluation(step, leaves)
        return score if self._above is None and done == batches else None, stop

    def _end_evaluation(self, step: int, leaves: Callable[[], bool]) -> bool:
        """Pass the verdict up that ends a validation: whether all stages leave now."""
        decided = None
        if self._below is not None:
            self._progress.begin(f"waits for the end of the validation after step {step}")
        else:
            decided = Verdict(0.0, commit=False, checkpoint=False, stop=leaves())
        return self._pass_up(FrameKind.VALIDATED, step, decided).stop

    def _score(
        self,
        kind: FrameKind,
        step: int,
        number: int,
        batch: DeviceBatch,
        received: Tensor | None,
        score: Score,
    ) -> None:
        """One forward without gradients: to the stage above, or into the score."""
        with self._autocast():
            output = self._run_layers(received, batch)
            if self._above is None:
                score.add(self.stage.loss(output, batch.targets), batch.targets)
        if self._above is not None:
            self._sync()
            self._above.send_tensor(kind, output, step, number, self._update.versions)

    def costs(self) -> StageCosts:
        """Mean seconds of a forward, a backward and an update in the last step."""
        seconds, count = self.trace.seconds, self._schedule.microbatches
        return StageCosts(
            seconds("compute", "F") / count,
            seconds("compute", "B") / count,
            seconds("compute", "U") + seconds("compute", "norm"),
        )

    def _forward(self, step: int, microbatch: int) -> None:
        batch = self._feed.training(step, microbatch)
        if batch.wait is not None:
            with self.trace.span("wait", f"ids{microbatch}"):
                batch.wait()
        if self._update.rows is not None:
            self._update.rows.see(batch.inputs)
        received = None
        if self._below is not None:
            with self.trace.span("wait", f"F{microbatch}"):
                received = self._below.take_tensor(
                    FrameKind.FORWARD, step, microbatch, self._update.versions
                )
            received.requires_grad_()
        with self.trace.span("compute", f"F{microbatch}"):
            with self._autocast():
                output = self._run_layers(received, batch)
                if self._above is None:
                    output = batch.loss(self.stage, output, self._schedule.microbatches)
                    self._losses.append(output.detach())
            self._sync()
        self._in_flight[microbatch] = received, output
        if self._above is not None:
            sent = output.detach()
            self._above.send_tensor(
                FrameKind.FORWARD, sent, step, microbatch, self._update.versions
            )

    def _run_layers(self, received: Tensor | None, batch: DeviceBatch) -> Tensor:
        x = batch.inputs if received is None else received
        return self.stage(x, batch.inputs if self.stage.needs_ids else None)

    def _backward(self, step: int, microbatch: int) -> None:
        received, output = self._in_flight.pop(microbatch)
        gradient = None
        if self._above is not None:
            with self.trace.span("wait", f"B{microbatch}"):
                gradient = self._above.take_tensor(
                    FrameKind.BACKWARD, step, microbatch, self._update.versions
                ).to(output.dtype)
        with self.trace.span("compute", f"B{microbatch}"):
            torch.autograd.backward(output, gradient)
            self._sync()
        if self._below is not None:
            assert received is not None and received.grad is not None
            self._below.send_tensor(
                FrameKind.BACKWARD, received.grad, step, microbatch, self._update.versions
            )

    def _end_step(self, step: int, lr: float, decide: Decide) -> Verdict:
        update, keeper, new_basis_DK = self._update, self._update.keeper, None
        if keeper is not None:
            with self.trace.span("compute", "norm"):
                update.project()
                self._sync()
            borrowed = update.take_borrowed_gradients()
            self._send_basis(self._below, step, borrowed, FROM_ABOVE)
            lent = self._take_basis(self._above, step, self.stage.lent(), FROM_ABOVE)
            self._look(step, BACKWARD, borrowed)
            self._look(step, GRADIENT, lent)
            update.add_lent_gradients(lent)
            if keeper.moves_after(step):
                new_basis_DK = self._pass_move_down(step, keeper)
        if update.rows is not None:
            self._pass_rows_down(step, update.rows)
        with self.trace.span("compute", "norm"):
            tally = update.squared_norms()
            if not all(map(math.isfinite, tally)):
                self._sightings.note(step, BACKWARD)
        with self.trace.span("wait", "U"):
            verdict = self._agree(step, tally, decide)
        with self.trace.span("compute", "U"):
            if verdict.commit:
                update.commit(step, lr, verdict.grad_norm)
            else:
                update.withdraw(step)
            self._sync()
        if verdict.commit:
            if keeper is not None and new_basis_DK is not None:
                self._move_basis(step, keeper, new_basis_DK)
            self._send_basis(self._above, step, self.stage.lent(), FROM_BELOW)
            lenders = self._take_basis(self._below, step, self.stage.borrowed(), FROM_BELOW)
            self._check_basis(step, lenders, self._index - 1)
            update.follow_lender(lenders)
            if update.rows is not None:
                self._pass_rows_up(step, update.rows)
            with self.trace.span("compute", "U"):
                update.check(step)
        return verdict

    def _move_basis(self, step: int, keeper: Keeper, basis_DK: Tensor) -> None:
        """Switch, and score the same validation microbatch just before and just after.

        That costs two forwards of a microbatch for each move; no answer has to come back.
        """
        before = self._probe(step, 0)
        with self.trace.span("compute", "U"):
            keeper.switch(basis_DK)
            self._sync()
        after = self._probe(step, 1)
        if before is not None and after is not None:
            keeper.loss_jump = after - before

    @torch.no_grad()
    def _probe(self, step: int, number: int) -> float | None:
        """The loss of the first validation microbatch as things are, on the last stage."""
        received, score = None, Score()
        if self._below is not None:
            with self.trace.span("wait", "basis"):
                received = self._below.take_tensor(
                    FrameKind.PROBE, step, number, self._update.versions
                )
        with self.trace.span("compute", "U"):
            self.stage.eval()
            batch = self._feed.validation(0)
            self._score(FrameKind.PROBE, step, number, batch, received, score)
            self.stage.train()
            return score.loss if self._above is None else None

    def _pass_move_down(self, step: int, keeper: Keeper) -> Tensor:
        """The basis that the last stage proposes, handed on to the stage below."""
        if self._above is None:
            with self.trace.span("compute", "norm"):
                basis_DK = keeper.propose()
            self._send_basis(self._below, step, [basis_DK], FROM_ABOVE)
            return basis_DK
        with self.trace.span("wait", "basis"):
            message = self._above.take_message(FrameKind.BASIS, step, FROM_ABOVE)
        (basis_DK,) = _read_basis(message, [keeper.space.basis_DK])
        self._check_basis(step, [basis_DK], self._index + 1)
        if self._below is not None:
            self._below.send_message(FrameKind.BASIS, step, message, FROM_ABOVE)
        return basis_DK

    def _pass_rows_down(self, step: int, rows: SharedRows) -> None:
        """Gradients of the rows that are due: those of the stages above, and this one's."""
        with self.trace.span("compute", "norm"):
            rows.choose(step)
        for frame in range(rows.frames):
            number = row_number(frame, FROM_ABOVE)
            if self._above is not None:
                with self.trace.span("wait", "rows"):
                    message = self._above.take_message(FrameKind.ROWS, step, number)
                self._look(step, GRADIENT, [rows.add(step, frame, message)])
            if self._below is not None:
                content = rows.gradients(step, frame)
                self._below.send_message(FrameKind.ROWS, step, content, number)

    def _pass_rows_up(self, step: int, rows: SharedRows) -> None:
        """What the first stage makes of them, for all copies; then they are no longer due."""
        made = rows.changes(step, self._update.version) if self._below is None else []
        for frame in range(rows.frames):
            number = row_number(frame, FROM_BELOW)
            if self._below is None:
                content = made[frame]
            else:
                with self.trace.span("wait", "rows"):
                    content = self._below.take_message(FrameKind.ROWS, step, number)
            if self._above is not None:
                self._above.send_message(FrameKind.ROWS, step, content, number)
            with self.trace.span("compute", "U"):
                rows.follow(step, frame, content)
        rows.commit()

    def _agree(self, step: int, tally: list[float], decide: Decide) -> Verdict:
        """Pass the tallies down and the verdict up; the first stage is where they meet."""
        parts, decided = pack_tally(tally), None
        if self._above is not None:
            message = self._above.take_message(FrameKind.TALLY, step)
            parts += message
            tally += unpack_tally(message)
        if self._below is not None:
            self._below.send_message(FrameKind.TALLY, step, parts)
        else:
            norm = global_norm(tally)
            finite = math.isfinite(norm)
            decided = Verdict(norm, finite, *decide(step, finite))
        return self._pass_up(FrameKind.VERDICT, step, decided)

    def _pass_up(self, kind: FrameKind, step: int, decided: Verdict | None) -> Verdict:
        """A verdict, decided here or taken from below, goes on to the stage above as it came."""
        if decided is not None:
            content = decided.to_bytes()
        else:
            assert self._below is not None, "the first stage decides"
            content = self._below.take_message(kind, step)
            decided = Verdict.from_bytes(content)
        if self._above is not None:
            self._above.send_message(kind, step, content)
        return decided

    def _send_basis(
        self, port: Port | None, step: int, tensors: Sequence[Tensor], way: int
    ) -> None:
        """A basis or gradients of one to a neighbour, if there is any."""
        if port is not None and tensors:
            parts = [tensor.detach().cpu().contiguous().numpy().tobytes() for tensor in tensors]
            port.send_message(FrameKind.BASIS, step, b"".join(parts), way)

    def _take_basis(
        self, port: Port | None, step: int, like: Sequence[Tensor], way: int
    ) -> list[Tensor]:
        """Tensors of the shapes of `like` from a neighbour; the wait for them has its own name."""
        if port is None or not like:
            return []
        with self.trace.span("wait", "basis"):
            return _read_basis(port.take_message(FrameKind.BASIS, step, way), like)

    def _look(self, step: int, place: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._sightings.look(step, place, tensor)

    def _check_basis(self, step: int, tensors: Iterable[Tensor], sender: int) -> None:
        """Refuse a basis that would spoil the weights of this stage, in the sender's name."""
        if not all(map(is_finite, tensors)):
            raise WireError(f"stage {sender} sent a basis that is not finite after step {step + 1}")

    def _sync(self) -> None:
        """On a GPU wait until the queued work is done: what follows hands its result over."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _read_basis(content: bytes, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the shapes of `like`, as a neighbour has sent them."""
    due = sum(tensor.nbytes for tensor in like)
    if len(content) != due:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in like)
        raise StageError(f"a basis of shape {shapes} has {due} bytes, but {len(content)} arrived")
    flat = torch.frombuffer(bytearray(content), dtype=like[0].dtype).to(like[0].device)
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
