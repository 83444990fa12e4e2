"""The shape of a model: presets, and single keys that override them."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from thinwire.errors import ConfigError
from thinwire.typed import option

# layers, dim, heads, kv_heads, ffn, vocab, context
PRESETS: dict[str, tuple[int, int, int, int, int, int, int]] = {
    "tiny": (4, 128, 4, 2, 352, 2048, 128),
    "mini": (8, 256, 8, 4, 704, 4096, 256),
    "70m": (8, 512, 8, 4, 1536, 50304, 512),
    "160m": (12, 768, 12, 4, 2048, 50304, 1024),
    "400m": (24, 1024, 16, 8, 2816, 50304, 1024),
    "1b": (16, 2048, 32, 8, 8192, 128256, 2048),
    "2b": (8, 4096, 32, 32, 11008, 32000, 1024),
    "3b": (28, 3072, 24, 8, 8192, 128256, 4096),
    "8b": (32, 4096, 32, 8, 14336, 128256, 8192),
}
_SHAPE_KEYS = ("layers", "dim", "heads", "kv_heads", "ffn", "vocab", "context")


@dataclass(frozen=True)
class ModelConfig:
    """`[model]`: a Llama-style decoder. A key left at 0 takes the preset's value."""

    preset: str = option("tiny", "shape to start from", tuple(PRESETS))
    layers: int = option(0, "transformer blocks")
    dim: int = option(0, "width of the residual stream")
    heads: int = option(0, "attention heads")
    kv_heads: int = option(0, "key/value heads shared by groups of heads (GQA)")
    ffn: int = option(0, "hidden width of the SwiGLU feed-forward")
    vocab: int = option(0, "entries of the embedding table; the tokenizer must fit in")
    context: int = option(0, "tokens per training sequence")
    rope_theta: float = option(500000.0, "base of the rotary position encoding")
    norm_eps: float = option(1e-5, "epsilon of the RMS norms")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    def resolved(self) -> "ModelConfig":
        """The same config with every 0 filled from the preset, checked for consistency."""
        shape = dict(zip(_SHAPE_KEYS, PRESETS[self.preset], strict=True))
        chosen = {key: getattr(self, key) for key in _SHAPE_KEYS}
        for key, value in chosen.items():
            if value < 0:
                raise ConfigError(f"model.{key} = {value} must not be negative")
        filled: dict[str, Any] = {key: chosen[key] or shape[key] for key in _SHAPE_KEYS}
        full = dataclasses.replace(self, **filled)
        for key in ("rope_theta", "norm_eps"):
            if not 0 < getattr(full, key) < math.inf:
                raise ConfigError(f"model.{key} = {getattr(full, key)} must be a positive number")
        if full.dim % full.heads or full.head_dim % 2:
            raise ConfigError(
                f"model.dim = {full.dim} must split into model.heads = {full.heads} heads of even "
                f"width (rotary positions turn pairs of channels)"
            )
        if full.heads % full.kv_heads:
            raise ConfigError(
                f"model.heads = {full.heads} must be a multiple of model.kv_heads = {full.kv_heads}"
            )
        return full


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the whole model, embedding and head untied."""
    kv_dim = config.kv_heads * config.head_dim
    attention = 2 * config.dim * config.dim + 2 * config.dim * kv_dim
    block = attention + 3 * config.dim * config.ffn + 2 * config.dim
    return config.layers * block + 2 * config.vocab * config.dim + config.dim
