"""Rotary positions of models that were stretched to a longer context, as a setting. Needs no torch.

The setting is one line, `llama3(factor=8, low=1, high=4, context=8192)`: what Llama 3.1 and its
kin call `rope_scaling`.
"""

import math
import re
from dataclasses import dataclass

from thinwire.errors import ConfigError

KIND = "llama3"
_NUMBER = r"\s*([0-9][0-9_]*(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*"
_FORM = re.compile(
    rf"{KIND}\(\s*factor\s*={_NUMBER},\s*low\s*={_NUMBER},\s*high\s*={_NUMBER},"
    rf"\s*context\s*=\s*([0-9][0-9_]*)\s*\)"
)


@dataclass(frozen=True)
class RopeScaling:
    """Slow rotations, made slower still; fast ones, which tell near positions apart, stay.

    A pair of channels whose wave has fewer than `low` periods in the original context turns slower
    by `factor`; one with more than `high` is unchanged; between them the two are mixed.
    """

    factor: float
    low: float
    high: float
    context: int

    @classmethod
    def parse(cls, text: str, place: str = "model.rope_scaling") -> "RopeScaling | None":
        """Read the setting; None for an empty one."""
        if not text:
            return None
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise ConfigError(
                f'{place} = "{text}" must be empty or look like '
                f'"{cls(8.0, 1.0, 4.0, 8192)}", where context is the original one'
            )
        factor, low, high = (float(found[number]) for number in (1, 2, 3))
        scaling = cls(factor, low, high, int(found[4]))
        if not (1 <= factor < math.inf and 0 < low < high < math.inf and scaling.context > 0):
            raise ConfigError(
                f'{place} = "{text}" must have factor of at least 1, low below high, both above 0, '
                "and a context"
            )
        return scaling

    def __str__(self) -> str:
        """The setting that `parse` reads back."""
        return (
            f"{KIND}(factor={self.factor:.17g}, low={self.low:.17g}, high={self.high:.17g}, "
            f"context={self.context})"
        )
