"""How well a model does: the loss that trains it, and the score of a validation."""

import torch
from torch import Tensor
from torch.nn import functional as F


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy per token (B, T, V), in float32 at least.

    A target of -100 counts for nothing: it fills up a batch.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten())


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """As `token_loss`, the sum in place of the mean; 0 where every target is -100."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction="sum")


class Score:
    """The loss over batches: every token that counts weighs the same.

    Sums stay on the device until they are asked for, so that scoring a batch waits for nothing.
    They are one tensor, whatever the number of batches: a small tensor kept from each would sit
    between the logits of one batch and the next, and the memory of logits could not be used again.
    """

    def __init__(self) -> None:
        self._total: Tensor | None = None  # loss times count, count; in float64

    def add(self, loss: Tensor, targets: Tensor) -> None:
        """Take in a batch with its mean loss."""
        count = (targets >= 0).sum().double()
        part = torch.stack((loss.detach().double() * count, count))
        self._total = part if self._total is None else self._total.add_(part)

    @property
    def loss(self) -> float:
        """The mean loss."""
        total, count = self._sums()
        return total / count

    @property
    def count(self) -> int:
        """Tokens that count."""
        return int(self._sums()[1])

    def _sums(self) -> list[float]:
        assert self._total is not None, "a score of no batch"
        return self._total.tolist()
