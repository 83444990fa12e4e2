"""`thinwire lab optimizer`: what keeps constrained weights in their subspace while they learn.

A small constrained transformer is trained in float32 by five optimizers that differ in three
things: whether the second moment is constant along the model dimension (SubspaceAdamW), whether
gradients of constrained parameters are projected onto S first, and whether the weights are put
back into S now and then. The share of the weights outside S is measured after every update.
"""

import argparse
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from thinwire.boundary import DenseBoundary
from thinwire.data import DataConfig, Order, prepare
from thinwire.engine.chain import Chain
from thinwire.engine.keeper import REPROJECT_EVERY
from thinwire.lab.decide import too_short
from thinwire.lab.experiment import Say
from thinwire.lab.outcome import Outcome, Row
from thinwire.model import token_loss
from thinwire.optim import SubspaceAdamW, learning_rate
from thinwire.optim.build import BETAS
from thinwire.paths import cache_folder
from thinwire.settings import Settings
from thinwire.subspace import Constraint

STAYS = 1e-6  # what the engine's optimizer must not drift past, in float32
LEAVES = 1e-2  # what standard AdamW drifts past
LEAST_STEPS = 500  # drift adds up: fewer steps cannot show that it stays small
AVERAGED = 20  # last steps whose mean is called the final loss


@dataclass(frozen=True)
class Arm:
    """One way to train the constrained weights; everything else is the same for all."""

    name: str
    subspace_adamw: bool
    project_gradients: bool
    reproject_every: int
    colour: str


BARE = Arm("SubspaceAdamW, projected gradients", True, True, 0, "#56B4E9")
ENGINE = Arm(
    f"the same, weights re-projected every {REPROJECT_EVERY} steps (the engine)",
    True, True, REPROJECT_EVERY, "#0072B2",
)  # fmt: skip
STANDARD = Arm("AdamW, projected gradients", False, True, 0, "#D55E00")
UNPROJECTED = Arm("SubspaceAdamW, gradients as they are", True, False, 0, "#E69F00")
NEITHER = Arm("AdamW, gradients as they are", False, False, 0, "#CC79A7")
ARMS = (BARE, ENGINE, STANDARD, UNPROJECTED, NEITHER)


@dataclass(frozen=True)
class Size:
    """The model of two blocks and how long it is trained."""

    dim: int = 64
    rank: int = 16
    vocab: int = 512
    context: int = 32
    batch: int = 8
    steps: int = 500


QUICK = Size(dim=32, rank=8, vocab=257, context=16, batch=4, steps=60)


@dataclass(frozen=True)
class Curve:
    """What one arm did, step by step."""

    losses: list[float]
    drifts: list[float]  # after each update, before any re-projection: the worst there is
    cut_error: float  # by how much the cut changes the trained model's loss

    @property
    def final_loss(self) -> float:
        """Mean training loss of the last steps."""
        return float(np.mean(self.losses[-AVERAGED:]))


def settings_of(size: Size, seed: int, device: str) -> Settings:
    """Two constrained blocks with a cut between them, in float32."""
    values: dict[str, dict[str, Any]] = {
        "run": {"seed": seed, "device": device, "precision": "fp32", "threads": 1},
        "model": {"layers": 2, "dim": size.dim, "heads": 4, "kv_heads": 2,
                  "ffn": size.dim * 3 // 2, "vocab": size.vocab, "context": size.context},
        "pipeline": {"stages": 2, "microbatches": 1, "schedule": "gpipe"},
        "boundary": {"mode": "subspace", "rank": size.rank, "basis_seed": seed,
                     "free_layers": 0},
        "codec": {"forward": "fp32", "backward": "fp32"},
        "train": {"steps": size.steps, "batch": size.batch},
    }  # fmt: skip
    return Settings.from_plain(values)


def stdlib_tokens(vocab: int) -> np.ndarray:
    """Python's standard library as token ids."""
    return prepare(DataConfig(), vocab, cache_folder()).train


def synthetic_tokens(vocab: int, seed: int, count: int = 20_000) -> np.ndarray:
    """Ids with something to learn: a few fixed walks through the vocabulary, often switched."""
    generator = np.random.Generator(np.random.PCG64(seed))
    walks = np.stack([generator.permutation(vocab) for _ in range(3)])
    switches = generator.random(count) < 0.2
    choices = generator.integers(len(walks), size=count)
    ids, walk = np.zeros(count, dtype=np.int64), 0
    for i in range(1, count):
        walk = int(choices[i]) if switches[i] else walk
        ids[i] = walks[walk][ids[i - 1]]
    return ids


def held_by(chain: Chain) -> Constraint:
    """The constraint on all stages of a chain together."""
    constraints = [chain.builder.constraint(stage) for stage in chain.stages]
    assert chain.builder.space is not None
    held = [entry for found in constraints if found is not None for entry in found.held]
    return Constraint(chain.builder.space.basis_DK, held)


def build_optimizer(
    parameters: list[nn.Parameter], constraint: Constraint, subspace_adamw: bool, decay: float
) -> torch.optim.Optimizer:
    """The same groups for both kinds; `axis` is what only SubspaceAdamW reads."""
    held = {entry.parameter: entry.axis for entry in constraint.held}
    free = [p for p in parameters if p not in held]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in held if held[p] == 0], "weight_decay": decay, "axis": 0},
        {"params": [p for p in held if held[p] == 1], "weight_decay": decay, "axis": 1},
        {"params": [p for p in free if p.ndim > 1], "weight_decay": decay, "axis": None},
        {"params": [p for p in free if p.ndim < 2], "weight_decay": 0.0, "axis": None},
    ]
    kind = SubspaceAdamW if subspace_adamw else torch.optim.AdamW
    return kind(groups, betas=BETAS)


def train_arm(arm: Arm, settings: Settings, tokens: np.ndarray) -> Curve:
    """Train from the same start on the same tokens; nothing but the arm's choices differs."""
    chain = Chain(settings)
    constraint = held_by(chain)
    parameters = [p for stage in chain.stages for p in stage.parameters()]
    decay, clip = settings.optim.weight_decay, settings.optim.clip
    optimizer = build_optimizer(parameters, constraint, arm.subspace_adamw, decay)
    model, train = settings.model, settings.train
    order = Order(tokens, model.context, train.batch, 1, settings.run.seed)
    losses, drifts = [], []
    for step in range(train.steps):
        batch = order.microbatch(step, 0)
        inputs_BT = torch.from_numpy(batch.inputs_BT).to(chain.device)
        targets_BT = torch.from_numpy(batch.targets_BT).to(chain.device)
        loss = token_loss(chain.logits(inputs_BT), targets_BT)
        loss.backward()
        if arm.project_gradients:
            constraint.project_gradients()
        nn.utils.clip_grad_norm_(parameters, clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings.optim, step, train.steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        drifts.append(constraint.drift())
        if arm.reproject_every and (step + 1) % arm.reproject_every == 0:
            constraint.project_weights()
    return Curve(losses, drifts, cut_error(chain, inputs_BT, targets_BT))


@torch.no_grad()
def cut_error(chain: Chain, inputs_BT: Tensor, targets_BT: Tensor) -> float:
    """Relative change of the loss by the chain's cuts, which are left open afterwards."""
    cut = float(token_loss(chain.logits(inputs_BT), targets_BT))
    for left, right in pairwise(chain.stages):
        left.outgoing = right.incoming = DenseBoundary(chain.settings.model.dim)
    uncut = float(token_loss(chain.logits(inputs_BT), targets_BT))
    return abs(cut - uncut) / uncut


def run(options: argparse.Namespace, say: Say) -> Outcome:
    """Train all arms and compare their drift with the aims."""
    quick, seed, device = options.quick, options.seed, options.device
    size = QUICK if quick else Size()
    tokens = synthetic_tokens(size.vocab, seed) if quick else stdlib_tokens(size.vocab)
    settings = settings_of(size, seed, device)
    curves = {arm: train_arm(arm, settings, tokens) for arm in ARMS}
    rows: list[Row] = [
        {
            "arm": arm.name,
            "largest drift": max(curve.drifts),
            "last drift": curve.drifts[-1],
            "first loss": curve.losses[0],
            "final loss": curve.final_loss,
            "loss changed by the cut": curve.cut_error,
        }
        for arm, curve in curves.items()
    ]
    engine, standard, bare = (max(curves[arm].drifts) for arm in (ENGINE, STANDARD, BARE))
    holds = engine <= STAYS and standard > LEAVES
    text = "a synthetic stream" if quick else "Python's standard library"
    return Outcome(
        name="optimizer",
        question="Which optimizer keeps constrained weights in their subspace while they learn?",
        verdict=f"Over {size.steps} float32 steps the engine's optimizer drifts by {engine:.1e} at "
        f"most (limit {STAYS:.0e}). Standard AdamW drifts by {standard:.1e}, although its "
        f"gradients are projected too. Without re-projection rounding adds up to {bare:.1e}.",
        holds=holds,
        too_small=too_short(size.steps, LEAST_STEPS) if holds else "",  # a drift seen is seen
        rows=rows,
        figure=draw(curves),
        notes=[
            "Drift is the largest ||W - U U^T W|| / ||W|| of any constrained parameter, measured "
            "after every update and before any re-projection.",
            f"Two blocks, both constrained, with a cut between them; width {size.dim}, rank "
            f"{size.rank}, {size.batch} sequences of {size.context} tokens of {text}; the same "
            "start, tokens, clipping and learning rates for all. Losses are of training, the "
            f"final one a mean of {AVERAGED} steps.",
            "A low training loss does not excuse drift: weights outside the subspace are free "
            "weights, but what they write there is lost at every cut, so that the model as a "
            "whole is not the model in stages (last column).",
        ],
    )


def draw(curves: dict[Arm, Curve]) -> Figure:
    """The drift of each arm over the steps, on a log scale."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.add_subplot()
    for arm, curve in curves.items():
        steps = range(1, len(curve.drifts) + 1)
        style = "-" if arm.subspace_adamw else "--"
        axes.plot(steps, curve.drifts, style, color=arm.colour, linewidth=2, label=arm.name)
    for level, words in ((STAYS, "must stay below"), (LEAVES, "leaves the subspace")):
        axes.axhline(level, color="#808080", linestyle=":", linewidth=1)
        axes.text(len(steps), level * 1.15, words, color="#606060", ha="right", va="bottom")
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("drift: share of the weights outside the subspace")
    axes.grid(color="#E8E8E8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("Drift of constrained weights out of their subspace")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure
