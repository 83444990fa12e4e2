"""`thinwire lab frontier`: loss against bytes, for every way to make a cut thin.

An arm is a boundary mode, a rank and a codec for each direction, all on one model with the same
batches. The map shows what a byte saved costs in loss; on its edge lie the choices worth making.
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from thinwire.data import Corpus
from thinwire.engine.build import choose_device
from thinwire.engine.chain import Chain
from thinwire.engine.feed import Feed
from thinwire.errors import ConfigError
from thinwire.lab.arms import (
    Ground,
    Session,
    TrainingArm,
    Values,
    differences,
    fingerprint,
    gap_to_dense,
    mean,
    split_patterns,
    train_arms,
)
from thinwire.lab.decide import noise_note, one_seed, too_short
from thinwire.lab.experiment import Outcome, Row
from thinwire.lab.labels import Point, name_points
from thinwire.lab.measure import train_measured

DENSE = "dense bf16/bf16"
GRID = (
    DENSE,
    "dense int8/int8",
    "dense int4(group=64,hadamard)/int8",
    "dense int8/int4",
    # 8 bits forward and 4 back, which were found to cost least, at three ranks
    "projected d/8 int8/int4",
    "projected d/16 int8/int4",
    "projected d/32 int8/int4",
    # 21 times fewer bytes than bf16
    "projected d/4 int2/int4",
    "projected d/8 int4/int8",
    # about 31 times, from many coordinates in few bits to few in many
    "projected d/4 int2/int2",
    "projected d/8 int4/int4",
    "projected d/16 int8/int8",
    "projected d/32 bf16/bf16",
    # 77 times
    "projected d/16 int2/int4",
    "projected d/32 int4/int8",
    # what lies around these
    "projected d/4 int4/int8",
    "projected d/8 bf16/bf16",
    "projected d/8 step(3)+zstd/step(5)+zstd",
    "projected d/16 int4/int8",
    "projected d/32 int4/int4",
    "reparam d/8 int4/int8",
    "reparam d/32 bf16/bf16",
    "reparam d/32 int4/int8",
    "reparam d/96 bf16/bf16",
)
QUICK = (
    DENSE,
    "dense int8/int8",
    "projected d/4 int2/int2",
    "projected d/8 int4/int8",
    "projected d/8 int4/int4",
    "projected d/32 bf16/bf16",
    "reparam d/8 int4/int8",
)
LEAST_STEPS = 200  # shorter runs do not tell arms apart
RATIOS = (10, 30, 60, 100)
EQUAL_BYTES = 0.1  # two arms cost the same if their bytes differ by no more than this share
_SPEC = re.compile(r"(dense|subspace|reparam|projected)(?: (d/)?(\d+))? ([^/]+)/(.+)")


@dataclass(frozen=True)
class Arm(TrainingArm):
    """One training run."""

    spec: str
    mode: str
    rank: int
    forward: str
    backward: str
    lr: float
    seed: int
    steps: int

    @property
    def label(self) -> str:
        """The arm in a line of progress."""
        return f"{self.spec}  lr {self.lr:g}  seed {self.seed}"

    def changes(self) -> Values:
        """What this arm has of its own."""
        changes: Values = {
            "boundary": {"mode": self.mode, "rank": self.rank},
            "codec": {"forward": self.forward, "backward": self.backward},
            "optim": {"lr": self.lr, "warmup": max(1, self.steps // 10)},
            "run": {"seed": self.seed},
            "train": {"steps": self.steps},
        }
        return changes


def specs(patterns: str | None, quick: bool) -> list[str]:
    """The chosen lines of the grid, and lines of one's own; dense, to compare with, is in any."""
    grid = QUICK if quick else GRID
    found = [DENSE]
    for pattern in split_patterns(patterns) if patterns else ["*"]:
        fitting = [line for line in grid if fnmatchcase(line, pattern)]
        if not fitting and not _SPEC.fullmatch(pattern):
            known = "; ".join(grid)
            raise ConfigError(
                f'--arms "{pattern}" matches no arm of the grid and is not an arm itself; write '
                f'"MODE [RANK] FORWARD/BACKWARD", such as "projected d/8 int8/int4". '
                f"The grid: {known}"
            )
        found += fitting or [pattern]
    return list(dict.fromkeys(found))


def make_arms(
    lines: list[str], dim: int, lrs: list[float], seeds: list[int], steps: int
) -> list[Arm]:
    """Each line at every learning rate; dense with all seeds, which shows the noise."""
    arms = []
    for line in lines:
        matched = _SPEC.fullmatch(line)
        assert matched is not None, f"{line} is no line of a grid"
        mode, divides, number, forward, backward = matched.groups()
        rank = max(1, dim // int(number)) if divides else int(number or 0)
        for lr in lrs:
            for seed in seeds if line == DENSE else seeds[:1]:
                arms.append(Arm(line, mode, rank, forward, backward, lr, seed, steps))
    return arms


def train(arm: Row, shared: dict[str, Any]) -> Row:
    """What an arm's process does."""
    settings = Arm(**arm).settings(shared["base"])
    device = choose_device(settings.run.device, 0)
    return train_measured(Chain(settings, Feed(Corpus.open(shared["corpus"]), settings, device)))


def train_grid(arms: list[Arm], base: Values, corpus: Corpus, session: Session) -> list[Row]:
    """Train the arms that the log lacks; returns all rows of this ground and length."""
    neutral = dataclasses.replace(arms[0], lr=1e-3, steps=10)
    names = {
        "corpus": corpus.fingerprint,
        "base": fingerprint(differences(neutral.settings(base))),
    }
    shared = {"base": base, "corpus": str(corpus.folder)}
    ground = Ground("thinwire.lab.frontier", shared, names)
    rows = train_arms(arms, ground, session)
    return [row for row in rows if row["steps"] == arms[0].steps]


def table(rows: list[Row]) -> list[Row]:
    """A row for each line of the grid at its best learning rate, fewest bytes last.

    A line whose loss is no number at any rate has diverged: it has neither loss nor gap.
    """
    groups: dict[str, dict[float, list[Row]]] = {}
    for row in rows:
        groups.setdefault(row["spec"], {}).setdefault(row["lr"], []).append(row)
    best = {spec: _best(by_lr) for spec, by_lr in groups.items()}
    dense = [row for row in best.get(DENSE, []) if row["loss"] is not None]
    if not dense:
        raise ConfigError(f"{DENSE} could not be trained: there is nothing to compare with")
    lines = [_line(spec, members, dense) for spec, members in best.items()]
    for line in lines:
        line["edge"] = is_on_edge(line, lines)
    return sorted(lines, key=lambda line: -line["bytes per token"])


def _best(by_lr: dict[float, list[Row]]) -> list[Row]:
    """The rows at the learning rate with the least loss."""

    def loss(rows: list[Row]) -> float:
        return mean(math.inf if row["loss"] is None else row["loss"] for row in rows)

    return min(by_lr.values(), key=loss)


def _line(spec: str, rows: list[Row], dense: list[Row]) -> Row:
    """What is told of a line; its gap is against dense of the same seed."""
    losses = [row["loss"] for row in rows]
    settled = None not in losses
    first = rows[0]
    return {
        "arm": spec,
        "rank": first["rank"] or None,
        "bytes per token": first["bytes_forward"] + first["bytes_backward"],
        "ratio": first["ratio"],
        "lr": first["lr"],
        "seeds": len(rows),
        "valid loss": mean(losses) if settled else None,
        "spread": max(losses) - min(losses) if settled and len(losses) > 1 else None,
        "gap": gap_to_dense(rows, dense) if settled else None,
    }


def is_on_edge(line: Row, lines: list[Row]) -> bool:
    """Whether no other line has as low a loss with fewer bytes, or a lower one with as many."""
    if line["gap"] is None:
        return False
    here = line["bytes per token"], line["gap"]
    others = [(o["bytes per token"], o["gap"]) for o in lines if o["gap"] is not None]
    return not any(b <= here[0] and g <= here[1] and (b, g) != here for b, g in others)


def best_at(lines: list[Row], ratio: float) -> Row | None:
    """The least loss among the lines that are at least so much smaller than bf16."""
    small = [line for line in lines if line["ratio"] >= ratio and line["gap"] is not None]
    return min(small, key=lambda line: line["gap"], default=None)


def equal_bytes(lines: list[Row]) -> list[str]:
    """Arms of one mode that cost the same bytes, best first: how to spend them."""
    found = []
    waiting = [line for line in lines if line["gap"] is not None]  # most bytes first
    while waiting:
        line = waiting[0]
        least = line["bytes per token"] * (1 - EQUAL_BYTES)
        group = [o for o in waiting if _mode(o) == _mode(line) and o["bytes per token"] >= least]
        waiting = [other for other in waiting if other not in group]
        if len(group) > 1:
            order = sorted(group, key=lambda other: other["gap"])
            shown = ", ".join(f"{other['arm']} {other['gap']:+.1%}" for other in order)
            found.append(f"at about {line['bytes per token']:.0f} bytes per token: {shown}")
    return found


def _mode(line: Row) -> str:
    return str(line["arm"]).split()[0]


def figure(lines: list[Row], noise: float | None) -> Figure:
    """Gap over bytes; the edge is drawn through, and named in black."""
    plot = Figure(figsize=(12, 7), layout="constrained")
    axis: Axes = plot.subplots()
    lines = [line for line in lines if line["gap"] is not None]
    names: list[Point] = []
    for number, mode in enumerate(dict.fromkeys(map(_mode, lines))):
        mine = [line for line in lines if _mode(line) == mode]
        axis.scatter(
            [line["bytes per token"] for line in mine],
            [100 * line["gap"] for line in mine],
            color=f"C{number}",
            marker="so^D"[number],
            s=36,
            label=mode,
            zorder=3,
        )
        names += [
            (
                line["bytes per token"],
                100 * line["gap"],
                line["arm"].partition(" ")[2],
                "black" if line["edge"] else f"C{number}",
            )
            for line in mine
        ]
    edge = [line for line in lines if line["edge"]]
    axis.plot(
        [line["bytes per token"] for line in edge],
        [100 * line["gap"] for line in edge],
        color="0.4",
        linewidth=1,
        drawstyle="steps-post",
        label="edge: nothing is better in both",
    )
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
    for shown in (axis.xaxis, above.xaxis):
        shown.set_major_locator(LogLocator(10, (1, 2, 5)))
        shown.set_major_formatter("{x:g}")
        shown.set_minor_locator(NullLocator())
    axis.grid(alpha=0.3)
    plot.suptitle("Loss against bytes at a cut")
    plot.legend(loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    plot.canvas.draw()  # the layout must be final before names are placed
    name_points(axis, names)
    return plot


def outcome(rows: list[Row]) -> Outcome:
    """The map as a report, with the choices that its figures give."""
    lines = table(rows)
    dense = next(line for line in lines if line["arm"] == DENSE)
    noise = dense["spread"] / dense["valid loss"] if dense["spread"] is not None else None
    steps = rows[0]["steps"]
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
    best = best_at(lines, ratio)
    if best is None:
        return ""
    equals = [
        line
        for line in lines
        if line["ratio"] >= ratio and line["gap"] is not None and line["gap"] - best["gap"] <= noise
    ]
    others = len(equals) - 1
    tie = f", within the noise of {others} other{'s' if others > 1 else ''}" if others else ""
    return f"at {ratio}x or more: {best['arm']} ({best['ratio']:.0f}x, {best['gap']:+.1%}{tie})"
