"""`thinwire lab lossless`: a cut through a constrained model changes nothing but rounding.

The same weights run twice: as a chain of stages with a boundary at every cut, and as one whole
model with no boundary at all. Loss, the stream around every layer and every gradient are compared.
In float64 they must agree; then each assumption of the method is broken on purpose, and the same
comparison must see it.
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
from operator import itemgetter

import torch
from torch import Tensor, nn

from thinwire.model import Space, SubspaceBoundary, project, token_loss
from thinwire.model.subspace import retract
from thinwire.settings import Settings
from thinwire_lab.arms import Values, own_settings
from thinwire_lab.chain import Chain
from thinwire_lab.experiment import Say, sheet, words
from thinwire_lab.outcome import Outcome, Row
from thinwire_lab.plots import Line, Panel

GRID = sheet("lossless")["grid"]
WAYS = list(product(GRID["modes"], GRID["blocks"], GRID["stages"]))
EXACT = 1e-12  # the largest relative difference that float64 may show
BROKEN = 1e-6  # the least that a broken assumption must show
QUANTITIES = {"loss": "o", "activation": "s", "gradient": "^"}  # drawn as
UNCUT = "uncut gradient against float64"  # what rounding does without any cut
PRECISIONS = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16"}
WARM_UP_STEPS = 3
OFF_SUBSPACE, BASIS_MOVE = 0.1, 0.01  # how far a writer leaves S, and one end's basis turns

Tensors = dict[str, Tensor]
Trace = dict[str, Tensors]
"""What one pass left, by quantity and by global name. A "gradient" is projected by the engine's
own code where it is constrained, a "raw gradient" is as autograd gives it."""


@dataclass(frozen=True)
class Case:
    """One model, grouped-query attention included, and the way it is cut."""

    mode: str
    blocks: int  # of each stage
    stages: int
    quick: bool = True
    seed: int = 0
    device: str = "cpu"
    precision: str = "fp64"

    @property
    def name(self) -> str:
        """Such as `subspace 4×2`: four stages of two blocks."""
        return f"{self.mode} {self.stages}×{self.blocks}"

    def settings(self, cut: bool = True) -> Settings:
        """The settings of this model as a pipeline, or as one stage without any boundary."""
        free = self.blocks  # those of the last stage, uncut too
        chosen: Values = {
            "run": {"seed": self.seed, "device": self.device, "precision": self.precision},
            "model": {"layers": self.stages * self.blocks},
            "pipeline": {"stages": self.stages if cut else 1},
            "boundary": {"mode": self.mode, "basis_seed": self.seed, "free_layers": free},
            "codec": {"forward": self.precision, "backward": self.precision},
        }
        return own_settings("lossless", chosen, self.quick)


class Pair:
    """The same weights twice: with a boundary at every cut, and with none at all.

    They are rounded to the case's precision and put back into S.
    """

    @torch.no_grad()
    def __init__(self, case: Case, weights: Tensors):
        self.chain, self.whole = Chain(case.settings()), Chain(case.settings(cut=False))
        ours = parameters_of(self.chain)
        for name, parameter in ours.items():
            parameter.copy_(weights[name])
        for stage in self.chain.stages:
            constraint = self.chain.builder.constraint(stage)
            if constraint is not None:
                constraint.project_weights()
        for name, parameter in parameters_of(self.whole).items():
            parameter.copy_(ours[name])

    def traces(self, draw: int = WARM_UP_STEPS) -> tuple[Trace, Trace]:
        """One pass of each over the same tokens: the whole model, then the chain."""
        return trace(self.whole, draw), trace(self.chain, draw)


def loss_of(chain: Chain, draw: int) -> Tensor:
    """The loss on some microbatch; which tokens it has does not matter here."""
    model, seed = chain.settings.model, chain.settings.run.seed * 1_000 + draw
    shape = chain.settings.train.batch, model.context + 1
    ids = torch.randint(model.vocab, shape, generator=torch.Generator().manual_seed(seed))
    ids = ids.to(chain.device)
    return token_loss(chain.logits(ids[:, :-1]), ids[:, 1:])


def warm_weights(case: Case) -> Tensors:
    """Weights after a few updates of the engine, in the case's precision.

    Fresh ones are too tame: gains are all one and attention is nearly uniform.
    """
    chain = Chain(case.settings())
    for step in range(WARM_UP_STEPS):
        loss_of(chain, step).backward()
        chain.update(step)
    return {name: parameter.detach() for name, parameter in parameters_of(chain).items()}


def parameters_of(chain: Chain) -> dict[str, nn.Parameter]:
    """All parameters of the model by their global names."""
    return {n: p for stage in chain.stages for n, p in stage.global_parameters().items()}


def trace(chain: Chain, draw: int) -> Trace:
    """One forward and backward pass, everything written down."""
    activations: Tensors = {}

    def note(name: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if inputs[0].is_floating_point():  # the embedding reads ids
            activations[f"{name} in"] = inputs[0].detach()
        activations[f"{name} out"] = output.detach()

    def gradients() -> Tensors:
        return {n: p.grad.clone() for n, p in parameters_of(chain).items() if p.grad is not None}

    handles = [
        layer.register_forward_hook(partial(note, name))
        for stage in chain.stages
        for name, layer in zip(stage.names, stage.layers, strict=True)
    ]
    loss = loss_of(chain, draw)
    loss.backward()
    for handle in handles:
        handle.remove()
    found = {"loss": {"": loss.detach()}, "activation": activations, "raw gradient": gradients()}
    for update in chain.updates:
        update.project_gradients()
    found["gradient"] = gradients()
    for stage in chain.stages:
        stage.zero_grad()
    return found


def relative_difference(reference: Tensor, other: Tensor) -> float:
    """Largest absolute difference over largest absolute value."""
    reference, other = reference.double(), other.double()
    gap, size = float((reference - other).abs().max()), float(reference.abs().max())
    if not gap:
        return 0.0
    return gap / size if size and math.isfinite(gap) else math.inf


def largest_difference(reference: Tensors, other: Tensors) -> float:
    """The largest relative difference of any tensor; both must have the same names."""
    assert reference.keys() == other.keys(), "the two models do not have the same parts"
    return max(relative_difference(reference[name], other[name]) for name in reference)


def differences(whole: Trace, chain: Trace) -> dict[str, float]:
    """The largest relative difference of each quantity."""
    return {
        quantity: largest_difference(whole[quantity], chain[quantity]) for quantity in QUANTITIES
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
    found = {}
    for name, sabotage in SABOTAGES.items():
        if case.mode == "subspace" or sabotage is not leave_the_subspace:
            broken = copy.deepcopy(pair)
            sabotage(broken)
            found[name] = differences(*broken.traces())
    if case.mode == "subspace":
        whole, chain = pair.traces()
        raw = largest_difference(whole["raw gradient"], chain["raw gradient"])
        found["gradients not projected"] = {"gradient": raw}
    return found


def examine(case: Case) -> list[Row]:
    """One way to cut: its rows in every precision, and in float64 with an assumption broken."""
    weights = warm_weights(case)
    exact_pair = Pair(case, weights)
    exact, _ = exact_pair.traces()
    rows: list[Row] = []
    for precision, dtype in PRECISIONS.items():
        whole, chain = Pair(dataclasses.replace(case, precision=precision), weights).traces()
        row = {"setting": case.name, "broken": "-", "dtype": dtype, **differences(whole, chain)}
        if precision != "fp64":
            row[UNCUT] = largest_difference(exact["gradient"], whole["gradient"])
        rows.append(row)
    return rows + [
        {"setting": case.name, "broken": name, "dtype": "float64", **found}
        for name, found in failures(case, exact_pair).items()
    ]


def largest(row: Row) -> float:
    """The largest difference of any quantity in a row."""
    return max(row[quantity] for quantity in QUANTITIES if quantity in row)


def run(options: argparse.Namespace, say: Say) -> Outcome:
    """Every way to cut, in every precision, and every way to break it."""
    cases = [Case(*way, options.quick, options.seed, options.device) for way in WAYS]
    with warnings.catch_warnings():  # a CPU without bfloat16 says so at length
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")
        rows = [row for case in cases for row in examine(case)]
    kept = [row for row in rows if row["broken"] == "-"]
    broken = [row for row in rows if row["broken"] != "-"]

    def worst(dtype: str, figure: Callable[[Row], float] = largest) -> float:
        return max(figure(row) for row in kept if row["dtype"] == dtype)

    settings = cases[0].settings()
    facts: Row = {"dim": settings.model.dim, "rank": settings.boundary.rank}
    for dtype in ("float32", "bfloat16"):
        facts[f"{dtype}_cut"] = worst(dtype)
        facts[f"{dtype}_uncut"] = worst(dtype, itemgetter(UNCUT))
    exact, mildest = worst("float64"), min(map(largest, broken))
    return Outcome(
        **words("lossless", **facts, warm_up=WARM_UP_STEPS),
        verdict=f"With 2, 4 and 8 stages of one and two blocks, subspace and reparam, no float64 "
        f"figure changes by more than {exact:.1e} (limit {EXACT:.0e}). Every broken assumption "
        f"shows, the mildest by {mildest:.1e} (limit {BROKEN:.0e}).",
        holds=exact <= EXACT and mildest > BROKEN,
        rows=kept + broken,
        panels=panels_of(kept, broken),
    )


def panels_of(kept: list[Row], broken: list[Row]) -> list[Panel]:
    """Differences by setting, and with one assumption broken; exactly zero stands at 1e-18."""

    def lines(rows: list[Row], key: str) -> list[Line]:
        found = []
        for dtype, (quantity, marker) in product(PRECISIONS.values(), QUANTITIES.items()):
            own = [row for row in rows if row["dtype"] == dtype and quantity in row]
            names = [textwrap.fill(row[key], 10, break_long_words=False) for row in own]
            sizes = [max(row[quantity], 1e-18) for row in own]
            found += [Line(f"{dtype}, {quantity}", names, sizes, marker)] if own else []
        return found

    up = "largest relative difference, cut against uncut"
    return [
        Panel("boundaries as they are", "", up, lines(kept, "setting"), "y", {"float64": EXACT}),
        Panel("one assumption broken", "", up, lines(broken, "broken"), "y", {"at least": BROKEN}),
    ]
