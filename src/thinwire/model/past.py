"""What attention keeps of the positions before, so that the next one costs one position.

Shapes: B sequences, T new positions, S positions so far, K key/value heads, E head width.
"""

import torch
from torch import Tensor


class KeyValues:
    """Keys and values of one block, of at most a context of positions, in memory made once."""

    def __init__(self, context: int):
        self.length = 0
        self._context = context
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Take in the next positions; returns those of all so far, (B, K, S, E)."""
        if self._keys is None or self._values is None:
            batch, heads, _, width = k_BKTE.shape
            self._keys = k_BKTE.new_empty(batch, heads, self._context, width)
            self._values = torch.empty_like(self._keys)
        start, end = self.length, self.length + k_BKTE.shape[2]
        assert end <= self._context, "a model has no positions beyond its context"
        self._keys[:, :, start:end] = k_BKTE
        self._values[:, :, start:end] = v_BKTE
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]
