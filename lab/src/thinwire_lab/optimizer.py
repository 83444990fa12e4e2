"""`thinwire lab optimizer`: what keeps constrained weights in their subspace while they learn.

A small constrained transformer is trained in float32 in five ways: by SubspaceAdamW or AdamW, with
gradients of constrained parameters projected onto S first or not, and with weights put back into S
now and then or not. The share of the weights outside S is measured after every update.
"""

import argparse
import statistics
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.data import DataConfig, Order, prepare
from thinwire.engine.keeper import REPROJECT_EVERY
from thinwire.model import Constraint, DenseBoundary, SubspaceAdamW, learning_rate, token_loss
from thinwire.model.optim import BETAS
from thinwire.paths import cache_folder
from thinwire.settings import Settings
from thinwire_lab.arms import Values, own_settings
from thinwire_lab.chain import Chain
from thinwire_lab.decide import too_short
from thinwire_lab.experiment import Say, words
from thinwire_lab.outcome import Outcome, Row
from thinwire_lab.plots import Line, Panel

STAYS = 1e-6  # what the engine's optimizer must not drift past, in float32
LEAVES = 1e-2  # what standard AdamW drifts past
LEAST_STEPS = 500  # drift adds up: fewer steps cannot show that it stays small
AVERAGED = 20  # last steps whose mean is called the final loss


@dataclass(frozen=True)
class Way:
    """One way to train the constrained weights; everything else is the same for all."""

    name: str
    subspace_adamw: bool
    project_gradients: bool
    reproject_every: int = 0


BARE = Way("SubspaceAdamW, projected gradients", True, True)
_ENGINE = f"the same, weights re-projected every {REPROJECT_EVERY} steps (the engine)"
ENGINE = Way(_ENGINE, True, True, REPROJECT_EVERY)
STANDARD = Way("AdamW, projected gradients", False, True)
UNPROJECTED = Way("SubspaceAdamW, gradients as they are", True, False)
NEITHER = Way("AdamW, gradients as they are", False, False)
WAYS = (BARE, ENGINE, STANDARD, UNPROJECTED, NEITHER)


@dataclass(frozen=True)
class Curve:
    """What one way led to, step by step."""

    losses: list[float]
    drifts: list[float]  # after each update, before any re-projection: the worst there is
    cut_error: float  # by how much the cut changes the trained model's loss

    @property
    def final_loss(self) -> float:
        """Mean training loss of the last steps."""
        return statistics.fmean(self.losses[-AVERAGED:])


def settings_of(quick: bool, seed: int, device: str) -> Settings:
    """Two constrained blocks with a cut between them, in float32."""
    chosen: Values = {"run": {"seed": seed, "device": device}, "boundary": {"basis_seed": seed}}
    return own_settings("optimizer", chosen, quick)


def synthetic_tokens(vocab: int, seed: int, count: int = 20_000) -> np.ndarray:
    """Ids with something to learn: each is one of three that follow the id before it."""
    generator = np.random.Generator(np.random.PCG64(seed))
    walks = np.stack([generator.permutation(vocab) for _ in range(3)])
    ids = np.zeros(count, dtype=np.int64)
    for i, walk in enumerate(generator.choice(3, count - 1, p=[0.8, 0.1, 0.1]), 1):
        ids[i] = walks[walk][ids[i - 1]]
    return ids


def constraint_of(chain: Chain) -> Constraint:
    """The constraint on all stages of a chain together."""
    found = [chain.builder.constraint(stage) for stage in chain.stages]
    constraints = [constraint for constraint in found if constraint is not None]
    held = [entry for constraint in constraints for entry in constraint.held]
    return Constraint(constraints[0].basis_DK, held)


def build_optimizer(
    parameters: list[nn.Parameter], constraint: Constraint, way: Way, decay: float
) -> torch.optim.Optimizer:
    """The same groups for both kinds; `axis` is what only SubspaceAdamW reads."""
    axes = {entry.parameter: entry.axis for entry in constraint.held}
    groups: dict[tuple[int | None, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((axes.get(parameter), parameter.ndim > 1), []).append(parameter)
    kind = SubspaceAdamW if way.subspace_adamw else torch.optim.AdamW
    return kind(
        [
            {"params": params, "weight_decay": decay if is_matrix else 0.0, "axis": axis}
            for (axis, is_matrix), params in groups.items()
        ],
        betas=BETAS,
    )


def train(way: Way, settings: Settings, tokens: np.ndarray) -> Curve:
    """Train from the same start on the same tokens; nothing but the way differs."""
    chain, optim = Chain(settings), settings.optim
    constraint = constraint_of(chain)
    parameters = [p for stage in chain.stages for p in stage.parameters()]
    optimizer = build_optimizer(parameters, constraint, way, optim.weight_decay)
    model, steps, batch = settings.model, settings.train.steps, settings.train.batch
    order = Order(tokens, model.context, batch, 1, settings.run.seed)
    losses, drifts = [], []
    for step in range(steps):
        drawn = order.microbatch(step, 0)
        inputs_BT, targets_BT = (
            torch.from_numpy(ids).to(chain.device) for ids in (drawn.inputs_BT, drawn.targets_BT)
        )
        loss = token_loss(chain.logits(inputs_BT), targets_BT)
        loss.backward()
        if way.project_gradients:
            constraint.project_gradients()
        nn.utils.clip_grad_norm_(parameters, optim.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(optim, step, steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        drifts.append(constraint.drift())
        if way.reproject_every and (step + 1) % way.reproject_every == 0:
            constraint.project_weights()
    return Curve(losses, drifts, cut_error(chain, inputs_BT, targets_BT))


@torch.no_grad()
def cut_error(chain: Chain, inputs_BT: Tensor, targets_BT: Tensor) -> float:
    """Relative change of the loss by the chain's cuts, which are left open afterwards."""
    cut = float(token_loss(chain.logits(inputs_BT), targets_BT))
    for left, right in pairwise(chain.stages):
        left.outgoing = right.incoming = DenseBoundary()
    uncut = float(token_loss(chain.logits(inputs_BT), targets_BT))
    return abs(cut - uncut) / uncut


def run(options: argparse.Namespace, say: Say) -> Outcome:
    """Train in all ways and compare their drift with the aims."""
    settings = settings_of(options.quick, options.seed, options.device)
    model, steps = settings.model, settings.train.steps
    if options.quick:
        tokens, text = synthetic_tokens(model.vocab, options.seed), "a synthetic stream"
    else:
        tokens = prepare(DataConfig(), model.vocab, cache_folder()).train
        text = "Python's standard library"
    curves = {way: train(way, settings, tokens) for way in WAYS}
    rows: list[Row] = [
        {
            "arm": way.name,
            "largest drift": max(curve.drifts),
            "last drift": curve.drifts[-1],
            "first loss": curve.losses[0],
            "final loss": curve.final_loss,
            "loss changed by the cut": curve.cut_error,
        }
        for way, curve in curves.items()
    ]
    engine, standard, bare = (max(curves[way].drifts) for way in (ENGINE, STANDARD, BARE))
    holds = engine <= STAYS and standard > LEAVES
    facts = {"dim": model.dim, "rank": settings.boundary.rank, "batch": settings.train.batch}
    return Outcome(
        **words("optimizer", **facts, context=model.context, text=text, averaged=AVERAGED),
        verdict=f"Over {steps} float32 steps the engine's optimizer drifts by {engine:.1e} at "
        f"most (limit {STAYS:.0e}). Standard AdamW drifts by {standard:.1e}, although its "
        f"gradients are projected too. Without re-projection rounding adds up to {bare:.1e}.",
        holds=holds,
        too_small=too_short(steps, LEAST_STEPS) if holds else "",  # a drift seen is seen
        rows=rows,
        panels=[drift_panel(curves)],
    )


def drift_panel(curves: dict[Way, Curve]) -> Panel:
    """The drift over the steps, on a log scale."""
    lines = [
        Line(
            way.name,
            range(1, len(curve.drifts) + 1),
            curve.drifts,
            "-" if way.subspace_adamw else "--",
        )
        for way, curve in curves.items()
    ]
    levels = {"must stay below": STAYS, "leaves the subspace": LEAVES}
    return Panel("drift", "step", "share of the weights outside the subspace", lines, "y", levels)
