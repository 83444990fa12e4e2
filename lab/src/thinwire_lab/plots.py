"""Pictures of the lab as data: panels with lines or points, drawn alike for all experiments."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

# The first are of Okabe and Ito: distinct with every common form of colour blindness.
BLUE, RED, GREEN, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9"
COLOURS = (BLUE, RED, GREEN, ORANGE, SKY, "#CC79A7", "#000000", "#7A4FA3", "#7F5539")
Box = tuple[float, float, float, float]

_GLYPH, _LINE = 0.55, 1.25  # width of a letter and height of a line, in font sizes
_ASIDE, _ABOVE = 0.85, 0.75  # how far a name stands from its point, in font sizes
_PLACES = ((1, 1), (1, -1), (-1, 1), (-1, -1), (1, 2.2), (1, -2.2), (-1, 2.2), (-1, -2.2))


@dataclass(frozen=True)
class Line:
    """Points of one label: joined or not, as matplotlib's short style says ("o-", ":")."""

    label: str
    x: Sequence[Any]
    y: Sequence[Any]
    style: str = "o-"
    colour: str = ""  # as its label's elsewhere in the panel, or the next one
    names: Sequence[str] = ()  # beside the points
    errors: tuple[Sequence[float], Sequence[float]] | None = None  # below and above


@dataclass(frozen=True)
class Panel:
    """One pair of axes. `log` names those that are logarithmic, such as "xy"."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log: str = ""
    levels: dict[str, float] = field(default_factory=dict)  # horizontal lines, by their meaning
    limits: tuple[float, float] | None = None  # of y
    flipped: bool = False  # large x to the left


def draw(title: str, panels: Sequence[Panel]) -> Figure:
    """All panels side by side, or below each other where points have names; one legend for all."""
    named = any(line.names for panel in panels for line in panel.lines)
    rows, columns = (len(panels), 1) if named else (1, len(panels))
    size = (11, 5.5 * rows) if named else (max(8, 6 * columns), 6)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    colours: dict[str, str] = {}
    handles: dict[str, Any] = {}
    for axis, panel in zip(places, panels, strict=True):
        _draw_panel(axis, panel, colours)
        found = axis.get_legend_handles_labels()
        handles |= dict(zip(reversed(found[1]), reversed(found[0]), strict=True))
    names = list(reversed(handles))
    below: dict[str, Any] = {"ncols": 4, "fontsize": 8, "frameon": False}
    figure.legend([handles[name] for name in names], names, loc="outside lower center", **below)
    figure.canvas.draw()  # the layout must be final before names are placed
    for axis, panel in zip(places, panels, strict=True):
        _name_points(axis, panel, colours)
    return figure


def _draw_panel(axis: Axes, panel: Panel, colours: dict[str, str]) -> None:
    axis.grid(color="#E4E4E4", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    for line in panel.lines:
        known = line.colour or COLOURS[len(colours) % len(COLOURS)]
        style: dict[str, Any] = {"fmt": line.style, "capsize": 2, "ms": 5, "label": line.label}
        errors = None if line.errors is None else [list(side) for side in line.errors]
        axis.errorbar(line.x, line.y, errors, color=colours.setdefault(line.label, known), **style)
    for meaning, level in panel.levels.items():
        axis.axhline(level, color="0.5", linestyle=":", linewidth=1)
        axis.annotate(meaning, (0.99, level), xycoords=("axes fraction", "data"), color="0.5",
                      fontsize=7, ha="right", va="bottom")  # fmt: skip
    axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
    if "x" in panel.log:
        axis.set_xscale("log")
        log_ticks(axis.xaxis)
        axis.margins(x=0.1)
    if "y" in panel.log:
        axis.set_yscale("log")
    if panel.limits:
        axis.set_ylim(*panel.limits)
    if panel.flipped:
        axis.invert_xaxis()


def log_ticks(axis: Axis) -> None:
    """Ticks at 1, 2, 5, 10, ... as plain numbers."""
    axis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def _name_points(axis: Axes, panel: Panel, colours: dict[str, str], size: float = 7) -> None:
    """Write each name at that place around its point where it covers the fewest others."""
    low, high = axis.get_ylim()
    points = [
        (x, y, name, colours[line.label])
        for line in panel.lines
        for x, y, name in zip(line.x, line.y, line.names, strict=False)
        if name and low <= y <= high
    ]
    pixel = axis.figure.dpi / 72  # what sizes of fonts and offsets are multiplied with
    spots = [axis.transData.transform((x, y)) for x, y, _, _ in points]
    taken = [(x - 4 * pixel, y - 4 * pixel, x + 4 * pixel, y + 4 * pixel) for x, y in spots]
    for (x, y, name, colour), (across, up) in zip(points, spots, strict=True):
        boxes = [_box(across, up, name, place, size * pixel) for place in _PLACES]
        hits = [sum(_overlap(box, other) for other in taken) for box in boxes]
        best = min(range(len(boxes)), key=lambda n: hits[n])
        taken.append(boxes[best])
        to_right, to_top = _PLACES[best]
        place = (_ASIDE * size * to_right, _ABOVE * size * to_top)
        side = "left" if to_right > 0 else "right"
        axis.annotate(name, (x, y), textcoords="offset points", xytext=place, va="center",
                      ha=side, fontsize=size, color=colour)  # fmt: skip


def _box(x: float, y: float, name: str, place: tuple[float, float], size: float) -> Box:
    to_right, to_top = place
    width, height = _GLYPH * size * len(name), _LINE * size
    left = x + _ASIDE * size if to_right > 0 else x - _ASIDE * size - width
    middle = y + _ABOVE * size * to_top
    return left, middle - height / 2, left + width, middle + height / 2


def _overlap(one: Box, other: Box) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, width) * max(0.0, height)


def short_name(method: str) -> str:
    """The label of an arm as a picture shows it: settings without their sections, codecs as a/b."""
    method = re.sub(r"codec\.forward=(\S+) codec\.backward=(\S+)", r"\1/\2", method)
    return re.sub(r"\b\w+\.(\w+=)", r"\1", method.replace("+zstd", ""))
