"""Token ids for one stage: computed from (step, microbatch), never received."""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codec import build_codecs
from thinwire.data import Batch, Corpus, Order, validation_batches
from thinwire.engine.settings import Settings
from thinwire.errors import ConfigError, DataError


@dataclass(frozen=True)
class DeviceBatch:
    """A microbatch's ids on the stage's device."""

    inputs_BT: Tensor
    targets_BT: Tensor


class Feed:
    """Every stage opens the same memory-mapped corpus and computes the ids it needs itself."""

    def __init__(
        self, corpus: Corpus, settings: Settings, device: torch.device, eval_batches: int = 0
    ):
        context, train = settings.model.context, settings.train
        microbatches = settings.pipeline.microbatches
        self._order = Order(corpus.train, context, train.batch, microbatches, settings.run.seed)
        self._validation = validation_batches(
            corpus.valid, context, settings.microbatch_size, eval_batches or train.eval_batches
        )
        self._device = device
        self._check_memory(settings)
        sequences = len(self._validation[0].examples_B)
        if sequences < settings.microbatch_size:
            raise DataError(
                f"the validation text makes {sequences} sequences of {context} tokens, but one "
                f"microbatch takes {settings.microbatch_size}: raise data.valid_fraction, or lower "
                "train.batch"
            )

    @property
    def example_count(self) -> int:
        """Training examples there are: windows of the corpus, the same ones in every epoch."""
        return self._order.windows

    def examples(self, step: int, microbatch: int) -> tuple[int, ...]:
        """Which training examples the rows of a microbatch are; one may stand there twice."""
        return tuple(self._order.microbatch(step, microbatch).examples_B.tolist())

    @property
    def validation_count(self) -> int:
        """Validation microbatches there are: fewer than asked for when the text is short."""
        return len(self._validation)

    def training(self, step: int, microbatch: int) -> DeviceBatch:
        """The ids of one training microbatch."""
        return self._on_device(self._order.microbatch(step, microbatch))

    def validation(self, microbatch: int) -> DeviceBatch:
        """The ids of one validation microbatch."""
        return self._on_device(self._validation[microbatch])

    def _check_memory(self, settings: Settings) -> None:
        """Refuse codecs that remember examples in a run that sees none of them again."""
        train, cuts = settings.train, range(settings.pipeline.stages - 1)
        codecs = [c for cut in cuts for c in build_codecs(*settings.codec.names(cut)).values()]
        remembering = [codec.name for codec in codecs if codec.remembers_examples]
        if remembering and train.steps * train.batch <= self.example_count:
            raise ConfigError(
                f"{remembering[0]} remembers each training example until it comes back, but none "
                f"does: train.steps = {train.steps} of train.batch = {train.batch} sequences see "
                f"{train.steps * train.batch:,} of {self.example_count:,} examples, each once. "
                "Train for several epochs, or choose a codec that does not remember examples, "
                "such as one with +ef21"
            )

    def _on_device(self, batch: Batch) -> DeviceBatch:
        return DeviceBatch(
            torch.from_numpy(batch.inputs_BT).to(self._device),
            torch.from_numpy(batch.targets_BT).to(self._device),
        )
