"""`thinwire lab lossless`: a cut through a constrained model changes nothing but rounding.

The same weights run twice: as a chain of stages with a boundary at every cut, and as one whole
model with no boundary at all. Loss, the stream around every layer, every gradient and every clipped
gradient are compared. In float64 they must agree; then each assumption of the method is broken
on purpose, and the same comparison must see it.
"""

import argparse
import copy
import dataclasses
import math
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from thinwire.boundary import SubspaceBoundary
from thinwire.engine.build import choose_device
from thinwire.engine.chain import Chain
from thinwire.lab.experiment import Say
from thinwire.lab.outcome import Outcome, Row
from thinwire.model import token_loss
from thinwire.settings import Settings
from thinwire.subspace import Space, project, retract

WAYS = list(product(("subspace", "reparam"), (1, 2), (2, 4, 8)))  # mode, blocks, stages
EXACT = 1e-12  # the largest relative difference that float64 may show
BROKEN = 1e-6  # the least that a broken assumption must show
QUANTITIES = {"loss": "o", "activation": "s", "gradient": "^", "clipped gradient": "D"}  # drawn as
UNCUT = "uncut gradient against float64"  # what rounding does without any cut
PRECISIONS = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16"}
VOCAB, BATCH, WARM_UP_STEPS = 257, 2, 3
OFF_SUBSPACE, BASIS_MOVE = 0.1, 0.01  # how far a writer leaves S, and one end's basis turns


@dataclass(frozen=True)
class Case:
    """One model, grouped-query attention included, and the way it is cut."""

    mode: str
    stages: int
    blocks_per_stage: int
    dim: int = 32
    rank: int = 6
    context: int = 16
    seed: int = 0
    device: str = "cpu"
    precision: str = "fp64"

    @property
    def name(self) -> str:
        """Such as `subspace 4×2`: four stages of two blocks."""
        return f"{self.mode} {self.stages}×{self.blocks_per_stage}"

    def settings(self, cut: bool) -> Settings:
        """The settings of this model as a pipeline, or as one stage without any boundary."""
        values: dict[str, dict[str, Any]] = {
            "run": {"seed": self.seed, "device": self.device, "precision": self.precision,
                    "threads": 1},
            "model": {"layers": self.stages * self.blocks_per_stage, "dim": self.dim,
                      "heads": 4, "kv_heads": 2, "ffn": self.dim * 3 // 2, "vocab": VOCAB,
                      "context": self.context},
            "pipeline": {"stages": self.stages if cut else 1, "microbatches": 1,
                         "schedule": "gpipe"},
            "boundary": {"mode": self.mode, "rank": self.rank, "basis_seed": self.seed,
                         "free_layers": self.blocks_per_stage},  # the last stage's, uncut too
            "codec": {"forward": self.precision, "backward": self.precision},
            "optim": {"lr": 0.01, "warmup": 0, "schedule": "constant", "clip": 0},
            "train": {"batch": BATCH},
        }  # fmt: skip
        return Settings.from_plain(values)

    def ids(self, draw: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a microbatch; which tokens they are does not matter here."""
        generator = torch.Generator().manual_seed(self.seed * 1_000 + draw)
        drawn = torch.randint(VOCAB, (BATCH, self.context + 1), generator=generator)
        ids = drawn.to(choose_device(self.device, 0))
        return ids[:, :-1], ids[:, 1:]


@dataclass(frozen=True)
class Trace:
    """What one pass left behind, by the global names of layers and parameters."""

    loss: Tensor
    activations: dict[str, Tensor]
    gradients: dict[str, Tensor]  # constrained ones projected by the engine's own code
    raw_gradients: dict[str, Tensor]  # as autograd gives them


@dataclass(frozen=True)
class Pair:
    """The same weights twice: with a boundary at every cut, and with none at all."""

    chain: Chain
    whole: Chain

    def traces(self, batch: tuple[Tensor, Tensor]) -> tuple[Trace, Trace]:
        """One pass of each over the same tokens: the whole model, then the chain."""
        return trace(self.whole, *batch), trace(self.chain, *batch)


def warm_weights(case: Case) -> dict[str, Tensor]:
    """Weights after a few updates of the engine, in the case's precision.

    Fresh ones are too tame: gains are all one and attention is nearly uniform.
    """
    chain = Chain(case.settings(cut=True))
    for step in range(WARM_UP_STEPS):
        inputs_BT, targets_BT = case.ids(step)
        token_loss(chain.logits(inputs_BT), targets_BT).backward()
        chain.update(step)
    return {name: parameter.detach() for name, parameter in parameters_of(chain).items()}


@torch.no_grad()
def build_pair(case: Case, weights: dict[str, Tensor]) -> Pair:
    """Both models with these weights, rounded to the case's precision and put back into S."""
    pair = Pair(Chain(case.settings(cut=True)), Chain(case.settings(cut=False)))
    ours = parameters_of(pair.chain)
    for name, parameter in ours.items():
        parameter.copy_(weights[name])
    for stage in pair.chain.stages:
        constraint = pair.chain.builder.constraint(stage)
        if constraint is not None:
            constraint.project_weights()
    for name, parameter in parameters_of(pair.whole).items():
        parameter.copy_(ours[name])
    return pair


def parameters_of(chain: Chain) -> dict[str, nn.Parameter]:
    """All parameters of the model by their global names."""
    return {n: p for stage in chain.stages for n, p in stage.global_parameters().items()}


def trace(chain: Chain, inputs_BT: Tensor, targets_BT: Tensor) -> Trace:
    """One forward and backward pass, everything written down."""
    activations: dict[str, Tensor] = {}

    def note(name: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if inputs[0].is_floating_point():  # the embedding reads ids
            activations[f"{name} in"] = inputs[0].detach()
        activations[f"{name} out"] = output.detach()

    handles = [
        layer.register_forward_hook(partial(note, name))
        for stage in chain.stages
        for name, layer in zip(stage.names, stage.layers, strict=True)
    ]
    loss = token_loss(chain.logits(inputs_BT), targets_BT)
    loss.backward()
    for handle in handles:
        handle.remove()
    raw = _gradients(chain)
    for keeper in chain.keepers:
        keeper.project_gradients()
    found = Trace(loss.detach(), activations, _gradients(chain), raw)
    for stage in chain.stages:
        stage.zero_grad()
    return found


def _gradients(chain: Chain) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in parameters_of(chain).items() if p.grad is not None}


def relative_difference(reference: Tensor, other: Tensor) -> float:
    """Largest absolute difference over largest absolute value."""
    reference, other = reference.double(), other.double()
    gap, size = float((reference - other).abs().max()), float(reference.abs().max())
    if not gap:
        return 0.0
    return gap / size if size and math.isfinite(gap) else math.inf


def largest_difference(reference: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest relative difference of any tensor; both must have the same names."""
    assert reference.keys() == other.keys(), "the two models do not have the same parts"
    return max(relative_difference(reference[name], other[name]) for name in reference)


def global_norm(gradients: dict[str, Tensor]) -> float:
    """The norm of all gradients together."""
    return math.sqrt(
        sum(float(gradient.double().square().sum()) for gradient in gradients.values())
    )


def clipping_difference(whole: Trace, chain: Trace, projected: bool) -> float:
    """How clipped gradients differ when the norm is that of the projected or the raw ones."""

    def clipped(found: Trace) -> dict[str, Tensor]:
        norm = global_norm(found.gradients if projected else found.raw_gradients)
        return {name: g * min(1.0, limit / norm) for name, g in found.gradients.items()}

    limit = 0.5 * global_norm(whole.gradients)  # so that it does clip
    return largest_difference(clipped(whole), clipped(chain))


def differences(whole: Trace, chain: Trace) -> dict[str, float]:
    """The largest relative difference of each quantity."""
    return {
        "loss": relative_difference(whole.loss, chain.loss),
        "activation": largest_difference(whole.activations, chain.activations),
        "gradient": largest_difference(whole.gradients, chain.gradients),
        "clipped gradient": clipping_difference(whole, chain, projected=True),
    }


def drop_anchors(pair: Pair, sides: tuple[str, ...]) -> None:
    """T_fixed is not subtracted by senders ("outgoing"), or not added by receivers ("incoming")."""
    for side in sides:
        for end in _ends(pair.chain, side):
            end.anchored = False


def move_one_basis(pair: Pair) -> None:
    """The receiver of the middle cut decodes with a basis that has moved."""
    end = _ends(pair.chain, "incoming")[(len(pair.chain.stages) - 1) // 2]
    basis_DK = end.space.basis_DK
    moved_DK = retract(basis_DK + BASIS_MOVE * _noise(basis_DK))
    end.space = Space(moved_DK, end.space.table_VD)


def leave_the_subspace(pair: Pair) -> None:
    """One writer of the first block gets a part outside S, in both models alike."""
    name = "model.layers.0.self_attn.o_proj.weight"
    weight = parameters_of(pair.chain)[name].detach()
    noise, basis_DK = _noise(weight), _ends(pair.chain, "outgoing")[0].basis_DK
    outside = noise - project(noise, basis_DK, axis=0)
    outside *= OFF_SUBSPACE * weight.norm() / outside.norm()
    for model in (pair.chain, pair.whole):
        parameters_of(model)[name].data.add_(outside)


def _ends(chain: Chain, side: str) -> list[SubspaceBoundary]:
    ends = (getattr(stage, side) for stage in chain.stages)
    return [end for end in ends if isinstance(end, SubspaceBoundary)]


def _noise(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(like)


SABOTAGES: dict[str, Callable[[Pair], None]] = {
    "T_fixed not subtracted": partial(drop_anchors, sides=("outgoing",)),
    "T_fixed left out on both sides": partial(drop_anchors, sides=("outgoing", "incoming")),
    "stale basis on one side": move_one_basis,
    "a writer 10% off the subspace": leave_the_subspace,
}


def failures(case: Case, pair: Pair) -> dict[str, dict[str, float]]:
    """What the comparison says when an assumption is broken, by what is broken.

    A reparametrised model cannot leave the subspace and has nothing to project.
    """
    batch, found = case.ids(WARM_UP_STEPS), {}
    for name, sabotage in SABOTAGES.items():
        if case.mode == "subspace" or sabotage is not leave_the_subspace:
            broken = copy.deepcopy(pair)
            sabotage(broken)
            found[name] = differences(*broken.traces(batch))
    if case.mode == "subspace":
        whole, chain = pair.traces(batch)
        raw = largest_difference(whole.raw_gradients, chain.raw_gradients)
        clipped = clipping_difference(whole, chain, projected=False)
        found["gradients not projected"] = {"gradient": raw}
        found["clipped by the unprojected norm"] = {"clipped gradient": clipped}
    return found


def examine(case: Case) -> tuple[list[Row], list[Row]]:
    """One way to cut: its rows in every precision, and in float64 with an assumption broken."""
    weights, batch = warm_weights(case), case.ids(WARM_UP_STEPS)
    exact_pair = build_pair(case, weights)
    exact, _ = exact_pair.traces(batch)
    kept: list[Row] = []
    for precision, dtype in PRECISIONS.items():
        pair = build_pair(dataclasses.replace(case, precision=precision), weights)
        whole, chain = pair.traces(batch)
        row = {"setting": case.name, "broken": "-", "dtype": dtype, **differences(whole, chain)}
        if precision != "fp64":
            row[UNCUT] = largest_difference(exact.gradients, whole.gradients)
        kept.append(row)
    broken: list[Row] = [
        {"setting": case.name, "broken": name, "dtype": "float64", **found}
        for name, found in failures(case, exact_pair).items()
    ]
    return kept, broken


def largest(row: Row) -> float:
    """The largest difference of any quantity in a row."""
    return max(row[quantity] for quantity in QUANTITIES if quantity in row)


def run(options: argparse.Namespace, say: Say) -> Outcome:
    """Every way to cut, in every precision, and every way to break it."""
    quick, seed, device = options.quick, options.seed, options.device
    dim, rank, context = (32, 6, 16) if quick else (64, 8, 32)
    with warnings.catch_warnings():  # a CPU without bfloat16 says so at length
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")
        examined = [
            examine(Case(mode, stages, blocks, dim, rank, context, seed, device))
            for mode, blocks, stages in WAYS
        ]
    kept = [row for rows, _ in examined for row in rows]
    broken = [row for _, rows in examined for row in rows]
    worst = max(largest(row) for row in kept if row["dtype"] == "float64")
    mildest = min(largest(row) for row in broken)
    holds = worst <= EXACT and mildest > BROKEN
    rounding = {
        dtype: (max(map(largest, rows)), max(row[UNCUT] for row in rows))
        for dtype in ("float32", "bfloat16")
        if (rows := [row for row in kept if row["dtype"] == dtype])
    }
    return Outcome(
        name="lossless",
        question="Do cuts through a constrained model change its loss, activations or gradients?",
        verdict=f"With 2, 4 and 8 stages of one and two blocks, subspace and reparam, no float64 "
        f"figure changes by more than {worst:.1e} (limit {EXACT:.0e}). Every broken assumption "
        f"shows, the mildest by {mildest:.1e} (limit {BROKEN:.0e}).",
        holds=holds,
        rows=kept + broken,
        figure=draw(kept, broken),
        notes=[
            "Figures are the largest over all tensors of max |difference| / max |value|, with "
            "the cuts against the same weights as one whole model without any.",
            f"`subspace 4×2` is four stages of two blocks. Width {dim}, rank {rank}, "
            f"4 heads on 2 key/value heads, weights after {WARM_UP_STEPS} updates; the last "
            "stage's blocks and the head are unconstrained.",
            *(
                f"{dtype}: {cut:.1e} at most between cut and uncut, and {uncut:.1e} between the "
                "uncut model's gradients and its own in float64: rounding, with or without cuts."
                for dtype, (cut, uncut) in rounding.items()
            ),
            "bfloat16 stands for autocast and bfloat16 on the wire. Its largest differences are in "
            "query and key gradients that are nearly zero, because attention is still even.",
            "Constrained gradients are compared after projection, as the optimizer sees them: "
            "before it they differ, because the cut drops their part outside the subspace.",
        ],
    )


_COLOURS = {"float64": "#0072B2", "float32": "#009E73", "bfloat16": "#E69F00"}
_BROKEN_COLOUR = "#D55E00"
_ZERO = 1e-18  # where a difference of exactly zero is drawn


def draw(kept: list[Row], broken: list[Row]) -> Figure:
    """Differences by setting on the left, broken assumptions on the right, on one log scale."""
    figure = Figure(figsize=(14, 6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    for dtype, colour in _COLOURS.items():
        _points(left, [row for row in kept if row["dtype"] == dtype], "setting", colour)
        left.plot([], [], "o", color=colour, label=dtype)
    _points(right, broken, "broken", _BROKEN_COLOUR)
    for quantity, marker in QUANTITIES.items():
        left.plot([], [], marker, color="#808080", label=quantity)
    left.set_title("boundaries as they are", loc="left")
    right.set_title("one assumption broken, float64, all settings", loc="left")
    left.set_ylabel("largest relative difference, cut against uncut")
    left.set_yscale("log")
    left.set_ylim(_ZERO / 4, 300)
    ticks = {"equal": _ZERO, **{f"$10^{{{p}}}$": 10.0**p for p in range(-16, 3, 2)}}
    left.set_yticks(list(ticks.values()), list(ticks))
    left.axhline(EXACT, color=_COLOURS["float64"], linestyle="--")
    left.text(-0.5, 1.5 * EXACT, "float64 must stay below", color=_COLOURS["float64"])
    right.axhline(BROKEN, color=_BROKEN_COLOUR, linestyle="--")
    right.text(-0.5, BROKEN / 15, "the largest must rise above", va="top", color=_BROKEN_COLOUR)
    figure.suptitle("What cuts change: the model in stages against the same model as a whole")
    figure.legend(loc="outside lower center", ncols=7, frameon=False)
    return figure


def _points(axes: Axes, rows: list[Row], key: str, colour: str) -> None:
    """The quantities of each row side by side, above the row's label."""
    labels = list(dict.fromkeys(row[key] for row in rows))
    for offset, (quantity, marker) in enumerate(QUANTITIES.items()):
        shown = [row for row in rows if quantity in row]
        axes.plot(
            [labels.index(row[key]) + 0.16 * (offset - 1.5) for row in shown],
            [max(row[quantity], _ZERO) for row in shown],
            marker, color=colour, markersize=5, alpha=0.75, markeredgewidth=0,
        )  # fmt: skip
    wrapped = [textwrap.fill(text, 10, break_long_words=False) for text in labels]
    axes.set_xticks(range(len(labels)), wrapped, fontsize=9)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.grid(color="#E8E8E8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
