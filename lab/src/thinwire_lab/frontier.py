"""`thinwire lab frontier`: loss against bytes, for every way to make a cut thin.

An arm is a boundary mode, a rank and a codec for each direction, all on one model with the same
batches. The map shows what a byte saved costs in loss; on its edge lie the choices worth making.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinwire.errors import ConfigError
from thinwire.report import PlainDisplay
from thinwire.run.start import prepare_data
from thinwire_lab.arms import (
    Arm,
    Values,
    base_of,
    check_arms,
    chosen_lines,
    ground_of,
    small_settings,
    width_of,
)
from thinwire_lab.decide import at_best_rate, compared, noise_note, noise_of, one_seed, too_short
from thinwire_lab.experiment import Say, sheet, steps_of
from thinwire_lab.labels import Point, log_ticks, name_points
from thinwire_lab.outcome import Outcome, Row
from thinwire_lab.pool import Session, Trained, train_arms

DENSE = "dense bf16/bf16"
LEAST_STEPS = 200  # shorter runs do not separate the arms
RATIOS = (10, 30, 60, 100)
EQUAL_BYTES = 0.1  # two arms cost the same if their bytes differ by no more than this share
_SPEC = re.compile(r"(dense|subspace|reparam|projected)(?: (d/)?(\d+))? ([^/]+)/(.+)")
_FORM = '"MODE [RANK] FORWARD/BACKWARD", such as "projected d/8 int8/int4"'


def run(options: argparse.Namespace, say: Say) -> Outcome:
    """Train the chosen arms and draw the map."""
    base = base_of(options, small_settings("quick" if options.quick else "whole"))
    lines, steps = specs(options.arms, options.quick), steps_of(options)
    arms = make_arms(lines, width_of(base), options.lrs or [3e-3], options.seeds, steps)
    check_arms(arms, base, options.set)
    corpus = prepare_data(arms[0].settings(base), PlainDisplay(sys.stderr))
    runs = train_arms(arms, ground_of(arms[0], base, corpus), Session.of(options, say))
    return outcome([run for run in runs if run.arm.steps == steps])


def specs(patterns: str | None, quick: bool) -> list[str]:
    """The chosen lines of the grid, and lines of one's own; dense, to compare with, is in any."""
    grid = sheet("frontier")["grid"]["quick" if quick else "usual"]
    return list(dict.fromkeys([DENSE, *chosen_lines(patterns, grid, _SPEC, _FORM)]))


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
            for seed in seeds if line == DENSE else seeds[:1]:
                arms.append(Arm(line, seed, steps, changes))
    return arms


def table(runs: list[Trained]) -> list[Row]:
    """A row for each line of the grid at its best learning rate, fewest bytes last."""
    groups: dict[str, list[Trained]] = {}
    for run in runs:
        groups.setdefault(run.arm.label, []).append(run)
    best = {spec: at_best_rate(group) for spec, group in groups.items()}
    dense = [run for run in best.get(DENSE, []) if run.loss is not None]
    if not dense:
        raise ConfigError(f"{DENSE} could not be trained: there is nothing to compare with")
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


def equal_bytes(lines: list[Row]) -> list[str]:
    """Arms of one mode that cost the same bytes, best first: how to spend them."""
    found = []
    waiting = [line for line in lines if line["gap"] is not None]  # most bytes first
    while waiting:
        line = waiting[0]
        least = line["bytes per token"] * (1 - EQUAL_BYTES)
        group = [
            other
            for other in waiting
            if other["mode"] == line["mode"] and other["bytes per token"] >= least
        ]
        waiting = [other for other in waiting if other not in group]
        if len(group) > 1:
            order = sorted(group, key=lambda other: other["gap"])
            shown = ", ".join(f"{other['arm']} {other['gap']:+.1%}" for other in order)
            found.append(f"at about {line['bytes per token']:.0f} bytes per token: {shown}")
    return found


def figure(lines: list[Row], noise: float | None) -> Figure:
    """Gap over bytes; the edge is drawn through, and named in black."""
    plot = Figure(figsize=(12, 7), layout="constrained")
    axis: Axes = plot.subplots()
    lines = [line for line in lines if line["gap"] is not None]
    names: list[Point] = []
    for number, mode in enumerate(dict.fromkeys(line["mode"] for line in lines)):
        mine = [line for line in lines if line["mode"] == mode]
        points = [(line["bytes per token"], 100 * line["gap"]) for line in mine]
        across, up = zip(*points, strict=True)
        marker = "so^D"[number]
        axis.scatter(across, up, color=f"C{number}", marker=marker, s=36, label=mode, zorder=3)
        for line, point in zip(mine, points, strict=True):
            name = line["arm"].removeprefix(f"{mode} ")
            names.append((*point, name, "black" if line["edge"] else f"C{number}"))
    edge = [(line["bytes per token"], 100 * line["gap"]) for line in lines if line["edge"]]
    across, up = zip(*edge, strict=True)
    label = "edge: nothing is better in both"
    axis.plot(across, up, color="0.4", linewidth=1, drawstyle="steps-post", label=label)
    if noise is not None:
        axis.axhspan(0, 100 * noise, color="0.92", label="what two seeds of dense differ by")
    axis.set(
        xscale="log",
        xlabel="bytes per token at one cut, both ways, headers included",
        ylabel="loss above dense bf16, %",
    )
    axis.margins(x=0.12)
    axis.invert_xaxis()
    full = lines[0]["ratio"] * lines[0]["bytes per token"]

    def flipped(x: Any) -> Any:
        return full / np.maximum(x, 1e-9)

    above = axis.secondary_xaxis("top", functions=(flipped, flipped))
    above.set_xlabel("times fewer than bf16")
    log_ticks(axis.xaxis)
    log_ticks(above.xaxis)
    axis.grid(alpha=0.3)
    plot.suptitle("Loss against bytes at a cut")
    plot.legend(loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    plot.canvas.draw()  # the layout must be final before names are placed
    name_points(axis, names)
    return plot


def outcome(runs: list[Trained]) -> Outcome:
    """The map as a report, with the choices that its figures give."""
    lines = table(runs)
    noise = noise_of(next(line for line in lines if line["arm"] == DENSE))
    steps = runs[0].arm.steps
    choices = [choice for ratio in RATIOS if (choice := _choice(lines, ratio, noise or 0.0))]
    return Outcome(
        name="frontier",
        question=(
            "What does each byte saved at the cut cost in loss, by boundary mode, rank and codec?"
        ),
        verdict=f"Least loss {'; '.join(choices)}." if choices else "No arm saves enough bytes.",
        holds=None,
        too_small=too_short(steps, LEAST_STEPS) or one_seed(noise),
        rows=lines,
        figure=figure(lines, noise),
        notes=[
            "gap: validation loss relative to dense bf16 of the same seed at equal tokens, "
            "compression on; edge: no other arm is better in both bytes and loss",
            noise_note(noise),
            f"{steps} steps; arms other than dense have one seed, and the learning rate "
            "that the table names",
            *equal_bytes(lines),
        ],
    )


def _choice(lines: list[Row], ratio: float, noise: float) -> str:
    """The best arm that is so much smaller than bf16, and how many the noise hides it among."""
    small = [line for line in lines if line["ratio"] >= ratio and line["gap"] is not None]
    if not small:
        return ""
    best = min(small, key=lambda line: line["gap"])
    equals = [line for line in small if line["gap"] - best["gap"] <= noise]
    others = len(equals) - 1
    tie = f", within the noise of {others} other{'s' if others > 1 else ''}" if others else ""
    return f"at {ratio}x or more: {best['arm']} ({best['ratio']:.0f}x, {best['gap']:+.1%}{tie})"
