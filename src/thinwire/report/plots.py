"""Pictures of a run: the loss over tokens, and the timeline of one step.

Figures are built with matplotlib's objects alone, so nothing global changes and no window
system is needed. Building is apart from saving: tests look at the artists.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from thinwire.report.human import human_count
from thinwire.report.records import EvaluationRecord, StageRecord, StepRecord, TraceSpan

DPI = 150

# Colours of Okabe and Ito: told apart with every common form of colour blindness.
_FORWARD, _BACKWARD, _UPDATE, _OTHER = "#56B4E9", "#E69F00", "#009E73", "#CC79A7"
_TRAIN, _VALID = "#0072B2", "#D55E00"
_WAIT_FACE, _WAIT_EDGE = "#F0F0F0", "#B8B8B8"
_KINDS = {
    "F": ("forward", _FORWARD),
    "B": ("backward", _BACKWARD),
    "U": ("update", _UPDATE),
    "other": ("other", _OTHER),
}
_COMPUTE_HEIGHT, _SEND_HEIGHT = 0.5, 0.16
_LEAST_TYPE = 6.5  # points; smaller numbers would be dust
_SEND_OFFSET = 0.36  # the send lane hangs this far below the middle of the compute lane


def plot_loss(
    steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord], path: str | Path
) -> None:
    """Save the training and validation loss over the tokens or images seen, as PNG."""
    _save(loss_figure(steps, evaluations), path)


def plot_step(
    spans: Sequence[TraceSpan], stages: Sequence[StageRecord], path: str | Path, title: str
) -> None:
    """Save the timeline of one step, as PNG; a row per stage, the first on top."""
    _save(step_figure(spans, stages, title), path)


def loss_figure(steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]) -> Figure:
    """Training loss thin, its running mean strong, validation losses as points."""
    figure = Figure(figsize=(9, 5), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    tokens = np.array([record.tokens for record in steps], dtype=float)
    losses = np.array([record.loss for record in steps], dtype=float)
    axes.plot(tokens, losses, color=_TRAIN, alpha=0.35, linewidth=0.8, label="train, each step")
    axes.plot(tokens, running_mean(losses), color=_TRAIN, linewidth=2, label="train, running mean")
    if evaluations:
        axes.plot(
            _tokens_at([record.step for record in evaluations], steps),
            [record.loss for record in evaluations],
            color=_VALID, marker="o", markersize=7, linestyle="none", label="validation",
        )  # fmt: skip
    unit = steps[0].unit if steps else "token"
    axes.set_xlabel(f"{unit}s seen", fontsize=13)
    axes.set_ylabel(f"loss (nats per {unit})", fontsize=13)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_count(value, 2)))
    axes.tick_params(labelsize=11)
    axes.grid(color="#E0E0E0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=11, frameon=False)
    return figure


def running_mean(values: np.ndarray) -> np.ndarray:
    """Centred mean over about a twentieth of the curve; values that are not finite are skipped.

    At the ends the window shrinks on both sides alike, so the curve is not bent there.
    """
    count = len(values)
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(count)
    reach = np.minimum(np.minimum(index, count - 1 - index), count // 40)
    low, high = index - reach, index + reach + 1
    known = counts[high] - counts[low]
    means = (sums[high] - sums[low]) / np.maximum(known, 1)
    return np.where(known > 0, means, np.nan)


def _tokens_at(at: Sequence[int], steps: Sequence[StepRecord]) -> np.ndarray:
    """Tokens seen after each step of `at`; an evaluation before the first step has seen none."""
    known = [0] + [record.step for record in steps]
    tokens = [0] + [record.tokens for record in steps]
    return np.interp(at, known, tokens)


def step_figure(spans: Sequence[TraceSpan], stages: Sequence[StageRecord], title: str) -> Figure:
    """Per stage a lane of computing and waiting, and under it a thin lane of sending."""
    height = 1.9 + 0.8 * len(stages)
    figure = Figure(figsize=(13, height), dpi=DPI)
    # Fixed margins instead of a layout engine: the width of a bar must be known while drawing.
    figure.subplots_adjust(left=0.1, right=0.985, top=1 - 0.85 / height, bottom=0.7 / height)
    axes = figure.add_subplot()
    rows = {record.stage: row for row, record in enumerate(stages)}
    axes.set_xlim(
        min((span.start for span in spans), default=0.0),
        max((span.end for span in spans), default=1.0),
    )
    axes.set_ylim(len(stages) - 0.4, -0.4)
    _draw_waits(axes, [span for span in spans if span.lane == "wait"], rows)
    for kind, (name, colour) in _KINDS.items():
        alike = [span for span in spans if span.lane != "wait" and _kind(span) == kind]
        _draw_bars(axes, [s for s in alike if s.lane == "compute"], rows, name, colour)
        _draw_bars(axes, [s for s in alike if s.lane == "send"], rows, f"send {name}", colour)
    axes.set_yticks(range(len(stages)))
    axes.set_yticklabels([f"stage {record.stage}\n{record.layers}" for record in stages])
    axes.tick_params(labelsize=12)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("seconds since the step began", fontsize=13)
    axes.set_title(title, fontsize=14, loc="left", pad=30)
    axes.spines[["top", "right", "left"]].set_visible(False)
    _legend(axes)
    return figure


def _kind(span: TraceSpan) -> str:
    letter = span.label.strip("<>")[:1]
    return letter if letter in _KINDS else "other"


def _draw_waits(axes: Axes, spans: Sequence[TraceSpan], rows: dict[int, int]) -> None:
    if not spans:
        return
    axes.barh(
        [rows[span.stage] for span in spans],
        [span.end - span.start for span in spans],
        left=[span.start for span in spans],
        height=_COMPUTE_HEIGHT,
        facecolor=_WAIT_FACE, edgecolor=_WAIT_EDGE, hatch="////", linewidth=0, label="wait",
    )  # fmt: skip


def _draw_bars(
    axes: Axes, spans: Sequence[TraceSpan], rows: dict[int, int], name: str, colour: str
) -> None:
    if not spans:
        return
    sending = spans[0].lane == "send"
    axes.barh(
        [rows[span.stage] + (_SEND_OFFSET if sending else 0) for span in spans],
        [span.end - span.start for span in spans],
        left=[span.start for span in spans],
        height=_SEND_HEIGHT if sending else _COMPUTE_HEIGHT,
        facecolor=colour, edgecolor="white", alpha=0.65 if sending else 1.0,
        linewidth=0 if sending else 0.6,  # a white edge would swallow a short message
        label=name,
    )  # fmt: skip
    if not sending:
        _draw_numbers(axes, spans, rows)


def _draw_numbers(axes: Axes, spans: Sequence[TraceSpan], rows: dict[int, int]) -> None:
    """Each microbatch's number inside its bar, where there is room.

    All bars of a kind get the size of type that suits the usual one, so that 9 and 10 look alike.
    """
    edges = np.array([[(span.start, 0), (span.end, 0)] for span in spans]).reshape(-1, 2)
    pixels = axes.transData.transform(edges)[:, 0].reshape(-1, 2)
    room = (pixels[:, 1] - pixels[:, 0]) * 72 / DPI  # in points, as type is measured
    digits = max(len(span.label) - 1 for span in spans)
    size = min(10.0, _largest_type(float(np.median(room)), digits))
    if size < _LEAST_TYPE:
        return
    for span, points in zip(spans, room, strict=True):
        number = span.label[1:]
        if number and _largest_type(points, len(number)) >= 0.9 * size:
            middle = (span.start + span.end) / 2
            axes.text(middle, rows[span.stage], number, ha="center", va="center", fontsize=size)


def _largest_type(room: float, digits: int) -> float:
    """The size at which that many digits fill `room` points, with a little air around them."""
    return (room - 2) / (0.65 * max(1, digits))


def _legend(axes: Axes) -> None:
    """The lanes' colours in one line above the chart."""
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: (labels[i].startswith("send"), i))
    axes.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.2, ncols=len(order),
        fontsize=11, frameon=False, handlelength=1.4, columnspacing=1.4,
    )  # fmt: skip


def _save(figure: Figure, path: str | Path) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=DPI)
