"""Numbers as people read them: bytes, counts, durations, shares, and a curve in one line."""

import itertools
import math
from collections.abc import Sequence

ABSENT = "-"  # stands for a number that is unknown; ASCII, so that every terminal can show it
SHORT = {"token": "tok", "image": "img"}  # what is counted, where there is little room
_BLOCKS = "▁▂▃▄▅▆▇█"


def _scaled(number: float, suffixes: Sequence[str]) -> tuple[float, str]:
    """`number` divided by 1000 until it prints below 1000, and the suffix it then needs."""
    for suffix in suffixes[:-1]:
        # 999.95 would be printed as "1000.0" with one decimal: it belongs to the next suffix
        if abs(number) < 999.95:
            return number, suffix
        number /= 1000
    return number, suffixes[-1]


def human_bytes(count: float) -> str:
    """Bytes with decimal prefixes, as network speeds are counted: 1_500_000 is "1.5 MB"."""
    if not math.isfinite(count):
        return ABSENT
    value, suffix = _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))
    return f"{value:.0f} B" if suffix == "B" else f"{value:.1f} {suffix}"


def human_count(count: float, decimals: int = 1) -> str:
    """A count of tokens or samples: 1_500_000 is "1.5M", a billion is "1B"."""
    if not math.isfinite(count):
        return ABSENT
    value, suffix = _scaled(count, ("", "k", "M", "B", "T"))
    text = f"{value:.{decimals}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + suffix


def duration(seconds: float) -> str:
    """A time span in its two largest units: "45s", "3m12s", "2h05m", "3d04h"."""
    if not math.isfinite(seconds):
        return ABSENT
    total = max(0, round(seconds))
    minutes, second = divmod(total, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02d}h"
    if hours:
        return f"{hours}h{minute:02d}m"
    if minutes:
        return f"{minutes}m{second:02d}s"
    return f"{second}s"


def elapsed(seconds: float | None) -> str:
    """A measured time to three digits, "13.8 s", so that a rate told beside it can be checked.

    From a minute on as `duration` has it.
    """
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    if seconds >= 59.95:
        return duration(seconds)
    return f"{seconds:.{1 if seconds >= 9.995 else 2 if seconds >= 0.9995 else 3}f} s"


def loss_text(loss: float | None) -> str:
    """A loss to four decimals; one that is not finite is named, one that is unknown is "-"."""
    if loss is None:
        return ABSENT
    if math.isfinite(loss):
        return f"{loss:.4f}"
    return "NaN" if math.isnan(loss) else "infinite"


def percent(fraction: float | None) -> str:
    """A fraction of one as whole per cent: 0.625 is "62 %"."""
    if fraction is None or not math.isfinite(fraction):
        return ABSENT
    return f"{100 * fraction:.0f} %"


def amount(done: float, total: float, unit: str) -> str:
    """How far a piece of work is: "4.1 MB / 10.2 MB" for unit "B", else "40 / 100 files"."""
    if unit == "B":
        return f"{human_bytes(done)} / {human_bytes(total)}"
    return f"{done:,} / {total:,} {unit}"


def meter_bar(fraction: float, width: int = 10) -> str:
    """A bar of `width` cells filled to `fraction`; empty text when the fraction is unknown."""
    if not math.isfinite(fraction):
        return ""
    filled = round(width * min(1.0, max(0.0, fraction)))
    return "█" * filled + "░" * (width - filled)


def sparkline(values: Sequence[float], width: int) -> str:
    """The curve of `values` in at most `width` characters; a gap where nothing is finite.

    More values than characters are averaged in equal runs, so the whole curve stays in view.
    """
    cells = min(width, len(values))
    edges = [index * len(values) // cells for index in range(cells + 1)] if cells else []
    means = [finite_mean(values[a:b]) for a, b in itertools.pairwise(edges)]
    known = [mean for mean in means if math.isfinite(mean)]
    if not known:
        return " " * cells
    # halves, because the distance between two huge values would overflow
    low, span = min(known) / 2, max(known) / 2 - min(known) / 2
    top = len(_BLOCKS) - 1

    def block(mean: float) -> str:
        if not math.isfinite(mean):
            return " "
        return _BLOCKS[round((mean / 2 - low) / span * top)] if span > 0 else _BLOCKS[top // 2]

    return "".join(block(mean) for mean in means)


def finite_mean(values: Sequence[float]) -> float:
    """The mean of the finite values, nan when there is none."""
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


class Curve:
    """A whole run's curve in bounded memory, for a sparkline.

    Holds means over runs of equal length; when full, neighbours are merged and the run
    length doubles, so the cost of drawing does not grow with the number of steps.
    """

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._run_length = 1
        self._points: list[float] = []
        self._open_run: list[float] = []

    def add(self, value: float) -> None:
        """Append the next value."""
        self._open_run.append(value)
        if len(self._open_run) < self._run_length:
            return
        self._points.append(finite_mean(self._open_run))
        self._open_run = []
        if len(self._points) >= self._capacity:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [finite_mean(pair) for pair in pairs]
            self._run_length *= 2

    @property
    def points(self) -> list[float]:
        """The curve so far, the newest (perhaps incomplete) run last."""
        return self._points + ([finite_mean(self._open_run)] if self._open_run else [])
