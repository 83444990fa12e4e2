"""Numbers as people read them: bytes, counts, durations, shares."""

import math
from collections.abc import Sequence

ABSENT = "-"  # stands for a number that is unknown; ASCII, so that every terminal can show it


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


def human_flops(rate: float) -> str:
    """A rate of floating-point operations: 5e9 is "5.0 GFLOP/s"."""
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.1f} GFLOP/s"


def human_count(count: float, decimals: int = 1) -> str:
    """A count of tokens or samples: 1_500_000 is "1.5M", a billion is "1B"."""
    value, suffix = _scaled(count, ("", "k", "M", "B", "T"))
    text = f"{value:.{decimals}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + suffix


def duration(seconds: float) -> str:
    """A time span in its two largest units: "45s", "3m12s", "2h05m", "3d04h"."""
    if not math.isfinite(seconds):
        return ABSENT
    total = max(0, round(seconds))
    for large, small, size, count in ("d", "h", 3600, 24), ("h", "m", 60, 60), ("m", "s", 1, 60):
        whole, rest = divmod(total // size, count)
        if whole:
            return f"{whole}{large}{rest:02d}{small}"
    return f"{total}s"


def elapsed(seconds: float) -> str:
    """A measured time to three digits, "13.8 s"; from a minute on as `duration` has it."""
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


def finite_mean(values: Sequence[float]) -> float:
    """The mean of the finite values, NaN when there is none."""
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan
