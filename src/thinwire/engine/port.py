"""A stage's end of one link: what the neighbour may send, how it is checked, and where it waits.

Everything that is not due is the neighbour's error, before memory is allocated for it.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from thinwire.codec import Codec
from thinwire.engine.cut import LEGS, TRAINING, CutEnd
from thinwire.engine.rows import FROM_ABOVE, FROM_BELOW
from thinwire.engine.source import Versions
from thinwire.engine.step_end import TALLY_BYTES, VERDICT_BYTES, Verdict, unpack_tally
from thinwire.engine.trace import BACKWARD, FORWARD, GRADIENT, INPUT, NORMS, Sightings
from thinwire.errors import ThinwireError, WireError
from thinwire.schedule import Schedule
from thinwire.wire import Frame, FrameKind, Link

Key = tuple[Any, ...]

_MADE = {FrameKind.FORWARD: FORWARD, FrameKind.BACKWARD: BACKWARD}
_ARRIVED = {FrameKind.FORWARD: INPUT, FrameKind.BACKWARD: GRADIENT}
PROBES = 2  # a move of the basis is scored just before it and just after
_MESSAGE_CHECKS: dict[FrameKind, Callable[[bytes], object]] = {
    FrameKind.TALLY: unpack_tally,
    FrameKind.VERDICT: Verdict.from_bytes,
    FrameKind.VALIDATED: Verdict.from_bytes,
}
# Validations send no gradients back, so nothing but this window keeps a fast stage from piling up
# its activations on a slow uplink, or before a slow stage. Training is bounded by its schedule.
EVALUATION_WINDOW = 4


@dataclass(frozen=True)
class Due:
    """What a neighbour sends: which kinds, and how much of each.

    A stage below may be a step ahead, while this one still saves the step before; the stage above
    cannot be, for it needs this stage's activations.
    """

    stage: int  # this one
    is_from_below: bool
    first_step: int
    schedule: Schedule | None = None
    validation_batches: int = 0
    basis_bytes: int = 0  # of one that moves
    rows: tuple[int, int] = (0, 0)  # frames in a step and bytes of one, at most; 0 = none cross

    @property
    def sender(self) -> int:
        """The stage that sends."""
        return self.stage + (-1 if self.is_from_below else 1)

    @cached_property
    def kinds(self) -> set[FrameKind]:
        """From below activations, of validations too, and verdicts; from above gradients, tallies,
        to which each stage adds its own, and the basis as the last stage moves it.
        """
        if self.is_from_below:
            kinds = {FrameKind.FORWARD, FrameKind.VERDICT, FrameKind.EVALUATE, FrameKind.VALIDATED}
        else:
            kinds = {FrameKind.BACKWARD, FrameKind.TALLY}
        if self.basis_bytes:
            kinds.add(FrameKind.PROBE if self.is_from_below else FrameKind.BASIS)
        return kinds | ({FrameKind.ROWS} if self.rows[0] else set())

    @property
    def steps_behind(self) -> int:
        """Steps that are still under way when the next one is opened."""
        return min(self.schedule.delay, 1) if self.schedule else 0

    @cached_property
    def answers_before(self) -> tuple[int, ...]:
        """For each forward from below, gradients sent back before: by the schedule it keeps a
        window. Negative: it may begin while so many less one of the step before are missing.
        """
        if self.schedule is None or not self.is_from_below:
            return ()
        held = self.schedule.held[self.sender]
        count, delay = self.schedule.microbatches, self.schedule.delay
        least = [0 if number >= delay else -count for number in range(count)]
        return tuple(max(number - held + 1, least[number]) for number in range(count))

    def has_number(self, kind: FrameKind, number: int) -> bool:
        """Whether there is a message of this kind and number, of those that no codec packs."""
        if kind is FrameKind.ROWS:
            frame, way = divmod(number, 2)
            return (
                way == (FROM_BELOW if self.is_from_below else FROM_ABOVE) and frame < self.rows[0]
            )
        return number == 0

    def most_bytes(self, kind: FrameKind) -> int:
        """The largest message of a kind."""
        return {
            FrameKind.BASIS: self.basis_bytes,
            FrameKind.ROWS: self.rows[1],
            FrameKind.TALLY: TALLY_BYTES,
        }.get(kind, VERDICT_BYTES)


class Mailbox:
    """Items by key, put by link threads as they arrive and taken once by the runner.

    What may be put is bounded by ports, which know what is due; a flow that has no such bound is
    held back by `wait_for_room`.

    A failure of any link is put here too, so that a stage which waits for a frame that can no
    longer come stops at once instead of waiting forever. A link may be as slow as it likes:
    unless a `timeout` is given, waiting ends with the item or with a failure only.
    """

    def __init__(self, timeout: float | None = None):
        self._items: dict[Key, tuple[int, Any]] = {}  # with their steps
        self._changed = threading.Condition()
        self._failure: ThinwireError | None = None
        self._timeout = timeout
        self._done_step = -1
        self.dropped = 0

    def put(self, key: Key, step: int, item: Any) -> None:
        """Keep an item until it is taken; late and repeated ones are dropped and counted."""
        with self._changed:
            if step <= self._done_step or key in self._items:
                self.dropped += 1
                return
            self._items[key] = step, item
            self._changed.notify_all()

    def wait_for_room(self, kind: Any, most: int) -> None:
        """On a link thread: wait until fewer than `most` items wait whose key begins with `kind`.

        Meanwhile the link reads nothing, so that its sender is held back too. A failure ends it.
        """
        self.wait_until(lambda: sum(key[0] == kind for key in self._items) < most)

    def take(self, key: Key) -> Any:
        """The item of this key, waiting for it if need be."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._items or self._failure, self._timeout)
            if key in self._items:
                _, item = self._items.pop(key)
                self._changed.notify_all()
                return item
            raise self._failure or WireError(f"no {key} arrived within {self._timeout} s")

    def wait_for_either(self, key: Key, other: Key) -> Key:
        """Wait until one of the two is there, without taking it; `key` if both are."""
        with self._changed:
            self._changed.wait_for(
                lambda: key in self._items or other in self._items or self._failure, self._timeout
            )
            return other if other in self._items and key not in self._items else key

    def changed(self) -> None:
        """Something that `wait_until` may wait for has changed."""
        with self._changed:
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """On a link thread: wait until something holds; False if a failure comes first."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or condition())
            return self._failure is None

    def close_step(self, step: int) -> None:
        """Frames of this step and of earlier ones are late from now on.

        What nobody took is dropped: nobody will, and it would pile up step by step.
        """
        with self._changed:
            self._done_step = step
            kept = {key: item for key, item in self._items.items() if item[0] > step}
            self.dropped += len(self._items) - len(kept)
            self._items = kept

    def fail(self, error: ThinwireError) -> None:
        """Wake everyone who waits with this error; the first one stays the reason."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()


def decision_number(kind: FrameKind, step: int) -> int:
    """The number of a decision of the first stage, from 1; a validation comes before the step."""
    return 2 * step + 1 + (kind is FrameKind.VERDICT)


class Port:
    """Sends tensors to one neighbour and receives the neighbour's.

    Packing runs on the link's sending thread and unpacking on its receiving one, so neither
    costs the compute thread anything. Every received frame is held against the contract
    (kind, step, shape, codec, size) before memory is allocated for it, so that what waits in the
    mailbox is bounded; a frame beyond is the sender's error.

    A neighbour may be a step ahead while this stage still saves the step before. A codec that
    remembers must not have seen that step yet, so its frames are held until `open_step`. Nor may it
    see a tensor twice, or one that is not due: that would change what it remembers for good.

    A stage that takes the place of a lost one gets what its neighbours have sent since its state as
    fast as it can take it: such frames wait here until they are due, and are no error.

    Tensors that are not finite are let through, for all stages refuse such a step; `sightings`
    notes on which side of the cut they were first seen.
    """

    def __init__(
        self,
        link: Link,
        end: CutEnd,
        mailbox: Mailbox,
        due: Due,
        sightings: Sightings | None = None,
    ):
        self.link = link
        self.stage = due.stage
        self._end = end
        self._mailbox = mailbox
        self._due = due
        self._sightings = sightings or Sightings()
        self._gate = threading.Lock()
        self._open_step = due.first_step - 1  # a validation may come before the first step
        self._evaluated = (due.first_step, -1)  # step and number of the last validation frame
        # Of the open step and later: what came, and the microbatches that were sent, by step.
        self._seen: set[tuple[FrameKind, int, int]] = set()
        self._sent: dict[int, set[int]] = {}
        self._held: list[Frame] = []
        self._state = link.pipe.state  # where the neighbour may be replaced
        link.start(self._on_frame, mailbox.fail, self._on_end)

    def send_tensor(
        self, kind: FrameKind, tensor: Tensor, step: int, microbatch: int, made_with: Versions
    ) -> None:
        """Hand a tensor over; it must not be changed afterwards.

        Returns at once in training; in a validation it waits while enough frames wait to be sent.
        """
        if kind is FrameKind.EVALUATE:
            self.link.wait_for_room(EVALUATION_WINDOW)
        elif kind in TRAINING:  # before it leaves: the neighbour may answer at once
            self._sent.setdefault(step, set()).add(microbatch)
            self._mailbox.changed()

        def packed() -> Frame:
            if kind in _MADE:
                self._sightings.look(step, _MADE[kind], tensor)
            return self._end.pack(kind, tensor, step, microbatch, made_with)

        self.link.send(packed)

    def take_tensor(
        self, kind: FrameKind, step: int, microbatch: int, expected: Versions
    ) -> Tensor:
        """The neighbour's tensor, waiting for it; it must come from the versions expected."""
        tensor, theirs = self._mailbox.take((kind, step, microbatch))
        if theirs != expected:
            raise WireError(
                f"{self.link.name}: {kind.name} of step {step}, microbatch {microbatch} was made "
                f"with {theirs}, but this stage is at {expected}"
            )
        return tensor

    def take_evaluated(self, step: int, microbatch: int, expected: Versions) -> Tensor | None:
        """The neighbour's tensor of a validation, waiting for it; None if that is over."""
        key = (FrameKind.EVALUATE, step, microbatch)
        over = (FrameKind.VALIDATED, step, 0)
        if self._mailbox.wait_for_either(key, over) == over:
            return None
        return self.take_tensor(FrameKind.EVALUATE, step, microbatch, expected)

    def send_message(self, kind: FrameKind, step: int, payload: bytes, number: int = 0) -> None:
        """Hand over a message as it travels: a tally, a verdict, a basis."""
        self.link.send(
            Frame(kind=kind, sender=self.stage, step=step, microbatch=number, payload=payload)
        )

    def take_message(self, kind: FrameKind, step: int, number: int = 0) -> bytes:
        """The neighbour's message of this step, waiting for it."""
        return self._mailbox.take((kind, step, number))

    def open_step(self, step: int) -> None:
        """Let training tensors of this step in: what codecs remember may move on to it."""
        with self._gate:
            self._open_step, oldest = step, step - self._due.steps_behind
            self._seen = {what for what in self._seen if what[1] >= oldest}
            self._sent = {at: numbers for at, numbers in self._sent.items() if at >= oldest}
            held, self._held = self._held, []
            for frame in held:
                self._admit(frame)
        self._mailbox.changed()

    def close_step(self, step: int) -> None:
        """All that this step needed has come: whoever takes the neighbour's place need not send it
        again, also while this stage saves or validates.
        """
        if self._state is not None:
            self._state.start = step + 1

    def _on_frame(self, frame: Frame) -> None:
        is_again = self._state is not None and frame.step <= self._state.sent_again
        if is_again and not self._mailbox.wait_until(lambda: not self._too_early(frame)):
            return  # nobody will take it
        if frame.kind not in self._due.kinds:
            raise WireError(f"{self.link.name}: an unexpected {frame.kind.name} frame arrived")
        if frame.sender != self._due.sender:
            raise WireError(
                f"{self._described(frame)} bears the name of stage {frame.sender}, but stage "
                f"{self._due.sender} is the neighbour"
            )
        if frame.kind is FrameKind.EVALUATE:
            self._on_evaluation(frame)
        elif frame.kind not in LEGS:
            self._check_due(frame)
            self._on_message(frame)
        else:
            codec = self._check_contract(frame)
            self._check_due(frame)
            is_remembered = codec.remembers and frame.kind in TRAINING
            with self._gate:
                self._check_first(frame)
                if is_remembered:
                    self._admit(frame)
            if not is_remembered:
                self._receive(frame)

    def _too_early(self, frame: Frame) -> str:
        """Why the neighbour's schedule cannot have made a frame yet: it would pile up here."""
        before, number = self._due.answers_before, frame.microbatch
        if frame.step - self._open_step > self._due.is_from_below:
            return self._not_now()
        if frame.kind is FrameKind.BACKWARD and number not in self._sent.get(frame.step, ()):
            return "answers an activation that was not sent"
        if frame.kind is FrameKind.FORWARD and number < len(before):
            answers, wanted = self._answers(frame.step), before[number]
            if answers < wanted:
                return (
                    f"is beyond the window: it is due after {wanted} gradients, and {answers} were "
                    "sent"
                )
        return ""

    def _not_now(self) -> str:
        return f"belongs neither to the current step, {self._open_step}, nor to the next"

    def _answers(self, step: int) -> int:
        """Gradients of a step that were sent, less those that are missing of the step before."""
        count = len(self._sent.get(step, ()))
        if self._due.steps_behind and step > self._due.first_step:
            count -= self._end.microbatches - len(self._sent.get(step - 1, ()))
        return count

    def _check_due(self, frame: Frame) -> None:
        is_late = frame.step < self._open_step - self._due.steps_behind
        if why := self._not_now() if is_late else self._too_early(frame):
            raise WireError(f"{self._described(frame)} {why}")

    def _check_first(self, frame: Frame) -> None:
        what = frame.kind, frame.step, frame.microbatch
        if what in self._seen:
            raise WireError(f"{self._described(frame)} arrived twice")
        self._seen.add(what)

    def _on_message(self, frame: Frame) -> None:
        kind, step, number = frame.kind, frame.step, frame.microbatch
        ends_validation = kind is FrameKind.VALIDATED
        exists = self._due.has_number(kind, number)
        if not exists or (ends_validation and step != self._open_step + 1):
            raise WireError(f"{self._described(frame)} does not exist")
        with self._gate:
            self._check_first(frame)
        if len(frame.payload) > (most := self._due.most_bytes(kind)):
            raise WireError(
                f"{self._described(frame)} has {len(frame.payload)} bytes, but at most {most} "
                "were agreed"
            )
        content = bytes(frame.payload)
        try:
            if kind is FrameKind.BASIS and len(content) != (agreed := self._due.basis_bytes):
                raise WireError(f"it has {len(content)} bytes, but {agreed} were agreed")
            if kind in _MESSAGE_CHECKS:  # the size of rows the stage knows at the step's end
                said = _MESSAGE_CHECKS[kind](content)
                if isinstance(said, Verdict) and self._state is not None:
                    self._state.decide(decision_number(kind, step), said.stop)
                if isinstance(said, list) and not all(map(math.isfinite, said)):
                    self._sightings.note(step, NORMS)
        except WireError as error:
            raise WireError(f"{self._described(frame)}: {error}") from None
        self._mailbox.put((kind, step, number), step, content)

    def _on_evaluation(self, frame: Frame) -> None:
        """Take in the next frame of a validation: in order, so waiting cannot block."""
        self._check_contract(frame)
        step, number = self._evaluated
        expected = number + 1 if frame.step == step else 0
        if frame.step != self._open_step + 1 or frame.microbatch != expected:
            raise WireError(f"{self._described(frame)} is not the validation frame that is due")
        if frame.microbatch >= self._due.validation_batches:
            raise WireError(
                f"{self._described(frame)} does not exist: a validation has "
                f"{self._due.validation_batches} of them"
            )
        self._evaluated = frame.step, frame.microbatch
        self._mailbox.wait_for_room(FrameKind.EVALUATE, EVALUATION_WINDOW)
        self._receive(frame)

    def _admit(self, frame: Frame) -> None:
        """Receive a frame of a step that was opened, and hold one of the next: what its codec
        remembers may not move on to it yet.
        """
        self._check_due(frame)
        if frame.step <= self._open_step:
            self._receive(frame)
        else:
            self._held.append(frame)

    def _receive(self, frame: Frame) -> None:
        """Unpack a tensor and put it where the compute thread looks for it."""
        tensor = self._end.unpack(frame)
        if frame.kind in _ARRIVED:
            self._sightings.look(frame.step, _ARRIVED[frame.kind], tensor)
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        versions = Versions(frame.weight_version, frame.basis_version)
        key = (frame.kind, frame.step, frame.microbatch)
        self._mailbox.put(key, frame.step, (tensor, versions))

    def _described(self, frame: Frame) -> str:
        work = f"step {frame.step}, microbatch {frame.microbatch}"
        return f"{self.link.name}: {frame.kind.name} of {work}"

    def _check_contract(self, frame: Frame) -> Codec:
        what, codec = self._described(frame), self._end.codecs[LEGS[frame.kind]]
        most = PROBES if frame.kind is FrameKind.PROBE else self._end.microbatches
        if frame.kind is not FrameKind.EVALUATE and frame.microbatch >= most:
            raise WireError(f"{what} does not exist: a step has {most} of them")
        if frame.codec != codec.tag:
            raise WireError(f"{what} was not packed by {codec.name}: the ends' codecs differ")
        if frame.shape != self._end.spec.shape:
            raise WireError(
                f"{what} has shape {frame.shape}, but {self._end.spec.shape} was agreed"
            )
        limit = codec.payload_limit(frame.shape)
        if len(frame.payload) > limit:
            raise WireError(
                f"{what} has {len(frame.payload)} bytes, but at most {limit} were agreed"
            )
        return codec

    def _on_end(self) -> None:
        # What it sent before is already in the mailbox; only a wait for more is in vain.
        self._mailbox.fail(WireError(f"{self.link.name}: the neighbour has left the run"))
