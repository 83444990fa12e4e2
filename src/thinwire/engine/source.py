"""Where a state comes from: named tensors of one moment of a run, and the facts that go along."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from thinwire.errors import CheckpointError
from thinwire.settings import Settings


@dataclass(frozen=True)
class Versions:
    """How often weights were updated, and the shared basis moved."""

    weight_version: int
    basis_version: int

    def __str__(self) -> str:
        return f"weight version {self.weight_version} and basis version {self.basis_version}"


class Source(ABC):
    """Tensors by their global names, after `step` steps of the run that has these settings; `str`
    of it names it in errors.
    """

    settings: Settings

    def __init__(self, step: int, versions: Versions):
        self.step = step
        self.versions = versions

    @abstractmethod
    def names(self) -> set[str]:
        """The names of all tensors."""

    @abstractmethod
    def _read(self, names: set[str]) -> dict[str, Tensor]:
        """Tensors that are there; they become the taker's own."""

    def tensors(self, wanted: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of these names; CheckpointError says which is missing."""
        wanted = set(wanted)
        missing = wanted - self.names()
        if missing:
            raise CheckpointError(
                f"{len(missing)} tensors are missing from {self}, such as {min(missing)}: it was "
                "written by a model of another shape"
            )
        return self._read(wanted)

    def tensor(self, name: str) -> Tensor:
        """One of them."""
        return self.tensors([name])[name]

    def tensors_under(self, prefix: str) -> dict[str, Tensor]:
        """All tensors whose names begin so, by the rest of their names."""
        found = self._read({name for name in self.names() if name.startswith(prefix)})
        return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


class Snapshot(Source):
    """A state in memory: of a stage, or of all stages together."""

    def __init__(
        self, tensors: Mapping[str, Tensor], settings: Settings, step: int, versions: Versions
    ):
        super().__init__(step, versions)
        self._tensors = tensors
        self.settings = settings

    def names(self) -> set[str]:
        return set(self._tensors)

    def _read(self, names: set[str]) -> dict[str, Tensor]:
        return {name: self._tensors[name].detach().clone() for name in names}

    def __str__(self) -> str:
        return f"the state of step {self.step} in memory"
