"""Names beside the points of a plot, where they hide each other least, and legends below it."""

import re
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullLocator

Point = tuple[float, float, str, str]
"""x, y, name, color."""
Box = tuple[float, float, float, float]

_GLYPH, _LINE = 0.55, 1.25  # width of a letter and height of a line, in font sizes
_ASIDE, _ABOVE = 0.85, 0.75  # how far a name stands from its point, in font sizes
_PLACES = ((1, 1), (1, -1), (-1, 1), (-1, -1), (1, 2.2), (1, -2.2), (-1, 2.2), (-1, -2.2))


def name_points(axis: Axes, points: Sequence[Point], size: float = 7) -> None:
    """Write each name at that place around its point where it covers the fewest others.

    Call it when the limits of the axis are final.
    """
    pixel = axis.figure.dpi / 72  # what sizes of fonts and offsets are multiplied with
    spots = [axis.transData.transform((x, y)) for x, y, _, _ in points]
    taken = [(x - 4 * pixel, y - 4 * pixel, x + 4 * pixel, y + 4 * pixel) for x, y in spots]
    for (x, y, name, color), (across, up) in zip(points, spots, strict=True):
        boxes = [_box(across, up, name, place, size * pixel) for place in _PLACES]
        hits = [sum(_overlap(box, other) for other in taken) for box in boxes]
        best = min(range(len(boxes)), key=lambda n: hits[n])
        taken.append(boxes[best])
        to_right, to_top = _PLACES[best]
        axis.annotate(
            name,
            (x, y),
            textcoords="offset points",
            xytext=(_ASIDE * size * to_right, _ABOVE * size * to_top),
            ha="left" if to_right > 0 else "right",
            va="center",
            fontsize=size,
            color=color,
        )


def short_name(method: str) -> str:
    """The label of an arm as a picture shows it: settings without their sections, codecs as a/b."""
    method = re.sub(r"codec\.forward=(\S+) codec\.backward=(\S+)", r"\1/\2", method)
    return re.sub(r"\b\w+\.(\w+=)", r"\1", method.replace("+zstd", ""))


def legend_below(axis: Axes, columns: int = 3) -> None:
    """A legend below the axis and its label, where it covers no point."""
    below = {"bbox_to_anchor": (0.5, -0.2), "ncols": columns, "fontsize": 7, "handlelength": 3}
    axis.legend(loc="upper center", frameon=False, **below)


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


def log_ticks(axis: Axis) -> None:
    """Ticks at 1, 2, 5, 10, ... as plain numbers."""
    axis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())
