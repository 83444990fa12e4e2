"""Token ids for a stage whose machine does not have the corpus: both ends.

    FetchedCorpus  --TOKENS: a microbatch, which columns-->   TokenServer
                   <--TOKENS: its ids, 2 or 4 bytes each; with the targets of a corpus that is
                      not learned whole one bit each, and how many are learned in the step--

A stage asks only for what it reads, some steps before it reads it: the first for inputs, the last
for targets, those with a token table for inputs, others for nothing. Which examples a microbatch
has follows from the seed and their number, so codecs that remember examples need no ids. The same
validation comes again and again, so its ids are kept, up to a limit.

On the host a TokenServer is made of the pipe of each stage whose member did not prove the corpus's
fingerprint, and answers on threads of its own until the pipe ends. A peer can ask for any
microbatch of this run and nothing else. It is answered one request at a time, so one that asks
without end only slows itself down. The process of the stage makes a FetchedCorpus of its end and
gives it to its Worker as `far`. Its fingerprint becomes a part of the links' contract, as if the
corpus were there.
"""

import enum
import struct
import threading
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from thinwire.data import Batch, Corpus, Order, Validation
from thinwire.data.order import MASKED
from thinwire.engine.build import StageBuilder
from thinwire.engine.feed import FarCorpus
from thinwire.errors import WireError, printable
from thinwire.settings import Settings
from thinwire.wire import Frame, FrameKind, Link, Meter, Pipe, handshake
from thinwire.wire.background import on_daemon_thread

STEPS_AHEAD = 4
AHEAD_BYTES = 16 << 20  # of ids that were asked for ahead of their use, but for one microbatch
KEPT_BYTES = 64 << 20  # of a validation's ids
_GREETING_S = 60.0  # for the first word of the other end
_MOST_UNSENT = 4  # answers that wait for the link while the next one is made
_COUNT = struct.Struct("<I")

Count = Annotated[int, msgspec.Meta(ge=0)]


class Side(enum.IntEnum):
    """Which part of a corpus; the number is that of a request's weight version."""

    TRAINING = 0
    VALIDATION = 1


class Columns(enum.IntFlag):
    """What of a window is read; the number is the codec tag of a frame."""

    INPUTS = 1
    TARGETS = 2

    def span(self, context: int) -> range:
        """The places of a window of `context` + 1 tokens."""
        first = 0 if self.INPUTS in self else 1
        return range(first, context + 1 if self.TARGETS in self else context)


Key = tuple[Side, int, int]
"""A microbatch: its side, step (0 in a validation) and number."""


class Facts(msgspec.Struct, frozen=True):
    """What is said of a corpus before any of its ids."""

    corpus: Annotated[str, msgspec.Meta(max_length=256)]  # its fingerprint
    examples: Annotated[int, msgspec.Meta(ge=1)]
    validations: Count  # microbatches of one
    text_tokens: Count  # that a validation predicts, and the bytes that they stand for
    text_bytes: Count
    id_bytes: Literal[2, 4]
    masked: bool  # whether only some tokens are learned


def columns_read(settings: Settings, stage: int) -> Columns:
    """What a stage reads of its batches: inputs, targets, both or nothing."""
    built = StageBuilder(settings, torch.device("meta")).build(stage)
    inputs = Columns.INPUTS if built.incoming is None or built.needs_ids else Columns(0)
    return inputs | (Columns.TARGETS if built.outgoing is None else Columns(0))


class TokenIds(NamedTuple):
    """What is sent of a microbatch: its ids, which targets are learned, and how many in its step.

    The last two are None where all targets are learned, or where none are read.
    """

    ids_BW: np.ndarray
    learned_BT: np.ndarray | None = None
    learned_count: int | None = None

    def pack(self, dtype: np.dtype) -> bytes:
        """As bytes: ids, a bit for each target, the count."""
        packed = np.ascontiguousarray(self.ids_BW.astype(dtype.newbyteorder("<"))).tobytes()
        if self.learned_BT is None or self.learned_count is None:
            return packed
        return packed + np.packbits(self.learned_BT).tobytes() + _COUNT.pack(self.learned_count)

    @staticmethod
    def size(shape: tuple[int, int], dtype: np.dtype, targets: int) -> int:
        """Bytes of `pack`, where so many targets have a bit each."""
        bits = (targets + 7) // 8 + _COUNT.size if targets else 0
        return shape[0] * shape[1] * dtype.itemsize + bits

    @classmethod
    def unpack(
        cls, payload: memoryview, shape: tuple[int, int], dtype: np.dtype, targets: int
    ) -> "TokenIds":
        """The inverse of `pack`; the size has been checked."""
        end = shape[0] * shape[1] * dtype.itemsize
        ids_BW = np.frombuffer(payload[:end], dtype=dtype).reshape(shape)
        if not targets:
            return cls(ids_BW)
        bits = np.unpackbits(np.frombuffer(payload[end : -_COUNT.size], np.uint8), count=targets)
        (count,) = _COUNT.unpack(payload[-_COUNT.size :])
        return cls(ids_BW, bits.reshape(shape[0], -1).astype(bool), count)


class TokenServer:
    """Sends one stage the token ids that it asks for."""

    def __init__(
        self,
        pipe: Pipe,
        data: Corpus,
        settings: Settings,
        meter: Meter | None = None,
        timeout: float = _GREETING_S,
    ):
        self.meter = meter or Meter()
        self.failure: WireError | None = None  # why the stream broke, if it did
        context, train, seed = settings.model.context, settings.train, settings.run.seed
        microbatches, size = settings.pipeline.microbatches, settings.microbatch_size
        self._steps, self._type = train.steps, data.train.dtype
        self._order = Order(
            data.train, context, train.batch, microbatches, seed, data.train_learned
        )
        self._validation = Validation(
            data.valid, context, size, train.eval_batches, data.valid_learned
        )
        text = (0, 0)
        if data.valid_sizes is not None:
            total = self._validation.total_of_targets(data.valid_sizes)
            text = (self._validation.target_count, total)
        facts = Facts(
            data.fingerprint,
            self._order.count,
            len(self._validation),
            *text,
            self._type.itemsize,  # type: ignore[arg-type]
            self._order.is_masked,
        )
        said = {"config_hash": settings.hash}
        handshake(pipe, said | msgspec.structs.asdict(facts), said, timeout, self.meter)
        self._link = Link(pipe, self.meter, None, "token ids", 0)
        self._link.start(self._on_request, self._on_broken, self._on_end)

    def close(self) -> None:
        """End the stream: the stage is done, or gone."""
        self._link.close()

    def _on_request(self, asked: Frame) -> None:
        columns = Columns(asked.codec & 3)
        if asked.kind is not FrameKind.TOKENS or columns != asked.codec or not columns:
            raise WireError(f"a {asked.kind.name} frame does not ask for token ids")
        answer = self._answer(*self._asked_for(asked), columns)
        self._link.wait_for_room(_MOST_UNSENT)
        self._link.send(
            Frame(
                FrameKind.TOKENS,
                step=asked.step,
                microbatch=asked.microbatch,
                weight_version=asked.weight_version,
                codec=columns,
                shape=answer.ids_BW.shape,
                payload=answer.pack(self._type),
            )
        )

    def _asked_for(self, asked: Frame) -> tuple[Batch, int]:
        """A microbatch, and how many tokens are learned in its step, or in it by itself."""
        step, number = asked.step, asked.microbatch
        if asked.weight_version == Side.TRAINING and step < self._steps:
            if number < self._order.microbatches:
                return self._order.microbatch(step, number), self._order.learned_count(step)
        elif asked.weight_version == Side.VALIDATION and number < len(self._validation):
            batch = self._validation.microbatch(number)
            return batch, int((batch.targets_BT != MASKED).sum())
        raise WireError(f"microbatch {number} of step {step} is not in this run")

    def _answer(self, batch: Batch, learned: int, columns: Columns) -> TokenIds:
        # A stage that reads no inputs gets no token either that it does not learn from.
        targets_BT = np.maximum(batch.targets_BT, 0)
        parts = [batch.inputs_BT] if Columns.INPUTS in columns else [targets_BT[:, :-1]]
        parts += [targets_BT[:, -1:]] if Columns.TARGETS in columns else []
        ids_BW = np.concatenate(parts, axis=1)
        if Columns.TARGETS not in columns or not self._order.is_masked:
            return TokenIds(ids_BW)
        return TokenIds(ids_BW, batch.targets_BT != MASKED, learned)

    def _on_end(self) -> None:
        on_daemon_thread("thinwire tokens", self._link.close)  # the link's own thread asks for it

    def _on_broken(self, error: WireError) -> None:
        self.failure = error


class FetchedCorpus(FarCorpus):
    """Token ids that another machine sends as they are needed; reads wait for what is due."""

    def __init__(self, pipe: Pipe, settings: Settings, stage: int, timeout: float = _GREETING_S):
        self.meter = Meter()
        said = {"config_hash": settings.hash}
        facts = _checked_facts(handshake(pipe, said, said, timeout, self.meter))
        self.fingerprint = facts.corpus
        self.example_count, self.validation_count = facts.examples, facts.validations
        self.validation_text = facts.text_tokens, facts.text_bytes
        self._type = np.dtype(f"<u{facts.id_bytes}")
        self._steps, self._vocab = settings.train.steps, settings.model.vocab
        self._microbatches = settings.pipeline.microbatches
        self._columns, self._context = columns_read(settings, stage), settings.model.context
        self._shape = (settings.microbatch_size, len(self._columns.span(self._context)))
        is_masked = facts.masked and Columns.TARGETS in self._columns
        self._targets = settings.microbatch_size * self._context if is_masked else 0
        self._most_learned = settings.train.batch * self._context
        self._changed = threading.Condition()  # guards all that follows
        self._asked: set[Key] = set()  # here, or on their way
        self._answers: dict[Key, TokenIds] = {}
        self._failure: WireError | None = None
        self._bytes = TokenIds.size(self._shape, self._type, self._targets)
        most = AHEAD_BYTES // max(1, self._bytes)
        self._ahead = max(1, min(STEPS_AHEAD * self._microbatches, most))
        self._link = Link(pipe, self.meter, None, "token ids", self._bytes)
        self._link.start(self._on_ids, self._on_broken, self._on_end)

    def is_due(self, at: tuple[int, int] | int) -> bool:
        with self._changed:
            return bool(self._columns) and _key(at) not in self._answers

    def wait(self, at: tuple[int, int] | int) -> None:
        self._obtain(_key(at))

    def inputs(self, at: tuple[int, int] | int) -> Tensor:
        return self._read(at, Columns.INPUTS)

    def targets(self, at: tuple[int, int] | int) -> Tensor:
        targets_BT = self._read(at, Columns.TARGETS)
        learned_BT = self._obtain(_key(at)).learned_BT
        if learned_BT is not None:
            targets_BT[torch.from_numpy(~learned_BT)] = MASKED
        return targets_BT

    def learned_count(self, at: tuple[int, int]) -> int | None:
        return self._obtain(_key(at)).learned_count

    def close(self) -> None:
        """Say goodbye; whoever still reads gets an error."""
        self._link.close()

    def _read(self, at: tuple[int, int] | int, columns: Columns) -> Tensor:
        assert columns in self._columns, f"this stage was not to read {columns!r}"
        first, wanted = self._columns.span(self._context).start, columns.span(self._context)
        ids_BW = self._obtain(_key(at)).ids_BW
        ids_BT = ids_BW[:, wanted.start - first : wanted.stop - first]
        return torch.from_numpy(np.ascontiguousarray(ids_BT.astype(np.int64)))

    def _obtain(self, key: Key) -> TokenIds:
        """Ids of a microbatch, once they are here; those that follow are asked for meanwhile."""
        with self._changed:
            self._forget_before(key)
            for ahead in self._coming(key):
                if ahead not in self._asked:
                    self._ask(ahead)
            self._changed.wait_for(lambda: self._failure or key in self._answers)
            if key not in self._answers:
                raise WireError(f"token ids of {_named(key)} cannot be had: {self._failure}")
            return self._answers[key]

    def _coming(self, key: Key) -> list[Key]:
        """A microbatch and those that are read after it."""
        side, step, number = key
        if side is Side.VALIDATION:
            last = min(self.validation_count, number + self._ahead)
            return [(side, 0, n) for n in range(number, last)]
        first = step * self._microbatches + number
        last = min(self._steps * self._microbatches, first + self._ahead)
        return [(side, *divmod(n, self._microbatches)) for n in range(first, last)]

    def _ask(self, key: Key) -> None:
        self._asked.add(key)
        side, step, number = key
        try:
            self._link.send(
                Frame(
                    FrameKind.TOKENS,
                    step=step,
                    microbatch=number,
                    weight_version=side,
                    codec=self._columns,
                )
            )
        except WireError as error:
            self._failure = self._failure or error

    def _forget_before(self, key: Key) -> None:
        """Earlier steps are over. A validation is kept for the next one, if not too large."""
        side, step, number = key
        if side is Side.TRAINING:
            gone = {k for k in self._asked if k[0] is side and k[1] < step}
        else:
            kept = sum(a.ids_BW.nbytes for k, a in self._answers.items() if k[0] is side)
            gone = {k for k in self._asked if k[0] is side and k[2] < number}
            gone = gone if kept > KEPT_BYTES else set()
        self._asked -= gone
        for old in gone:
            self._answers.pop(old, None)

    def _on_ids(self, frame: Frame) -> None:
        if frame.kind is not FrameKind.TOKENS or frame.weight_version not in list(Side):
            raise WireError(f"a {frame.kind.name} frame came among token ids")
        key: Key = (Side(frame.weight_version), frame.step, frame.microbatch)
        payload, size = memoryview(frame.payload), self._bytes
        if (frame.shape, frame.codec, payload.nbytes) != (self._shape, self._columns, size):
            raise WireError(f"{payload.nbytes} bytes of token ids came, {frame.shape}, not {size}")
        answer = TokenIds.unpack(payload, self._shape, self._type, self._targets)
        if (largest := int(answer.ids_BW.max())) >= self._vocab:
            raise WireError(f"token id {largest} came, but model.vocab = {self._vocab}")
        if answer.learned_BT is not None:
            here, said = int(answer.learned_BT.sum()), answer.learned_count or 0
            if not 0 < here <= said <= self._most_learned:
                raise WireError(f"a microbatch with {here} learned tokens came, of {said} in all")
        with self._changed:
            if key in self._asked:  # else it came too late for the step that it was for
                self._answers[key] = answer
                self._changed.notify_all()

    def _on_broken(self, error: WireError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _on_end(self) -> None:
        self._on_broken(WireError("the host has ended the stream of token ids"))


def _checked_facts(said: dict[str, Any]) -> Facts:
    try:
        return msgspec.convert(said, Facts)
    except msgspec.ValidationError as error:
        reason = printable(str(error), 200)
        raise WireError(f"what the host says of its corpus cannot be read: {reason}") from None


def _key(at: tuple[int, int] | int) -> Key:
    return (Side.VALIDATION, 0, at) if isinstance(at, int) else (Side.TRAINING, *at)


def _named(key: Key) -> str:
    side, step, number = key
    if side is Side.VALIDATION:
        return f"validation batch {number}"
    return f"microbatch {number} of step {step + 1}"
