"""`thinwire lab convergence`: what narrow cuts cost in loss, at equal tokens.

Every arm trains the same model on the same batches with the same optimizer; arms differ in what
crosses the cut. Learning rates are swept per arm.
"""

import argparse
import itertools
from collections.abc import Iterable, Sequence
from statistics import fmean

from thinwire.errors import ConfigError
from thinwire.settings import Settings
from thinwire_lab.arms import (
    DENSE,
    Arm,
    Values,
    base_of,
    recipe_grid,
    small_settings,
    width_of,
    with_rates,
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
from thinwire_lab.experiment import Say, sheet, steps_of, words
from thinwire_lab.outcome import Outcome, Row
from thinwire_lab.plots import Line, Panel
from thinwire_lab.pool import Session, Trained, train_grid

PARITY = 0.01  # the loss above dense that counts as none lost
LEAST_STEPS = 200  # shorter runs say nothing of what a cut costs
CONTROL = "dense+tables"
MODES = "subspace,reparam,projected"
POINTS = 10  # of a curve
CONTROL_NOTE = f"gap to control: against {CONTROL}, which has the token tables but whole cuts"
COPYING_NOTE = "copying: how much lower the loss of half a window is, per token, when said again"

Place = tuple[int, int, str]
"""Stages, steps and label: what is one row of the table."""


def run(options: argparse.Namespace, say: Say) -> Outcome:
    """Train the grid and compare."""
    base = base_of(options, small_settings("small"))
    if options.recipes:  # which bring their rates
        if options.modes or options.ranks:
            raise ConfigError("--recipes: leave --modes and --ranks out, recipes have their own")
        base = with_rates(base)
    usual = sheet("convergence")["grid"]["quick" if options.quick else "usual"]
    parts = sorted({max(1, width_of(base) // part) for part in usual["parts"]})
    seeds, steps, session = options.seeds, steps_of(options), Session.of(options, say)

    two = seeds if len(seeds) > 1 else [seeds[0], seeds[0] + 1]  # dense shows the noise
    if options.recipes:
        lrs = options.lrs or [Settings.as_asked(base).optim.lr]
        arms = recipe_grid(options.recipes, base, lrs, options.stages, seeds, steps, two)
    else:
        modes, lrs = (options.modes or MODES).split(","), options.lrs or usual["lrs"]
        arms = grid(modes, options.ranks or parts, lrs, options.stages, seeds, steps, two)
    runs = train_grid(arms, base, options.set, session, points=POINTS)
    if not runs:
        raise ConfigError(f"no arm could be trained; see the messages above, and {session.log}")
    return outcome(runs, base)


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
    boundary = {"mode": name, "rank": rank, "anchor": "auto", "basis_update_every": 0}
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
            place = run.arm.get("pipeline.stages"), run.arm.steps, run.arm.label
            groups.setdefault(place, []).append(run)
    return {place: at_best_rate(group) for place, group in sorted(groups.items())}


def table(best: dict[Place, list[Trained]], base: Values) -> list[Row]:
    """One row per method: loss gap against the dense arm of the same stages and tokens, or of
    other stages, which only round elsewhere.
    """
    rows = []
    for (stages, steps, label), runs in best.items():
        dense = {s: found for (s, n, name), found in best.items() if (n, name) == (steps, DENSE)}
        tokens = steps * runs[0].arm.settings(base).tokens_per_step
        figures = compared(runs, dense.get(stages) or next(iter(dense.values()), []))
        row = {"stages": stages, "tokens": tokens, "method": label, **figures}
        if control := best.get((stages, steps, CONTROL)):
            row["gap to control"] = gap_to_dense(runs, control)
        if copies := [run.figures["copying"][-1][1] for run in runs if "copying" in run.figures]:
            row["copying"] = fmean(copies)
        rows.append(row)
    return rows


def panels_of(best: dict[Place, list[Trained]]) -> list[Panel]:
    """Loss over tokens, and over bytes of one cut."""
    longest = max(steps for _, steps, _ in best)
    stages = min(s for s, steps, _ in best if steps == longest)
    lines: tuple[list[Line], list[Line]] = ([], [])
    for (s, steps, label), runs in best.items():
        if (s, steps) == (stages, longest):
            tokens, losses = zip(*runs[0].figures["curve"][1:], strict=True)
            for own, scale in zip(
                lines, (1e-6, compared(runs, [])["bytes per token"] / 1e9), strict=True
            ):
                own.append(Line(label, [count * scale for count in tokens], losses))
    loss = f"validation loss, {stages} stages"
    return [
        Panel("over tokens", "million tokens", loss, lines[0]),
        Panel("over bytes", "GB over one cut, both ways", loss, lines[1], "x"),
    ]


def outcome(runs: list[Trained], base: Values) -> Outcome:
    """The grid as a report, with the verdict that its figures give."""
    best = best_by_method(runs)
    rows = table(best, base)
    steps = max(run.arm.steps for run in runs)
    longest = [row for row in rows if row["tokens"] == max(row["tokens"] for row in rows)]
    noise = noise_of(next((row for row in longest if row["method"] == DENSE), None))
    narrow = [row for row in longest if row["method"] != DENSE and row["gap"] is not None]
    narrow.sort(key=lambda row: row["gap"])
    parts = [
        f"{row['method']} ({row['ratio']:.0f}x) {row['gap']:+.1%}"
        for row in narrow
        if row["stages"] == narrow[0]["stages"]
    ]
    worst = max((row["gap"] for row in narrow), default=0.0)
    found = Outcome(
        **words("convergence", parity=PARITY, noise=noise_note(noise)),
        verdict="Loss against dense, best first: " + "; ".join(parts) + ".",
        holds=worst <= PARITY,
        too_small=too_short(steps, LEAST_STEPS) or _undecided(worst, noise, narrow),
        rows=rows,
        panels=panels_of(best),
    )
    if any("gap to control" in row for row in rows):
        found.notes.append(CONTROL_NOTE)
    if any("copying" in row for row in rows):
        found.notes.append(COPYING_NOTE)
    return found


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
