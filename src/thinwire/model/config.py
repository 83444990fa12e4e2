"""`[model]`, `[boundary]`, `[lora]` and `[optim]`: the settings of what is inside autograd, which
combinations can work, and the learning rate as a pure function of the step. Needs no torch.
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

from thinwire.errors import ConfigError
from thinwire.typed import nearest, option

SIZES = ("layers", "dim", "heads", "kv_heads", "ffn", "vocab", "context")
MATRIX_STD = 0.02  # of starting weights
CUSTOM = "custom"  # a preset without sizes: all stand in the file, as for imported models
KIND = "llama3"
_NUMBER = r"(\d[\d_]*(?:\.\d*)?(?:e[+-]?\d+)?)"
_FORM = re.compile(rf"{KIND}\(factor={_NUMBER},low={_NUMBER},high={_NUMBER},context=(\d[\d_]*)\)")

NARROW = ("subspace", "reparam", "projected")
CONSTRAINED = ("subspace", "reparam")
PER_STAGE, EMBEDDING = "per-stage", "embedding"
_OUTSIDE = "all stages must know of each token what lies outside the subspace"
ANCHORS = {
    "dense": (("none",), "it has no basis"),
    "projected": (("none", PER_STAGE), "its weights write outside the basis too"),
    **dict.fromkeys(CONSTRAINED, (("fixed", EMBEDDING), _OUTSIDE)),
}
"""What boundary.anchor may be in each mode, "auto" being the first, and why nothing else."""
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices of a block that an adapter can stand beside."""
AUTO_WARMUP = 20  # steps, in a run of at least twice as many
NOTICEABLE_CHANGE = 0.05  # of a learning rate, as a share
EQUAL_SHARES = {"matrix_lr": 1.0, "table_lr": 1.0, "head_lr": 1.0}
MUON_SHARES = {"matrix_lr": 3.0, "table_lr": 100.0, "head_lr": 10.0}
SHORT_RUN = 1000  # steps; longer runs want slower tables
LONG_MUON_SHARES = MUON_SHARES | {"table_lr": 30.0}
WSD_DECAY_SHARE = 0.2  # the last share of the steps in which WSD comes down to zero

_PRESETS = {  # layers, dim, heads, kv_heads, ffn, vocab, context
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
PRESETS = {name: dict(zip(SIZES, sizes, strict=True)) for name, sizes in _PRESETS.items()}


@dataclass(frozen=True)
class ModelConfig:
    """`[model]`: a Llama-style decoder. A key left at 0 takes the preset's value."""

    preset: str = option(
        "tiny",
        "model size to start from; custom = every size stands in the file",
        (*PRESETS, CUSTOM),
    )
    layers: int = option(
        0, "number of blocks, which are split over the stages; 0 = the preset's", most=10_000
    )
    dim: int = option(0, "width of the residual stream; 0 = the preset's", most=2**20)
    heads: int = option(0, "attention heads; 0 = the preset's", most=2**16)
    kv_heads: int = option(
        0, "key/value heads, shared by groups of heads (GQA); 0 = the preset's", most=2**16
    )
    ffn: int = option(0, "hidden width of the SwiGLU feed-forward; 0 = the preset's", most=2**22)
    vocab: int = option(
        0, "size of the vocabulary, at least the tokenizer's; 0 = the preset's", most=2**24
    )
    context: int = option(0, "tokens per training sequence; 0 = the preset's", most=2**24)
    embed_std: float = option(
        0.0, "standard deviation of the embedding at the start; 0 = 1 with muon, else 0.02"
    )
    rope_theta: float = option(500000.0, "base of the rotary position encoding", above=0)
    norm_eps: float = option(1e-5, "epsilon of the RMS norms", above=0)
    head_dim: int = option(0, "width of one attention head; 0 = dim / heads", most=2**16)
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
        """The same, checked, with every 0 filled from the preset, and the embedding's spread."""
        filled: dict[str, Any] = {k: getattr(self, k) or size for k, size in self.shape.items()}
        missing = [f"model.{key}" for key, size in filled.items() if not size]
        if missing:
            raise ConfigError(
                f'model.preset = "{self.preset}" has no sizes of its own: set {", ".join(missing)}'
            )
        filled["embed_std"] = self.embed_std or embed_std
        filled["rope_scaling"] = str(RopeScaling.parse(self.rope_scaling) or "")
        heads, kv_heads = filled["heads"], filled["kv_heads"]
        filled["head_dim"] = self.head_dim or filled["dim"] / heads
        if filled["head_dim"] % 2:
            raise ConfigError(
                f"model.head_dim = {filled['head_dim']:g} must be even, for rotary positions turn "
                f"pairs of channels: it is model.dim = {filled['dim']} / model.heads = {heads} "
                "unless it is set"
            )
        if heads % kv_heads:
            raise ConfigError(
                f"model.heads = {heads} must be a multiple of model.kv_heads = {kv_heads}"
            )
        filled["head_dim"] = int(filled["head_dim"])
        return dataclasses.replace(self, **filled)

    def unlike_preset(self) -> dict[str, tuple[int, int]]:
        """Sizes that are set and differ from the preset's, each with the preset's after it."""
        return {
            key: (getattr(self, key), size)
            for key, size in self.shape.items()
            if size and getattr(self, key) not in (0, size)
        }


@dataclass(frozen=True)
class RopeScaling:
    """Slow rotations, made slower still by `factor`: those of fewer than `low` periods in the
    original context. With more than `high` they are unchanged, and between them the two are mixed.
    """

    factor: float
    low: float
    high: float
    context: int

    @classmethod
    def parse(cls, text: str) -> "RopeScaling | None":
        """Read the setting; None for an empty one."""
        if not text:
            return None
        if found := _FORM.fullmatch("".join(text.split())):
            factor, low, high = map(float, found.groups()[:3])
            scaling = cls(factor, low, high, int(found[4]))
            if 1 <= factor < math.inf and 0 < low < high < math.inf and scaling.context > 0:
                return scaling
        raise ConfigError(
            f'model.rope_scaling = "{text}" must be empty or look like '
            f'"{cls(8.0, 1.0, 4.0, 8192)}": factor at least 1, low below high, both above 0, and '
            "the original context"
        )

    def __str__(self) -> str:
        """The setting that `parse` reads back."""
        return (
            f"{KIND}(factor={self.factor:.17g}, low={self.low:.17g}, high={self.high:.17g}, "
            f"context={self.context})"
        )


@dataclass(frozen=True)
class BoundaryConfig:
    """`[boundary]`: what crosses the cut."""

    mode: str = option(
        "dense",
        "dense: send whole activations; subspace: constrain the weights to a subspace; reparam: "
        "the same by parametrization; projected: free weights, compress at the cut only",
        ("dense", *NARROW),
    )
    rank: int = option(
        0, "dimension of the subspace, less than model.dim; 0 = from ratio, or for dense"
    )
    ratio: float = option(
        0.0, "with rank = 0: the rank is model.dim / ratio, rounded down", least=1, auto=0
    )
    basis_seed: int = option(0, "seed of the basis and of the fixed token table", least=None)
    basis_update_every: int = option(0, "steps between updates of the shared basis; 0 = never")
    basis_rate: float = option(
        0.5, "step size of such an update; 1 is about one power iteration", above=0
    )
    anchor: str = option(
        "auto",
        "what stages know of a token and need not send: none; fixed (subspace, reparam), a random "
        "table; per-stage (projected), a trainable table of each stage's own; embedding (subspace, "
        "reparam), the model's own, of which all stages have a copy; auto = fixed for subspace and "
        "reparam, none for projected",
        ("auto", "none", "fixed", PER_STAGE, EMBEDDING),
    )
    row_tokens: int = option(
        16,
        "anchor = embedding: a row is updated on all stages once its token was seen so often",
        least=1,
    )
    row_steps: int = option(
        100, "anchor = embedding: steps after which a row is updated if it was seen at all", least=1
    )
    table: int = option(
        0, "anchor = per-stage: width of the table, widened by a matrix; 0 = model.dim"
    )
    bound: float = option(
        0.0,
        "projected: the most gradient that a layer sends back for one token, as a multiple of the "
        "mean token's; 0 = no bound",
        least=1,
        auto=0,
    )
    free_layers: int = option(
        -1, "subspace, reparam: last blocks left unconstrained; -1 = those of the last stage"
    )

    @property
    def is_constrained(self) -> bool:
        """Whether weights are held in the subspace (by projection or by construction)."""
        return self.mode in CONSTRAINED

    @property
    def shares_embedding(self) -> bool:
        """Whether every stage has a copy of the embedding, which all of them train together."""
        return self.anchor == EMBEDDING

    @property
    def own_tables(self) -> bool:
        """Whether every stage has a trainable token table of its own."""
        return self.anchor == PER_STAGE

    @property
    def trains_tables(self) -> bool:
        """Whether what stages know of a token is trained, in a table of each or in copies."""
        return self.own_tables or self.shares_embedding

    def resolved(self, dim: int, split: list[range]) -> "BoundaryConfig":
        """The same config with `auto` and -1 filled in, refused if it cannot work."""
        here = f'with boundary.mode = "{self.mode}"'
        anchors, why = ANCHORS[self.mode]
        if self.anchor not in ("auto", *anchors):
            raise ConfigError(
                f'boundary.anchor = "{self.anchor}" cannot work {here}: {why}; set it to '
                f'"{anchors[-1]}" or "auto"'
            )
        is_narrow, last_stage = self.mode in NARROW, len(split[-1])
        idle = {
            "rank": not is_narrow and self.rank not in (0, dim),
            "basis_update_every": not is_narrow and self.basis_update_every,
            "free_layers": not self.is_constrained and self.free_layers > 0,
            "bound": self.mode != "projected" and self.bound,
            f'table (without boundary.anchor = "{PER_STAGE}")': self.table and not self.own_tables,
        }
        for key in (key for key, is_set in idle.items() if is_set):
            raise ConfigError(f"boundary.{key} has no meaning {here}: leave it at 0")
        if self.shares_embedding and self.basis_update_every:
            raise ConfigError(
                'boundary.basis_update_every cannot work with boundary.anchor = "embedding": leave '
                "it at 0"
            )
        by_ratio = max(1, int(dim / self.ratio)) if is_narrow and self.ratio else 0
        rank, table = self.rank or by_ratio, (self.table or dim) if self.own_tables else 0
        most = dim if self.own_tables else dim - 1  # the full width with tables: a control
        if is_narrow and not 0 < rank <= most:
            why = "at full width nothing is saved, use dense" if rank else "or set boundary.ratio"
            raise ConfigError(f"boundary.rank = {rank} must lie between 1 and {most} {here}: {why}")
        if table > dim:
            raise ConfigError(
                f"boundary.table = {table} must lie between 1 and model.dim = {dim}: a wider "
                "table holds nothing more"
            )
        free = last_stage if self.free_layers == -1 else self.free_layers
        if free > last_stage:
            raise ConfigError(
                f"boundary.free_layers = {free}, but only the {last_stage} blocks of the last "
                "stage may be free: what a block below the last cut writes must lie in the subspace"
            )
        return dataclasses.replace(
            self,
            rank=rank,
            anchor=anchors[0] if self.anchor == "auto" else self.anchor,
            table=table,
            free_layers=free if self.is_constrained else 0,
        )


@dataclass(frozen=True)
class LoraConfig:
    """`[lora]`: what is trained while the model itself stays frozen."""

    rank: int = option(
        0,
        "rank of the adapters (LoRA): they are trained, and the model's own weights stay as they "
        "are; 0 = no adapters, all weights are trained",
        most=2**16,
    )
    alpha: float = option(16.0, "what an adapter adds is scaled by alpha / rank", above=0)
    targets: list[str] = option(  # noqa: RUF009 -- option makes a fresh list each time
        list(TARGETS), "matrices of each block that get an adapter"
    )

    @property
    def scale(self) -> float:
        """The factor of what an adapter adds."""
        return self.alpha / self.rank

    def check(self, boundary: BoundaryConfig) -> None:
        """Refuse what cannot work."""
        if not self.rank:
            return
        for place, target in enumerate(self.targets):
            if target not in TARGETS:
                near = nearest(target, TARGETS)
                raise ConfigError(f'lora.targets[{place}] = "{target}" is not allowed{near}')
        if not self.targets:
            raise ConfigError(
                f"lora.targets is empty, but lora.rank = {self.rank}: name the matrices that get "
                f"an adapter ({', '.join(TARGETS)}), or set lora.rank = 0"
            )
        if boundary.shares_embedding:
            raise ConfigError(
                f"lora.rank = {self.rank} leaves the embedding frozen, so "
                'boundary.anchor = "embedding", which trains it on all stages, has no meaning; set '
                'it to "auto"'
            )
        if boundary.is_constrained and boundary.basis_update_every:
            raise ConfigError(
                f"boundary.basis_update_every = {boundary.basis_update_every} cannot work with "
                f'lora.rank = {self.rank} and boundary.mode = "{boundary.mode}": a move of the '
                "basis cuts off what lies outside it, and frozen weights could not learn that "
                "again; set it to 0"
            )


@dataclass(frozen=True)
class OptimConfig:
    """`[optim]`: the optimizer and its learning rate over the run."""

    name: str = option(
        "adamw", "adamw; muon (matrices of the blocks; adamw for the rest)", ("adamw", "muon")
    )
    lr: float = option(3e-3, "peak learning rate", above=0)
    weight_decay: float = option(0.1, "decoupled weight decay of matrices")
    warmup: int = option(-1, "steps of linear warmup; -1 = 20, or half of a shorter run")
    schedule: str = option(
        "cosine", "learning-rate schedule after the warmup", ("cosine", "linear", "wsd", "constant")
    )
    floor: float = option(0.1, "cosine: final learning rate as a fraction of lr", most=1)
    matrix_lr: float = option(
        -1.0, "muon: learning rate of the blocks' matrices as a fraction of lr; -1 = 3"
    )
    table_lr: float = option(
        -1.0,
        "learning rate of token tables (the embedding, those of cuts) as a fraction of lr; -1 = "
        "100 with muon (30 in more than 1,000 steps), else 1",
    )
    head_lr: float = option(
        -1.0, "learning rate of the output head as a fraction of lr; -1 = 10 with muon, else 1"
    )
    clip: float = option(1.0, "clip the global gradient norm to this; 0 = no clipping")

    def resolved(self, steps: int) -> "OptimConfig":
        """The same config with the warmup and the shares filled in for a run of `steps` steps."""
        warmup = min(AUTO_WARMUP, steps // 2) if self.warmup == -1 else self.warmup
        if warmup > steps:
            raise ConfigError(
                f"optim.warmup = {warmup} is longer than train.steps = {steps}: the learning rate "
                "would never reach its peak"
            )
        return dataclasses.replace(self.with_shares(steps), warmup=warmup)

    @property
    def embed_std(self) -> float:
        """The spread of an embedding at the start that was best with this optimizer."""
        return 1.0 if self.name == "muon" else 0.02

    def with_shares(self, steps: int = 0) -> "OptimConfig":
        """The same config with every rate that is a share of lr filled in."""
        muon = LONG_MUON_SHARES if steps > SHORT_RUN else MUON_SHARES
        auto = muon if self.name == "muon" else EQUAL_SHARES
        filled: dict[str, Any] = {k: share for k, share in auto.items() if getattr(self, k) == -1}
        return dataclasses.replace(self, **filled)


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of update number `step` (from 0) in a run of `steps` updates."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    span = max(1, steps - config.warmup)
    progress = min(1.0, (step - config.warmup) / span)
    if config.schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * progress))
        return config.lr * (config.floor + (1 - config.floor) * share)
    if config.schedule == "linear":
        return config.lr * (1 - progress)
    if config.schedule == "wsd":
        return config.lr * min(1.0, (1 - progress) / WSD_DECAY_SHARE)
    return config.lr


def rate_changes(
    before: OptimConfig, steps_before: int, now: OptimConfig, steps_now: int, done: int
) -> list[str]:
    """What becomes of the learning rate after `done` updates, and of what are shares of it."""
    due, notes = learning_rate(before, done, steps_before), []
    next_rate = learning_rate(now, done, steps_now)
    if not math.isclose(due, next_rate, rel_tol=NOTICEABLE_CHANGE):
        last = learning_rate(before, max(0, done - 1), steps_before)
        notes.append(
            f"the learning rate was {last:.3g} at the checkpoint and continues at {next_rate:.3g}: "
            "its schedule is different (optim.lr, optim.warmup, optim.schedule or train.steps "
            "changed)"
        )
    both = {key: (getattr(before, key), getattr(now, key)) for key in EQUAL_SHARES}
    told = [
        f"optim.{k} was {old:g} and is {new:g} now" for k, (old, new) in both.items() if old != new
    ]
    return [*notes, ", ".join(told)] if told else notes
