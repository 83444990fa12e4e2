"""Token ids for stages whose machines do not have the corpus: the end that has it.

Wiring, on the host: for each stage whose member did not prove the corpus's fingerprint, accept
`tokens-STAGE@EPOCH` from the member in that seat and make a `TokenServer` of the pipe (a lasting
pipe, where links may break). It answers on threads of its own until the pipe ends. The other end is
`FetchedCorpus` (engine/fetched.py), which says what travels and when.

A peer can ask for any microbatch of this run and nothing else. It is answered one request at a
time, so one that asks without end only slows itself down.
"""

from dataclasses import asdict

import numpy as np

from thinwire.data import Batch, Corpus, Order, Validation
from thinwire.data.order import MASKED
from thinwire.engine.fetched import Answer, Columns, Facts, Side
from thinwire.errors import WireError
from thinwire.settings import Settings
from thinwire.wire import Frame, FrameKind, Link, Meter, Pipe, handshake
from thinwire.wire.background import on_daemon_thread

_GREETING_S = 60.0
_MOST_UNSENT = 4  # answers that wait for the link while the next one is made


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
        context, train = settings.model.context, settings.train
        microbatches, size = settings.pipeline.microbatches, settings.microbatch_size
        self._steps = train.steps
        seed = settings.run.seed
        self._order = Order(
            data.train, context, train.batch, microbatches, seed, data.train_learned
        )
        self._validation = Validation(
            data.valid, context, size, train.eval_batches, data.valid_learned
        )
        self._type = data.train.dtype
        said = {"config_hash": settings.hash}
        handshake(pipe, {**said, **asdict(self._facts(data))}, said, timeout, self.meter)
        self._link = Link(pipe, self.meter, None, "token ids", 0)
        self._link.start(self._on_request, self._on_broken, self._on_end)

    def close(self) -> None:
        """End the stream: the stage is done, or gone."""
        self._link.close()

    def _facts(self, corpus: Corpus) -> Facts:
        validation, text = self._validation, (0, 0)
        if corpus.valid_sizes is not None:
            total = validation.total_of_targets(corpus.valid_sizes)
            text = (validation.target_count, total)
        width = self._type.itemsize
        masked = self._order.is_masked
        return Facts(corpus.fingerprint, self._order.count, len(validation), *text, width, masked)

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

    def _answer(self, batch: Batch, learned: int, columns: Columns) -> Answer:
        # A stage that reads no inputs gets no token either that it does not learn from.
        targets_BT = np.maximum(batch.targets_BT, 0)
        parts = [batch.inputs_BT] if Columns.INPUTS in columns else [targets_BT[:, :-1]]
        parts += [targets_BT[:, -1:]] if Columns.TARGETS in columns else []
        ids_BW = np.concatenate(parts, axis=1)
        if Columns.TARGETS not in columns or not self._order.is_masked:
            return Answer(ids_BW)
        return Answer(ids_BW, batch.targets_BT != MASKED, learned)

    def _on_end(self) -> None:
        on_daemon_thread("thinwire tokens", self._link.close)  # the link's own thread asks for it

    def _on_broken(self, error: WireError) -> None:
        self.failure = error
