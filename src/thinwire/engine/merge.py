"""A state whose adapters (LoRA) have become part of the matrices that they stood beside.

W + (alpha / rank) B A, in whatever form the matrix has: for a reparametrised one W and B are
coordinates in the same basis, and so is their sum.
"""

import dataclasses

from torch import Tensor

from thinwire.engine.source import Source
from thinwire.model import LoraConfig
from thinwire.model.adapter import DOWN, UP, is_adapter
from thinwire.settings import Settings


def merged(source: Source) -> Source:
    """The same model without adapters; the source itself where it has none."""
    return Merged(source) if source.settings.lora.rank else source


class Merged(Source):
    """The tensors of a state with adapters, as of a model without any.

    Matrices are merged when they are asked for. Moments of adapters are left out with them.
    """

    def __init__(self, source: Source):
        super().__init__(source.step, source.versions)
        self._source = source
        self._scale = source.settings.lora.scale

    @property
    def settings(self) -> Settings:
        return dataclasses.replace(self._source.settings, lora=LoraConfig())

    def names(self) -> set[str]:
        return {name for name in self._source.names() if not is_adapter(name)}

    def _read(self, names: set[str]) -> dict[str, Tensor]:
        adapted = {name for name in names if self._beside(name, UP) in self._source.names()}
        plain = self._source.tensors(names - adapted)
        return plain | {name: self._merge(name) for name in sorted(adapted)}

    def _merge(self, name: str) -> Tensor:
        """Added up in float64, rounded once."""
        ways = [name, self._beside(name, DOWN), self._beside(name, UP)]
        found = self._source.tensors(ways)
        base, down, up = (found[way].double() for way in ways)
        return (base + self._scale * (up @ down)).to(found[ways[-1]].dtype)

    def _beside(self, name: str, part: str) -> str:
        """The name of a part of the adapter of this matrix, if it has one."""
        layer, _, kind = name.rpartition(".")
        return f"{layer}.{part}.weight" if kind == "weight" else ""

    def __str__(self) -> str:
        return f"{self._source}, its adapters merged"
