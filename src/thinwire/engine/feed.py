"""Batches for one stage: computed from (step, microbatch), wherever the data is.

Shapes: B sequences of a microbatch, T tokens of context.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.codec import build_codecs
from thinwire.data import Corpus, Order, Validation
from thinwire.data.order import Shuffled
from thinwire.errors import ConfigError, DataError
from thinwire.model import Stage
from thinwire.settings import Settings

Loss = Callable[[Tensor, Tensor], Tensor]
At = tuple[int, int] | int  # step and microbatch of a training, or number in a validation


class Tokens(NamedTuple):
    """What is read of a microbatch."""

    inputs: Tensor | None  # token ids (B, T); None where they are not read
    targets: Tensor | None  # the token after each of these (B, T), or -100 where it is not learned
    learned_count: int | None  # tokens that are learned in its step; None where all are


class TokenSource(ABC):
    """Where a stage gets the token ids that it reads: a corpus here, or one on another machine,
    which has been found fit for the settings there.
    """

    fingerprint: str
    example_count: int
    validation_count: int
    validation_text: tuple[int, int]  # as that of a feed

    def is_due(self, at: At) -> bool:
        """Whether something that this stage reads of a microbatch is still to come."""
        return False

    @abstractmethod
    def read(self, at: At) -> Tokens:
        """All that this stage reads of a microbatch, once it is here."""


class DeviceBatch:
    """A microbatch on the stage's device: what a model reads, and what it should say, each computed
    when it is asked for. If it `is_due`, that takes until it has come from another machine.
    """

    def __init__(self, source: TokenSource, at: At, device: torch.device):
        self._device = device
        self._read = cache(partial(source.read, at))
        self.is_due = source.is_due(at)

    def wait(self) -> None:
        """Until all that this stage reads of it is here."""
        self._read()

    @cached_property
    def inputs(self) -> Tensor:
        """Token ids (B, T)."""
        return self._on_device(self._read().inputs)

    @cached_property
    def targets(self) -> Tensor:
        """The next token of each position (B, T); one of -100 is not learned."""
        return self._on_device(self._read().targets)

    def _on_device(self, ids_BT: Tensor | None) -> Tensor:
        assert ids_BT is not None, "a stage was not to read this"
        return ids_BT.to(self._device)

    def loss(self, stage: Stage, output: Tensor, microbatches: int) -> Tensor:
        """What this microbatch adds to the loss of its step, the mean over its learned tokens."""
        loss, parts = self.loss_of(stage, microbatches)
        return loss(output, self.targets) / parts

    def loss_of(self, stage: Stage, microbatches: int) -> tuple[Loss, int]:
        """The same as a function of logits and targets, and what its result is divided by. If
        tokens are masked, the mean over the step is not the mean of the means of its microbatches.
        """
        count = self._read().learned_count
        return (stage.loss, microbatches) if count is None else (stage.summed_loss, count)


class Feed:
    """Batches of the data. `batches` are the microbatches of a validation; 0 = as settings say."""

    def __init__(
        self, data: Corpus | TokenSource, settings: Settings, device: torch.device, batches: int = 0
    ):
        limit = batches or settings.train.eval_batches
        source = data if isinstance(data, TokenSource) else CorpusTokens(data, settings, limit)
        self._source, self._device = source, device
        self.example_count = source.example_count  # to train on, the same in every epoch
        self.validation_count = source.validation_count  # microbatches
        batch, pipeline = settings.train.batch, settings.pipeline
        self._order = Shuffled(self.example_count, batch, pipeline.microbatches, settings.run.seed)
        self._check_memory(settings)

    def examples(self, step: int, microbatch: int) -> tuple[int, ...]:
        """Which training examples the rows of a microbatch are; one may stand there twice."""
        return tuple(self._order.examples(step, microbatch).tolist())

    @property
    def validation_text(self) -> tuple[int, int]:
        """Tokens that the validation microbatches predict, and their bytes; 0 if not known."""
        return self._source.validation_text

    def training(self, step: int, microbatch: int) -> DeviceBatch:
        """One training microbatch."""
        return DeviceBatch(self._source, (step, microbatch), self._device)

    def validation(self, microbatch: int) -> DeviceBatch:
        """One validation microbatch."""
        return DeviceBatch(self._source, microbatch, self._device)

    def _check_memory(self, settings: Settings) -> None:
        """Refuse codecs that remember examples in a run that sees none of them again."""
        train, cuts = settings.train, range(settings.pipeline.stages - 1)
        codecs = [c for cut in cuts for c in build_codecs(*settings.codec.names(cut)).values()]
        remembering = [codec.name for codec in codecs if codec.remembers_examples]
        if remembering and train.steps * train.batch <= self.example_count:
            raise ConfigError(
                f"{remembering[0]} remembers each training example until it repeats, but none "
                f"does: train.steps = {train.steps} of train.batch = {train.batch} "
                f"sequences see {train.steps * train.batch:,} of "
                f"{self.example_count:,} examples, each once. Train for several epochs, or choose "
                "a codec that does not remember examples, such as one with +ef21"
            )


class CorpusTokens(TokenSource):
    """Windows of a corpus on this machine; nothing is read before it is asked for."""

    def __init__(self, corpus: Corpus, settings: Settings, limit: int):
        context, size, train = settings.model.context, settings.microbatch_size, settings.train
        microbatches, seed = settings.pipeline.microbatches, settings.run.seed
        self._order = Order(
            corpus.train, context, train.batch, microbatches, seed, corpus.train_learned
        )
        self._validation = Validation(corpus.valid, context, size, limit, corpus.valid_learned)
        self._valid_sizes = corpus.valid_sizes
        self.fingerprint = corpus.fingerprint
        self.example_count = self._order.count
        self.validation_count = len(self._validation)
        if self._validation.size < size:
            raise DataError(
                f"the validation text makes {self._validation.size} sequences of {context} "
                f"tokens, but one microbatch takes {size}: raise data.valid_fraction, or lower "
                "train.batch"
            )

    def read(self, at: At) -> Tokens:
        if isinstance(at, int):
            batch, count = self._validation.microbatch(at), None
        else:
            batch = self._order.microbatch(*at)
            count = self._order.learned_count(at[0]) if self._order.is_masked else None
        return Tokens(torch.from_numpy(batch.inputs_BT), torch.from_numpy(batch.targets_BT), count)

    @cached_property
    def validation_text(self) -> tuple[int, int]:  # type: ignore[override]
        """As that of a feed."""
        if self._valid_sizes is None:
            return 0, 0
        validation = self._validation
        return validation.target_count, validation.total_of_targets(self._valid_sizes)
