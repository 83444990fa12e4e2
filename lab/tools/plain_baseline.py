"""The dense baseline in a trainer that is not thinwire's: one plain torch loop, as in nanoGPT.

It shows whether thinwire's dense runs are a strong baseline. The model is a stock Llama (of
transformers, or the one below where that is not installed), batches are windows of the text, drawn
by chance or each of them once, and the optimizers are torch's own. Of thinwire come the shape of
the model, the prepared text and the validation windows, so that the losses compare.

    python lab/tools/plain_baseline.py --optimizer muon --lr 6e-4 --set model.preset=160m
"""

import argparse
import importlib.util
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.engine.build import choose_device
from thinwire.engine.feed import Feed
from thinwire.report import PlainDisplay
from thinwire.run.start import prepare_data
from thinwire.settings import Settings, apply_override
from thinwire_lab.arms import small_settings

POINTS = 10  # of the curve
FLOOR = 0.1  # the last learning rate as a share of the peak
BETAS = (0.9, 0.95)


class Block(nn.Module):
    """Attention with rotary positions, then a gated feed-forward; names as in transformers."""

    def __init__(self, shape: Any):
        super().__init__()
        self.heads, self.kv_heads, width = shape.heads, shape.kv_heads, shape.dim // shape.heads
        self.input_layernorm = nn.RMSNorm(shape.dim, shape.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.dim, shape.norm_eps)
        self.self_attn = nn.ModuleDict({
            "q_proj": nn.Linear(shape.dim, shape.heads * width, bias=False),
            "k_proj": nn.Linear(shape.dim, shape.kv_heads * width, bias=False),
            "v_proj": nn.Linear(shape.dim, shape.kv_heads * width, bias=False),
            "o_proj": nn.Linear(shape.heads * width, shape.dim, bias=False),
        })  # fmt: skip
        self.mlp = nn.ModuleDict({
            "gate_proj": nn.Linear(shape.dim, shape.ffn, bias=False),
            "up_proj": nn.Linear(shape.dim, shape.ffn, bias=False),
            "down_proj": nn.Linear(shape.ffn, shape.dim, bias=False),
        })  # fmt: skip

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The stream after this block."""
        attention, mlp, h = self.self_attn, self.mlp, self.input_layernorm(x)
        q, k, v = (
            attention[name](h).unflatten(-1, (heads, -1)).transpose(1, 2)
            for name, heads in (
                ("q_proj", self.heads), ("k_proj", self.kv_heads), ("v_proj", self.kv_heads),
            )
        )  # fmt: skip
        q, k = (turned(each, cos, sin).to(v.dtype) for each in (q, k))
        k, v = (each.repeat_interleave(self.heads // self.kv_heads, dim=1) for each in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attention["o_proj"](mixed.transpose(1, 2).flatten(2))
        h = self.post_attention_layernorm(x)
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](h)) * mlp["up_proj"](h))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: channel i pairs with channel i + half."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class PlainLlama(nn.Module):
    """A Llama in plain torch; its state dict is that of transformers."""

    def __init__(self, shape: Any):
        super().__init__()
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(shape.vocab, shape.dim),
            "layers": nn.ModuleList(Block(shape) for _ in range(shape.layers)),
            "norm": nn.RMSNorm(shape.dim, shape.norm_eps),
        })  # fmt: skip
        self.lm_head = nn.Linear(shape.dim, shape.vocab, bias=False)
        half = shape.dim // shape.heads // 2
        frequency = shape.rope_theta ** (-torch.arange(half) / half)
        angle = torch.outer(torch.arange(shape.context), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for matrix in self.parameters():
            if matrix.ndim > 1:
                nn.init.normal_(matrix, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token."""
        x = self.model["embed_tokens"](ids)
        for block in self.model["layers"]:
            x = block(x, self.cos, self.sin)
        return self.lm_head(self.model["norm"](x))


class StockLlama(nn.Module):
    """LlamaForCausalLM of transformers, with logits as its output."""

    def __init__(self, shape: Any):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=shape.vocab,
                hidden_size=shape.dim,
                intermediate_size=shape.ffn,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.kv_heads,
                max_position_embeddings=shape.context,
                rms_norm_eps=shape.norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
                rope_theta=shape.rope_theta,  # the name that versions before 5 read
                tie_word_embeddings=False,
                use_cache=False,
            )
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token."""
        return self.llama(input_ids=ids).logits


def optimizers(model: nn.Module, options: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters, or torch's Muon for the matrices of the blocks and AdamW for the
    rest. Each group has its share of the learning rate.
    """
    named = dict(model.named_parameters())
    kinds: dict[str, list[nn.Parameter]] = {"matrix": [], "table": [], "head": [], "gain": []}
    for name, parameter in named.items():
        kind = "table" if "embed_tokens" in name else "head" if "lm_head" in name else "matrix"
        kinds["gain" if parameter.ndim < 2 else kind].append(parameter)
    shares = {"matrix": options.matrix_lr, "table": options.table_lr, "head": options.head_lr}
    groups = {
        kind: {
            "params": parameters,
            "share": shares.get(kind, 1.0),
            "weight_decay": 0.0 if kind == "gain" else options.weight_decay,
        }
        for kind, parameters in kinds.items()
    }
    if options.optimizer == "adamw":
        return [torch.optim.AdamW(list(groups.values()), lr=options.lr, betas=BETAS)]
    if not hasattr(torch.optim, "Muon"):
        sys.exit(f"torch {torch.__version__} has no Muon: it came with torch 2.9")
    matrices = groups.pop("matrix")
    muon = torch.optim.Muon([matrices], lr=options.lr, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(list(groups.values()), lr=options.lr, betas=BETAS)]


def rate(step: int, options: argparse.Namespace) -> float:
    """Linear warmup, then a cosine down to a tenth, as a share of the peak."""
    if step < options.warmup:
        return (step + 1) / options.warmup
    progress = (step - options.warmup) / max(1, options.steps - options.warmup)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))


def batches_of(
    windows: str, tokens: int, context: int, batch: int, draw: torch.Generator
) -> Iterator[list[int]]:
    """Where the windows of each batch begin, without end.

    "random" draws every beginning by itself, so that parts of a text come twice before others come
    once; "once" takes the windows that lie side by side in a shuffled order, all before any again.
    """
    count = (tokens - 1) // context
    if count < 1:
        sys.exit(f"the text has {tokens} tokens: too few for one window of {context} and a target")

    def shuffled() -> Iterator[int]:
        while True:
            yield from (torch.randperm(count, generator=draw) * context).tolist()

    each_once = shuffled()
    while True:
        if windows == "once":
            yield list(itertools.islice(each_once, batch))
        else:
            yield torch.randint(tokens - context, (batch,), generator=draw).tolist()


def train(options: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Train and validate; returns the figures."""
    device = choose_device(settings.run.device, 0)
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    corpus = prepare_data(settings, PlainDisplay(sys.stderr))
    feed = Feed(corpus, settings, device)
    kind = {"transformers": StockLlama, "torch": PlainLlama}[options.model]
    whole: nn.Module = kind(settings.model).to(device)
    table = next(p for name, p in whole.named_parameters() if "embed_tokens" in name)
    nn.init.normal_(table, std=options.embed_std)
    model = torch.compile(whole) if settings.run.compile else whole
    steppers = optimizers(whole, options)
    text, context, batch = corpus.train, settings.model.context, settings.train.batch
    draw = torch.Generator().manual_seed(options.seed)
    order = batches_of(options.windows, len(text), context, batch, draw)
    bf16 = settings.run.precision == "bf16"

    def loss_of(ids: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            logits = model(ids)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def validation() -> float:
        batches = [feed.validation(number) for number in range(feed.validation_count)]
        return sum(float(loss_of(b.inputs, b.targets)) for b in batches) / len(batches)

    curve, start = [], time.perf_counter()
    due = {options.steps, *range(0, options.steps, max(1, options.steps // POINTS))}
    for step in range(options.steps + 1):
        if step in due:
            curve.append((step * batch * context, validation()))
            print(f"step {step:6}  validation loss {curve[-1][1]:.4f}", file=sys.stderr)
        if step == options.steps:
            break
        starts = next(order)
        rows = [torch.from_numpy(text[at : at + context + 1].astype("int64")) for at in starts]
        windows = torch.stack(rows).to(device)
        loss_of(windows[:, :-1], windows[:, 1:]).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        for stepper in steppers:
            for group in stepper.param_groups:
                group["lr"] = options.lr * group["share"] * rate(step, options)
            stepper.step()
            stepper.zero_grad()
    return {
        "model": options.model,
        "optimizer": options.optimizer,
        "windows": options.windows,
        "lr": options.lr,
        "seed": options.seed,
        "parameters": sum(p.numel() for p in whole.parameters()),
        "tokens": options.steps * batch * context,
        "loss": curve[-1][1],
        "curve": curve,
        "seconds": time.perf_counter() - start,
        "data": corpus.fingerprint,
        "torch": torch.__version__,
    }


def main(arguments: list[str] | None = None) -> None:
    """Train, and print the figures as one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    has_stock = importlib.util.find_spec("transformers") is not None
    parser.add_argument("--model", choices=("transformers", "torch"),
                        default="transformers" if has_stock else "torch")  # fmt: skip
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--windows", choices=("random", "once"), default="random",
                        help="draw them by chance, or take each before any again")  # fmt: skip
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    for kind in ("matrix", "table", "head"):
        told = f"learning rate of the {kind} parameters as a share of --lr"
        parser.add_argument(f"--{kind}-lr", type=float, default=1.0, help=told)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--embed-std", type=float, default=0.02)
    parser.add_argument("--log", type=Path, help="append the figures to this file too")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value",
                        help="model, data, train.batch, train.eval_batches, run.device and so on, "
                             "as for thinwire lab convergence")  # fmt: skip
    options = parser.parse_args(arguments)
    values = {key: dict(section) for key, section in small_settings("small").items()}
    if any(override.startswith("model.preset=") for override in options.set):
        values["model"] = {}
    for override in options.set:
        apply_override(values, override)
    line = json.dumps(train(options, Settings.from_plain(values)))
    print(line)
    if options.log:
        with options.log.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
