"""`thinwire lab lossless`: a cut through a constrained model changes nothing but rounding.

The same weights run twice: as a chain of stages with a boundary at every cut, and as one whole
model with no boundary at all. Loss, the stream around every layer, every gradient and every clipped
gradient are compared. In float64 they must agree; then each assumption of the method is broken
on purpose, and the same comparison must see it.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from thinwire.boundary import SubspaceBoundary
from thinwire.engine import Settings
from thinwire.lab.chain import Chain
from thinwire.lab.experiment import Outcome, Row
from thinwire.model import token_loss
from thinwire.subspace import Space, project, retract

EXACT = 1e-12  # the largest relative difference that float64 may show
BROKEN = 1e-6  # the least that a broken assumption must show
QUANTITIES = ("loss", "activation", "gradient", "clipped gradient")
PRECISIONS = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16"}
WARM_UP_STEPS = 3
OFF_SUBSPACE = 0.01  # how much of a writer is put outside the subspace
BASIS_MOVE = 0.01  # how far one end's basis is turned

Differences = dict[str, float]


@dataclass(frozen=True)
class Size:
    """How large the models are; grouped-query attention is always on."""

    dim: int = 128
    rank: int = 16
    context: int = 48
    batch: int = 4


FULL, QUICK = Size(), Size(dim=32, rank=6, context=16, batch=2)


@dataclass(frozen=True)
class Case:
    """One model and the way it is cut."""

    mode: str
    stages: int
    blocks_per_stage: int
    size: Size = QUICK
    precision: str = "fp64"
    seed: int = 0
    device: str = "cpu"

    @property
    def name(self) -> str:
        """Such as `subspace 4 x 2`: four stages of two blocks."""
        return f"{self.mode} {self.stages} x {self.blocks_per_stage}"

    def settings(self, cut: bool) -> Settings:
        """The settings of this model as a pipeline, or as one stage without any boundary."""
        dim = self.size.dim
        values: dict[str, dict[str, Any]] = {
            "run": {
                "seed": self.seed, "device": self.device, "precision": self.precision, "threads": 1,
            },
            "model": {
                "layers": self.stages * self.blocks_per_stage, "dim": dim, "heads": 4,
                "kv_heads": 2, "ffn": dim * 3 // 2, "vocab": 257, "context": self.size.context,
            },
            "pipeline": {
                "stages": self.stages if cut else 1, "microbatches": 1, "schedule": "gpipe",
            },
            "boundary": {
                "mode": self.mode, "rank": self.size.rank, "basis_seed": self.seed,
                "free_layers": self.blocks_per_stage,  # those of the last stage, however cut
            },
            "codec": {"forward": self.precision, "backward": self.precision},
            "optim": {"lr": 0.02, "warmup": 0, "schedule": "constant"},
            "train": {"batch": self.size.batch},
        }  # fmt: skip
        return Settings.from_plain(values)

    def ids(self, draw: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a microbatch; which tokens they are does not matter here."""
        generator = torch.Generator().manual_seed(self.seed * 1_000 + draw)
        shape = (self.size.batch, self.size.context + 1)
        ids = torch.randint(257, shape, generator=generator).to(self.device)
        return ids[:, :-1], ids[:, 1:]


@dataclass(frozen=True)
class Trace:
    """What one pass left behind, by the global names of layers and parameters."""

    loss: Tensor
    activations: dict[str, Tensor]
    gradients: dict[str, Tensor]  # constrained ones projected, by the engine's own code
    raw_gradients: dict[str, Tensor]  # as autograd gives them


def build_pair(case: Case) -> tuple[Chain, Chain]:
    """The model with cuts and the same weights without, after a few updates of the engine.

    Fresh weights are too tame: gains are all one and attention is nearly uniform.
    """
    chain, whole = Chain(case.settings(cut=True)), Chain(case.settings(cut=False))
    for step in range(WARM_UP_STEPS):
        inputs_BT, targets_BT = case.ids(step)
        token_loss(chain.logits(inputs_BT), targets_BT).backward()
        chain.update(step)
    weights = parameters_of(chain)
    with torch.no_grad():
        for name, parameter in parameters_of(whole).items():
            parameter.copy_(weights[name])
    return chain, whole


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
    loss.backward()  # type: ignore[no-untyped-call]
    for handle in handles:
        handle.remove()
    raw = _gradients(chain)
    for keeper in chain.keepers:
        keeper.project_gradients()
    projected = _gradients(chain)
    for stage in chain.stages:
        stage.zero_grad()
    return Trace(loss.detach(), activations, projected, raw)


def _gradients(chain: Chain) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in parameters_of(chain).items() if p.grad is not None}


def relative_difference(reference: Tensor, other: Tensor) -> float:
    """Largest absolute difference over largest absolute value."""
    reference, other = reference.double(), other.double()
    gap = float((reference - other).abs().max())
    return gap / float(reference.abs().max()) if gap else 0.0


def largest_difference(reference: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest relative difference of any tensor; both must have the same names."""
    assert reference.keys() == other.keys(), "the two models do not have the same parts"
    return max(relative_difference(reference[name], other[name]) for name in reference)


def global_norm(gradients: dict[str, Tensor]) -> float:
    """The norm of all gradients together."""
    norms = torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()])
    return float(torch.linalg.vector_norm(norms))


def clipping_difference(whole: Trace, chain: Trace, projected: bool) -> float:
    """How clipped gradients differ when the norm is that of the projected or the raw ones."""

    def clipped(found: Trace) -> dict[str, Tensor]:
        norm = global_norm(found.gradients if projected else found.raw_gradients)
        return {name: g * min(1.0, limit / norm) for name, g in found.gradients.items()}

    limit = 0.5 * global_norm(whole.gradients)  # so that it does clip
    return largest_difference(clipped(whole), clipped(chain))


def differences(whole: Trace, chain: Trace) -> Differences:
    """The largest relative difference of each quantity."""
    return {
        "loss": relative_difference(whole.loss, chain.loss),
        "activation": largest_difference(whole.activations, chain.activations),
        "gradient": largest_difference(whole.gradients, chain.gradients),
        "clipped gradient": clipping_difference(whole, chain, projected=True),
    }


def compare(
    case: Case, sabotage: Callable[[Chain, Chain], None] | None = None
) -> tuple[Differences, Trace, Trace]:
    """With cuts against without, after an optional sabotage of (chain, whole)."""
    chain, whole = build_pair(case)
    if sabotage is not None:
        sabotage(chain, whole)
    batch = case.ids(WARM_UP_STEPS)
    by_whole, by_chain = trace(whole, *batch), trace(chain, *batch)
    return differences(by_whole, by_chain), by_whole, by_chain


def keep_anchors_at_sender(chain: Chain, whole: Chain) -> None:
    """T_fixed is not subtracted before encoding, though the receiver adds it."""
    for end in _ends(chain, "outgoing"):
        end.anchored = False


def forget_anchors(chain: Chain, whole: Chain) -> None:
    """T_fixed is neither subtracted nor added: only the stream's part in S arrives."""
    for end in (*_ends(chain, "outgoing"), *_ends(chain, "incoming")):
        end.anchored = False


def move_one_basis(chain: Chain, whole: Chain) -> None:
    """The receiver of the middle cut decodes with a basis that has moved."""
    end = list(_ends(chain, "incoming"))[(len(chain.stages) - 1) // 2]
    basis_DK = end.space.basis_DK
    moved_DK = retract(basis_DK + BASIS_MOVE * _noise(basis_DK))
    end.space = Space(moved_DK, end.space.table_VD)


def leave_the_subspace(chain: Chain, whole: Chain) -> None:
    """One writer of the first block gets a part outside S, in both models alike."""
    name = "model.layers.0.self_attn.o_proj.weight"
    assert chain.builder.space is not None
    with torch.no_grad():
        weight = parameters_of(chain)[name]
        noise = _noise(weight)
        outside = noise - project(noise, chain.builder.space.basis_DK, axis=0)
        outside *= OFF_SUBSPACE * weight.norm() / outside.norm()
        for model in (chain, whole):
            parameters_of(model)[name].add_(outside)


def _ends(chain: Chain, side: str) -> Iterator[SubspaceBoundary]:
    for stage in chain.stages:
        end = getattr(stage, side)
        if isinstance(end, SubspaceBoundary):
            yield end


def _noise(like: Tensor) -> Tensor:
    noise = torch.randn(like.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return noise.to(like)


SABOTAGES: dict[str, Callable[[Chain, Chain], None]] = {
    "T_fixed not subtracted": keep_anchors_at_sender,
    "T_fixed left out on both sides": forget_anchors,
    "stale basis on one side": move_one_basis,
    "a writer 1 % off the subspace": leave_the_subspace,
}


def failures(case: Case) -> dict[str, Differences]:
    """What the comparison says when an assumption is broken, by what is broken.

    A reparametrised model cannot leave the subspace and has nothing to project.
    """
    constrained = case.mode == "subspace"
    found = {
        name: compare(case, sabotage)[0]
        for name, sabotage in SABOTAGES.items()
        if constrained or sabotage is not leave_the_subspace
    }
    if constrained:
        _, whole, chain = compare(case)
        raw = largest_difference(whole.raw_gradients, chain.raw_gradients)
        found["gradients not projected"] = {"gradient": raw}
        by_raw_norm = clipping_difference(whole, chain, projected=False)
        found["clipped by the unprojected norm"] = {"clipped gradient": by_raw_norm}
    return found


def run(quick: bool = False, seed: int = 0, device: str = "cpu") -> Outcome:
    """Every way to cut, in every precision, and every way to break it."""
    size = QUICK if quick else FULL
    kept: list[Row] = []
    broken: list[Row] = []
    for mode, blocks, stages in product(("subspace", "reparam"), (1, 2), (2, 4, 8)):
        case = Case(mode, stages, blocks, size, "fp64", seed, device)
        for precision, dtype in PRECISIONS.items():
            found, _, _ = compare(dataclasses.replace(case, precision=precision))
            kept.append({"setting": case.name, "broken": "-", "dtype": dtype, **found})
        for name, found in failures(case).items():
            broken.append({"setting": case.name, "broken": name, "dtype": "float64", **found})
    worst = max(largest(row) for row in kept if row["dtype"] == "float64")
    mildest = min(largest(row) for row in broken)
    holds = worst <= EXACT and mildest > BROKEN
    rounded = {
        dtype: max(largest(row) for row in kept if row["dtype"] == dtype)
        for dtype in PRECISIONS.values()
    }
    verdict = (
        f"{'holds' if holds else 'does not hold'}: over 2, 4 and 8 stages of one and two blocks, "
        f"subspace and reparam, the cuts change nothing in float64 by more than {worst:.1e} "
        f"(aim {EXACT:.0e}); every broken assumption shows, the mildest by {mildest:.1e} "
        f"(aim above {BROKEN:.0e})"
    )
    return Outcome(
        name="lossless",
        question="Do boundaries through a constrained model change its loss, its activations or "
        "its gradients?",
        verdict=verdict,
        holds=holds,
        rows=kept + broken,
        figure=draw(kept, broken),
        command=f"thinwire lab lossless --seed {seed}" + (" --quick" if quick else ""),
        notes=[
            "Figures are the largest over all tensors of max |difference| / max |value|, with "
            "the cuts against the same weights as one whole model without any.",
            f"`subspace 4 x 2` is four stages of two blocks. Width {size.dim}, rank {size.rank}, "
            f"4 heads on 2 key/value heads, weights after {WARM_UP_STEPS} updates; the last "
            "stage's blocks and the head are unconstrained.",
            f"In float32 the largest difference is {rounded['float32']:.1e}; with bfloat16 "
            f"(autocast, and on the wire) it is {rounded['bfloat16']:.1e}: rounding, not the cut, "
            "which float64 shows to be exact.",
            "Constrained gradients are compared after projection, as the optimizer sees them: "
            "without it they differ, because the cut drops the part outside the subspace.",
        ],
    )


def largest(row: Row) -> float:
    """The largest difference of any quantity in a row."""
    return max(row[quantity] for quantity in QUANTITIES if quantity in row)


_COLOURS = {"float64": "#0072B2", "float32": "#009E73", "bfloat16": "#E69F00"}
_BROKEN_COLOUR = "#D55E00"
_MARKERS = {"loss": "o", "activation": "s", "gradient": "^", "clipped gradient": "D"}
_FLOOR = 1e-17  # where a difference of exactly zero is drawn


def draw(kept: list[Row], broken: list[Row]) -> Figure:
    """Differences by setting on the left, broken assumptions on the right, on one log scale."""
    figure = Figure(figsize=(13, 6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    settings = list(dict.fromkeys(row["setting"] for row in kept))
    for dtype, colour in _COLOURS.items():
        _points(left, [r for r in kept if r["dtype"] == dtype], "setting", settings, colour)
    names = list(dict.fromkeys(row["broken"] for row in broken))
    _points(right, broken, "broken", names, _BROKEN_COLOUR)
    left.set_title("boundaries as they are", loc="left")
    right.set_title("one assumption broken, float64", loc="left")
    left.set_ylabel("largest relative difference, with cuts against without")
    for axes, labels in ((left, settings), (right, names)):
        axes.set_yscale("log")
        axes.set_ylim(_FLOOR / 3, 10)
        axes.set_xticks(range(len(labels)), labels, rotation=35, ha="right", rotation_mode="anchor")
        axes.set_xlim(-0.6, len(labels) - 0.4)
        axes.axhline(EXACT, color=_COLOURS["float64"], linestyle="--", linewidth=1)
        axes.axhline(BROKEN, color=_BROKEN_COLOUR, linestyle="--", linewidth=1)
        axes.grid(color="#E8E8E8", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    right.text(-0.5, EXACT, "float64 must stay below", va="bottom", color=_COLOURS["float64"])
    right.text(-0.5, BROKEN, "a broken one must stand above", va="top", color=_BROKEN_COLOUR)
    for dtype, colour in _COLOURS.items():
        left.plot([], [], "o", color=colour, label=dtype)
    for quantity, marker in _MARKERS.items():
        left.plot([], [], marker, color="#808080", label=quantity)
    figure.legend(loc="outside upper center", ncols=7, frameon=False)
    return figure


def _points(axes: Axes, rows: list[Row], key: str, labels: list[str], colour: str) -> None:
    for offset, (quantity, marker) in enumerate(_MARKERS.items()):
        shown = [row for row in rows if quantity in row]
        axes.plot(
            [labels.index(row[key]) + 0.14 * (offset - 1.5) for row in shown],
            [max(row[quantity], _FLOOR) for row in shown],
            marker, color=colour, markersize=5, alpha=0.75, markeredgewidth=0,
        )  # fmt: skip
