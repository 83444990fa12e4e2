"""`thinwire lab frontier`: loss against bytes, for every way to make a cut thin.

An arm is a boundary mode, a rank and a codec for each direction, all on one model with the same
batches. The map shows what a byte saved costs in loss; on its edge lie the choices worth making.
"""

import argparse
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from thinwire.errors import ConfigError
from thinwire_lab.arms import Arm, Values, base_of, small_settings, split_patterns, width_of
from thinwire_lab.decide import at_best_rate, compared, noise_note, noise_of, one_seed, too_short
from thinwire_lab.experiment import Say, sheet, steps_of, words
from thinwire_lab.outcome import Outcome, Row
from thinwire_lab.plots import Line, Panel
from thinwire_lab.pool import Session, Trained, train_grid

DENSE_BF16 = "dense bf16/bf16"
LEAST_STEPS = 200  # shorter runs do not separate the arms
RATIOS = (10, 30, 60, 100)
_SPEC = re.compile(r"(dense|subspace|reparam|projected)(?: (d/)?(\d+))? ([^/]+)/(.+)")


def run(options: argparse.Namespace, say: Say) -> Outcome:
    """Train the chosen arms and draw the map."""
    base = base_of(options, small_settings("quick" if options.quick else "whole"))
    lines, steps = specs(options.arms, options.quick), steps_of(options)
    arms = make_arms(lines, width_of(base), options.lrs or [3e-3], options.seeds, steps)
    runs = train_grid(arms, base, options.set, Session.of(options, say))
    return outcome([run for run in runs if run.arm.steps == steps])


def specs(patterns: str | None, quick: bool) -> list[str]:
    """The chosen lines of the grid, and lines of one's own; dense, to compare with, is in any."""
    grid = sheet("frontier")["grid"]["quick" if quick else "usual"]
    found = [DENSE_BF16]
    for pattern in split_patterns(patterns) if patterns else ["*"]:
        fitting = [known for known in grid if fnmatchcase(known, pattern)]
        if not fitting and not _SPEC.fullmatch(pattern):
            raise ConfigError(
                f'--arms "{pattern}" matches no arm of the grid and is not an arm itself; write '
                '"MODE [RANK] FORWARD/BACKWARD", such as "projected d/8 int8/int4". The grid: '
                f"{'; '.join(grid)}"
            )
        found += fitting or [pattern]
    return list(dict.fromkeys(found))


def make_arms(
    lines: Sequence[str], dim: int, lrs: Sequence[float], seeds: Sequence[int], steps: int
) -> list[Arm]:
    """Each line at every learning rate; dense with all seeds, which shows the noise."""
    arms = []
    for line in lines:
        matched = _SPEC.fullmatch(line)
        assert matched is not None, f"{line} is no line of a grid"
        mode, divides, number, forward, backward = matched.groups()
        rank = max(1, dim // int(number)) if divides else int(number or 0)
        for lr in lrs:
            changes: Values = {
                "boundary": {"mode": mode, "rank": rank},
                "codec": {"forward": forward, "backward": backward},
                "optim": {"lr": lr, "warmup": max(1, steps // 10)},
            }
            for seed in seeds if line == DENSE_BF16 else seeds[:1]:
                arms.append(Arm(line, seed, steps, changes))
    return arms


def table(runs: list[Trained]) -> list[Row]:
    """A row for each line of the grid at its best learning rate, fewest bytes last."""
    groups: dict[str, list[Trained]] = {}
    for run in runs:
        groups.setdefault(run.arm.label, []).append(run)
    best = {spec: at_best_rate(group) for spec, group in groups.items()}
    dense = [run for run in best.get(DENSE_BF16, []) if run.loss is not None]
    if not dense:
        raise ConfigError(f"{DENSE_BF16} could not be trained: there is nothing to compare with")
    lines = []
    for label, group in best.items():
        arm = group[0].arm
        place = {"mode": arm.get("boundary.mode"), "rank": arm.get("boundary.rank") or None}
        lines.append({"arm": label, **place, **compared(group, dense)})
    for line in lines:
        line["edge"] = is_on_edge(line, lines)
    return sorted(lines, key=lambda line: -line["bytes per token"])


def is_on_edge(line: Row, lines: list[Row]) -> bool:
    """Whether no other line has as low a loss with fewer bytes, or a lower one with as many."""
    if line["gap"] is None:
        return False
    here = line["bytes per token"], line["gap"]
    others = [(o["bytes per token"], o["gap"]) for o in lines if o["gap"] is not None]
    return not any(b <= here[0] and g <= here[1] and (b, g) != here for b, g in others)


def panel_of(lines: list[Row], noise: float | None) -> Panel:
    """Gap over bytes; the edge is drawn through."""
    lines = [line for line in lines if line["gap"] is not None]
    drawn = []
    for mode in dict.fromkeys(line["mode"] for line in lines):
        mine = [line for line in lines if line["mode"] == mode]
        names = [line["arm"].removeprefix(f"{mode} ") for line in mine]
        drawn.append(Line(mode, *_points(mine), "o", names=names))
    edge = [line for line in lines if line["edge"]]
    drawn.append(Line("edge: nothing is better in both", *_points(edge), "-", "0.4"))
    levels = {} if noise is None else {"what two seeds of dense differ by": 100 * noise}
    across = "bytes per token at one cut, both ways, headers included"
    up = "loss above dense bf16, %"
    return Panel("loss against bytes", across, up, drawn, "x", levels, flipped=True)


def _points(lines: list[Row]) -> tuple[list[float], list[float]]:
    return [line["bytes per token"] for line in lines], [100 * line["gap"] for line in lines]


def outcome(runs: list[Trained]) -> Outcome:
    """The map as a report, with the choices that its figures give."""
    lines = table(runs)
    noise = noise_of(next(line for line in lines if line["arm"] == DENSE_BF16))
    steps = runs[0].arm.steps
    choices = [choice for ratio in RATIOS if (choice := _choice(lines, ratio, noise or 0.0))]
    return Outcome(
        **words("frontier", noise=noise_note(noise), steps=steps),
        verdict=f"Least loss {'; '.join(choices)}." if choices else "No arm saves enough bytes.",
        holds=None,
        too_small=too_short(steps, LEAST_STEPS) or one_seed(noise),
        rows=lines,
        panels=[panel_of(lines, noise)],
    )


def _choice(lines: list[Row], ratio: float, noise: float) -> str:
    """The best arm that is so much smaller than bf16, and how many the noise hides it among."""
    small = [line for line in lines if line["ratio"] >= ratio and line["gap"] is not None]
    if not small:
        return ""
    best = min(small, key=lambda line: line["gap"])
    others = len([line for line in small if line["gap"] - best["gap"] <= noise]) - 1
    tie = f", within the noise of {others} other{'s' if others > 1 else ''}" if others else ""
    return f"at {ratio}x or more: {best['arm']} ({best['ratio']:.0f}x, {best['gap']:+.1%}{tie})"
