"""The shape of a model: presets, and single keys that override them."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from thinwire.errors import ConfigError
from thinwire.model.rope import RopeScaling
from thinwire.typed import option

SIZES = ("layers", "dim", "heads", "kv_heads", "ffn", "vocab", "context")
MATRIX_STD = 0.02  # of starting weights
CUSTOM = "custom"
"""The preset without sizes of its own: all of them stand in the file, as for imported models."""


def _sizes(*sizes: int) -> dict[str, int]:
    return dict(zip(SIZES, sizes, strict=True))


# layers, dim, heads, kv_heads, ffn, vocab, context
PRESETS: dict[str, dict[str, int]] = {
    "tiny": _sizes(4, 128, 4, 2, 352, 2048, 128),
    "mini": _sizes(8, 256, 8, 4, 704, 4096, 256),
    "70m": _sizes(8, 512, 8, 4, 1536, 50304, 512),
    "160m": _sizes(12, 768, 12, 4, 2048, 50304, 1024),
    "400m": _sizes(24, 1024, 16, 8, 2816, 50304, 1024),
    "1b": _sizes(16, 2048, 32, 8, 8192, 128256, 2048),
    "2b": _sizes(8, 4096, 32, 32, 11008, 32000, 1024),
    "3b": _sizes(28, 3072, 24, 8, 8192, 128256, 4096),
    "8b": _sizes(32, 4096, 32, 8, 14336, 128256, 8192),
}


@dataclass(frozen=True)
class ModelConfig:
    """`[model]`: a Llama-style decoder. A key left at 0 takes the preset's value."""

    preset: str = option(
        "tiny",
        "model size to start from; custom = every size stands in the file",
        (*PRESETS, CUSTOM),
    )
    layers: int = option(
        0,
        "number of blocks, which are split over the stages; 0 = the preset's",
        least=0,
        most=10_000,
    )
    dim: int = option(
        0,
        "width of the residual stream; 0 = the preset's",
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
    embed_std: float = option(
        0.0,
        "standard deviation of the embedding at the start; 0 = 1 with muon, else 0.02",
        least=0,
    )
    rope_theta: float = option(500000.0, "base of the rotary position encoding", above=0)
    norm_eps: float = option(1e-5, "epsilon of the RMS norms", above=0)
    head_dim: int = option(0, "width of one attention head; 0 = dim / heads", least=0, most=2**16)
    qkv_bias: bool = option(False, "biases on queries, keys and values, as in Qwen2")
    qk_norm: bool = option(False, "RMS norms on the heads of queries and keys, as in Qwen3")
    rope_scaling: str = option(
        "",
        'rotary positions stretched as in Llama 3.1: "llama3(factor=8, low=1, high=4, '
        'context=8192)"; empty = not',
    )

    @property
    def shape(self) -> dict[str, int]:
        """The preset's own sizes."""
        return PRESETS[self.preset] if self.preset != CUSTOM else dict.fromkeys(SIZES, 0)

    @property
    def attention_dim(self) -> int:
        """Width of all attention heads together: the stream's own, unless head_dim says not so."""
        return self.heads * self.head_dim

    def resolved(self, embed_std: float = MATRIX_STD) -> "ModelConfig":
        """The same config with every 0 filled from the preset, checked for consistency.

        `embed_std` is the embedding's spread where the config leaves it open.
        """
        filled: dict[str, Any] = {k: getattr(self, k) or size for k, size in self.shape.items()}
        missing = [f"model.{key}" for key, size in filled.items() if not size]
        if missing:
            raise ConfigError(
                f'model.preset = "{self.preset}" has no sizes of its own: set {", ".join(missing)}'
            )
        filled["embed_std"] = self.embed_std or embed_std
        filled["head_dim"] = self.head_dim or _even_share(filled["dim"], filled["heads"])
        filled["rope_scaling"] = str(RopeScaling.parse(self.rope_scaling) or "")
        full = dataclasses.replace(self, **filled)
        full._check_heads()
        return full

    def relaxed(self, embed_std: float = MATRIX_STD) -> "ModelConfig":
        """The inverse of `resolved`: 0 for every size that is the preset's own."""
        own: dict[str, Any] = {k: 0 for k, size in self.shape.items() if getattr(self, k) == size}
        if self.embed_std == embed_std:
            own["embed_std"] = 0.0
        if self.attention_dim == self.dim:
            own["head_dim"] = 0
        return dataclasses.replace(self, **own)

    def unlike_preset(self) -> dict[str, tuple[int, int]]:
        """Sizes that are set and differ from the preset's, each with the preset's after it."""
        if self.preset == CUSTOM:
            return {}
        return {
            key: (getattr(self, key), size)
            for key, size in self.shape.items()
            if getattr(self, key) not in (0, size)
        }

    def _check_heads(self) -> None:
        """Refuse sizes that cannot work together."""
        if not self.head_dim or (self.head_dim % 2 and self.attention_dim == self.dim):
            raise ConfigError(
                f"model.dim = {self.dim} must split into model.heads = {self.heads} heads of "
                "even width (rotary positions turn pairs of channels), or model.head_dim be set"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"model.head_dim = {self.head_dim} must be even: rotary positions turn pairs of "
                "channels"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model.heads = {self.heads} must be a multiple of model.kv_heads = {self.kv_heads}"
            )


def _even_share(dim: int, heads: int) -> int:
    """The width of a head where the stream's width is split evenly, else 0."""
    return 0 if dim % heads else dim // heads
