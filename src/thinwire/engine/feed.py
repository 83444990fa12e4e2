"""Batches for one stage: computed from (step, microbatch), wherever the data is.

Shapes: B sequences of a microbatch, T tokens of context.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from thinwire.codec import build_codecs
from thinwire.data import Batch, Corpus, Order, Validation
from thinwire.data.order import Shuffled
from thinwire.errors import ConfigError, DataError
from thinwire.model import Stage
from thinwire.settings import Settings


class FarCorpus(ABC):
    """A corpus on another machine, of which a stage gets the token ids that it reads.

    It has been found fit for the settings there. Which examples a microbatch has is computed here.
    """

    fingerprint: str
    example_count: int
    validation_count: int
    validation_text: tuple[int, int]  # as that of a feed

    @abstractmethod
    def is_due(self, at: tuple[int, int] | int) -> bool:
        """Whether something that this stage reads of a microbatch is still to come."""

    @abstractmethod
    def wait(self, at: tuple[int, int] | int) -> None:
        """Wait until all that this stage reads of a microbatch is here."""

    @abstractmethod
    def inputs(self, at: tuple[int, int] | int) -> Tensor:
        """Token ids (B, T) of a training microbatch, or of a validation's by its number alone."""

    @abstractmethod
    def targets(self, at: tuple[int, int] | int) -> Tensor:
        """The token after each of these (B, T), or -100 where it is not learned."""

    @abstractmethod
    def learned_count(self, at: tuple[int, int]) -> int | None:
        """Tokens that are learned in the step of a microbatch; None where all are."""


class DeviceBatch:
    """A microbatch on the stage's device: what a model reads, and what it should say.

    Each is computed when it is asked for: inputs by the first stage, targets by the last.
    `wait` is there if something has to come from another machine first. `learned` gives the number
    of tokens that are learned in the whole step, where that is not all of them.
    """

    def __init__(
        self,
        inputs: Callable[[], Tensor],
        targets: Callable[[], Tensor],
        wait: Callable[[], None] | None = None,
        learned: Callable[[], int | None] = lambda: None,
    ):
        self._read_inputs, self._read_targets = inputs, targets
        self.wait = wait
        self._count_learned = learned

    @cached_property
    def inputs(self) -> Tensor:
        """Token ids (B, T)."""
        return self._read_inputs()

    @cached_property
    def targets(self) -> Tensor:
        """The next token of each position (B, T).

        A target of -100 is not learned.
        """
        return self._read_targets()

    def loss(self, stage: Stage, output: Tensor, microbatches: int) -> Tensor:
        """What this microbatch adds to the loss of its step, which is the mean over all tokens
        that are learned in it.

        Each microbatch has as many, unless some are masked: then the mean over the step is not
        the mean of the means of its microbatches.
        """
        count = self._count_learned()
        if count is None:
            return stage.loss(output, self.targets) / microbatches
        return stage.summed_loss(output, self.targets) / count


class Feed:
    """Every stage opens the same memory-mapped data and computes what it needs of a batch itself,
    or gets just that from where the data is.

    `eval_batches` are the microbatches of a validation; 0 = as the settings say.
    """

    def __init__(
        self,
        data: Corpus | FarCorpus,
        settings: Settings,
        device: torch.device,
        eval_batches: int = 0,
    ):
        limit = eval_batches or settings.train.eval_batches
        self._source: _Source
        if isinstance(data, FarCorpus):
            self._source = _FarTokens(data, settings, device)
        else:
            self._source = _Tokens(data, settings, device, limit)
        self._check_memory(settings)

    @property
    def example_count(self) -> int:
        """Training examples there are, the same ones in every epoch."""
        return self._source.order.count

    def examples(self, step: int, microbatch: int) -> tuple[int, ...]:
        """Which training examples the rows of a microbatch are; one may stand there twice."""
        return tuple(self._source.order.examples(step, microbatch).tolist())

    @property
    def validation_count(self) -> int:
        """Validation microbatches there are: fewer than asked for when there is little data."""
        return self._source.validation_count

    def training(self, step: int, microbatch: int) -> DeviceBatch:
        """One training microbatch."""
        return self._source.training(step, microbatch)

    def validation(self, microbatch: int) -> DeviceBatch:
        """One validation microbatch."""
        return self._source.validation(microbatch)

    @cached_property
    def validation_text(self) -> tuple[int, int]:
        """How many tokens the validation microbatches predict, and their UTF-8 bytes.

        Just those that a validation scores, so that a loss and its bits per byte belong
        together. Both are 0 for token shards, whose text is not known.
        """
        return self._source.validation_text()

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


class _Source(ABC):
    """One kind of data behind a feed."""

    order: Shuffled
    validation_count: int

    @abstractmethod
    def training(self, step: int, microbatch: int) -> DeviceBatch: ...

    @abstractmethod
    def validation(self, microbatch: int) -> DeviceBatch: ...

    def validation_text(self) -> tuple[int, int]:
        return 0, 0


class _Tokens(_Source):
    """Windows of a corpus."""

    order: Order

    def __init__(self, corpus: Corpus, settings: Settings, device: torch.device, limit: int):
        context, size, train = settings.model.context, settings.microbatch_size, settings.train
        microbatches, seed = settings.pipeline.microbatches, settings.run.seed
        self.order = Order(
            corpus.train, context, train.batch, microbatches, seed, corpus.train_learned
        )
        self._validation = Validation(corpus.valid, context, size, limit, corpus.valid_learned)
        self._valid_sizes = corpus.valid_sizes
        self._device = device
        self.validation_count = len(self._validation)
        if self._validation.size < size:
            raise DataError(
                f"the validation text makes {self._validation.size} sequences of {context} "
                f"tokens, but one microbatch takes {size}: raise data.valid_fraction, or lower "
                "train.batch"
            )

    def training(self, step: int, microbatch: int) -> DeviceBatch:
        batch = self.order.microbatch(step, microbatch)
        if not self.order.is_masked:
            return self._on_device(batch)
        return self._on_device(batch, lambda: self.order.learned_count(step))

    def validation(self, microbatch: int) -> DeviceBatch:
        return self._on_device(self._validation.microbatch(microbatch))

    def validation_text(self) -> tuple[int, int]:
        if self._valid_sizes is None:
            return 0, 0
        validation = self._validation
        return validation.target_count, validation.total_of_targets(self._valid_sizes)

    def _on_device(
        self, batch: Batch, learned: Callable[[], int | None] = lambda: None
    ) -> DeviceBatch:
        return DeviceBatch(
            lambda: torch.from_numpy(batch.inputs_BT).to(self._device),
            lambda: torch.from_numpy(batch.targets_BT).to(self._device),
            learned=learned,
        )


class _FarTokens(_Source):
    """Windows of a corpus on another machine; nothing is asked for before it is read."""

    def __init__(self, far: FarCorpus, settings: Settings, device: torch.device):
        batch, microbatches = settings.train.batch, settings.pipeline.microbatches
        self.order = Shuffled(far.example_count, batch, microbatches, settings.run.seed)
        self.validation_count = far.validation_count
        self._far = far
        self._device = device

    def training(self, step: int, microbatch: int) -> DeviceBatch:
        return self._on_device((step, microbatch))

    def validation(self, microbatch: int) -> DeviceBatch:
        return self._on_device(microbatch)

    def validation_text(self) -> tuple[int, int]:
        return self._far.validation_text

    def _on_device(self, at: tuple[int, int] | int) -> DeviceBatch:
        return DeviceBatch(
            lambda: self._far.inputs(at).to(self._device),
            lambda: self._far.targets(at).to(self._device),
            (lambda: self._far.wait(at)) if self._far.is_due(at) else None,
            lambda: None if isinstance(at, int) else self._far.learned_count(at),
        )
