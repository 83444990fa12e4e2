"""What a model is trained to do: continue text, or classify images.

A preset belongs to one task (`ModelConfig.task`). All that differs between tasks outside a model's
layers is here, or in the boundary of its architecture and the feed of its data. Settings ask a task
what it refuses, so this file needs no torch.
"""

import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from thinwire.boundary import BoundaryConfig
from thinwire.data import Corpus, DataConfig, ImageSet, prepare, prepare_images
from thinwire.data.prepared import Progress
from thinwire.errors import ConfigError
from thinwire.optim import OptimConfig
from thinwire.schedule import PipelineConfig

if TYPE_CHECKING:
    from thinwire.model.config import ModelConfig
    from thinwire.model.loss import Score

Data = Corpus | ImageSet

ONE_PIXEL_SIDE = 8  # of an image at most that a ResNet-18 halves three times to a single pixel


class Task(ABC):
    """What those who count, feed and score must know of a model."""

    unit: ClassVar[str]
    """What is counted where the speed and the bytes of a run are told."""
    rows: ClassVar[str]
    """What a batch consists of."""
    validated: ClassVar[int]
    """Tokens or images behind a validation, where settings leave that open: a loss of few of them
    depends on which they are."""
    no_text: ClassVar[str] = ""
    """Why such a model cannot continue a text, if it cannot."""

    @abstractmethod
    def check_model(self, model: "ModelConfig") -> None:
        """Refuse sizes that cannot work together."""

    @abstractmethod
    def check(
        self,
        model: "ModelConfig",
        data: DataConfig,
        boundary: BoundaryConfig,
        pipeline: PipelineConfig,
        optim: OptimConfig,
        microbatch: int,
        /,
    ) -> None:
        """Refuse settings that have no meaning for this task; `microbatch` in rows."""

    @abstractmethod
    def prepare(self, config: DataConfig, vocab: int, cache: Path, progress: Progress) -> Data:
        """Make the data of a run under `cache`, or find it there, and open it."""

    @abstractmethod
    def open(self, folder: Path) -> Data:
        """What was prepared for a run, mapped into memory."""

    @abstractmethod
    def accuracy(self, score: "Score") -> float | None:
        """The share of right answers, where models are judged by it."""

    @abstractmethod
    def figures(self, score: "Score", bits_per_byte: float | None) -> dict[str, float | None]:
        """What an evaluation shows beside the loss."""


class Text(Task):
    """Says the next token at every position of a sequence."""

    unit = "token"
    rows = "sequences"
    validated = 65_536

    def check_model(self, model: "ModelConfig") -> None:
        if not model.head_dim or (model.head_dim % 2 and model.attention_dim == model.dim):
            raise ConfigError(
                f"model.dim = {model.dim} must split into model.heads = {model.heads} heads of "
                "even width (rotary positions turn pairs of channels), or model.head_dim be set"
            )
        if model.head_dim % 2:
            raise ConfigError(
                f"model.head_dim = {model.head_dim} must be even: rotary positions turn pairs of "
                "channels"
            )
        if model.heads % model.kv_heads:
            raise ConfigError(
                f"model.heads = {model.heads} must be a multiple of model.kv_heads = "
                f"{model.kv_heads}"
            )

    def check(self, model: "ModelConfig", data: DataConfig, *_: object) -> None:
        if data.source == "images":
            raise ConfigError(
                f'model.preset = "{model.preset}" reads text, but data.source = "images": set '
                'model.preset = "resnet18", or another source'
            )

    def prepare(self, config: DataConfig, vocab: int, cache: Path, progress: Progress) -> Data:
        return prepare(config, vocab, cache, progress)

    def open(self, folder: Path) -> Data:
        return Corpus.open(folder)

    def accuracy(self, score: "Score") -> float | None:
        return None

    def figures(self, score: "Score", bits_per_byte: float | None) -> dict[str, float | None]:
        return {
            "perplexity": _perplexity(score.loss),
            "bits_per_byte": bits_per_byte,
            "tokens": score.count,
        }


class Images(Task):
    """Says the class of an image."""

    unit = "image"
    rows = "images"
    validated = 2_048
    no_text = "classifies images: it has no text to continue. `thinwire eval` measures its accuracy"

    def check_model(self, model: "ModelConfig") -> None:
        blocks = model.shape["layers"]
        if model.layers != blocks:
            raise ConfigError(
                f"model.layers = {model.layers}, but {model.preset} has {blocks} blocks: only its "
                "width, model.dim, can be chosen"
            )
        if model.channels not in (1, 3):
            raise ConfigError(f"model.channels = {model.channels} must be 3, or 1 for grey images")

    def check(
        self,
        model: "ModelConfig",
        data: DataConfig,
        boundary: BoundaryConfig,
        pipeline: PipelineConfig,
        optim: OptimConfig,
        microbatch: int,
        /,
    ) -> None:
        preset = f'model.preset = "{model.preset}"'
        if data.source != "images":
            raise ConfigError(
                f'{preset} classifies images, but data.source = "{data.source}" has none: set '
                'data.source = "images" and data.path'
            )
        if boundary.mode != "dense" or boundary.rank:
            raise ConfigError(
                f'boundary.mode = "{boundary.mode}", rank = {boundary.rank} cannot work with '
                f"{preset}: its stream changes its width from group to group and passes through "
                "rectifiers, so no subspace holds it. Use dense, and a codec; `thinwire init "
                "--recipe dense` writes such a file"
            )
        if pipeline.recompute:
            raise ConfigError(
                f"pipeline.recompute = true cannot work with {preset}: its batch norms would "
                "count every microbatch twice"
            )
        if optim.name == "muon":
            raise ConfigError(
                f'optim.name = "muon" cannot work with {preset}: it is for matrices, not '
                "convolutions; use sgd or adamw"
            )
        if data.tokenizer or data.valid_path or data.valid_fraction != DataConfig().valid_fraction:
            raise ConfigError(
                "data.tokenizer, data.valid_path and data.valid_fraction have no effect with "
                'data.source = "images": an image set has its own test images'
            )
        if model.side <= ONE_PIXEL_SIDE and microbatch == 1:
            raise ConfigError(
                f"images of model.side = {model.side} shrink to one pixel, so with one image per "
                "microbatch a batch norm sees a single value: raise train.batch, or lower "
                "pipeline.microbatches"
            )

    def prepare(self, config: DataConfig, vocab: int, cache: Path, progress: Progress) -> Data:
        return prepare_images(config.path, cache, progress)

    def open(self, folder: Path) -> Data:
        return ImageSet.open(folder)

    def accuracy(self, score: "Score") -> float | None:
        return score.accuracy

    def figures(self, score: "Score", bits_per_byte: float | None) -> dict[str, float | None]:
        return {"accuracy": score.accuracy, "images": score.count}


def _perplexity(loss: float) -> float:
    """e to the loss; infinite where a float cannot hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


TEXT, IMAGES = Text(), Images()
