"""Pictures of a run: the loss over tokens, the timeline of one step, and those of several runs.

Figures are built with matplotlib's objects alone: nothing global changes, and no window is needed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinwire.report.human import finite_mean, human_count
from thinwire.report.metrics import Curves
from thinwire.report.records import Timeline, TraceSpan

DPI = 150
_WIDTH, _CHART = 13, 810  # inches of a timeline; points of them that its bars have, about

# Colours of Okabe and Ito: distinct with every common form of colour blindness.
_TRAIN, _VALID = "#0072B2", "#D55E00"
_COLOURS = {
    "wait": "#F0F0F0",
    "forward": "#56B4E9",
    "backward": "#E69F00",
    "update": "#009E73",
    "other": "#CC79A7",
}
_KINDS = {"F": "forward", "B": "backward", "U": "update"}  # by the first letter of a label
_LANES: dict[str, dict[str, Any]] = {
    "wait": {"height": 0.5, "edgecolor": "#B8B8B8", "hatch": "////", "linewidth": 0},
    "compute": {"height": 0.5, "edgecolor": "white", "linewidth": 0.6},
    # without an edge, which would swallow a short message
    "send": {"height": 0.16, "edgecolor": "white", "linewidth": 0, "alpha": 0.65},
}


def loss_figure(curves: Curves, title: str) -> Figure:
    """Training loss thin, its running mean strong, validation losses as points."""
    figure = Figure(figsize=(9, 5), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    points = curves.points()
    tokens, values = points["tokens"], points["loss"]
    each = "each step" if points["size"] == 1 else f"mean of {points['size']} steps"
    reach = len(values) // 40  # the mean takes in about a twentieth of the curve
    thin = {"alpha": 0.35, "linewidth": 0.8} if reach else {"linewidth": 2}
    axes.plot(tokens, values, color=_TRAIN, label=f"training, {each}", **thin)
    if reach:
        # At the ends the window shrinks on both sides alike, so the curve is not bent there.
        near = [min(k, len(values) - 1 - k, reach) for k in range(len(values))]
        smooth = [finite_mean(values[k - n : k + n + 1]) for k, n in enumerate(near)]
        axes.plot(tokens, smooth, color=_TRAIN, linewidth=2, label="training, running mean")
    if curves.valid:
        before = np.interp([v.step for v in curves.valid], [0, *points["step"]], [0, *tokens])
        losses = [v.loss for v in curves.valid]
        axes.plot(before, losses, "o", markersize=7, color=_VALID, label="validation")
    axes.set_xlabel("tokens seen", fontsize=13)
    axes.set_ylabel("loss (nats per token)", fontsize=13)
    axes.xaxis.set_major_formatter(lambda value, _: human_count(value, 2))
    axes.tick_params(labelsize=11)
    axes.grid(color="#E0E0E0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    _head(figure, title)
    return figure


def steps_figure(timelines: Sequence[Timeline], title: str = "") -> Figure:
    """Per stage a lane of computing and waiting, and under it a thin lane of sending; runs one
    below the other, on the scale of the longest. Without a title that of the run is the figure's.
    """
    rows = [len(timeline.stages) for timeline in timelines]
    height = 1.9 + 0.8 * sum(rows) + (0.45 * len(rows) if title else 0)
    figure = Figure(figsize=(_WIDTH, height), dpi=DPI, layout="constrained")
    charts = figure.subplots(len(rows), sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    spans = [span for timeline in timelines for span in timeline.spans]
    charts[0].set_xlim(min(span.start for span in spans), max(span.end for span in spans))
    for axes, timeline in zip(charts, timelines, strict=True):
        _draw_timeline(axes, timeline)
        if title:
            axes.set_title(timeline.title(), fontsize=12, loc="left", pad=4)
    charts[-1].set_xlabel("seconds since the step began on stage 0", fontsize=13)
    _head(figure, title or timelines[0].title())
    return figure


def _head(figure: Figure, title: str) -> None:
    """The title, and under it what the colours of all charts mean."""
    named: dict[str, Artist] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    figure.legend(
        named.values(), named, title=title, title_fontsize=14, alignment="left",
        loc="outside upper left", ncols=max(1, len(named)),
        fontsize=11, frameon=False, handlelength=1.4, columnspacing=1.4,
    )  # fmt: skip


def _draw_timeline(axes: Axes, timeline: Timeline) -> None:
    rows = {record.stage: row for row, record in enumerate(timeline.stages)}
    for lane, look in _LANES.items():
        below = 0.36 if lane == "send" else 0  # hangs below the middle of the compute lane
        for kind, colour in _COLOURS.items():
            spans = [s for s in timeline.spans if s.lane == lane and _kind(s) == kind]
            if not spans:
                continue
            middles, starts = [rows[s.stage] + below for s in spans], [s.start for s in spans]
            lengths = np.array([s.end - s.start for s in spans])
            name = f"send {kind}" if lane == "send" else kind
            bars = axes.barh(middles, lengths, left=starts, facecolor=colour, label=name, **look)
            if lane == "compute":  # numbers of microbatches, where there is room
                numbers = [s.label[1:] for s in spans]
                room = lengths / np.ptp(axes.get_xlim()) * _CHART - 2
                widths = np.array([0.65 * max(1, len(number)) for number in numbers])  # at size 1
                # One size, which suits the usual bar, so that 9 and 10 look alike.
                size = min(10.0, float(np.median(room / widths.max())))
                fits = (room / widths >= 0.9 * size) & (size >= 6.5)  # smaller ones would be dust
                shown = [number if fit else "" for number, fit in zip(numbers, fits, strict=True)]
                axes.bar_label(bars, shown, label_type="center", fontsize=size)
    labels = [f"stage {record.stage}\nlayers {record.layers}" for record in timeline.stages]
    axes.set_ylim(len(rows) - 0.4, -0.4)
    axes.set_yticks(range(len(rows)), labels)
    axes.tick_params(axis="x", labelsize=12)
    axes.tick_params(axis="y", length=0, labelsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _kind(span: TraceSpan) -> str:
    return "wait" if span.lane == "wait" else _KINDS.get(span.label.strip("<>")[:1], "other")
