"""What a model is to everyone else, a list of named layers; and a Llama-style decoder as such.

Where the config says so also with Qwen2's biases, Qwen3's norms of heads, heads wider than the
stream, and Llama 3.1's stretched positions. Names are those of a Hugging Face checkpoint.

Shapes: B sequences, T positions, D model width, H heads, K key/value heads, E head width.
"""

import hashlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.model.config import MATRIX_STD, ModelConfig, RopeScaling
from thinwire.model.layers import DOWN, UP, InSpaceEmbedding, Narrow, writer

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"  # as a Hugging Face Llama calls them
WRITERS = ("o_proj.weight", "down_proj.weight")
_COSINES = threading.Lock()


class LayerPlan(NamedTuple):
    """One layer of the model before it exists: its global name and how to make it."""

    name: str
    make: Callable[[], nn.Module]


class KeyValues:
    """What attention keeps of the positions before, in memory that doubles when it is full."""

    def __init__(self) -> None:
        self.length = 0
        self._kept: Tensor | None = None  # keys, then values

    def extend(self, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Take in the next positions; returns those of all S so far, (B, K, S, E)."""
        start, self.length = self.length, self.length + k_BKTE.shape[2]
        if self._kept is None or self.length > self._kept.shape[3]:
            batch, heads, _, width = k_BKTE.shape
            room = k_BKTE.new_empty(2, batch, heads, 2 * self.length, width)
            if self._kept is not None:
                room[:, :, :, :start] = self._kept[:, :, :, :start]
            self._kept = room
        for kept, new in zip(self._kept, (k_BKTE, v_BKTE), strict=True):
            kept[:, :, start : self.length] = new
        return self._kept[0, :, :, : self.length], self._kept[1, :, :, : self.length]


class RMSNorm(nn.Module):
    """Scale to unit root mean square, then by a gain per channel."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Computed in float32 at least, whatever autocast does around it."""
        wide = x_BTD if x_BTD.dtype == torch.float64 else x_BTD.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x_BTD.dtype)


def rotary_tables(
    context: int, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, E) of the rotary positions, computed in float32 on the CPU, by one
    thread at a time: where two call a cosine first in one moment, MKL's may be off by 1e-4. On the
    meta device only their shape: torch imports its compiler to compute there, for seconds.
    """
    if torch.get_default_device().type == "meta":
        return torch.empty(context, head_dim), torch.empty(context, head_dim)
    frequency = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is not None:  # slow ones are turned slower still, for a longer context
        periods = scaling.context * frequency / (2 * math.pi)  # in the original context
        kept = ((periods - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
        frequency = (1 - kept) * frequency / scaling.factor + kept * frequency
    angle_TE = torch.outer(torch.arange(context, dtype=torch.float32), frequency).repeat(1, 2)
    with _COSINES:
        return angle_TE.cos(), angle_TE.sin()


def rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Turn each channel pair (i, i + E/2) by its position's angle."""
    left, right = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos_TE + torch.cat((-right, left), dim=-1) * sin_TE


class Attention(nn.Module):
    """Causal grouped-query attention. `o_proj` is one of the two writers to the stream."""

    def __init__(self, config: ModelConfig, narrow: Narrow | None):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        kv_dim = self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.dim, config.attention_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=config.qkv_bias)
        self.o_proj = writer(config.attention_dim, config.dim, narrow)
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.norm_eps)
        self.qk_norm = config.qk_norm

    def forward(
        self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor, past: KeyValues | None = None
    ) -> Tensor:
        """What attention adds to the stream; with a past, at the positions that follow it."""
        batch, context, _ = x_BTD.shape
        q_BHTE = self.q_proj(x_BTD).view(batch, context, self.heads, -1).transpose(1, 2)
        k_BKTE = self.k_proj(x_BTD).view(batch, context, self.kv_heads, -1).transpose(1, 2)
        v_BKTE = self.v_proj(x_BTD).view(batch, context, self.kv_heads, -1).transpose(1, 2)
        if self.qk_norm:
            q_BHTE, k_BKTE = self.q_norm(q_BHTE), self.k_norm(k_BKTE)
        q_BHTE, k_BKTE = rotate(q_BHTE, cos_TE, sin_TE), rotate(k_BKTE, cos_TE, sin_TE)
        is_causal = True
        if past is not None:
            assert context == 1 or not past.length, "a past grows by one position at a time"
            is_causal = not past.length  # a single new position sees all there are
            k_BKTE, v_BKTE = past.extend(k_BKTE, v_BKTE)
        group = self.heads // self.kv_heads
        k_BHTE = k_BKTE.repeat_interleave(group, dim=1) if group > 1 else k_BKTE
        v_BHTE = v_BKTE.repeat_interleave(group, dim=1) if group > 1 else v_BKTE
        mixed_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=is_causal)
        return self.o_proj(mixed_BHTE.transpose(1, 2).reshape(batch, context, -1))


class FeedForward(nn.Module):
    """SwiGLU. `down_proj` is the other writer to the stream."""

    def __init__(self, config: ModelConfig, narrow: Narrow | None):
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn, bias=False)
        self.down_proj = writer(config.ffn, config.dim, narrow)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Block(nn.Module):
    """One transformer block: attention and feed-forward, each behind a norm, each added back."""

    cos_TE: Tensor
    sin_TE: Tensor

    def __init__(self, config: ModelConfig, narrow: Narrow | None = None):
        super().__init__()
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config, narrow)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = FeedForward(config, narrow)
        scaling = RopeScaling.parse(config.rope_scaling)
        cos_TE, sin_TE = rotary_tables(config.context, config.head_dim, config.rope_theta, scaling)
        self.register_buffer("cos_TE", cos_TE, persistent=False)
        self.register_buffer("sin_TE", sin_TE, persistent=False)

    def forward(self, x_BTD: Tensor, past: KeyValues | None = None) -> Tensor:
        """The stream after this block. Sequences may be shorter than the context."""
        start = past.length if past is not None else 0
        end = start + x_BTD.shape[1]
        cos_TE, sin_TE = self.cos_TE[start:end], self.sin_TE[start:end]
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_TE, sin_TE, past)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


@dataclass(frozen=True)
class Llama:
    """A model as those who cut, place and plan it need to know it."""

    config: ModelConfig

    def layers(self, narrow: Narrow | None = None) -> list[LayerPlan]:
        """The whole model as a list: embedding, blocks, final norm, head."""
        config = self.config

        def embedding() -> nn.Module:
            if narrow is not None and not narrow.free_embedding:
                shape = config.vocab, config.dim
                return InSpaceEmbedding(shape, narrow.space, narrow.reparam)
            # Left empty: the start is the seed's, and torch's own costs a compiler on "meta".
            empty_VD = torch.empty(config.vocab, config.dim)
            return nn.Embedding.from_pretrained(empty_VD, freeze=False)

        def block(index: int) -> LayerPlan:
            held = narrow if narrow is not None and index < narrow.blocks else None
            return LayerPlan(self.block_name(index), partial(Block, config, held))

        head = partial(nn.Linear, config.dim, config.vocab, bias=False)
        return [
            LayerPlan(EMBEDDING, embedding),
            *map(block, range(config.layers)),
            LayerPlan("model.norm", partial(RMSNorm, config.dim, config.norm_eps)),
            LayerPlan(HEAD, head),
        ]

    def stage_layers(self, blocks: range, narrow: Narrow | None = None) -> list[LayerPlan]:
        """The layers of the stage that holds these blocks: the ends carry what is beyond."""
        first = blocks.start + 1 if blocks.start else 0  # the embedding is before all blocks
        last = None if blocks.stop == self.config.layers else blocks.stop + 1
        return self.layers(narrow)[first:last]

    def block_name(self, block: int) -> str:
        """The global name of a block."""
        return f"model.layers.{block}"

    @torch.no_grad()
    def initialise(self, name: str, parameter: Tensor, seed: int) -> None:
        """Fill a parameter from its global name and the seed alone, whatever the split."""
        if name.endswith((f"{UP}.weight", ".bias")):
            parameter.zero_()
        elif name.endswith(f"{DOWN}.weight"):
            drawn = torch.rand(parameter.shape, generator=generator_of(name, seed))
            parameter.copy_((2 * drawn - 1) / parameter.shape[1] ** 0.5)
        elif parameter.ndim < 2:
            parameter.fill_(1)
        else:
            spread = self.config.embed_std if name == f"{EMBEDDING}.weight" else MATRIX_STD
            if name.endswith(WRITERS):
                spread /= (2 * self.config.layers) ** 0.5
            drawn = torch.randn(parameter.shape, generator=generator_of(name, seed))
            parameter.copy_(drawn * spread)

    def logits(self, batch: int) -> int:
        """How many numbers the model says of a batch."""
        return batch * self.config.context * self.config.vocab

    def forward_flops(self, blocks: range, batch: int) -> float:
        """Operations of one forward of the stage with these blocks, with the head on the last."""
        config = self.config
        head = 2.0 * self.logits(batch) * config.dim if blocks.stop == config.layers else 0.0
        return len(blocks) * self._block_flops(batch * config.context) + head

    def backward_flops(self, blocks: range, batch: int, frozen: bool = False) -> float:
        """Of one backward: each product of the forward twice; if frozen only those of attention."""
        forward = self.forward_flops(blocks, batch)
        attention = len(blocks) * self._attention_flops(batch * self.config.context)
        return forward + (attention if frozen else forward)

    def kept_bytes(self, blocks: range, batch: int, width: int, computed: int) -> int:
        """Bytes that a forward of these blocks leaves behind for its backward; numbers have `width`
        bytes, and what matrices give `computed` (less under autocast): norms in and out, q k v as
        attention reads them and its result, four of the feed-forward.
        """
        config = self.config
        normed = 4 * config.dim
        if config.qk_norm:
            normed += 2 * (config.attention_dim + config.kv_heads * config.head_dim)
        computed_numbers = 2 * config.dim + 4 * config.attention_dim + 4 * config.ffn
        kept = normed * width + computed_numbers * computed
        return batch * config.context * len(blocks) * kept

    def probe(self, batch: int, most_flops: float) -> tuple[nn.Module, tuple[int, ...], float]:
        """To measure a machine: a block, a shape of so many operations at most, and how many."""
        config = self.config
        tokens = batch * config.context
        share = min(1.0, most_flops / self._block_flops(tokens))
        context = min(config.context, max(16, int(tokens * share)))
        sequences = max(1, int(tokens * share) // context)
        flops = self._block_flops(sequences * context)
        return self.layers()[1].make(), (sequences, context, config.dim), flops

    def describe(self) -> str:
        """The shape of the model in a few words."""
        config = self.config
        return f"{config.layers} blocks of width {config.dim}, context {config.context}"

    def _block_flops(self, tokens: int) -> float:
        config = self.config
        kv_dim = config.kv_heads * config.head_dim
        projections = 2 * config.dim * (config.attention_dim + kv_dim)
        matrices = projections + 3 * config.dim * config.ffn
        return 2.0 * tokens * matrices + self._attention_flops(tokens)

    def _attention_flops(self, tokens: int) -> float:
        """Scores and their use, each over half the context."""
        return 2.0 * tokens * self.config.context * self.config.attention_dim


def generator_of(name: str, seed: int) -> torch.Generator:
    """Random numbers for one parameter, whatever is made before it or beside it."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


architecture = Llama  # what is to be known of the model of a resolved config
