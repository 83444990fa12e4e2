"""How well a model does: the loss that trains it, and the score of a validation."""

import torch
from torch import Tensor
from torch.nn import functional as F


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy per token (B, T, V) or per image (B, K), in float32 at least.

    A target of -100 counts for nothing: it fills up a batch.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten())


class Score:
    """Loss and accuracy over batches: every token or image that counts weighs the same.

    Sums stay on the device until they are asked for, so that scoring a batch waits for nothing.
    """

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, loss: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Take in a batch with its mean loss."""
        count = (targets >= 0).sum().double()
        right = (logits.argmax(-1) == targets).sum().double()
        self._parts.append(torch.stack((loss.double() * count, right, count)))

    @property
    def loss(self) -> float:
        """The mean loss."""
        total, _, count = self._sums()
        return total / count

    @property
    def accuracy(self) -> float:
        """The share of tokens or images whose likeliest answer is the right one."""
        _, right, count = self._sums()
        return right / count

    @property
    def count(self) -> int:
        """Tokens or images that count."""
        return int(self._sums()[2])

    def _sums(self) -> list[float]:
        return torch.stack(self._parts).sum(0).tolist()
