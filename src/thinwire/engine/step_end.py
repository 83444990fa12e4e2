"""The end of a step: one decision for all stages, and what becomes of the gradients.

Norms go down with `gather`, behind the last gradients, together with a basis that moves and rows of
a shared embedding. `conclude` waits for the verdict, which rides up ahead of the next step's first
activation, with changes of rows behind it: no extra round trip. With delayed updates the next step
is under way between the two. What passes between the stages of one process stays here, and ports
carry the rest: so a pipeline and a chain in one process end a step by the same lines.
"""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from thinwire.codec import Leg
from thinwire.engine.build import StageBuilder
from thinwire.engine.checkpoint import Versions
from thinwire.engine.shared import FROM_ABOVE, FROM_BELOW, Keeper, SharedRows, row_number
from thinwire.engine.trace import BACKWARD, GRADIENT, Sightings, StepTrace, is_finite, not_finite
from thinwire.errors import StageError, WireError
from thinwire.model import Stage, StageOptimizer
from thinwire.wire import HEADER_BYTES, FrameKind

_VERDICT = struct.Struct("<dBBB")
VERDICT_BYTES = _VERDICT.size
TALLY_BYTES = 8 << 14  # of all stages together: more tensors than any model of ours has

Decide = Callable[[int, bool], tuple[bool, bool]]
"""On the first stage: (step, commit) -> (checkpoint?, stop?)."""
# (step, 0 just before a move of the basis or 1 just after) -> the loss of the same batches then
LossProbe = Callable[[int, int], float | None]


@dataclass(frozen=True)
class Verdict:
    """What the first stage decides for all at the end of a step."""

    grad_norm: float
    commit: bool
    checkpoint: bool
    stop: bool

    def to_bytes(self) -> bytes:
        """Eleven bytes: the norm and three flags."""
        return _VERDICT.pack(self.grad_norm, self.commit, self.checkpoint, self.stop)

    @classmethod
    def from_bytes(cls, payload: bytes) -> "Verdict":
        """The inverse of `to_bytes`; WireError when the payload is not a verdict."""
        if len(payload) != _VERDICT.size:
            raise WireError(f"a verdict has {_VERDICT.size} bytes, but {len(payload)} arrived")
        norm, *flags = _VERDICT.unpack(payload)
        if not {*flags} <= {0, 1}:
            raise WireError(f"the flags of a verdict are 0 or 1, but {flags} arrived")
        commit, checkpoint, stop = map(bool, flags)
        if norm < 0 or (commit and not math.isfinite(norm)):
            raise WireError(f"a verdict cannot {'commit' if commit else 'have'} a norm of {norm}")
        return cls(norm, commit, checkpoint, stop)


def pack_tally(squares: Sequence[float]) -> bytes:
    """Squared gradient norms, one for each parameter, in float64."""
    return struct.pack(f"<{len(squares)}d", *squares)


def unpack_tally(payload: bytes) -> list[float]:
    """The inverse of `pack_tally`; WireError if it is none. A norm may be infinite or NaN."""
    if len(payload) % 8:
        raise WireError(f"a tally has 8 bytes for each parameter, but {len(payload)} arrived")
    squares = list(struct.unpack(f"<{len(payload) // 8}d", payload))
    if any(square < 0 for square in squares):
        raise WireError("a tally holds a squared norm below zero")
    return squares


def global_norm(squares: Sequence[float]) -> float:
    """The norm of all gradients together, however they are split into stages: the sum is exactly
    rounded. Infinite if any is not finite, or the sum is not.
    """
    if not all(map(math.isfinite, squares)):
        return math.inf
    try:
        return math.sqrt(math.fsum(squares))
    except OverflowError:
        return math.inf


class StageUpdate:
    """One stage's weights, with all that changes them or takes the change back.

    With delayed updates there are two of a stage, each other's `twin`, for even and for odd steps.
    The first microbatches of a step are computed here, with all updates but the last, the others in
    the twin, which has that one already. Their gradients are added up here, for the weights and
    moments in the twin: then this is the latest of the two.
    """

    def __init__(
        self, builder: StageBuilder, stage: Stage, index: int, twin: "StageUpdate | None" = None
    ):
        """Without a `twin` it makes its own where updates are delayed, with the same weights."""
        settings = builder.settings
        self._constraint = constraint = builder.constraint(stage, in_training=True)
        by_rows = settings.boundary.shares_embedding
        self.stage, self.index, self.device = stage, index, builder.device
        self.version = 0  # updates committed
        self.sightings: Sightings = Sightings() if twin is None else twin.sightings
        self.optimizer = optimizer = StageOptimizer(
            stage.trained_parameters(), stage.roles(), settings.optim, constraint, by_rows
        )
        self.rows = SharedRows(settings, index, stage, optimizer) if by_rows else None
        self.keeper = Keeper(builder, stage, optimizer) if builder.space else None
        self.twin, self._is_latest = twin, True
        self._clip = settings.optim.clip
        self._delay, self._microbatches = settings.pipeline.delay, settings.pipeline.microbatches
        if self._delay and twin is None:
            other = builder.build(index)
            other.share_frozen(stage)
            self.twin = StageUpdate(builder, other, index, twin=self)
            self.twin.follow_twin()

    @property
    def versions(self) -> Versions:
        """Of the weights, and of the shared basis."""
        return Versions(self.version, self.keeper.space.version if self.keeper else 0)

    def of_step(self, step: int) -> "StageUpdate":
        """Of this one and its twin, asked of the one for even steps: that of a step."""
        return self if self.twin is None or step % 2 == 0 else self.twin

    def of_microbatch(self, step: int, microbatch: int) -> "StageUpdate":
        """The same, of a microbatch of a step: that with whose weights it is computed."""
        return self.of_step(step if microbatch < self._delay else step + 1)

    @torch.no_grad()
    def add_gradients_of_twin(self) -> None:
        """Behind the last backward of a step: have all its gradients here."""
        if self.twin is None or self._delay == self._microbatches:
            return  # none of them are there; of the step before there may be
        for own, others in zip(self.stage.parameters(), self.twin.stage.parameters(), strict=True):
            if own is not others and others.grad is not None:
                own.grad = others.grad if own.grad is None else own.grad.add_(others.grad)
                others.grad = None

    @property
    def latest(self) -> "StageUpdate":
        """Of this one and its twin: that with all updates."""
        return self if self.twin is None or self._is_latest else self.twin

    def follow_twin(self) -> None:
        """Take over weights, moments and version of the twin, if there is one."""
        if self.twin is not None:
            self._take_weights(self.twin)
            self.optimizer.take_state(self.twin.optimizer)
            self._is_latest, self.twin._is_latest = True, False

    @torch.no_grad()
    def _take_weights(self, other: "StageUpdate") -> None:
        for own, others in zip(self.stage.parameters(), other.stage.parameters(), strict=True):
            if own is not others:  # as frozen ones are
                own.copy_(others)
        self.version = other.version

    def before(self) -> dict[str, Tensor]:
        """Weights without the last update, of the twin, where they are not the same."""
        if self.twin is None or self.twin.version == self.version:
            return {}
        return dict(self.twin.stage.trained_parameters())

    @torch.no_grad()
    def restore_twin(self, before: Mapping[str, Tensor]) -> None:
        """Be the latest of the two: the twin gets what `before` gave, or else the same weights."""
        if self.twin is None:
            return
        self._is_latest, self.twin._is_latest = True, False
        self.twin._take_weights(self)
        self.twin.version -= bool(before)
        for name, weights in before.items():
            self.twin.stage.trained_parameters()[name].copy_(weights)

    def begin(self, step: int) -> None:
        """Before the first forward: note what a refused step must leave as it was."""
        if self.keeper is not None:
            self.keeper.begin_step(step)

    def project_gradients(self) -> None:
        """Before clipping and before the moments: only what stays in the space counts."""
        if self._constraint is not None:
            self._constraint.project_gradients()

    def squared_norms(self) -> list[float]:
        """The squared gradient norm of each parameter; rows count only if they are not finite."""
        self.project_gradients()
        gradients = [p.grad for p in self.stage.owned_parameters().values() if p.grad is not None]
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
        squares = [norm * norm for norm in torch.stack(norms).tolist()] if norms else []
        is_bad = self.rows is not None and not self.rows.is_finite()
        return [*squares, math.inf] if is_bad else squares

    def commit(self, step: int, lr: float, norm: float) -> None:
        """Change the weights; `norm` is that of the gradients of all stages."""
        scale = self._clip / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ has it
        for parameter in self.stage.parameters() if self._clip > 0 and scale < 1 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        self.follow_twin()
        self.optimizer.step(lr)
        self.version += 1
        if self.keeper is not None:
            self.keeper.after_update(step)

    @torch.no_grad()
    def withdraw(self, step: int) -> None:
        """Leave everything as it was before the step."""
        self.optimizer.zero_grad()
        self.follow_twin()
        if self.keeper is not None:
            self.keeper.withdraw(step)
        if self.rows is not None:
            self.rows.withdraw()

    @torch.no_grad()
    def check(self, step: int) -> None:
        """End the run before weights or moments that are not finite reach a checkpoint."""
        now = f"not finite after step {step + 1}"
        again = "No checkpoint contains it. Resume with a lower optim.lr"
        if name := not_finite(self.stage.trained_parameters()):
            raise StageError(f"weights of {name} are {now}: the update overflowed. {again}")
        rows = self.rows.state_tensors() if self.rows is not None else {}
        if name := not_finite({**self.optimizer.state_tensors(), **rows}):
            raise StageError(
                f"the optimizer's state {name} is {now}: a gradient was too large, and its weights "
                f"would stop learning. {again}, or with optim.clip"
            )


class Messenger(Protocol):
    """The way to a neighbour, as the end of a step needs it."""

    def send_message(self, kind: FrameKind, step: int, payload: bytes, number: int = 0) -> None:
        """Hand over a message as it travels."""

    def take_message(self, kind: FrameKind, step: int, number: int = 0) -> bytes:
        """The neighbour's message of this step, waiting for it."""


class StepEnd:
    """Ends the steps of the neighbouring stages that one process holds: `updates`, lowest first.
    `below` and `above` lead to the neighbours in other processes. `row_bytes` counts what rows of a
    shared embedding would cost between stages that are both here.
    """

    def __init__(
        self,
        updates: Sequence[StageUpdate],
        below: Messenger | None = None,
        above: Messenger | None = None,
    ):
        self.trace = StepTrace()
        self.row_bytes = dict.fromkeys(Leg, 0)
        self._updates = updates
        self._keepers = [update.keeper for update in updates if update.keeper is not None]
        self._rows = [update.rows for update in updates if update.rows is not None]
        self._below, self._above = below, above
        self._new_basis_DK: Tensor | None = None
        self._decided: dict[int, Verdict] = {}  # on the first stage, of steps to be concluded

    def gather(self, step: int, decide: Decide) -> None:
        """Behind the last backward: what goes down to the first stage, which decides at once."""
        for update in self._of_step(step):
            update.add_gradients_of_twin()
        if self._keepers and self._keepers[-1].moves_after(step):
            self._new_basis_DK = self._pass_basis_down(step)
        if self._rows:
            self._pass_rows_down(step)
        with self.trace.span("compute", "norm"):
            tally: list[float] = []
            for update in self._of_step(step):
                squares = update.squared_norms()
                tally += squares
                if not all(map(math.isfinite, squares)):
                    update.sightings.note(step, BACKWARD)
        with self.trace.span("wait", "U"):
            parts = pack_tally(tally)
            if self._above is not None:
                message = self._above.take_message(FrameKind.TALLY, step)
                parts += message
                tally += unpack_tally(message)
            if self._below is not None:
                self._below.send_message(FrameKind.TALLY, step, parts)
                return
            norm = global_norm(tally)
            is_good = math.isfinite(norm)
            decided = Verdict(norm, is_good, *decide(step, is_good))
            self._decided[step] = self.pass_up(FrameKind.VERDICT, step, decided)

    def conclude(self, step: int, lr: float, probe: LossProbe) -> Verdict:
        """Take the verdict, and change the weights or leave them as they were."""
        with self.trace.span("wait", "U"):
            verdict = self._decided.pop(step, None)
            if verdict is None:
                verdict = self.pass_up(FrameKind.VERDICT, step, None)
        with self.trace.span("compute", "U"):
            for update in self._of_step(step):
                if verdict.commit:
                    update.commit(step, lr, verdict.grad_norm)
                else:
                    update.withdraw(step)
            self.sync()
        new_basis_DK, self._new_basis_DK = self._new_basis_DK, None
        if verdict.commit and new_basis_DK is not None:
            self._move_basis(step, new_basis_DK, probe)
        if verdict.commit and self._rows:
            self._pass_rows_up(step)
        return verdict

    def _of_step(self, step: int) -> list[StageUpdate]:
        return [update.of_step(step) for update in self._updates]

    def pass_up(self, kind: FrameKind, step: int, decided: Verdict | None) -> Verdict:
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

    def sync(self) -> None:
        """On a GPU wait until the queued work is done: what follows hands its result over."""
        if (device := self._updates[0].device).type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def _pass_basis_down(self, step: int) -> Tensor:
        """The basis that the last stage proposes, handed on to the stage below."""
        if self._above is None:
            with self.trace.span("compute", "norm"):
                basis_DK = self._keepers[-1].propose()
            content = basis_DK.detach().cpu().contiguous().numpy().tobytes()
        else:
            old_DK = self._keepers[-1].space.basis_DK
            with self.trace.span("wait", "basis"):
                content = self._above.take_message(FrameKind.BASIS, step)
            flat = torch.frombuffer(bytearray(content), dtype=old_DK.dtype)
            basis_DK = flat.to(old_DK.device).view(old_DK.shape)
            if not is_finite(basis_DK):  # it would spoil the weights of this stage
                raise WireError(
                    f"stage {self._updates[-1].index + 1} sent a basis that is not finite after "
                    f"step {step + 1}"
                )
        if self._below is not None:
            self._below.send_message(FrameKind.BASIS, step, content)
        return basis_DK

    def _move_basis(self, step: int, basis_DK: Tensor, probe: LossProbe) -> None:
        """Switch, and score the same batches just before and just after. All stages here share one
        space, which moves once.
        """
        before = probe(step, 0)
        with self.trace.span("compute", "U"):
            space = self._keepers[0].space
            old_DK = space.basis_DK.clone()
            space.move(basis_DK)
            for keeper in self._keepers:
                keeper.follow(old_DK)
            self.sync()
        after = probe(step, 1)
        if before is not None and after is not None:
            self._keepers[-1].loss_jump = after - before

    def _pass_rows_down(self, step: int) -> None:
        """Gradients of the rows that are due: those of the stages above, and those of each here."""
        with self.trace.span("compute", "norm"):
            for own in self._rows:
                own.choose(step)
        for frame in range(self._rows[0].frames):
            number, payload = row_number(frame, FROM_ABOVE), None
            if self._above is not None:
                with self.trace.span("wait", "rows"):
                    payload = self._above.take_message(FrameKind.ROWS, step, number)
            for own, update in zip(self._rows[::-1], self._updates[::-1], strict=True):
                if payload is not None:
                    update.sightings.look(step, GRADIENT, own.add(step, frame, payload))
                if self._below is not None or own is not self._rows[0]:
                    payload = own.gradients(step, frame)
                    self._count(Leg.BACKWARD, payload, own is not self._rows[0])
            if self._below is not None:
                assert payload is not None, "every stage has gradients to send"
                self._below.send_message(FrameKind.ROWS, step, payload, number)

    def _pass_rows_up(self, step: int) -> None:
        """What the first stage makes of them, for all copies; then they are no longer due."""
        rows, made = self._rows, []
        if self._below is None and rows[0].frames:
            made = rows[0].changes(step, self._updates[0].version)
        for frame in range(rows[0].frames):
            number = row_number(frame, FROM_BELOW)
            if self._below is None:
                content = made[frame]
            else:
                with self.trace.span("wait", "rows"):
                    content = self._below.take_message(FrameKind.ROWS, step, number)
            if self._above is not None:
                self._above.send_message(FrameKind.ROWS, step, content, number)
            with self.trace.span("compute", "U"):
                for own in rows:
                    own.follow(step, frame, content)
                    self._count(Leg.FORWARD, content, own is not rows[0])
        for own in rows:
            own.commit()

    def _count(self, leg: Leg, payload: bytes, crosses: bool) -> None:
        self.row_bytes[leg] += crosses * (len(payload) + HEADER_BYTES)
