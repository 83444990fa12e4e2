"""Token ids for a stage whose machine does not have the corpus: both ends.

    FetchedCorpus  --TOKENS: a microbatch, which columns-->   TokenServer
                   <--TOKENS: its ids, 2 or 4 bytes each; with the targets of a corpus that is
                      not learned whole one bit each, and how many are learned in the step--

A stage asks only for what it reads, some steps before it reads it. A validation comes again and
again, so its ids are kept, up to a limit. The host answers on the link's threads, and of this run
alone. The corpus's fingerprint is a part of the links' contract, as if it were there.
"""

import dataclasses
import enum
import math
import struct
import threading
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch

from thinwire.background import on_daemon_thread
from thinwire.data import Corpus
from thinwire.data.order import MASKED
from thinwire.engine.build import StageBuilder
from thinwire.engine.checkpoint import Count
from thinwire.engine.feed import At, CorpusTokens, Tokens, TokenSource
from thinwire.errors import WireError, printable
from thinwire.settings import Settings
from thinwire.typed import learn_types
from thinwire.wire import Frame, FrameKind, Link, Meter, Pipe, handshake

STEPS_AHEAD = 4
AHEAD_BYTES = 16 << 20  # of ids that were asked for ahead of their use, but for one microbatch
KEPT_BYTES = 64 << 20  # of a validation's ids
_GREETING_S = 60.0  # for the first word of the other end
_MOST_UNSENT = 4  # answers that wait for the link while the next one is made
_COUNT = struct.Struct("<I")


class Columns(enum.IntFlag):
    """What of a window is read; the number is the codec tag of a frame."""

    INPUTS = 1
    TARGETS = 2


class CorpusFacts(msgspec.Struct, frozen=True):
    """What is said of a corpus before any of its ids."""

    corpus: Annotated[str, msgspec.Meta(max_length=256)]  # its fingerprint
    examples: Annotated[int, msgspec.Meta(ge=1)]
    validations: Count  # microbatches of one
    text_tokens: Count  # that a validation predicts, and the bytes that they stand for
    text_bytes: Count
    id_bytes: Literal[2, 4]
    masked: bool  # whether only some tokens are learned


learn_types(CorpusFacts)


def columns_read(settings: Settings, stage: int) -> Columns:
    """What a stage reads of its batches: inputs, targets, both or nothing."""
    built = StageBuilder(settings, torch.device("meta")).build(stage)
    inputs = Columns.INPUTS if built.incoming is None or built.needs_ids else Columns(0)
    return inputs | (Columns.TARGETS if built.outgoing is None else Columns(0))


def _request(at: At, columns: Columns) -> Frame:
    """Asks for a microbatch; the weight version says: 0 of the training, 1 of a validation."""
    side, (step, number) = (1, (0, at)) if isinstance(at, int) else (0, at)
    return Frame(FrameKind.TOKENS, step=step, microbatch=number, weight_version=side, codec=columns)


def _place(frame: Frame, steps: int, microbatches: int, validations: int) -> At | None:
    """Which microbatch of a run a frame is about; None for none."""
    side, step, number = frame.weight_version, frame.step, frame.microbatch
    if side == 0 and step < steps and number < microbatches:
        return step, number
    return number if side == 1 and number < validations else None


# What has come of a microbatch: ids (B, W); where not all targets are learned, which of them are
# (B, T), and how many in its step.
TokenIds = tuple[np.ndarray, np.ndarray | None, int | None]


class TokenServer:
    """Sends one stage the token ids that it asks for."""

    def __init__(self, pipe: Pipe, data: Corpus, settings: Settings, meter: Meter | None = None):
        self.meter = meter or Meter()
        self._type = data.train.dtype
        self._source = source = CorpusTokens(data, settings, settings.train.eval_batches)
        steps, microbatches = settings.train.steps, settings.pipeline.microbatches
        self._places = steps, microbatches, source.validation_count
        self._is_masked = data.train_learned is not None
        sizes = source.example_count, source.validation_count, *source.validation_text
        known: Any = source.fingerprint, *sizes, self._type.itemsize, self._is_masked
        facts = CorpusFacts(*known)
        said = {"config_hash": settings.hash}
        handshake(pipe, said | msgspec.structs.asdict(facts), said, _GREETING_S, self.meter)
        self.link = Link(pipe, self.meter, "token ids", 0)
        # At its end the link's own thread asks for it to be closed.
        on_end = partial(on_daemon_thread, "thinwire tokens", self.link.close)
        self.link.start(self._on_request, lambda error: None, on_end)

    def _on_request(self, asked: Frame) -> None:
        columns = Columns(asked.codec & 3)
        if asked.kind is not FrameKind.TOKENS or columns != asked.codec or not columns:
            raise WireError(f"a {asked.kind.name} frame does not ask for token ids")
        if (at := _place(asked, *self._places)) is None:
            which = f"microbatch {asked.microbatch} of step {asked.step}"
            raise WireError(f"{which} is not in this run")
        shape, payload = self._answer(at, columns)
        self.link.wait_for_room(_MOST_UNSENT)
        self.link.send(dataclasses.replace(asked, shape=shape, payload=payload))

    def _answer(self, at: At, columns: Columns) -> tuple[tuple[int, ...], bytes]:
        """The shape of what is read of a microbatch, and all that is sent of it."""
        inputs, targets, of_step = self._source.read(at)
        assert inputs is not None and targets is not None, "a corpus has both"
        inputs_BT, targets_BT = inputs.numpy(), targets.numpy()
        learned_BT = targets_BT != MASKED
        # A stage that reads no inputs gets no token either that it does not learn from.
        shown_BT = np.maximum(targets_BT, 0)
        parts = [inputs_BT] if Columns.INPUTS in columns else [shown_BT[:, :-1]]
        parts += [shown_BT[:, -1:]] if Columns.TARGETS in columns else []
        ids_BW = np.concatenate(parts, axis=1)
        packed = ids_BW.astype(self._type.newbyteorder("<")).tobytes()
        if Columns.TARGETS in columns and self._is_masked:
            count = of_step or int(learned_BT.sum())
            packed += np.packbits(learned_BT).tobytes() + _COUNT.pack(count)
        return ids_BW.shape, packed


class FetchedCorpus(TokenSource):
    """Token ids that another machine sends as they are needed; reads wait for what is due."""

    def __init__(self, pipe: Pipe, settings: Settings, stage: int):
        self.meter = Meter()
        said = {"config_hash": settings.hash}
        heard = handshake(pipe, said, said, _GREETING_S, self.meter)
        try:
            facts = msgspec.convert(heard, CorpusFacts)
        except msgspec.ValidationError as error:
            reason = printable(str(error), 200)
            raise WireError(f"what the host says of its corpus cannot be read: {reason}") from None
        self.fingerprint = facts.corpus
        self.example_count, self.validation_count = facts.examples, facts.validations
        self.validation_text = facts.text_tokens, facts.text_bytes
        self._type = np.dtype(f"<u{facts.id_bytes}")
        self._steps, self._vocab = settings.train.steps, settings.model.vocab
        self._microbatches = settings.pipeline.microbatches
        self._columns, self._context = columns_read(settings, stage), settings.model.context
        reads_all = self._columns == Columns.INPUTS | Columns.TARGETS
        self._shape = (settings.microbatch_size, self._context + reads_all)
        is_masked = facts.masked and Columns.TARGETS in self._columns
        self._targets = settings.microbatch_size * self._context if is_masked else 0
        self._most_learned = settings.train.batch * self._context
        self._changed = threading.Condition()  # guards all that follows
        self._ids: dict[At, TokenIds | None] = {}  # None: they are on their way
        self._failure: WireError | None = None
        self._id_bytes = math.prod(self._shape) * facts.id_bytes
        bits = -(-self._targets // 8) + _COUNT.size if self._targets else 0
        self._bytes = self._id_bytes + bits
        most = AHEAD_BYTES // max(1, self._bytes)
        self._ahead = max(1, min(STEPS_AHEAD * self._microbatches, most))
        self.link = Link(pipe, self.meter, "token ids", self._bytes)
        ended = WireError("the host has ended the stream of token ids")
        self.link.start(self._on_ids, self._on_broken, partial(self._on_broken, ended))

    def is_due(self, at: At) -> bool:
        with self._changed:
            return bool(self._columns) and self._ids.get(at) is None

    def read(self, at: At) -> Tokens:
        ids_BW, learned_BT, count = self._obtain(at)
        inputs_BT = targets_BT = None
        if Columns.INPUTS in self._columns:
            inputs_BT = torch.from_numpy(ids_BW[:, : self._context].astype(np.int64))
        if Columns.TARGETS in self._columns:
            targets_BT = torch.from_numpy(ids_BW[:, -self._context :].astype(np.int64))
            if learned_BT is not None:
                targets_BT[torch.from_numpy(~learned_BT)] = MASKED
        return Tokens(inputs_BT, targets_BT, count)

    def _obtain(self, at: At) -> TokenIds:
        """Ids of a microbatch, once they are here; those that follow are asked for meanwhile."""
        with self._changed:
            self._forget_before(at)
            for ahead in self._coming(at):
                if ahead not in self._ids:
                    self._ids[ahead] = None
                    try:
                        self.link.send(_request(ahead, self._columns))
                    except WireError as error:
                        self._failure = self._failure or error
            self._changed.wait_for(lambda: self._failure or self._ids.get(at))
            if (found := self._ids.get(at)) is None:
                which = f"validation batch {at}"
                if isinstance(at, tuple):
                    which = f"microbatch {at[1]} of step {at[0] + 1}"
                raise WireError(f"token ids of {which} cannot be had: {self._failure}")
            return found

    def _coming(self, at: At) -> list[At]:
        """A microbatch and those that are read after it."""
        if isinstance(at, int):
            return [*range(at, min(self.validation_count, at + self._ahead))]
        first = at[0] * self._microbatches + at[1]
        last = min(self._steps * self._microbatches, first + self._ahead)
        return [divmod(n, self._microbatches) for n in range(first, last)]

    def _forget_before(self, at: At) -> None:
        """Earlier steps are over. A validation is kept for the next one, if not too large."""
        first = at if isinstance(at, int) else (at[0], 0)
        alike = [key for key in self._ids if type(key) is type(at)]
        if isinstance(at, tuple) or len(alike) * self._id_bytes > KEPT_BYTES:
            for key in alike:
                if key < first:  # type: ignore[operator]  # they are alike
                    del self._ids[key]

    def _on_ids(self, frame: Frame) -> None:
        at = _place(frame, self._steps, self._microbatches, self.validation_count)
        if frame.kind is not FrameKind.TOKENS or at is None:
            raise WireError(f"a {frame.kind.name} frame came among token ids")
        payload, size = memoryview(frame.payload), self._bytes
        if (frame.shape, frame.codec, payload.nbytes) != (self._shape, self._columns, size):
            raise WireError(f"{payload.nbytes} bytes of token ids came, {frame.shape}, not {size}")
        ids_BW = np.frombuffer(payload[: self._id_bytes], self._type).reshape(self._shape)
        if (largest := int(ids_BW.max())) >= self._vocab:
            raise WireError(f"token id {largest} came, but model.vocab = {self._vocab}")
        learned_BT, count = None, None
        if self._targets:
            packed = np.frombuffer(payload[self._id_bytes : -_COUNT.size], np.uint8)
            bits = np.unpackbits(packed, count=self._targets)
            learned_BT = bits.reshape(self._shape[0], -1).astype(bool)
            here, (count,) = int(learned_BT.sum()), _COUNT.unpack(payload[-_COUNT.size :])
            if not 0 < here <= count <= self._most_learned:
                raise WireError(f"a microbatch with {here} learned tokens came, of {count} in all")
        with self._changed:
            if at in self._ids:  # else it came too late for the step that it was for
                self._ids[at] = ids_BW, learned_BT, count
                self._changed.notify_all()

    def _on_broken(self, error: WireError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
