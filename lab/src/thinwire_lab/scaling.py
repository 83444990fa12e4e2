"""`thinwire lab scaling`: does the gap of a narrow cut grow or shrink with length?

From logs with runs of three lengths or more: a straight line of the gap over log tokens, and power
laws of the losses themselves. Nothing is trained.
"""

import argparse
import math
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from thinwire.errors import ConfigError
from thinwire_lab.decide import CAST_NOISE, gap_to_dense
from thinwire_lab.experiment import Say, words
from thinwire_lab.logs import Method, dense_among, grounds_of, methods_of, read_logs, tokens_of
from thinwire_lab.outcome import Outcome, Row
from thinwire_lab.plots import canvas, shared_legend

LEAST_LENGTHS = 3
DRAWS = 2000
EXPONENTS = np.geomspace(0.02, 2.0, 100)
INTERVAL = (2.5, 97.5)  # percentiles

Line = tuple[Any, Any]
"""Intercept and slope over log10 tokens; numbers, or an array of many fits."""


@dataclass(frozen=True)
class Series:
    """A method's gaps at several lengths, beside dense."""

    method: Method
    tokens: np.ndarray
    dense: np.ndarray  # mean losses
    losses: np.ndarray
    gaps: list[list[float]]  # by length, one for each seed

    @property
    def means(self) -> np.ndarray:
        """The mean gap at each length."""
        return np.array([fmean(gaps) for gaps in self.gaps])


def run(options: argparse.Namespace, say: Say) -> Outcome:
    """Fit every method that has enough lengths."""
    runs = read_logs(options.logs or [options.out / "convergence.jsonl"])
    found = [one for ground in grounds_of(runs) for one in series_of(methods_of(ground))]
    if not found:
        raise ConfigError(
            f"no method has runs of {LEAST_LENGTHS} lengths beside dense of the same lengths: "
            "train with other --steps into the same log"
        )
    longest = max(float(one.tokens[-1]) for one in found)
    at = options.at or 10 * longest
    noise, source = noise_of(found)
    rows = [row_of(one, at, noise) for one in found]
    return Outcome(
        **words("scaling", draws=DRAWS, noise=source, times=at / longest),
        verdict=verdict(rows, at),
        holds=None,
        rows=rows,
        figure=figure(found, at),
    )


def series_of(methods: list[Method]) -> list[Series]:
    """The methods whose gap is known at enough lengths."""
    dense = dense_among(methods)
    found = []
    for method in methods:
        shared = sorted(method.by_steps.keys() & dense.by_steps.keys())
        if method.label == dense.label or len(shared) < LEAST_LENGTHS:
            continue
        pairs = [(method.by_steps[steps], dense.by_steps[steps]) for steps in shared]
        own, other = zip(*pairs, strict=True)
        found.append(
            Series(
                method,
                np.array([tokens_of(runs[0]) for runs in own]),
                np.array([fmean(run.figures["loss"] for run in runs) for runs in other]),
                np.array([fmean(run.figures["loss"] for run in runs) for runs in own]),
                [[gap_to_dense([run], base) for run in runs] for runs, base in pairs],
            )
        )
    return found


def noise_of(series: list[Series]) -> tuple[float, str]:
    """The standard deviation of a gap by chance, and where it is known from."""
    repeated = [gaps for one in series for gaps in one.gaps if len(gaps) > 1]
    if not repeated:
        return CAST_NOISE / 2, f"{CAST_NOISE / 2:.2%}, assumed: every length has one seed"
    pooled = math.sqrt(fmean(stdev(gaps) ** 2 for gaps in repeated))
    return pooled, f"{pooled:.2%}, measured between seeds"


def row_of(series: Series, at: float, noise: float) -> Row:
    """The fits of one method, with their intervals."""
    counts = np.array([len(gaps) for gaps in series.gaps])
    spread = noise / np.sqrt(counts)
    generator = np.random.default_rng(0)
    moved = series.means + spread * generator.standard_normal((DRAWS, len(spread)))

    intercepts, slopes = line(series.tokens, moved)
    fitted = line(series.tokens, series.means)
    there = at_line((intercepts, slopes), at)
    low, high = np.percentile(slopes, INTERVAL)
    row: Row = {
        "method": series.method.label,
        "stages": series.method.stages,
        "lengths": len(counts),
        "seeds": int(counts.min()),
        "tokens, least": float(series.tokens[0]),
        "tokens, most": float(series.tokens[-1]),
        "gap, shortest": series.means[0],
        "gap, longest": series.means[-1],
        "gap per tenfold": fitted[1],
        "from": low,
        "to": high,
        "trend, predicted": at_line(fitted, at),
    }
    row["trend, from"], row["trend, to"] = np.percentile(there, INTERVAL)
    losses = series.dense * (1 + moved)
    laws = [law_gap(series.tokens, series.dense, own, at) for own in losses[: DRAWS // 10]]
    row["laws, predicted"] = law_gap(series.tokens, series.dense, series.losses, at)
    row["laws, from"], row["laws, to"] = np.percentile(laws, INTERVAL)
    return {
        key: value.item() if isinstance(value, np.generic) else value for key, value in row.items()
    }


def line(tokens: np.ndarray, gaps: np.ndarray) -> Line:
    """Intercept and slope of the gap over log10 tokens, by least squares; of each row of gaps."""
    across = np.log10(tokens)
    off = across - across.mean()
    slope = gaps @ off / (off @ off)
    return gaps.mean(axis=-1) - slope * across.mean(), slope


def at_line(fitted: Line, tokens: float) -> Any:
    """The gap that a line predicts."""
    return fitted[0] + fitted[1] * math.log10(tokens)


def law(tokens: np.ndarray, losses: np.ndarray) -> tuple[float, float, float]:
    """a, b and c of loss = a + b tokens^-c, by least squares; a and b are not negative.

    Tokens count in units of the shortest run, which keeps b in size.
    """
    powers_EN = (tokens / tokens[0]) ** -EXPONENTS[:, None]
    off_EN = powers_EN - powers_EN.mean(axis=1, keepdims=True)
    b_E = off_EN @ losses / (off_EN**2).sum(axis=1)
    b_E = np.maximum(b_E, 0.0)
    a_E = losses.mean() - b_E * powers_EN.mean(axis=1)
    through_zero_E = powers_EN @ losses / (powers_EN**2).sum(axis=1)
    b_E = np.where(a_E < 0, through_zero_E, b_E)
    a_E = np.maximum(a_E, 0.0)
    errors_E = ((a_E[:, None] + b_E[:, None] * powers_EN - losses) ** 2).sum(axis=1)
    best = int(errors_E.argmin())
    return float(a_E[best]), float(b_E[best]), float(EXPONENTS[best])


def law_gap(tokens: np.ndarray, dense: np.ndarray, losses: np.ndarray, at: float) -> float:
    """The gap between the laws of a method and of dense."""
    times = at / tokens[0]
    (a, b, c), (a0, b0, c0) = law(tokens, losses), law(tokens, dense)
    return float((a + b * times**-c) / (a0 + b0 * times**-c0) - 1)


def verdict(rows: list[Row], at: float) -> str:
    """Which gaps grow, which shrink, which cannot be told."""
    parts = []
    for row in rows:
        if row["from"] <= 0 <= row["to"]:
            way = "neither grows nor shrinks by more than chance"
        else:
            way = "grows" if row["from"] > 0 else "shrinks"
        parts.append(
            f"{row['method']} ({row['stages']} stages) {way} ({100 * row['gap per tenfold']:+.2f} "
            f"points per tenfold length, {100 * row['from']:+.2f} to {100 * row['to']:+.2f}): from "
            f"{row['gap, longest']:+.2%} to {row['trend, predicted']:+.2%} "
            f"({row['trend, from']:+.2%} to {row['trend, to']:+.2%}) by the trend, "
            f"{row['laws, predicted']:+.2%} ({row['laws, from']:+.2%} to {row['laws, to']:+.2%}) "
            "by the laws"
        )
    return f"The gap after {at / 1e6:,.0f}M tokens, predicted: {'; '.join(parts)}."


def figure(series: list[Series], at: float) -> Figure:
    """Gaps over tokens with their trends, drawn on to where they predict."""
    plot, (axis,) = canvas("Loss above dense over the length of training", (9, 5.5))
    for number, one in enumerate(series):
        colour, ends = f"C{number}", np.array([one.tokens[0], at])
        label = f"{one.method.label}, {one.method.stages} stages"
        for tokens, gaps in zip(one.tokens, one.gaps, strict=True):
            axis.plot([tokens] * len(gaps), [100 * gap for gap in gaps], "o", color=colour)
        fitted = line(one.tokens, one.means)
        heights = [100 * at_line(fitted, float(end)) for end in ends]
        axis.plot(ends, heights, "--", color=colour, label=label)
    axis.set(xscale="log", xlabel="training tokens", ylabel="validation loss above dense, %")
    axis.axhline(0, color="0.4", linewidth=0.8)
    shared_legend(axis, columns=3)
    return plot
