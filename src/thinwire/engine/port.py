"""A stage's end of one boundary: codec, contract and link, on the way out and on the way in."""

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.codec import Codec, Leg
from thinwire.engine.cut import CutEnd
from thinwire.engine.mailbox import Mailbox
from thinwire.errors import WireError
from thinwire.wire import Frame, FrameKind, Link

_LEGS = {
    FrameKind.FORWARD: Leg.FORWARD,
    FrameKind.EVALUATE: Leg.FORWARD,
    FrameKind.BACKWARD: Leg.BACKWARD,
}


class Versions(NamedTuple):
    """What a tensor was made with: how often weights were updated, and the basis moved."""

    weights: int
    basis: int

    def __str__(self) -> str:
        return f"weight version {self.weights} and basis version {self.basis}"


class Port:
    """Sends tensors to one neighbour and receives the neighbour's.

    Packing runs on the link's sending thread and unpacking on its receiving one, so neither
    costs the compute thread anything. Every received frame is held against the contract
    (kind, shape, codec, size) before memory is allocated for it.

    A neighbour may be a step ahead while this stage still saves the step before. A codec that
    remembers must not have seen that step yet, so its frames are held until `open_step`. Nor may it
    see a tensor twice, or one that is not due: that would change what it remembers for good.
    """

    def __init__(
        self,
        link: Link,
        stage: int,
        end: CutEnd,
        mailbox: Mailbox,
        receives: set[FrameKind],
    ):
        self.link = link
        self._stage = stage
        self._end = end
        self._mailbox = mailbox
        self._receives = receives
        self._gate = threading.Lock()
        self._open_step: int | None = None  # which step comes first, a port is not told
        self._seen: set[tuple[int, int]] = set()  # (step, microbatch), of the open step and later
        self._held: list[Frame] = []
        link.start(self._on_frame, mailbox.fail, self._on_end)

    def send_tensor(
        self, kind: FrameKind, tensor: Tensor, step: int, microbatch: int, made_with: Versions
    ) -> None:
        """Hand a tensor over; returns at once. The tensor must not be changed afterwards."""
        codec = self._end.codecs[_LEGS[kind]]

        def packed() -> Frame:
            training = kind is not FrameKind.EVALUATE
            place = self._end.place(_LEGS[kind], step, microbatch, training)
            return Frame(
                kind=kind,
                sender=self._stage,
                step=step,
                microbatch=microbatch,
                weight_version=made_with.weights,
                basis_version=made_with.basis,
                codec=codec.tag,
                shape=tuple(tensor.shape),
                payload=codec.pack(tensor.to(self._end.spec.dtype), place),
            )

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

    def send_message(self, kind: FrameKind, step: int, payload: bytes, number: int = 0) -> None:
        """Hand over a message that no codec packs: a tally, a verdict, a basis."""
        self.link.send(
            Frame(kind=kind, sender=self._stage, step=step, microbatch=number, payload=payload)
        )

    def take_message(self, kind: FrameKind, step: int, number: int = 0) -> bytes:
        """The neighbour's message of this step, waiting for it."""
        return self._mailbox.take((kind, step, number))

    def open_step(self, step: int) -> None:
        """Let training tensors of this step in: what codecs remember may move on to it."""
        with self._gate:
            self._open_step = step
            self._seen = {place for place in self._seen if place[0] >= step}
            held, self._held = self._held, []
            for frame in held:
                self._admit(frame)

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind not in self._receives:
            raise WireError(f"{self.link.name}: an unexpected {frame.kind.name} frame arrived")
        if frame.kind not in _LEGS:
            key = (frame.kind, frame.step, frame.microbatch)
            self._mailbox.put(key, frame.step, bytes(frame.payload))
            return
        codec = self._end.codecs[_LEGS[frame.kind]]
        self._check_contract(frame, codec)
        if not codec.remembers or frame.kind is FrameKind.EVALUATE:
            self._receive(frame)
            return
        with self._gate:
            place = frame.step, frame.microbatch
            if place in self._seen:
                raise WireError(f"{self._described(frame)} has come before")
            self._admit(frame)
            self._seen.add(place)

    def _admit(self, frame: Frame) -> None:
        """Receive a frame of the open step, and hold one of the next; there are no others."""
        if frame.step == self._open_step:
            self._receive(frame)
            return
        is_next = self._open_step is None or frame.step == self._open_step + 1
        if not is_next or len(self._held) == self._end.microbatches:
            raise WireError(
                f"{self._described(frame)} is neither of the step under way nor of the next"
            )
        self._held.append(frame)

    def _receive(self, frame: Frame) -> None:
        """Unpack a tensor and put it where the compute thread looks for it."""
        leg, training = _LEGS[frame.kind], frame.kind is not FrameKind.EVALUATE
        place = self._end.place(leg, frame.step, frame.microbatch, training)
        tensor = self._end.codecs[leg].unpack(frame.payload, self._end.spec, place)
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        versions = Versions(frame.weight_version, frame.basis_version)
        key = (frame.kind, frame.step, frame.microbatch)
        self._mailbox.put(key, frame.step, (tensor, versions))

    def _described(self, frame: Frame) -> str:
        work = f"step {frame.step}, microbatch {frame.microbatch}"
        return f"{self.link.name}: {frame.kind.name} of {work}"

    def _check_contract(self, frame: Frame, codec: Codec) -> None:
        what = self._described(frame)
        is_training = frame.kind is not FrameKind.EVALUATE
        if is_training and frame.microbatch >= self._end.microbatches:
            raise WireError(f"{what} does not exist: a step has {self._end.microbatches} of them")
        if frame.codec != codec.tag:
            raise WireError(f"{what} was not packed by {codec.name}: the ends' codecs differ")
        if frame.shape != self._end.spec.shape:
            raise WireError(f"{what} has shape {frame.shape}, agreed was {self._end.spec.shape}")
        limit = codec.payload_limit(frame.shape)
        if len(frame.payload) > limit:
            raise WireError(f"{what} has {len(frame.payload)} bytes, agreed were at most {limit}")

    def _on_end(self) -> None:
        # What it sent before is already in the mailbox; only a wait for more is in vain.
        self._mailbox.fail(WireError(f"{self.link.name}: the neighbour has left the run"))
