"""`thinwire lab convergence`: what narrow cuts cost in loss, at equal tokens.

Every arm trains the same model on the same batches with the same optimizer; arms differ in what
crosses the cut. Learning rates are swept per arm. An arm is trained in one process
(engine/chain.py), several arms at a time (lab/arms.py).
"""

import dataclasses
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from thinwire.data import Corpus
from thinwire.engine.build import choose_device
from thinwire.engine.chain import Chain
from thinwire.engine.feed import Feed
from thinwire.lab.arms import (
    Ground,
    Session,
    TrainingArm,
    Values,
    differences,
    fingerprint,
    gap_to_dense,
    mean,
    noise_of,
    train_arms,
)
from thinwire.lab.decide import noise_note, one_seed, too_short
from thinwire.lab.experiment import Outcome, Row
from thinwire.plan import estimate_costs
from thinwire.schedule import Network, simulate
from thinwire.settings import Settings
from thinwire.settings.crossing import frame_bytes, size_notes

BF16_BYTES = 2
PARITY = 0.01  # the loss above dense that counts as none lost
LEAST_STEPS = 200  # shorter runs say nothing of what a cut costs
CHOSEN_LINK = Network(80.0, 80.0, 0.025)
_FIRST_KEYS = {
    "model": ("preset", "layers", "dim", "heads", "kv_heads", "ffn", "vocab", "context",
              "rope_theta", "norm_eps"),
    "train": ("steps", "batch", "eval_every", "eval_batches", "checkpoint_every", "keep"),
}  # fmt: skip
_NOT_SHARED = ("run.", "pipeline.", "optim.lr", "optim.warmup")  # of the arm, or of no weight


@dataclass(frozen=True)
class Arm(TrainingArm):
    """One training run of the grid."""

    mode: str
    rank: int
    lr: float
    stages: int
    seed: int
    steps: int
    anchor: str = "auto"
    learn: bool = False
    update_every: int = 0

    @property
    def method(self) -> str:
        """The arm without learning rate and seed: what is compared."""
        extras = [
            f" k={self.rank}" if self.rank else "",
            f" anchor={self.anchor}" if self.anchor != "auto" else "",
            " learned" if self.learn else "",
            f" moved/{self.update_every}" if self.update_every else "",
        ]
        return self.mode + "".join(extras)

    @property
    def label(self) -> str:
        """The arm in a line of progress."""
        return (
            f"{self.stages} stages  {self.method}  lr {self.lr:g}  seed {self.seed}  "
            f"steps {self.steps}"
        )

    def changes(self) -> Values:
        """What this arm has of its own."""
        boundary = {
            "mode": self.mode,
            "rank": self.rank,
            "anchor": self.anchor,
            "learn": self.learn,
            "basis_update_every": self.update_every,
        }
        if self.learn:
            boundary["basis"] = "per-cut"
        changes: Values = {
            "boundary": boundary,
            "pipeline": {"stages": self.stages, "schedule": "gpipe"},
            "optim": {"lr": self.lr, "warmup": max(1, self.steps // 10)},
            "run": {"seed": self.seed},
            "train": {"steps": self.steps},
        }
        return changes


def train_arm(arm: Arm, base: Values, corpus: Corpus) -> Row:
    """Train one arm and say how its validation loss fell."""
    settings = arm.settings(base)
    device = choose_device(settings.run.device, 0)
    chain = Chain(settings, Feed(corpus, settings, device))
    every = max(1, arm.steps // 10)
    curve = [(0, chain.evaluate())]
    start = time.perf_counter()
    for step in range(arm.steps):
        chain.train_step(step)
        if (step + 1) % every == 0 or step + 1 == arm.steps:
            curve.append(((step + 1) * settings.tokens_per_step, chain.evaluate()))
    seconds = time.perf_counter() - start
    return {"curve": curve, "loss": curve[-1][1], "seconds": seconds}


def train(arm: Row, shared: dict[str, Any]) -> Row:
    """What an arm's process does."""
    return train_arm(Arm(**arm), shared["base"], Corpus.open(shared["corpus"]))


def train_grid(arms: list[Arm], base: Values, corpus: Corpus, session: Session) -> list[Row]:
    """Train the arms that the log lacks.

    Returns the log's rows of this model, batch and corpus: losses on others do not compare.
    """
    shared = {"base": base, "corpus": str(corpus.folder)}
    ground = Ground("thinwire.lab.convergence", shared, _ground(base, corpus))
    return train_arms(arms, ground, session)


def best_by_method(rows: Iterable[Row]) -> dict[tuple[int, int, str], Row]:
    """(stages, steps, method) -> the learning rate with the least mean loss over its seeds."""
    groups: dict[tuple[int, int, str, float], list[Row]] = {}
    for row in rows:
        if row["loss"] is None:  # diverged
            continue
        arm = _arm(row)
        groups.setdefault((arm.stages, arm.steps, arm.method, arm.lr), []).append(row)
    best: dict[tuple[int, int, str], Row] = {}
    for (stages, steps, method, lr), members in groups.items():
        losses = [member["loss"] for member in members]
        found = {
            "lr": lr,
            "loss": mean(losses),
            "seeds": len(losses),
            "spread": max(losses) - min(losses),
            "rows": members,
            "row": members[0],
        }
        place = (stages, steps, method)
        if place not in best or found["loss"] < best[place]["loss"]:
            best[place] = found
    return best


def table(rows: list[Row], base: Values) -> list[Row]:
    """One row per method: loss gap against the dense arm of the same stages and tokens."""
    best = best_by_method(rows)
    result = []
    for (stages, steps, method), found in sorted(best.items()):
        arm = _arm(found["row"])
        settings = arm.settings(base)
        out, back = frame_bytes(settings)
        tokens = settings.tokens_per_microbatch
        dense = _dense(best, stages, steps)
        result.append(
            {
                "stages": stages,
                "tokens": steps * settings.tokens_per_step,
                "method": method,
                "bytes per token": (out + back) / tokens,
                "ratio": 2 * BF16_BYTES * settings.model.dim * tokens / (out + back),
                "best lr": found["lr"],
                "seeds": found["seeds"],
                "valid loss": found["loss"],
                "spread": found["spread"] if found["seeds"] > 1 else None,
                "gap": gap_to_dense(found["rows"], dense["rows"]) if dense else None,
            }
        )
    return result


def _dense(best: dict[tuple[int, int, str], Row], stages: int, steps: int) -> Row | None:
    """The dense arm to hold against: of the same cuts, or of others, which only round to bf16."""
    same = {s: row for (s, n, method), row in best.items() if n == steps and method == "dense"}
    return same.get(stages) or next(iter(same.values()), None)


def figure(rows: list[Row], base: Values, flops_per_s: float) -> Figure:
    """Loss over tokens, over bytes of one boundary, and over time at the chosen link."""
    best = best_by_method(rows)
    longest = max(steps for _, steps, _ in best)
    stages = min(s for s, steps, _ in best if steps == longest)
    plot = Figure(figsize=(15, 5), layout="constrained")
    axes = plot.subplots(1, 3, sharey=True)
    colours = iter(itertools.cycle(matplotlib.colormaps["tab20"].colors))  # type: ignore[attr-defined]
    for (s, steps, method), found in sorted(best.items()):
        if (s, steps) != (stages, longest):
            continue
        settings = _arm(found["row"]).settings(base)
        out, back = frame_bytes(settings)
        per_token = (out + back) / settings.tokens_per_microbatch
        tokens = [t for t, _ in found["row"]["curve"]][1:]
        losses = [loss for _, loss in found["row"]["curve"]][1:]
        piped = _with_microbatches(settings)
        costs = estimate_costs(piped, flops_per_s)
        step = simulate(piped.schedule(), costs, CHOSEN_LINK).step_seconds
        hours = [t / settings.tokens_per_step * step / 3600 for t in tokens]
        style = {"label": method, "marker": "o", "markersize": 3, "color": next(colours)}
        axes[0].plot([t / 1e6 for t in tokens], losses, **style)
        axes[1].plot([t * per_token / 1e9 for t in tokens], losses, **style)
        axes[2].plot(hours, losses, **style)
    axes[0].set(xlabel="million tokens", ylabel="validation loss", title="over tokens")
    axes[1].set(xlabel="GB over one cut, both ways", xscale="log", title="over bytes")
    axes[2].set(xlabel="hours", xscale="log", title="over time at 80 Mbps + 25 ms (simulated)")
    for axis in axes:
        axis.grid(alpha=0.3)
    plot.suptitle(f"Validation loss of narrow cuts, {stages} stages")
    handles, labels = axes[0].get_legend_handles_labels()
    plot.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    return plot


def _with_microbatches(settings: Settings) -> Settings:
    """For the time axis: the batch in as many microbatches as a pipeline would use, at most 16."""
    values = settings.to_plain()
    counts = [n for n in range(1, 17) if settings.train.batch % n == 0]
    values["pipeline"].update({"microbatches": max(counts), "schedule": "gpipe", "window": 0})
    return Settings.from_plain(values)


def outcome(rows: list[Row], base: Values, flops_per_s: float) -> Outcome:
    """The grid as a report, with the verdict that its figures give."""
    lines = table(rows, base)
    longest = max(line["tokens"] for line in lines)
    decided = [r for r in lines if r["tokens"] == longest and r["gap"] is not None]
    narrow = sorted((r for r in decided if r["method"] != "dense"), key=lambda r: r["gap"])
    parts = [
        f"{r['method']} ({r['ratio']:.0f}x) {r['gap']:+.1%}"
        for r in narrow
        if r["stages"] == narrow[0]["stages"]
    ]
    steps = max(row["steps"] for row in rows)
    dense = _dense(best_by_method(rows), min(r["stages"] for r in lines), steps)
    noise = noise_of(dense["rows"]) if dense else None
    worst = max((r["gap"] for r in narrow), default=0.0)
    return Outcome(
        name="convergence",
        question=(
            "What do narrow cuts cost in validation loss at equal tokens, same optimizer, learning "
            f"rate tuned per arm? The claim: no more than {PARITY:.0%}."
        ),
        verdict="Loss against dense, best first: " + "; ".join(parts) + ".",
        holds=worst <= PARITY,
        too_small=too_short(steps, LEAST_STEPS) or _undecided(worst, noise, narrow),
        rows=lines,
        figure=figure(rows, base, flops_per_s),
        notes=[
            "gap: against dense with the same tokens and seed (at the first number of stages)",
            noise_note(noise),
            "arms are trained in one process with every cut's boundary and rounding in place",
            f"time: simulated at 80 Mbps + 25 ms with {flops_per_s / 1e12:g} TFLOP/s per stage",
            *size_notes(_arm(rows[0]).settings(base)),
        ],
    )


def _undecided(worst: float, noise: float | None, narrow: list[Row]) -> str:
    """Why the worst gap does not tell whether the claim holds, if so."""
    if not narrow:
        return "no narrow arm was trained beside dense"
    if noise is None or abs(worst - PARITY) > noise:
        return one_seed(noise)
    return (
        f"the largest gap is {worst:.1%}, and two seeds of dense differ by {noise:.1%}, which "
        f"reaches across {PARITY:.0%}"
    )


def grid(
    modes: list[str],
    ranks: list[int],
    lrs: list[float],
    stages: list[int],
    seeds: list[int],
    steps: int,
    dense_seeds: list[int] | None = None,
) -> list[Arm]:
    """Each mode at every rank, number of stages, learning rate and seed; dense beside them.

    Dense arms are trained for the first number of stages only: other cuts would change nothing
    but where activations are rounded.
    """
    arms = [
        Arm("dense", 0, lr, stages[0], seed, steps)
        for lr, seed in itertools.product(lrs, dense_seeds or seeds)
    ]
    for count, mode, rank, lr, seed in itertools.product(stages, modes, ranks, lrs, seeds):
        name, _, variant = mode.partition("+")
        arms.append(
            Arm(
                name,
                rank,
                lr,
                count,
                seed,
                steps,
                anchor=variant if variant in ("fixed", "trainable") else "auto",
                learn=variant == "learned",
                update_every=int(variant[5:]) if variant.startswith("moved") else 0,
            )
        )
    return arms


def _ground(base: Values, corpus: Corpus) -> dict[str, str]:
    """What arms must share for their losses to be compared: model, batch and corpus.

    Settings that came after the first logs are named only where they are not at their defaults.
    """
    shared = Arm("dense", 0, 1e-3, 1, 0, 10).settings(base)
    plain = shared.to_plain()
    told: list[Any] = [
        {key: plain[section][key] for key in keys} for section, keys in _FIRST_KEYS.items()
    ]
    told.append(plain["run"]["precision"])
    first = {f"{section}.{key}" for section, keys in _FIRST_KEYS.items() for key in keys}
    later = {
        name: value
        for name, value in differences(shared).items()
        if name not in first and not name.startswith(_NOT_SHARED)
    }
    return {
        "corpus": corpus.fingerprint,
        "base": fingerprint([*told, later] if later else told),
    }


def _arm(row: Row) -> Arm:
    return Arm(**{field.name: row[field.name] for field in dataclasses.fields(Arm)})
