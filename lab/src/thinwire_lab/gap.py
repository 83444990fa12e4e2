"""`thinwire lab gap`: one picture of what bytes cost in loss, from logs of trained arms.

Nothing is trained. Each log gives the arms of its longest runs; beside them stand the figures that
others have published, with their sources.
"""

import argparse
import math
import re
from statistics import NormalDist, fmean, stdev
from typing import Any

import numpy as np

from thinwire.codec import build_codecs
from thinwire.engine.build import model_weights
from thinwire.recipes import SHEETS
from thinwire_lab.decide import CAST_NOISE, gap_to_dense
from thinwire_lab.experiment import Say, sheet, words
from thinwire_lab.logs import Method, dense_among, grounds_of, methods_of, read_logs, tokens_of
from thinwire_lab.outcome import Outcome, Row
from thinwire_lab.plots import Line, Panel, short_name
from thinwire_lab.pool import Trained

BARS = (8, 32, 100, 300)  # ratios that the verdict speaks of
ABOUT = 0.9  # the share of such a ratio that is enough: headers and scales take theirs
LEAST = 1.5  # a ratio below which an arm saves nothing worth a place in the picture
LEAST_LENGTHS = 3  # of training, before a trend is told
SPREADS = NormalDist().inv_cdf(0.975)  # standard deviations on each side of 95 %
CLOSE = 4.0  # the second panel shows what costs less than this, in percent
TABLES = {"per-stage": " + stages' own tables", "embedding": " around a shared embedding"}
MODES = {"subspace": "the paper's subspace", "reparam": "reparam", "projected": "projected"}

Place = tuple[str, int, str]
"""Model, stages and tokens."""


def run(options: argparse.Namespace, say: Say) -> Outcome:
    """Read the logs and draw."""
    runs = read_logs(options.logs or [options.out / "convergence.jsonl"])
    grounds = grounds_of(runs)
    ours = [row for ground in grounds for row in rows_of(ground)]
    ours = [row for row in ours if not options.stages or row["stages"] == options.stages]
    others = published()
    rows = [*ours, *others]
    panels = [*panels_of(ours, others), *over_length(grounds, usual_of(ours))]
    return Outcome(**words("gap"), verdict=verdict(ours), holds=None, rows=rows, panels=panels)


def rows_of(ground: list[Trained]) -> list[Row]:
    """What each narrow arm of a ground costs and saves, of those as long as its longest dense."""
    methods = methods_of(ground)
    dense = dense_among(methods)
    steps, noise = max(dense.by_steps), noise_of(methods, dense)
    found = [
        _row(method, dense, steps) | trend(gaps_by_length(method, dense), noise)
        for method in methods
        if steps in method.by_steps and method.by_steps[steps][0].figures["ratio"] >= LEAST
    ]
    return sorted(found, key=lambda row: row["ratio"])


def _row(method: Method, dense: Method, steps: int) -> Row:
    runs, settings = method.by_steps[steps], method.settings
    gaps = [gap_to_dense([run], dense.by_steps[steps]) for run in runs]
    tables = TABLES.get(settings.boundary.anchor, "")
    mode = MODES.get(settings.boundary.mode, "dense cuts, fewer bits") + tables
    optimizer = settings.optim.name.replace("adamw", "AdamW").replace("muon", "Muon")
    codecs = build_codecs(*settings.codec.names(0)).values()
    coded = ", entropy-coded" if any(codec.content_decides_size for codec in codecs) else ""
    return {
        "method": method.label,
        "kind": f"{mode}, {optimizer}{coded}",
        "ratio": fmean(run.figures["ratio"] for run in runs),
        "gap": gap_to_dense(runs, dense.by_steps[steps]),
        "least": min(gaps),
        "most": max(gaps),
        "seeds": len(runs),
        "stages": method.stages,
        "model": settings.model.preset,
        "parameters": model_weights(settings).count,
        "tokens": steps * settings.tokens_per_step,
        "source": "measured by this lab",
    }


def gaps_by_length(method: Method, dense: Method) -> dict[float, list[float]]:
    """Tokens of each length that both have, and the gap of each seed there."""
    shared = sorted(method.by_steps.keys() & dense.by_steps.keys())
    return {
        tokens_of(method.by_steps[steps][0]): [
            gap_to_dense([run], dense.by_steps[steps]) for run in method.by_steps[steps]
        ]
        for steps in shared
    }


def noise_of(methods: list[Method], dense: Method) -> float:
    """The standard deviation of a gap between seeds; with single seeds an assumed one."""
    every = [gaps for one in methods for gaps in gaps_by_length(one, dense).values()]
    repeated = [gaps for gaps in every if len(gaps) > 1 and any(gaps)]
    return math.sqrt(fmean(stdev(own) ** 2 for own in repeated)) if repeated else CAST_NOISE / 2


def trend(gaps: dict[float, list[float]], noise: float) -> Row:
    """How a gap changes with the length of training, where there are three lengths or more.

    A straight line over the logarithm of the tokens, by least squares; the interval (95 %) carries
    the noise through the fit.
    """
    if len(gaps) < LEAST_LENGTHS:
        return {}
    across = np.log10(list(gaps))
    weights = (across - across.mean()) / ((across - across.mean()) ** 2).sum()
    slope = float(weights @ [fmean(own) for own in gaps.values()])
    spread = float(np.linalg.norm(weights * noise / np.sqrt([len(own) for own in gaps.values()])))
    low, high = slope - SPREADS * spread, slope + SPREADS * spread
    way = "chance" if low <= 0 <= high else "grows" if slope > 0 else "shrinks"
    told: Row = {"gap per tenfold length": slope, "from": low, "to": high, "with length": way}
    return {"lengths": len(gaps), **told}


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


def usual_of(rows: list[Row]) -> Place:
    """Where most rows were measured."""
    places = [_place(row) for row in rows]
    return max(places, key=places.count, default=("", 0, ""))


def over_length(grounds: list[list[Trained]], usual: Place) -> list[Panel]:
    """The gap of recipes over the length of training, each run to the end of its own schedule.

    Of the usual model and stages; nothing where no recipe has two lengths.
    """
    lines = []
    for ground in grounds:
        methods = methods_of(ground)
        dense = dense_among(methods)
        for method in methods:
            settings, gaps = method.settings, gaps_by_length(method, dense)
            is_usual = (settings.model.preset, method.stages) == usual[:2]
            if is_usual and method is not dense and method.label in SHEETS and len(gaps) > 1:
                norms = ", norms on queries and keys" if settings.model.qk_norm else ""
                means = [100 * fmean(own) for own in gaps.values()]
                ends = [(100 * min(own), 100 * max(own)) for own in gaps.values()]
                below = [max(0.0, mean - low) for mean, (low, _) in zip(means, ends, strict=True)]
                above = [max(0.0, high - mean) for mean, (_, high) in zip(means, ends, strict=True)]
                name, across = f"{method.label}{norms}", [tokens / 1e6 for tokens in gaps]
                names = [""] * (len(gaps) - 1) + [name]
                lines.append(Line(name, across, means, "o-", "", names, (below, above)))
    title = f"recipes over the length of training: {usual[0]}, {usual[1]} stages"
    levels, up = {"as dense": 0.0}, "validation loss above dense, %"
    return [Panel(title, "million tokens", up, lines, "x", levels)] if lines else []


def panels_of(ours: list[Row], others: list[Row]) -> list[Panel]:
    """Gap over ratio, whole and from close; a bar reaches from the least to the most."""
    usual = usual_of(ours)
    lowest = min([-1.0, *(100 * row["least"] - 0.3 for row in ours)])
    unless = (
        f"{usual[0]}, {usual[1]} stages, {usual[2]} tokens unless named; bars: seeds, or a range"
    )
    across, up = "times fewer bytes at a cut than bf16, both ways", "validation loss above dense, %"
    panels = []
    for title, limits in ((unless, None), (f"below {CLOSE:g} %", (lowest, CLOSE))):
        lines = []
        for kind in dict.fromkeys(row["kind"] for row in ours):
            own = [row for row in ours if row["kind"] == kind]
            is_here = [(row["gap"] * 100 < CLOSE) == (limits is not None) for row in own]
            names = [_name(r, usual) if here else "" for r, here in zip(own, is_here, strict=True)]
            lines.append(_line(kind, own, "o", names))
        for number, method in enumerate(dict.fromkeys(row["method"] for row in others)):
            own = [row for row in others if row["method"] == method]
            lines.append(_line(method, own, "sD^v<>"[number % 6], colour="0.35"))
        panels.append(Panel(title, across, up, lines, "x", {"as dense": 0.0}, limits))
    return panels


def _line(
    label: str, rows: list[Row], style: str, names: list[str] | None = None, colour: str = ""
) -> Line:
    gaps = [100 * row["gap"] for row in rows]
    below = [max(0.0, 100 * (row["gap"] - row["least"])) for row in rows]  # rounding aside
    above = [max(0.0, 100 * (row["most"] - row["gap"])) for row in rows]
    ratios = [row["ratio"] for row in rows]
    return Line(label, ratios, gaps, style, colour, names or (), (below, above))


def _place(row: Row) -> Place:
    return row["model"], row["stages"], f"{row['tokens'] / 1e6:.0f}M"


def _name(row: Row, usual: Place) -> str:
    """The name at a point: its colour says the mode and its tables."""
    method = re.sub(r" boundary\.anchor=\S+", "", row["method"])
    first, _, rest = method.partition(" ")
    name = short_name(rest if first in MODES and rest else method)
    model, stages, tokens = _place(row)
    parts = {model: usual[0], f"{stages} stages": f"{usual[1]} stages", tokens: usual[2]}
    return ", ".join([name, *(own for own, others in parts.items() if own != others)])
