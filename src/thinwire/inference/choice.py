"""How the next token is chosen. Shapes: V entries of the vocabulary."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import CheckpointError, ConfigError

COLDEST = 1e-6  # a temperature below is 0: logits divided by it would overflow


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: temperature 0 takes the likeliest, top-k 0 and top-p 1 allow all."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < math.inf and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ConfigError(
                f"temperature {self.temperature} and top-k {self.top_k} must not be negative, and "
                f"top-p {self.top_p} must be above 0 and at most 1"
            )


class Choice:
    """Chooses tokens by their logits, the same ones for the same seed."""

    def __init__(self, sampling: Sampling):
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits_V: Tensor) -> int:
        """The next token."""
        if logits_V.isnan().any():
            raise CheckpointError(
                "the model's output is NaN: its training has diverged; use an earlier checkpoint"
            )
        if self._sampling.temperature < COLDEST:
            return int(logits_V.argmax())
        shares_V = shares(logits_V, self._sampling)
        return int(torch.multinomial(shares_V, 1, generator=self._generator))


def shares(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """The probability of each token: of the top-k likeliest, then of the fewest of these that
    make up top-p together; equal ones at the edge of top-k stay in.
    """
    if sampling.top_k:
        worst = torch.topk(logits_V, min(sampling.top_k, len(logits_V))).values[-1]
        logits_V = logits_V.masked_fill(logits_V < worst, -math.inf)
    shares_V = torch.softmax(logits_V / sampling.temperature, -1)
    if sampling.top_p == 1:
        return shares_V
    sorted_V, order_V = shares_V.sort(descending=True, stable=True)
    # What comes before a token must not be enough by itself: so the likeliest always stays.
    kept_V = sorted_V.cumsum(-1) - sorted_V < sampling.top_p
    shares_V = torch.zeros_like(shares_V).scatter(0, order_V, sorted_V * kept_V)
    return shares_V / shares_V.sum()
