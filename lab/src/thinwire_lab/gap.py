"""`thinwire lab gap`: one picture of what bytes cost in loss, from logs of trained arms.

Nothing is trained. Each log gives the arms of its longest runs; beside them stand the figures that
others have published, with their sources.
"""

import argparse
import re
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinwire.engine.build import parameter_count
from thinwire.settings.crossing import is_entropy_coded
from thinwire_lab.experiment import Say, sheet, words
from thinwire_lab.labels import log_ticks, name_points, short_name
from thinwire_lab.logs import Method, dense_among, gap_at, grounds_of, methods_of, read_logs
from thinwire_lab.outcome import Outcome, Row
from thinwire_lab.plots import (
    BLACK,
    BLUE,
    BROWN,
    GREEN,
    ORANGE,
    PINK,
    PURPLE,
    RED,
    SKY,
    canvas,
    shared_legend,
)
from thinwire_lab.pool import Trained

BARS = (8, 32, 100, 300)  # ratios that the verdict speaks of
ABOUT = 0.9  # the share of such a ratio that is enough: headers and scales take theirs
LEAST = 1.5  # a ratio below which an arm saves nothing worth a place in the picture
CLOSE = 4.0  # the second panel shows what costs less than this, in percent
COLOURS = (BLUE, RED, GREEN, ORANGE, SKY, PINK, BLACK, PURPLE, BROWN)
TABLES = {
    "per-stage": " + stages' own tables",
    "embedding": " around a shared embedding",
}
MODES = {"subspace": "the paper's subspace", "reparam": "reparam", "projected": "projected"}


def run(options: argparse.Namespace, say: Say) -> Outcome:
    """Read the logs and draw."""
    runs = read_logs(options.logs or [options.out / "convergence.jsonl"])
    ours = [row for ground in grounds_of(runs) for row in rows_of(ground)]
    ours = [row for row in ours if not options.stages or row["stages"] == options.stages]
    others = published()
    return Outcome(
        **words("gap"),
        verdict=verdict(ours),
        holds=None,
        rows=[*ours, *others],
        figure=figure(ours, others),
    )


def rows_of(ground: list[Trained]) -> list[Row]:
    """What each narrow arm of a ground costs and saves, of those as long as its longest dense."""
    methods = methods_of(ground)
    dense = dense_among(methods)
    steps = max(dense.by_steps)
    found = [
        _row(method, dense, steps)
        for method in methods
        if steps in method.by_steps and method.by_steps[steps][0].figures["ratio"] >= LEAST
    ]
    return sorted(found, key=lambda row: row["ratio"])


def _row(method: Method, dense: Method, steps: int) -> Row:
    runs, settings = method.by_steps[steps], method.settings
    gaps = [gap_at(Method("", 0, {steps: [run]}), dense, steps) or 0.0 for run in runs]
    tables = TABLES.get(settings.boundary.anchor, "")
    mode = MODES.get(settings.boundary.mode, "dense cuts, fewer bits") + tables
    optimizer = settings.optim.name.replace("adamw", "AdamW").replace("muon", "Muon")
    coded = ", entropy-coded" if is_entropy_coded(settings) else ""
    return {
        "method": method.label,
        "kind": f"{mode}, {optimizer}{coded}",
        "ratio": fmean(run.figures["ratio"] for run in runs),
        "gap": gap_at(method, dense, steps),
        "least": min(gaps),
        "most": max(gaps),
        "seeds": len(runs),
        "stages": method.stages,
        "model": settings.model.preset,
        "parameters": parameter_count(settings),
        "tokens": steps * settings.tokens_per_step,
        "source": "measured by this lab",
    }


def published() -> list[Row]:
    """The figures of others, one row for each point."""
    return [
        {
            "method": told["method"],
            "kind": "published",
            "ratio": ratio,
            "gap": (low + high) / 2,
            "least": low,
            "most": high,
            "source": told["source"],
        }
        for told in sheet("gap")["published"]
        for ratio, low, high in told["points"]
    ]


def verdict(ours: list[Row]) -> str:
    """The least gap from each of a few ratios on, for each model and number of stages."""
    found: dict[tuple[Any, ...], Row] = {}
    for place in sorted({(row["model"], row["stages"]) for row in ours}):
        own = [row for row in ours if (row["model"], row["stages"]) == place]
        for bar in BARS:
            enough = [row for row in own if row["ratio"] >= ABOUT * bar]
            if enough:
                best = min(enough, key=lambda row: row["gap"])
                found[(*place, best["method"])] = best
    parts = [
        f"{row['method']} {row['ratio']:.0f}x {row['gap']:+.2%} ({row['model']}, {row['stages']} "
        f"stages, {row['tokens'] / 1e6:.0f}M tokens, {row['seeds']} "
        f"seed{'s' if row['seeds'] > 1 else ''})"
        for row in found.values()
    ]
    bars = ", ".join(f"{bar}x" for bar in BARS)
    if not parts:
        return "No arm of the logs saves bytes."
    return f"Least loss at about {bars} or more: {'; '.join(parts)}."


def figure(ours: list[Row], others: list[Row]) -> Figure:
    """Gap over ratio, whole and from close: ours filled, others hollow.

    A bar reaches from the least to the most.
    """
    plot, axes = canvas("What fewer bytes cost in loss", (11, 11), rows=2)
    places = [(row["model"], row["stages"]) for row in ours]
    usual = max(places, key=places.count, default=("", 0))
    for axis in axes:
        _draw(axis, ours, others)
        axis.axhline(0, color="0.4", linewidth=0.8)
        axis.set(xscale="log", ylabel="validation loss above dense, %")
        axis.margins(x=0.1)
        log_ticks(axis.xaxis)
    whole, close = axes
    whole.set_title(
        f"{usual[0]}, {usual[1]} stages unless named; bars: seeds, or a published range"
    )
    close.set(
        xlabel="times fewer bytes at a cut than bf16, both ways",
        title=f"below {CLOSE:g} %",
        ylim=(min([-1.0, *(100 * row["least"] - 0.3 for row in ours)]), CLOSE),
    )
    shared_legend(whole, 3)
    plot.canvas.draw()  # the layout must be final before names are placed
    colours = _colours(ours)
    for axis in axes:
        points = [
            (row["ratio"], 100 * row["gap"], _name(row, usual), colours[row["kind"]])
            for row in ours
            if (100 * row["gap"] < CLOSE) == (axis is close)
        ]
        name_points(axis, points)
    return plot


def _colours(ours: list[Row]) -> dict[str, str]:
    kinds = dict.fromkeys(row["kind"] for row in ours)
    return {kind: COLOURS[number % len(COLOURS)] for number, kind in enumerate(kinds)}


def _draw(axis: Axes, ours: list[Row], others: list[Row]) -> None:
    for kind, colour in _colours(ours).items():
        rows = [row for row in ours if row["kind"] == kind]
        _points(axis, rows, {"color": colour, "fmt": "o", "label": kind})
    for number, method in enumerate(dict.fromkeys(row["method"] for row in others)):
        rows = [row for row in others if row["method"] == method]
        style = {"color": "0.35", "fmt": "sD^v<>"[number % 6], "mfc": "white", "label": method}
        _points(axis, rows, style)


def _points(axis: Axes, rows: list[Row], style: dict[str, Any]) -> None:
    gaps = [100 * row["gap"] for row in rows]
    below = [max(0.0, 100 * (row["gap"] - row["least"])) for row in rows]  # rounding aside
    above = [max(0.0, 100 * (row["most"] - row["gap"])) for row in rows]
    across = [row["ratio"] for row in rows]
    axis.errorbar(across, gaps, [below, above], markersize=6, capsize=2, zorder=3, **style)


def _name(row: Row, usual: tuple[str, int]) -> str:
    """The name at a point: its colour says the mode and its tables."""
    method = re.sub(r" boundary\.anchor=\S+", "", row["method"])
    first, _, rest = method.partition(" ")
    name = short_name(rest if first in MODES and rest else method)
    model = f", {row['model']}" if row["model"] != usual[0] else ""
    return name + model + (f", {row['stages']} stages" if row["stages"] != usual[1] else "")
