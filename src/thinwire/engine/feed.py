"""Token ids for one stage: computed from (step, microbatch), never received."""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.data import Batch, Corpus, Order, validation_batches
from thinwire.engine.settings import Settings
from thinwire.errors import DataError


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
        sequences = len(self._validation[0].examples_B)
        if sequences < settings.microbatch_size:
            raise DataError(
                f"the validation text makes {sequences} sequences of {context} tokens, but one "
                f"microbatch takes {settings.microbatch_size}: raise data.valid_fraction, or lower "
                "train.batch"
            )

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

    def _on_device(self, batch: Batch) -> DeviceBatch:
        return DeviceBatch(
            torch.from_numpy(batch.inputs_BT).to(self._device),
            torch.from_numpy(batch.targets_BT).to(self._device),
        )
