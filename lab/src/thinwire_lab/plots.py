"""The look that pictures of the lab share: light grids, no frame, one legend below."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Colours of Okabe and Ito: distinct with every common form of colour blindness.
BLACK, BLUE, SKY, GREEN = "#000000", "#0072B2", "#56B4E9", "#009E73"
ORANGE, RED, PINK = "#E69F00", "#D55E00", "#CC79A7"
GREY = "#808080"
PURPLE, BROWN = "#7A4FA3", "#7F5539"  # beside those, where there are more kinds


def canvas(
    title: str, size: tuple[float, float], rows: int = 1, columns: int = 1, **grid: Any
) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row."""
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    axes = list(figure.subplots(rows, columns, squeeze=False, **grid).flat)
    for axis in axes:
        axis.grid(color="#E4E4E4", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def shared_legend(axis: Axes, columns: int) -> None:
    """One legend for the whole figure, of what this axis shows, where it covers nothing."""
    handles, labels = axis.get_legend_handles_labels()
    axis.figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
