"""`thinwire lab convergence`: what narrow cuts cost in loss, at equal tokens.

Every arm trains the same model on the same batches with the same optimizer; arms differ in what
crosses the cut. Learning rates are swept per arm.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from thinwire.errors import ConfigError
from thinwire.plan import estimate_costs
from thinwire.report import PlainDisplay
from thinwire.run.prepare import prepare_corpus
from thinwire.schedule import Network, simulate
from thinwire.settings import Settings
from thinwire_lab.arms import (
    Arm,
    Values,
    base_of,
    check_arms,
    ground_of,
    small_settings,
    width_of,
)
from thinwire_lab.decide import (
    at_best_rate,
    compared,
    gap_to_dense,
    noise_note,
    noise_of,
    one_seed,
    too_short,
)
from thinwire_lab.experiment import Say, sheet, steps_of
from thinwire_lab.outcome import Outcome, Row
from thinwire_lab.pool import Session, Trained, train_arms
from thinwire_lab.recipe_arms import DENSE, recipe_grid, with_rates

PARITY = 0.01  # the loss above dense that counts as none lost
LEAST_STEPS = 200  # shorter runs say nothing of what a cut costs
CONTROL = "dense+tables"
MODES = "subspace,reparam,projected"
POINTS = 10  # of a curve
CONTROL_NOTE = f"gap to control: against {CONTROL}, which has the token tables but whole cuts"
CHOSEN_LINK = Network(80.0, 80.0, 0.025)

Place = tuple[int, int, str]
"""Stages, steps and label: what is one row of the table."""


def run(options: argparse.Namespace, say: Say) -> Outcome:
    """Train the grid and compare."""
    base = _base(options)
    usual = sheet("convergence")["grid"]["quick" if options.quick else "usual"]
    parts = sorted({max(1, width_of(base) // part) for part in usual["parts"]})
    seeds, sweep, session = options.seeds, options.sweep_steps, Session.of(options, say)

    def grid_of(seeds: list[int], dense_seeds: list[int], steps: int) -> list[Arm]:
        stages = options.stages
        if options.recipes:
            lrs = options.lrs or [Settings.as_asked(base).optim.lr]
            return recipe_grid(options.recipes, base, lrs, stages, seeds, steps, dense_seeds)
        modes = (options.modes or MODES).split(",")
        ranks, lrs = options.ranks or parts, options.lrs or usual["lrs"]
        return grid(modes, ranks, lrs, stages, seeds, steps, dense_seeds)

    two = seeds if len(seeds) > 1 else [seeds[0], seeds[0] + 1]  # dense shows the noise
    arms = grid_of(seeds, two, steps_of(options))
    check_arms(arms, base, options.set)
    corpus = prepare_corpus(arms[0].settings(base), PlainDisplay(sys.stderr))
    ground = ground_of(arms[0], base, corpus, points=POINTS)
    if sweep:
        swept = train_arms(grid_of(seeds[:1], seeds[:1], sweep), ground, session)
        best = best_by_method(run for run in swept if run.arm.steps == sweep)
        rates = {(place[0], place[2]): runs[0].arm.get("optim.lr") for place, runs in best.items()}
        arms = [a for a in arms if rates.get((_stages(a), a.label)) == a.get("optim.lr")]
    runs = train_arms(arms, ground, session)
    if not runs:
        raise ConfigError(f"no arm could be trained; see the messages above, and {session.log}")
    return outcome(runs, base, options.tflops * 1e12)


def _base(options: argparse.Namespace) -> Values:
    """The settings that all arms share; recipes bring their rates."""
    base = base_of(options, small_settings("small"))
    if not options.recipes:
        return base
    if options.modes or options.ranks:
        raise ConfigError("--recipes has its own modes and ranks: leave --modes and --ranks out")
    return with_rates(base)


def grid(
    modes: Sequence[str],
    ranks: Sequence[int],
    lrs: Sequence[float],
    stages: Sequence[int],
    seeds: Sequence[int],
    steps: int,
    dense_seeds: Sequence[int] = (),
) -> list[Arm]:
    """Each mode at every rank, number of stages, learning rate and seed; dense beside them.

    Dense arms are trained for the first number of stages only: other cuts would change nothing
    but where activations are rounded.
    """
    dense = itertools.product(stages[:1], [DENSE], [0], lrs, dense_seeds or seeds)
    narrow = itertools.product(stages, modes, ranks, lrs, seeds)
    return [_arm(*choice, steps) for choice in itertools.chain(dense, narrow)]


def _arm(stages: int, mode: str, rank: int, lr: float, seed: int, steps: int) -> Arm:
    name, _, variant = mode.partition("+")
    boundary: dict[str, Any] = {
        "mode": name, "rank": rank, "anchor": "auto", "basis_update_every": 0,
    }  # fmt: skip
    known, moves = sheet("convergence")["variants"], variant.removeprefix("moved")
    if variant in known:
        boundary |= known[variant]
    elif moves != variant and moves.isdecimal():
        boundary["basis_update_every"] = int(moves)
    elif variant:
        raise ConfigError(f"--modes {mode}: a variant is one of {', '.join(known)} and movedN")
    label = name + (f" k={rank}" if rank else "") + (f" {variant}" if variant else "")
    changes: Values = {
        "boundary": boundary,
        "pipeline": {"stages": stages, "schedule": "gpipe"},
        "optim": {"lr": lr, "warmup": max(1, steps // 10)},
    }
    return Arm(label, seed, steps, changes)


def best_by_method(runs: Iterable[Trained]) -> dict[Place, list[Trained]]:
    """The runs of each method at its best learning rate. What diverged does not count."""
    groups: dict[Place, list[Trained]] = {}
    for run in runs:
        if run.loss is not None:
            place = _stages(run.arm), run.arm.steps, run.arm.label
            groups.setdefault(place, []).append(run)
    return {place: at_best_rate(group) for place, group in sorted(groups.items())}


def _stages(arm: Arm) -> int:
    return arm.get("pipeline.stages")


def table(best: dict[Place, list[Trained]], base: Values) -> list[Row]:
    """One row per method: loss gap against the dense arm of the same stages and tokens."""
    rows = []
    for (stages, steps, label), runs in best.items():
        tokens = steps * runs[0].arm.settings(base).tokens_per_step
        figures = compared(runs, _dense(best, stages, steps))
        row = {"stages": stages, "tokens": tokens, "method": label, **figures}
        control = best.get((stages, steps, CONTROL))
        if control:
            row["gap to control"] = gap_to_dense(runs, control)
        rows.append(row)
    return rows


def _dense(best: dict[Place, list[Trained]], stages: int, steps: int) -> list[Trained]:
    """The dense arm to hold against: of the same cuts, or of others, which only round to bf16."""
    same = {s: runs for (s, n, label), runs in best.items() if (n, label) == (steps, DENSE)}
    return same.get(stages) or next(iter(same.values()), [])


def figure(best: dict[Place, list[Trained]], base: Values, flops_per_s: float) -> Figure:
    """Loss over tokens, over bytes of one cut, and over time at the chosen link."""
    longest = max(steps for _, steps, _ in best)
    stages = min(s for s, steps, _ in best if steps == longest)
    plot = Figure(figsize=(15, 5), layout="constrained")
    axes = plot.subplots(1, 3, sharey=True)
    colours = itertools.cycle(matplotlib.colormaps["tab20"].colors)  # type: ignore[attr-defined]
    for (s, steps, label), runs in best.items():
        if (s, steps) != (stages, longest):
            continue
        tokens, losses = zip(*runs[0].figures["curve"][1:], strict=True)
        settings = _with_microbatches(runs[0].arm.settings(base))
        costs = estimate_costs(settings, flops_per_s)
        step = simulate(settings.schedule(), costs, CHOSEN_LINK).step_seconds
        per_token = compared(runs, [])["bytes per token"]
        scales = (1e-6, per_token / 1e9, step / settings.tokens_per_step / 3600)
        style = {"label": label, "marker": "o", "markersize": 3, "color": next(colours)}
        for axis, scale in zip(axes, scales, strict=True):
            axis.plot([count * scale for count in tokens], losses, **style)
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
    count = max(n for n in range(1, 17) if settings.train.batch % n == 0)
    values["pipeline"].update({"microbatches": count, "schedule": "gpipe", "window": 0})
    return Settings.from_plain(values)


def outcome(runs: list[Trained], base: Values, flops_per_s: float) -> Outcome:
    """The grid as a report, with the verdict that its figures give."""
    best = best_by_method(runs)
    rows = table(best, base)
    steps = max(run.arm.steps for run in runs)
    longest = [row for row in rows if row["tokens"] == max(row["tokens"] for row in rows)]
    dense = next((row for row in longest if row["method"] == DENSE), None)
    narrow = [row for row in longest if row["method"] != DENSE and row["gap"] is not None]
    narrow.sort(key=lambda row: row["gap"])
    parts = [
        f"{row['method']} ({row['ratio']:.0f}x) {row['gap']:+.1%}"
        for row in narrow
        if row["stages"] == narrow[0]["stages"]
    ]
    noise = noise_of(dense)
    worst = max((row["gap"] for row in narrow), default=0.0)
    return Outcome(
        name="convergence",
        question=(
            "What do narrow cuts cost in validation loss at equal tokens, same optimizer, learning "
            f"rate tuned per arm? The claim: no more than {PARITY:.0%}."
        ),
        verdict="Loss against dense, best first: " + "; ".join(parts) + ".",
        holds=worst <= PARITY,
        too_small=too_short(steps, LEAST_STEPS) or _undecided(worst, noise, narrow),
        rows=rows,
        figure=figure(best, base, flops_per_s),
        notes=[
            "gap: against dense with the same tokens and seed (at the first number of stages)",
            *([CONTROL_NOTE] if any("gap to control" in row for row in rows) else []),
            noise_note(noise),
            "arms are trained in one process with every cut's boundary and rounding in place",
            f"time: simulated at 80 Mbps + 25 ms with {flops_per_s / 1e12:g} TFLOP/s per stage",
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
