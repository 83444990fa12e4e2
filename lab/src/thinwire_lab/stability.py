"""`thinwire lab subspace`: how a moving basis behaves over a long run, and whether moving it helps.

The same constrained model is trained with the basis moved at several cadences and never, on the
same batches. A probe of its own watches the gradient of the stream at every step, so that the share
that the basis captures is known between moves too, in the arms that never move, and on gradients
that a move has not been fitted to.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

from thinwire.data import Corpus, DataConfig, prepare
from thinwire.engine.build import choose_device
from thinwire.engine.feed import Feed
from thinwire.engine.keeper import GATHER_SHARE
from thinwire.model.subspace import captured_energy, principal_angles
from thinwire.paths import cache_folder
from thinwire.settings import Settings, merged
from thinwire_lab.arms import Arm
from thinwire_lab.chain import Chain
from thinwire_lab.decide import too_short
from thinwire_lab.experiment import Say, sheet, steps_of, words
from thinwire_lab.outcome import Outcome, Row
from thinwire_lab.plots import Line, Panel

LEAST_STEPS = 500  # shorter runs have too few moves, and models that have hardly learned
NEVER, OTHER_BASIS = "never", "never, other basis"
WINDOWS = 20  # points of the energy curve


def distance(first_DK: Tensor, second_DK: Tensor) -> float:
    """How far two subspaces are apart: the length of the shortest way from one to the other."""
    return float(torch.linalg.vector_norm(principal_angles(first_DK, second_DK)))


def straightness(bases: Sequence[Tensor]) -> float | None:
    """The way from the first basis to the last over the length of all moves: 1 went straight on.

    Of three bases: 0 came back, and two equal moves in unrelated directions leave 0.71. None if
    nothing moved.
    """
    path = sum(distance(first_DK, second_DK) for first_DK, second_DK in pairwise(bases))
    return distance(bases[0], bases[-1]) / path if path > 1e-9 else None


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
        taken = self._sum_DD.cpu().double()
        self._sum_DD.zero_()
        return taken / taken.trace().clamp(min=1e-300)

    def _attach(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(self._add)

    def _add(self, gradient_BTD: Tensor) -> None:
        flat_ND = gradient_BTD.detach().flatten(0, 1).float()
        self._sum_DD += flat_ND.T @ flat_ND


@dataclass
class Track:
    """All that one arm's training showed."""

    name: str
    rank: int
    losses: list[float] = field(default_factory=list)
    covariances: list[Tensor] = field(default_factory=list)  # of each step, (D, D)
    bases: list[Tensor] = field(default_factory=list)  # before the first move, after each move
    moves: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # step, measures
    jumps: list[float] = field(default_factory=list)  # of the validation loss, by each move
    valid: dict[int, float] = field(default_factory=dict)  # updates done -> validation loss
    at_end: float = math.nan  # the same after the last update, and a move if one follows it

    def energy(self, start: int, stop: int) -> tuple[float, float]:
        """The mean share captured over some steps, and the best that one basis could capture."""
        shares = [
            captured_energy(covariance_DD, self.bases[sum(moved < step for moved, _ in self.moves)])
            for step, covariance_DD in enumerate(self.covariances[start:stop], start)
        ]
        total_DD = torch.stack(self.covariances[start:stop]).sum(0)
        return statistics.fmean(shares), best_share(total_DD, self.rank)

    def summary(self) -> Row:
        """The arm in one row."""
        steps = len(self.losses)
        captured, best = self.energy(steps - max(1, steps // 10), steps)
        angles = (measures.get("largest_angle", 0.0) for _, measures in self.moves)
        triples = (self.bases[end - 3 : end] for end in range(3, len(self.bases) + 1))
        turns = [turn for triple in triples if (turn := straightness(triple)) is not None]
        return {
            "updates every": self.name,
            "moves": len(self.moves),
            "captured": captured,
            "best possible": best,
            "largest angle": max(angles, default=None),
            "oscillation": statistics.median(turns) if turns else None,
            "loss jump": statistics.median(self.jumps) if self.jumps else None,
            "straightness": straightness(self.bases),
            "validation loss": list(self.valid.values())[-1],
            "after the last step": self.at_end,
        }


def follow(name: str, settings: Settings, corpus: Corpus, say: Say) -> Track:
    """Train one arm."""
    chain = Chain(settings, Feed(corpus, settings, choose_device(settings.run.device, 0)))
    assert chain.builder.space is not None
    space, probe, steps = chain.builder.space, StreamProbe(chain), settings.train.steps
    track = Track(name, settings.boundary.rank, bases=[_copy(space.basis_DK)])
    chain.move_jumps = track.jumps
    every = max(1, steps // (10 if steps >= 300 else 4))
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
                f"{name:<19} step {step + 1:>5}  validation loss {track.valid[step]:.4f}  "
                f"captured {captured:.1%} of {best:.1%} possible"
            )
    track.at_end = chain.evaluate()
    return track


def judge(tracks: list[Track], chance: float) -> tuple[bool, str, str]:
    """Whether moving lowered the loss, why that cannot be told, if so, and what was seen."""
    rows = {track.name: track.summary() for track in tracks}
    still, other = rows.pop(NEVER), rows.pop(OTHER_BASIS)
    most = max(rows.values(), key=lambda row: row["captured"])
    best = min(rows.values(), key=lambda row: row["validation loss"])
    gain = still["validation loss"] - best["validation loss"]
    spread = abs(still["validation loss"] - other["validation loss"])
    seen = (
        f"the best moving arm (every {best['updates every']} steps) ends {abs(gain):.4f} "
        f"{'below' if gain > 0 else 'above'} the fixed basis, and two fixed bases end "
        f"{spread:.4f} apart"
    )
    told = (
        f"Moving every {most['updates every']} steps captured most of the gradient's energy: "
        f"{most['captured']:.1%} in the last tenth of the run, {still['captured']:.1%} "
        f"without moves, {most['best possible']:.1%} possible, {chance:.1%} by chance."
    )
    if most["loss jump"] is not None:
        told += f" A move changes the validation loss by {most['loss jump']:+.4f} (median)."
    if abs(gain) <= spread:
        return gain > 0, seen, told
    return gain > 0, "", f"{told} In loss, {seen}."


def panels_of(tracks: list[Track]) -> list[Panel]:
    """Captured energy over the run, and the loss."""
    energy, loss = [], []
    for track in tracks:
        steps, is_fixed = len(track.losses), track.name in (NEVER, OTHER_BASIS)
        label = track.name if is_fixed else f"moved every {track.name}"
        width = max(1, steps // WINDOWS)
        starts = range(0, steps - width + 1, width)
        captured, best = zip(*(track.energy(n, n + width) for n in starts), strict=True)
        middles = [start + width / 2 for start in starts]
        energy += [Line(label, middles, captured, "-"), Line(label, middles, best, ":")]
        loss.append(Line(label, list(track.valid), list(track.valid.values())))
    share = "share captured (solid), best possible (dotted)"
    return [
        Panel("gradient energy", "step", share, energy, limits=(0, 1)),
        Panel("validation loss", "step", "nats per token", loss),
    ]


def arms_of(cadences: Sequence[int], seed: int, steps: int) -> list[Arm]:
    """Every cadence, never, and never from another basis: what chance in the basis does."""
    ways = [*((str(n), n, 0) for n in cadences), (NEVER, 0, 0), (OTHER_BASIS, 0, 1)]
    return [
        Arm(name, seed, steps, {"boundary": {"basis_update_every": every, "basis_seed": basis}})
        for name, every, basis in ways
    ]


def run(options: argparse.Namespace, say: Say) -> Outcome:
    """Train every arm and compare."""
    told, steps = sheet("stability"), steps_of(options)
    changes = {"run": {"device": options.device}, "optim": {"warmup": min(20, steps)}}
    base = merged(told["settings"], changes)
    cadences = told["cadences"]["short" if steps < LEAST_STEPS else "long"]
    arms = arms_of(cadences, options.seed, steps)
    model = arms[0].settings(base).model
    corpus = prepare(DataConfig(), model.vocab, cache_folder())
    tracks = [follow(arm.label, arm.settings(base), corpus, say) for arm in arms]
    rank = tracks[0].rank
    helps, unclear, verdict = judge(tracks, rank / model.dim)
    fitted = ", ".join(f"{-(-every // GATHER_SHARE)} at {every}" for every in cadences)
    facts = {"dim": model.dim, "rank": rank, "share": GATHER_SHARE}
    return Outcome(
        **words("stability", **facts, fitted=fitted),
        verdict=verdict,
        holds=helps,
        too_small=too_short(steps, LEAST_STEPS) or unclear,
        rows=[track.summary() for track in tracks],
        panels=panels_of(tracks),
    )


def _copy(basis_DK: Tensor) -> Tensor:
    return basis_DK.detach().cpu().to(torch.float64, copy=True)
