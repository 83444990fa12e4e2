"""Pictures of a run: the loss over tokens, the timeline of one step, and those of several runs.

Figures are built with matplotlib's objects alone: nothing global changes, and no window is needed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from thinwire.report.human import human_count
from thinwire.report.metrics import Curves
from thinwire.report.records import Timeline, TraceSpan

DPI = 150

# Colours of Okabe and Ito: distinct with every common form of colour blindness.
_TRAIN, _VALID = "#0072B2", "#D55E00"
_KINDS = {
    "F": ("forward", "#56B4E9"),
    "B": ("backward", "#E69F00"),
    "U": ("update", "#009E73"),
    "other": ("other", "#CC79A7"),
}
_LANES: dict[str, dict[str, Any]] = {
    "wait": {"height": 0.5, "edgecolor": "#B8B8B8", "hatch": "////", "linewidth": 0},
    "compute": {"height": 0.5, "edgecolor": "white", "linewidth": 0.6},
    # without an edge, which would swallow a short message
    "send": {"height": 0.16, "edgecolor": "white", "linewidth": 0, "alpha": 0.65},
}
_WAITING = "#F0F0F0"
_LEFT = 0.13  # share of the width beside the charts: "layers embed+10..15" fits
_LEAST_TYPE = 6.5  # points; smaller numbers would be dust
_SEND_OFFSET = 0.36  # the send lane hangs this far below the middle of the compute lane


def loss_figure(curves: Curves, title: str) -> Figure:
    """Training loss thin, its running mean strong, validation losses as points."""
    figure = Figure(figsize=(9, 5), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    points = curves.points()
    tokens, values = (np.array(points[name], dtype=float) for name in ("tokens", "loss"))
    each = "each step" if points["size"] == 1 else f"mean of {points['size']} steps"
    reach = len(values) // 40  # the mean takes in about a twentieth of the curve
    thin = {"alpha": 0.35, "linewidth": 0.8} if reach else {"linewidth": 2}
    axes.plot(tokens, values, color=_TRAIN, label=f"training, {each}", **thin)
    if reach:
        smooth = running_mean(values, reach)
        axes.plot(tokens, smooth, color=_TRAIN, linewidth=2, label="training, running mean")
    if curves.valid:
        steps, losses, _ = zip(*curves.valid, strict=True)
        before = np.interp(steps, [0, *points["step"]], [0, *tokens])
        axes.plot(
            before, np.array(losses, dtype=float),
            color=_VALID, marker="o", markersize=7, linestyle="none", label="validation",
        )  # fmt: skip
    axes.set_xlabel("tokens seen", fontsize=13)
    axes.set_ylabel("loss (nats per token)", fontsize=13)
    axes.set_title(title, fontsize=14, loc="left", pad=32)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_count(value, 2)))
    axes.tick_params(labelsize=11)
    axes.grid(color="#E0E0E0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    legend = {"bbox_to_anchor": (0, 1.0), "borderaxespad": 0.2, "fontsize": 11, "frameon": False}
    axes.legend(loc="lower left", ncols=3, **legend)
    return figure


def running_mean(values: np.ndarray, reach: int) -> np.ndarray:
    """Centred mean over so many points on either side; those that are not finite are skipped. At
    the ends the window shrinks on both sides alike, so the curve is not bent there.
    """
    finite, index = np.isfinite(values), np.arange(len(values))
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    near = np.minimum(np.minimum(index, index[::-1]), reach)
    low, high = index - near, index + near + 1
    known = counts[high] - counts[low]
    means = (sums[high] - sums[low]) / np.maximum(known, 1)
    return np.where(known > 0, means, np.nan)


def steps_figure(timelines: Sequence[Timeline], title: str = "") -> Figure:
    """Per stage a lane of computing and waiting, and under it a thin lane of sending; runs one
    below the other, on the scale of the longest. Without a title that of the run is the figure's.
    """
    gap = 0.45 if title else 0.0
    # Fixed margins instead of a layout engine: the width of a bar must be known while drawing.
    heights = [0.8 * max(1, len(timeline.stages)) for timeline in timelines]
    total = 1.9 + sum(heights) + gap * len(timelines)
    figure = Figure(figsize=(13, total), dpi=DPI)
    spans = [span for timeline in timelines for span in timeline.spans]
    first = min((span.start for span in spans), default=0.0)
    last = max((span.end for span in spans), default=1.0)
    top = total - 1.0
    for timeline, height in zip(timelines, heights, strict=True):
        top -= gap
        box = (_LEFT, (top - height) / total, 0.985 - _LEFT, height / total)
        axes = figure.add_axes(box)
        axes.set_xlim(first, last)
        _draw_timeline(axes, timeline)
        if gap:
            axes.set_title(timeline.title(), fontsize=12, loc="left", pad=4)
        if timeline is not timelines[-1]:
            axes.tick_params(labelbottom=False)
        top -= height
    axes.set_xlabel("seconds since the step began on stage 0", fontsize=13)
    title = title or timelines[0].title()
    figure.text(_LEFT, 1 - 0.35 / total, title, fontsize=14, va="center")
    _legend(figure, 1 - 0.75 / total)
    return figure


def _draw_timeline(axes: Axes, timeline: Timeline) -> None:
    spans, stages = timeline.spans, timeline.stages

    def kind_of(span: TraceSpan) -> str:
        letter = span.label.strip("<>")[:1]
        return letter if letter in _KINDS else "other"

    rows = {record.stage: row for row, record in enumerate(stages)}
    axes.set_ylim(len(stages) - 0.4, -0.4)
    _draw_bars(axes, [span for span in spans if span.lane == "wait"], rows, "wait", _WAITING)
    for kind, (name, colour) in _KINDS.items():
        alike = [span for span in spans if span.lane != "wait" and kind_of(span) == kind]
        computing = [span for span in alike if span.lane == "compute"]
        _draw_bars(axes, computing, rows, name, colour)
        sending = [span for span in alike if span.lane == "send"]
        _draw_bars(axes, sending, rows, f"send {name}", colour)
    labels = [f"stage {record.stage}\nlayers {record.layers}" for record in stages]
    axes.set_yticks(range(len(stages)), labels)
    axes.tick_params(axis="x", labelsize=12)
    axes.tick_params(axis="y", length=0, labelsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_bars(
    axes: Axes, spans: Sequence[TraceSpan], rows: dict[int, int], name: str, colour: str
) -> None:
    """Bars of one lane, all alike; of computing with the numbers of microbatches that have room."""
    if not spans:
        return
    lane, lengths = spans[0].lane, np.array([span.end - span.start for span in spans])
    middles = [rows[span.stage] + (_SEND_OFFSET if lane == "send" else 0) for span in spans]
    starts = [span.start for span in spans]
    bars = axes.barh(middles, lengths, left=starts, facecolor=colour, label=name, **_LANES[lane])
    if lane == "compute":
        numbers = [span.label[1:] for span in spans]
        room = lengths / np.ptp(axes.get_xlim()) * axes.bbox.width * 72 / DPI - 2  # in points
        widths = np.array([0.65 * max(1, len(number)) for number in numbers])  # of type of size 1
        # One size, which suits the usual bar, so that 9 and 10 look alike.
        size = min(10.0, float(np.median(room) / widths.max()))
        if size >= _LEAST_TYPE:
            fits = room / widths >= 0.9 * size
            shown = [number if fit else "" for number, fit in zip(numbers, fits, strict=True)]
            axes.bar_label(bars, shown, label_type="center", fontsize=size)


def _legend(figure: Figure, y: float) -> None:
    """The colours of all charts in one line under the title."""
    named: dict[str, Artist] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        named |= {str(label): handle for label, handle in zip(labels, handles, strict=True)}
    order = sorted(named, key=lambda label: label.startswith("send"))
    if order:
        figure.legend(
            [named[label] for label in order], order,
            loc="center left", bbox_to_anchor=(_LEFT - 0.008, y), borderaxespad=0, ncols=len(order),
            fontsize=11, frameon=False, handlelength=1.4, columnspacing=1.4,
        )  # fmt: skip
