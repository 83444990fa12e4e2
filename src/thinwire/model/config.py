"""The shape of a model: presets, and single keys that override them."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from thinwire.errors import ConfigError
from thinwire.typed import option

_LLAMA = ("layers", "dim", "heads", "kv_heads", "ffn", "vocab", "context")
_RESNET = ("layers", "dim", "classes", "channels", "side")
SIZES = tuple(dict.fromkeys((*_LLAMA, *_RESNET)))
MATRIX_STD = 0.02  # of starting weights
_LLAMA_REALS = ("embed_std", "rope_theta", "norm_eps")


def _llama(*sizes: int) -> dict[str, int]:
    return dict(zip(_LLAMA, sizes, strict=True))


# layers, dim, heads, kv_heads, ffn, vocab, context; or those of an image model
PRESETS: dict[str, dict[str, int]] = {
    "tiny": _llama(4, 128, 4, 2, 352, 2048, 128),
    "mini": _llama(8, 256, 8, 4, 704, 4096, 256),
    "70m": _llama(8, 512, 8, 4, 1536, 50304, 512),
    "160m": _llama(12, 768, 12, 4, 2048, 50304, 1024),
    "400m": _llama(24, 1024, 16, 8, 2816, 50304, 1024),
    "1b": _llama(16, 2048, 32, 8, 8192, 128256, 2048),
    "2b": _llama(8, 4096, 32, 32, 11008, 32000, 1024),
    "3b": _llama(28, 3072, 24, 8, 8192, 128256, 4096),
    "8b": _llama(32, 4096, 32, 8, 14336, 128256, 8192),
    "resnet18": dict(zip(_RESNET, (8, 64, 10, 3, 32), strict=True)),
}


@dataclass(frozen=True)
class ModelConfig:
    """`[model]`: a Llama-style decoder, or a ResNet-18 for images.

    A key left at 0 takes the preset's value; one that is of no use to the preset stays at 0.
    """

    preset: str = option("tiny", "model size to start from", tuple(PRESETS))
    layers: int = option(
        0,
        "number of blocks, which are split over the stages; 0 = the preset's",
        least=0,
        most=10_000,
    )
    dim: int = option(
        0,
        "width of the residual stream; resnet18: of its first group; 0 = the preset's",
        least=0,
        most=2**20,
    )
    heads: int = option(0, "attention heads; 0 = the preset's", least=0, most=2**16)
    kv_heads: int = option(
        0, "key/value heads, shared by groups of heads (GQA); 0 = the preset's", least=0, most=2**16
    )
    ffn: int = option(
        0, "hidden width of the SwiGLU feed-forward; 0 = the preset's", least=0, most=2**22
    )
    vocab: int = option(
        0, "size of the vocabulary, at least the tokenizer's; 0 = the preset's", least=0, most=2**24
    )
    context: int = option(0, "tokens per training sequence; 0 = the preset's", least=0, most=2**24)
    classes: int = option(0, "resnet18: number of classes; 0 = the preset's", least=0, most=2**20)
    channels: int = option(
        0, "resnet18: channels of an image, 3 or 1; 0 = the preset's", least=0, most=2**10
    )
    side: int = option(
        0, "resnet18: height and width of an image in pixels; 0 = the preset's", least=0, most=2**14
    )
    embed_std: float = option(
        0.0,
        "standard deviation of the embedding at the start; 0 = 1 with muon, else 0.02",
        least=0,
    )
    rope_theta: float = option(500000.0, "base of the rotary position encoding", above=0)
    norm_eps: float = option(1e-5, "epsilon of the RMS norms", above=0)

    @property
    def sees_images(self) -> bool:
        """Whether it reads images and says a class, and not tokens and the next one."""
        return "side" in PRESETS[self.preset]

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    def resolved(self, embed_std: float = MATRIX_STD) -> "ModelConfig":
        """The same config with every 0 filled from the preset, checked for consistency.

        `embed_std` is the embedding's spread where the config leaves it open.
        """
        shape = PRESETS[self.preset]
        filled: dict[str, Any] = {}
        if not self.sees_images:
            filled["embed_std"] = self.embed_std or embed_std
        for key in SIZES:
            value = getattr(self, key)
            if value and key not in shape:
                raise ConfigError(_no_use(key, value, self.preset, 0))
            filled[key] = value or shape.get(key, 0)
        full = dataclasses.replace(self, **filled)
        if full.sees_images:
            _check_resnet(full)
        else:
            _check_llama(full)
        return full

    def relaxed(self, embed_std: float = MATRIX_STD) -> "ModelConfig":
        """The inverse of `resolved`: 0 for every size that is the preset's own."""
        shape = PRESETS[self.preset]
        own: dict[str, Any] = {k: 0 for k, value in shape.items() if getattr(self, k) == value}
        if self.embed_std == embed_std:
            own["embed_std"] = 0.0
        return dataclasses.replace(self, **own)

    def unlike_preset(self) -> dict[str, tuple[int, int]]:
        """Sizes that are set and differ from the preset's, each with the preset's after it."""
        shape = PRESETS[self.preset]
        sizes = {key: getattr(self, key) for key in SIZES}
        return {
            key: (value, shape.get(key, 0))
            for key, value in sizes.items()
            if value not in (0, shape.get(key, 0))
        }


def _check_llama(config: ModelConfig) -> None:
    if config.dim % config.heads or config.head_dim % 2:
        raise ConfigError(
            f"model.dim = {config.dim} must split into model.heads = {config.heads} heads of even "
            f"width (rotary positions turn pairs of channels)"
        )
    if config.heads % config.kv_heads:
        raise ConfigError(
            f"model.heads = {config.heads} must be a multiple of model.kv_heads = {config.kv_heads}"
        )


def _check_resnet(config: ModelConfig) -> None:
    default = ModelConfig()
    for key in _LLAMA_REALS:
        if getattr(config, key) != getattr(default, key):
            raise ConfigError(
                _no_use(key, getattr(config, key), config.preset, getattr(default, key))
            )
    blocks = PRESETS[config.preset]["layers"]
    if config.layers != blocks:
        raise ConfigError(
            f"model.layers = {config.layers}, but {config.preset} has {blocks} blocks: only its "
            "width, model.dim, can be chosen"
        )
    if config.channels not in (1, 3):
        raise ConfigError(f"model.channels = {config.channels} must be 3, or 1 for grey images")


def _no_use(key: str, value: float, preset: str, default: float) -> str:
    return (
        f'model.{key} = {value} has no effect with model.preset = "{preset}": leave it at {default}'
    )
