"""What a model is to everyone else: a list of named layers, and the stream between its blocks."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.model.config import ModelConfig
from thinwire.model.narrow import Narrow
from thinwire.optim.roles import Role

EMBEDDING = "model.embed_tokens"  # as a Hugging Face Llama calls it
EMBEDDING_WEIGHT = f"{EMBEDDING}.weight"


@dataclass(frozen=True)
class LayerPlan:
    """One layer of the model before it exists: its global name and how to make it."""

    name: str
    make: Callable[[], nn.Module]
    label: str = ""
    """What the description of a stage calls it: a block by its number, a minor layer not at all."""
    role: Role | None = None
    """What its matrices are to an optimizer."""


@dataclass(frozen=True)
class Probe:
    """A block to measure a machine with."""

    plan: LayerPlan
    shape: tuple[int, ...]
    """Of what it reads."""
    flops: float
    """Floating-point operations of its forward."""


class Architecture(ABC):
    """A family of models, as those who cut, place and plan them need to know it.

    A row of a batch is a sequence of tokens. What is split over stages is blocks; the first stage
    also has what comes before them, and the last one what comes after.
    """

    def __init__(self, config: ModelConfig):
        self._config = config

    @abstractmethod
    def layers(self, narrow: Narrow | None = None) -> list[LayerPlan]:
        """The whole model as a list; `narrow` where it writes into a subspace."""

    @abstractmethod
    def initialise(self, name: str, parameter: Tensor, seed: int) -> None:
        """Fill a parameter from its global name and the seed alone, whatever the split."""

    @abstractmethod
    def stream_shape(self, blocks: int, batch: int) -> tuple[int, ...]:
        """What a dense cut after so many blocks carries: (batch, tokens, channels)."""

    @abstractmethod
    def forward_flops(self, blocks: range, batch: int) -> float:
        """Floating-point operations of one forward of the stage with these blocks."""

    def backward_flops(self, blocks: range, batch: int, frozen: bool = False) -> float:
        """Of one backward, which multiplies each matrix twice: for its own gradient, and for that
        of what it read. A frozen matrix has no gradient.
        """
        return 2.0 * self.forward_flops(blocks, batch)

    @abstractmethod
    def kept_bytes(self, blocks: range, batch: int, width: int, computed: int) -> int:
        """Bytes that a forward of these blocks leaves behind for its backward.

        Numbers have `width` bytes, and what matrices give `computed` (less under autocast).
        """

    @abstractmethod
    def logits(self, batch: int) -> int:
        """How many numbers the model says of a batch."""

    @abstractmethod
    def probe(self, batch: int, most_flops: float) -> Probe:
        """The first block, on as much of a batch as costs no more than so many operations."""

    @abstractmethod
    def describe(self) -> str:
        """The shape of the model in a few words."""

    def stage_layers(self, blocks: range, narrow: Narrow | None = None) -> list[LayerPlan]:
        """The layers of the stage that holds these blocks: the ends carry what is beyond."""
        plans = self.layers(narrow)
        places = [place for place, plan in enumerate(plans) if plan.label.isdigit()]
        first = 0 if blocks.start == 0 else places[blocks.start]
        last = len(plans) if blocks.stop == len(places) else places[blocks.stop]
        return plans[first:last]

    def block_name(self, block: int) -> str:
        """The global name of a block."""
        return next(plan.name for plan in self.layers() if plan.label == str(block))

    def parameter_count(self) -> int:
        """Parameters of the whole model, counted on layers without memory."""
        with torch.device("meta"):
            layers = [plan.make() for plan in self.layers()]
        return sum(p.numel() for layer in layers for p in layer.parameters())


def generator_of(name: str, seed: int) -> torch.Generator:
    """Random numbers for one parameter, whatever is made before it or beside it."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
