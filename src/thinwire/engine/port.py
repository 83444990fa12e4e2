"""A stage's end of one link: what the neighbour may send, how it is checked, and where it waits.

Everything that is not due is the neighbour's error, before memory is allocated for it.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from thinwire.codec import Codec
from thinwire.engine.checkpoint import Versions
from thinwire.engine.cut import LEGS, TRAINING, CutEnd
from thinwire.engine.shared import FROM_ABOVE, FROM_BELOW, row_number
from thinwire.engine.step_end import TALLY_BYTES, VERDICT_BYTES, Verdict, unpack_tally
from thinwire.engine.trace import BACKWARD, FORWARD, GRADIENT, INPUT, NORMS, Sightings
from thinwire.errors import ThinwireError, WireError
from thinwire.schedule import Schedule
from thinwire.wire import Frame, FrameKind, Link
from thinwire.wire.frame import HEADER_BYTES, BytesLike, kind_and_step

Key = tuple[FrameKind, int, int]  # kind, step and number of a frame

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
    """What a neighbour sends: which kinds, and how much of each. One below may be a step ahead,
    while this stage still saves the step before; one above needs this stage's activations.
    """

    stage: int  # this one
    is_from_below: bool
    first_step: int
    schedule: Schedule
    validation_batches: int = 0
    basis_bytes: int = 0  # of one that moves
    rows: tuple[int, int] = (0, 0)  # frames in a step and bytes of one, at most; 0 = none cross

    @cached_property
    def kinds(self) -> dict[FrameKind, tuple[Collection[int], int]]:
        """By kind of frame: its numbers in a step, and its most bytes where no codec packs it."""
        count, (row_frames, row_bytes) = self.schedule.microbatches, self.rows
        way = FROM_BELOW if self.is_from_below else FROM_ABOVE
        rows = {row_number(frame, way) for frame in range(row_frames)}
        kinds: dict[FrameKind, tuple[Collection[int], int]] = {FrameKind.ROWS: (rows, row_bytes)}
        if self.is_from_below:
            kinds[FrameKind.FORWARD] = range(count), 0
            kinds[FrameKind.EVALUATE] = range(self.validation_batches), 0
            kinds[FrameKind.PROBE] = range(PROBES if self.basis_bytes else 0), 0
            kinds[FrameKind.VERDICT] = kinds[FrameKind.VALIDATED] = range(1), VERDICT_BYTES
        else:
            kinds[FrameKind.BACKWARD] = range(count), 0
            kinds[FrameKind.TALLY] = range(1), TALLY_BYTES
            kinds[FrameKind.BASIS] = range(1 if self.basis_bytes else 0), self.basis_bytes
        return {kind: due for kind, due in kinds.items() if due[0]}


class Mailbox:
    """Items by key, put by link threads as they arrive and taken once by the worker. A failure of
    any link is put here too: a stage that waits for what can no longer come stops at once.
    """

    def __init__(self) -> None:
        self._items: dict[Key, Any] = {}
        self._changed = threading.Condition()
        self._failure: ThinwireError | None = None
        self.dropped = 0

    def put(self, key: Key, item: Any) -> None:
        """Keep an item until it is taken, or its step is closed."""
        with self._changed:
            self._items[key] = item
            self._changed.notify_all()

    def take(self, key: Key, unless: Key | None = None) -> Any:
        """The item of this key, waiting for it; None if `unless` is there before, which stays."""
        with self._changed:
            self._changed.wait_for(
                lambda: key in self._items or unless in self._items or self._failure
            )
            if key in self._items:
                self._changed.notify_all()
                return self._items.pop(key)
            if self._failure is not None and unless not in self._items:
                raise self._failure
            return None

    def count(self, kind: Any) -> int:
        """How many items wait whose key begins so."""
        return sum(key[0] == kind for key in self._items)

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
        """What nobody took of the steps up to this one is dropped, and counted."""
        with self._changed:
            kept = {key: item for key, item in self._items.items() if key[1] > step}
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
    """Sends tensors to one neighbour and receives the neighbour's, packed and unpacked by threads
    of the link. Every frame is held against the contract before memory is allocated for it.

    A neighbour may be a step ahead while this stage still saves. A codec that remembers must not
    have seen that step yet, nor a tensor twice, so its frames are held until `open_step`.

    A stage that takes the place of a lost one gets what its neighbours have sent since its state as
    fast as it can take it: such frames wait here until they are due, and are no error. Nor are
    tensors that are not finite, for all stages refuse such a step: `sightings` notes them.
    """

    def __init__(self, link: Link, end: CutEnd, mailbox: Mailbox, due: Due, sightings: Sightings):
        self.link, self._end, self._mailbox, self._due = link, end, mailbox, due
        self._sightings, self.stage = sightings, due.stage
        self._sender = due.stage + (-1 if due.is_from_below else 1)
        # Steps that are still under way when the next one is opened.
        self._steps_behind = min(due.schedule.delay, 1)
        self._gate = threading.Lock()
        self._open_step = due.first_step - 1  # a validation may come before the first step
        # Of the open step and later: what came, and the microbatches that were sent, by step.
        self._seen: set[Key] = set()
        self._sent: dict[int, set[int]] = {}
        self._held: list[Frame] = []
        self._state = link.pipe.state  # where the neighbour may be replaced
        if self._state is not None:
            self._state.note = self._note_decision
        link.start(self._on_frame, mailbox.fail, self._on_end)

    def send_tensor(
        self, kind: FrameKind, tensor: Tensor, step: int, microbatch: int, made_with: Versions
    ) -> None:
        """Hand a tensor over, which must not be changed afterwards. A validation waits for room."""
        if kind is FrameKind.EVALUATE:
            self.link.wait_for_room(EVALUATION_WINDOW)

        def packed() -> Frame:
            if kind in _MADE:
                self._sightings.look(step, _MADE[kind], tensor)
            frame = self._end.pack(kind, tensor, step, microbatch, made_with)
            if kind in TRAINING:
                # Before it leaves, for the neighbour may answer at once. And once it is packed:
                # an answer from a log may be here already, and need the mask of this tensor.
                self._sent.setdefault(step, set()).add(microbatch)
                self._mailbox.changed()
            return frame

        self.link.send(packed)

    def take_tensor(self, kind: FrameKind, step: int, microbatch: int, expected: Versions) -> Any:
        """The neighbour's tensor, once it is here; None if it is of a validation that is over."""
        over = (FrameKind.VALIDATED, step, 0) if kind is FrameKind.EVALUATE else None
        found = self._mailbox.take((kind, step, microbatch), over)
        if found is None:
            return None
        tensor, theirs = found
        if theirs != expected:
            raise WireError(
                f"{self.link.name}: {kind.name} of step {step}, microbatch {microbatch} was made "
                f"with {theirs}, but this stage is at {expected}"
            )
        return tensor

    def send_message(self, kind: FrameKind, step: int, payload: bytes, number: int = 0) -> None:
        """Hand over a message as it travels: a tally, a verdict, a basis."""
        self.link.send(Frame(kind, self.stage, step, number, payload=payload))

    def take_message(self, kind: FrameKind, step: int, number: int = 0) -> bytes:
        """The neighbour's message of this step, waiting for it."""
        return self._mailbox.take((kind, step, number))

    def open_step(self, step: int) -> None:
        """Let training tensors of this step in: what codecs remember may move on to it."""
        with self._gate:
            self._open_step, oldest = step, step - self._steps_behind
            self._seen = {what for what in self._seen if what[1] >= oldest}
            for past in [at for at in [*self._sent] if at < oldest]:  # others add to it meanwhile
                del self._sent[past]
            held, self._held = self._held, []
            for frame in held:
                self._admit(frame)
        self._mailbox.changed()

    def close_step(self, step: int) -> None:
        """All of this step has come: whoever takes the neighbour's place need not send it again."""
        if self._state is not None:
            self._state.start = step + 1

    def _on_frame(self, frame: Frame) -> None:
        is_again = self._state is not None and frame.step <= self._state.sent_again
        if is_again and not self._mailbox.wait_until(lambda: not self._too_early(frame)):
            return  # nobody will take it
        try:
            self._take_in(frame)
        except WireError as error:
            work = f"{frame.kind.name} of step {frame.step}, microbatch {frame.microbatch}"
            raise WireError(f"{self.link.name}: {work}: {error}") from None

    def _take_in(self, frame: Frame) -> None:
        """Check a frame and take it in; what is not due is an error."""
        kind = frame.kind
        if kind not in self._due.kinds:
            raise WireError(f"it is an unexpected {kind.name} frame")
        if frame.sender != self._sender:
            raise WireError(
                f"it bears the name of stage {frame.sender}, but stage {self._sender} is the "
                "neighbour"
            )
        codec = self._check_contract(frame) if kind in LEGS else None
        numbers, most = self._due.kinds[kind]
        if frame.microbatch not in numbers:
            raise WireError(f"it does not exist: there are {len(numbers)} of them")
        with self._gate:
            self._check_due(frame)
            if codec is not None and codec.remembers and kind in TRAINING:
                self._admit(frame)
                return
        if kind is FrameKind.EVALUATE:
            # Meanwhile the link reads nothing, so that its sender is held back too.
            self._mailbox.wait_until(lambda: self._mailbox.count(kind) < EVALUATION_WINDOW)
        if codec is not None:
            self._receive(frame)
        else:
            self._on_message(frame, most)

    def _too_early(self, frame: Frame) -> str:
        """Why the neighbour's schedule cannot have made a frame yet: it would pile up here."""
        number, schedule = frame.microbatch, self._due.schedule
        if frame.step - self._open_step > self._due.is_from_below:
            return self._not_now()
        if frame.kind is FrameKind.BACKWARD and number not in self._sent.get(frame.step, ()):
            return "it answers an activation that was not sent"
        is_forward = frame.kind is FrameKind.FORWARD and self._due.is_from_below
        if is_forward and number < schedule.microbatches:
            # By the schedule its sender keeps a window: it comes behind so many gradients that were
            # sent, less those that are missing of the step before.
            answers = len(self._sent.get(frame.step, ()))
            if self._steps_behind and frame.step > self._due.first_step:
                answers -= schedule.microbatches - len(self._sent.get(frame.step - 1, ()))
            wanted = number - schedule.held[self.stage - 1] + 1
            if number >= schedule.delay:  # the step before is over
                wanted = max(0, wanted)
            if answers < wanted:
                due = f"it is due after {wanted} gradients, and {answers} were sent"
                return f"it is beyond the window: {due}"
        return ""

    def _not_now(self) -> str:
        return f"it belongs neither to the current step, {self._open_step}, nor to the next"

    def _check_due(self, frame: Frame) -> None:
        kind, step, number = what = frame.kind, frame.step, frame.microbatch
        is_late = step < self._open_step - self._steps_behind
        if why := self._not_now() if is_late else self._too_early(frame):
            raise WireError(why)
        if kind in (FrameKind.EVALUATE, FrameKind.VALIDATED) and step != self._open_step + 1:
            raise WireError("it is of no validation that is due")
        if what in self._seen:
            raise WireError("it arrived twice")
        # Those of a validation come in order, so waiting for room cannot block.
        if kind is FrameKind.EVALUATE and number and (kind, step, number - 1) not in self._seen:
            raise WireError("it is not the validation frame that is due")
        self._seen.add(what)

    def _on_message(self, frame: Frame, most: int) -> None:
        kind, step, content = frame.kind, frame.step, bytes(frame.payload)
        if len(content) > most or (kind is FrameKind.BASIS and len(content) != most):
            raise WireError(f"it has {len(content)} bytes, but at most {most} were agreed")
        if kind in _MESSAGE_CHECKS:  # the size of rows the stage knows at the step's end
            said = _MESSAGE_CHECKS[kind](content)
            if isinstance(said, list) and not all(map(math.isfinite, said)):
                self._sightings.note(step, NORMS)
        self._mailbox.put((kind, step, frame.microbatch), content)

    def _note_decision(self, message: BytesLike) -> None:
        """Whoever replaces its sender hears that it was received: what it was must be known too."""
        kind, step = kind_and_step(message)
        if self._state is not None and kind in (FrameKind.VERDICT, FrameKind.VALIDATED):
            with contextlib.suppress(WireError):  # which shows when it is taken in
                said = Verdict.from_bytes(bytes(message[HEADER_BYTES:]))
                self._state.decide(decision_number(FrameKind(kind), step), said.stop)

    def _admit(self, frame: Frame) -> None:
        """Receive a frame of a step that was opened, and hold one of the next."""
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
        self._mailbox.put((frame.kind, frame.step, frame.microbatch), (tensor, versions))

    def _check_contract(self, frame: Frame) -> Codec:
        codec, shape = self._end.codecs[LEGS[frame.kind]], self._end.spec.shape
        if frame.codec != codec.tag:
            raise WireError(f"it was not packed by {codec.name}: the ends' codecs differ")
        if frame.shape != shape:
            raise WireError(f"it has shape {frame.shape}, but {shape} was agreed")
        if len(frame.payload) > (limit := codec.payload_limit(shape)):
            raise WireError(f"it has {len(frame.payload)} bytes, but at most {limit} were agreed")
        return codec

    def _on_end(self) -> None:
        # What it sent before is already in the mailbox; only a wait for more is in vain.
        self._mailbox.fail(WireError(f"{self.link.name}: the neighbour has left the run"))
