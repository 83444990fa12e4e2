"""`thinwire lab subspace`: how a moving basis behaves over a long run, and whether moving it helps.

The same constrained model is trained with the basis moved at several cadences and never, on the
same batches. A probe of its own watches the gradient of the stream at every step, so that the share
that the basis captures is known between moves too, in the arms that never move, and on gradients
that a move has not been fitted to.
"""

import argparse
import math
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from thinwire.data import Corpus, DataConfig, prepare
from thinwire.engine.build import choose_device
from thinwire.engine.chain import Chain
from thinwire.engine.feed import Feed
from thinwire.engine.keeper import GATHER_SHARE
from thinwire.lab.decide import too_short
from thinwire.lab.experiment import Say, steps_of
from thinwire.lab.outcome import Outcome, Row
from thinwire.lab.rank_collapse import say
from thinwire.paths import cache_folder
from thinwire.report.plots import running_mean
from thinwire.settings import Settings
from thinwire.subspace import captured_energy, principal_angles

LEAST_STEPS = 500  # shorter runs have too few moves, and models that have hardly learned
CADENCES, SHORT_CADENCES = (50, 100, 500), (20, 40, 60)
NEVER, OTHER_BASIS = "never", "never, other basis"
NEAR = 5  # steps after a move whose gradients it was not fitted to
WINDOWS = 20  # points of the energy curve
COLOURS = ("#D55E00", "#E69F00", "#009E73", "#0072B2", "#56B4E9")
MODEL = {
    "layers": 4, "dim": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 1024, "context": 64,
}  # fmt: skip


def distance(first_DK: Tensor, second_DK: Tensor) -> float:
    """How far two subspaces are apart: the length of the shortest way from one to the other."""
    return float(torch.linalg.vector_norm(principal_angles(first_DK, second_DK)))


def oscillation(first_DK: Tensor, second_DK: Tensor, third_DK: Tensor) -> float | None:
    """How much of two moves is left when both are done: 0 came back, 1 went straight on.

    Two equal moves in unrelated directions leave 0.71. None if nothing moved.
    """
    path = distance(first_DK, second_DK) + distance(second_DK, third_DK)
    return distance(first_DK, third_DK) / path if path > 1e-9 else None


def best_share(covariance_DD: Tensor, rank: int) -> float:
    """The share of energy that the best basis of that rank would capture."""
    values = torch.linalg.eigvalsh(covariance_DD).clamp(min=0)
    return float(values[-rank:].sum() / values.sum()) if values.sum() > 0 else 0.0


class StreamProbe:
    """Sums g g^T of the stream where it leaves the constrained blocks, as the keeper does."""

    def __init__(self, chain: Chain):
        last, free = chain.stages[-1], chain.settings.boundary.free_layers
        dim = chain.settings.model.dim
        self._sum_DD = torch.zeros(dim, dim, device=chain.device)
        last.layers[len(last.names) - 2 - free].register_forward_pre_hook(self._attach)

    def take(self) -> Tensor:
        """What has been gathered since the last time, scaled to unit energy.

        So every step weighs the same: a single spike in the gradient cannot decide a mean.
        """
        taken, self._sum_DD = self._sum_DD, torch.zeros_like(self._sum_DD)
        taken = taken.cpu().double()
        return taken / taken.trace().clamp(min=1e-300)

    def _attach(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(self._add)

    def _add(self, gradient_BTD: Tensor) -> None:
        flat_ND = gradient_BTD.detach().flatten(0, 1).float()
        self._sum_DD += flat_ND.T @ flat_ND


@dataclass(frozen=True)
class Arm:
    """One run: how often its basis moves (0 = never), and which basis it starts from."""

    name: str
    every: int
    basis_seed: int


@dataclass
class Track:
    """All that one arm's training showed."""

    arm: Arm
    rank: int
    losses: list[float] = field(default_factory=list)
    covariances: list[Tensor] = field(default_factory=list)  # of each step, (D, D)
    bases: list[Tensor] = field(default_factory=list)  # before the first move, after each move
    moves: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    jumps: list[float] = field(default_factory=list)  # of the validation loss, by each move
    valid: dict[int, float] = field(default_factory=dict)  # updates done -> validation loss
    at_end: float = math.nan  # the same after the last update, and a move if one follows it

    @property
    def last_valid(self) -> float:
        """The validation loss before the last update: no move stands between it and training."""
        return list(self.valid.values())[-1]

    def basis_at(self, step: int) -> Tensor:
        """The basis that this step computed with."""
        return self.bases[sum(moved < step for moved, _ in self.moves)]

    def energy(self, start: int, stop: int) -> tuple[float, float]:
        """The mean share captured over some steps, and the best that one basis could capture."""
        steps = range(start, min(stop, len(self.covariances)))
        shares = [captured_energy(self.covariances[t], self.basis_at(t)) for t in steps]
        total_DD = torch.stack(self.covariances[start:stop]).sum(0)
        return statistics.fmean(shares), best_share(total_DD, self.rank)

    def straightness(self) -> float | None:
        """The way from the first basis to the last over the length of all moves."""
        path = sum(distance(a, b) for a, b in zip(self.bases, self.bases[1:], strict=False))
        return distance(self.bases[0], self.bases[-1]) / path if path > 1e-9 else None

    def ratios(self) -> list[float | None]:
        """The oscillation at each move; None at the first, which has no move before it."""
        triples = zip(self.bases, self.bases[1:], self.bases[2:], strict=False)
        return ([None] if self.moves else []) + [oscillation(*triple) for triple in triples]


def follow(arm: Arm, settings: Settings, corpus: Corpus) -> Track:
    """Train one arm."""
    chain = Chain(settings, Feed(corpus, settings, choose_device(settings.run.device, 0)))
    assert chain.builder.space is not None
    space, probe, steps = chain.builder.space, StreamProbe(chain), settings.train.steps
    track = Track(arm, settings.boundary.rank, bases=[_copy(space.basis_DK)])
    chain.move_jumps = track.jumps
    start, every = time.perf_counter(), max(1, steps // (10 if steps >= 300 else 4))
    for step in range(steps):
        looks = (step + 1) % every == 0 or step + 1 == steps
        if looks:  # before the update: a move that follows it is not judged while still fresh
            track.valid[step] = chain.evaluate()
        version = space.version
        track.losses.append(chain.train_step(step))
        track.covariances.append(probe.take())
        measures = chain.keepers[-1].measures(step)
        if space.version != version:
            track.moves.append((step, measures))
            track.bases.append(_copy(space.basis_DK))
        if looks:
            captured, best = track.energy(max(0, step + 1 - every), step + 1)
            say(
                f"{arm.name:<19} step {step + 1:>5}  validation loss {track.valid[step]:.4f}  "
                f"captured {captured:.1%} of {best:.1%} possible  "
                f"({time.perf_counter() - start:.0f} s)"
            )
    track.at_end = chain.evaluate()
    return track


def move_rows(track: Track) -> list[Row]:
    """One row per move."""
    rows = []
    ratios = track.ratios()
    for number, (step, measures) in enumerate(track.moves):
        fresh = track.covariances[step + 1 : step + 1 + NEAR]
        fresh_DD = torch.stack(fresh).sum(0) if len(fresh) == NEAR else None
        old_DK, new_DK = track.bases[number], track.bases[number + 1]
        rows.append(
            {
                "updates every": track.arm.name,
                "move": number + 1,
                "step": step + 1,
                "energy before": measures.get("energy_before"),
                "energy after": measures.get("energy_after"),
                "fresh before": None if fresh_DD is None else captured_energy(fresh_DD, old_DK),
                "fresh after": None if fresh_DD is None else captured_energy(fresh_DD, new_DK),
                "best possible": None if fresh_DD is None else best_share(fresh_DD, track.rank),
                "largest angle": measures.get("largest_angle"),
                "oscillation": ratios[number],
                "loss jump": track.jumps[number],
            }
        )
    return rows


def summary_row(track: Track) -> Row:
    """One arm in one row."""
    steps = len(track.losses)
    captured, best = track.energy(steps - max(1, steps // 10), steps)
    return {
        "updates every": track.arm.name,
        "move": f"all {len(track.moves)}",
        "step": steps,
        "fresh after": captured,
        "best possible": best,
        "largest angle": max((m.get("largest_angle", 0.0) for _, m in track.moves), default=None),
        "oscillation": _median(track.ratios()),
        "loss jump": statistics.median(track.jumps) if track.jumps else None,
        "straightness": track.straightness(),
        "validation loss": track.last_valid,
        "after the last step": track.at_end,
    }


def reference_of(tracks: list[Track]) -> Track:
    """The arm that starts where the moving ones do and never moves."""
    return next(track for track in tracks if track.arm.name == NEVER)


def judge(tracks: list[Track], chance: float) -> tuple[bool, str, str]:
    """Whether moving lowered the loss, why that cannot be told, if so, and what was seen."""
    rows = {track.arm.name: summary_row(track) for track in tracks}
    moving = [track.arm.name for track in tracks if track.arm.every]
    still = rows[NEVER]
    most = max(moving, key=lambda name: rows[name]["fresh after"])
    best = min(moving, key=lambda name: rows[name]["validation loss"])
    gain = still["validation loss"] - rows[best]["validation loss"]
    spread = abs(still["validation loss"] - rows[OTHER_BASIS]["validation loss"])
    seen = (
        f"the best moving arm (every {best} steps) ends {abs(gain):.4f} "
        f"{'below' if gain > 0 else 'above'} the fixed basis, and two fixed bases end "
        f"{spread:.4f} apart"
    )
    jump = rows[most]["loss jump"]
    moved = "" if jump is None else f" A move changes the validation loss by {jump:+.4f} (median)."
    told = (
        f"Moving every {most} steps captured most of the gradient's energy: "
        f"{rows[most]['fresh after']:.1%} in the last tenth of the run, {still['fresh after']:.1%} "
        f"without moves, {rows[most]['best possible']:.1%} possible, {chance:.1%} by chance.{moved}"
    )
    unclear = abs(gain) <= spread
    if not unclear:
        told += f" In loss, {seen}."
    return gain > 0, seen if unclear else "", told


def figure(tracks: list[Track]) -> Figure:
    """Captured energy over the run, the loss, and the loss against the arm that never moves."""
    plot = Figure(figsize=(17, 5), layout="constrained")
    energy, loss, against = plot.subplots(1, 3)
    still = reference_of(tracks)
    for track, colour in zip(tracks, COLOURS, strict=False):
        steps, name = len(track.losses), track.arm.name
        style = {"color": colour, "label": f"moved every {name}" if track.arm.every else name}
        width = max(1, steps // WINDOWS)
        starts = range(0, steps - width + 1, width)
        shares = [track.energy(start, start + width) for start in starts]
        middles = [start + width / 2 for start in starts]
        energy.plot(middles, [share for share, _ in shares], linewidth=2, **style)
        energy.plot(middles, [best for _, best in shares], color=colour, linestyle=":")
        loss.plot(list(track.valid), list(track.valid.values()), marker="o", markersize=4, **style)
        if track is not still:
            apart = running_mean(np.array(track.losses) - np.array(still.losses))
            against.plot(range(1, steps + 1), apart, linewidth=1.5, **style)
            valid = [value - still.valid[done] for done, value in track.valid.items()]
            against.plot(list(track.valid), valid, "o", color=colour, markersize=5)
    energy.set(title="gradient energy: captured (solid), best possible (dotted)",
               xlabel="step", ylabel="share", ylim=(0, 1))  # fmt: skip
    loss.set(title="validation loss", xlabel="step", ylabel="nats per token")
    against.set(title="loss against never: training (line), validation (dots)",
                xlabel="step", ylabel="nats per token")  # fmt: skip
    against.axhline(0, color="#808080", linewidth=1)
    plot.suptitle("A subspace whose basis moves")
    handles, labels = loss.get_legend_handles_labels()
    plot.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    for axis in (energy, loss, against):
        axis.grid(color="#E0E0E0", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return plot


def arms_of(cadences: tuple[int, ...]) -> list[Arm]:
    """Every cadence, never, and never from another basis: what chance in the basis does."""
    moving = [Arm(str(every), every, 0) for every in cadences]
    return [*moving, Arm(NEVER, 0, 0), Arm(OTHER_BASIS, 0, 1)]


def arm_settings(arm: Arm, steps: int, seed: int, device: str, model: dict[str, Any]) -> Settings:
    """A constrained model in four stages, with exact rounding at the cuts."""
    dim = model["dim"]
    return Settings.from_plain(
        {
            "run": {"seed": seed, "device": device, "threads": 1},
            "model": model,
            "pipeline": {"stages": 4, "microbatches": 1, "schedule": "gpipe"},
            "boundary": {
                "mode": "subspace",
                "rank": dim // 8,
                "basis_seed": arm.basis_seed,
                "basis_update_every": arm.every,
            },
            "codec": {"forward": "fp32", "backward": "fp32"},
            "optim": {"warmup": min(20, steps)},
            "train": {"steps": steps, "batch": 8, "eval_batches": 16},
        }
    )


def run(options: argparse.Namespace, say: Say) -> Outcome:
    """Train every arm and compare."""
    steps, seed, device = steps_of(options), options.seed, options.device
    corpus = prepare(DataConfig(), MODEL["vocab"], cache_folder())
    arms = arms_of(SHORT_CADENCES if steps < LEAST_STEPS else CADENCES)
    tracks = [follow(arm, arm_settings(arm, steps, seed, device, MODEL), corpus) for arm in arms]
    rank = tracks[0].rank
    helps, unclear, verdict = judge(tracks, rank / MODEL["dim"])
    return Outcome(
        name="subspace",
        question=(
            "How does the basis behave over a long run when it moves at different cadences? The "
            "claim: moving it lowers the loss."
        ),
        verdict=verdict,
        holds=helps,
        too_small=too_short(steps, LEAST_STEPS) or unclear,
        rows=[
            *(row for track in tracks for row in move_rows(track)),
            *(summary_row(track) for track in tracks),
        ],
        figure=figure(tracks),
        notes=[
            f"width {MODEL['dim']}, rank {rank}, 4 blocks in 4 stages, fp32, the same batches and "
            "starting weights in every arm; one seed",
            "energy before, after: on the gradients that the move was fitted to; fresh: the old "
            f"and the new basis on the gradients of the {NEAR} steps after the move; summary rows "
            "give the share captured over the last tenth of the run",
            "oscillation: the distance between the bases two moves apart over the sum of the two "
            "moves: 0 is back and forth, 0.71 unrelated directions, 1 a steady drift; "
            "straightness: the same for the whole run",
            "loss jump: validation loss right after a move minus right before it, on the same "
            "batches and weights; summary rows give the median",
            "validation loss is read before an update that a move follows; `after the last step` "
            "includes such a move, which has no step left to recover in",
            f"a move is fitted to the last 1/{GATHER_SHARE} of the steps before it: "
            + ", ".join(
                f"{-(-arm.every // GATHER_SHARE)} at {arm.name}" for arm in arms if arm.every
            ),
        ],
    )


def _copy(basis_DK: Tensor) -> Tensor:
    return basis_DK.detach().cpu().to(torch.float64, copy=True)


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
