"""What `thinwire lab codecs` says of its rows: a table of findings, one of arms, and a picture."""

import textwrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from thinwire.lab.arms import mean
from thinwire.lab.codecs import grid
from thinwire.lab.experiment import Outcome, Row
from thinwire.lab.findings import BITS, FEEDBACK, FEEDBACK_SHARE, SEPARATE, Harms, judge, too_small
from thinwire.lab.labels import Point, legend_below, name_points

TITLES = {
    "cifar": "ResNet-18, images",
    "scratch": "language model from scratch",
    "tune": "language model, fine-tuned",
}
FAMILIES = {  # what is in the names, the first that fits; marker
    "AQ-SGD": ("+aqsgd", "^"),
    "with feedback": ("+ef", "D"),
    "integers": ("fw", "s"),
    "TopK": ("topk", "o"),
    "dense": ("dense", "*"),
}


class GroundReport:
    """The rows of one ground, averaged over seeds."""

    def __init__(self, ground: str, rows: list[Row]):
        self.ground = ground
        self.is_accuracy = ground == "cifar"
        self.metric = "accuracy" if self.is_accuracy else "loss"
        self.steps = rows[0]["steps"]
        self.seconds = sum(row["seconds"] for row in rows)
        self._codecs = {codecs.name: codecs for codecs in grid(ground)}
        self._rows: dict[str, list[Row]] = {}
        for row in rows:
            codecs = self._codecs.get(row["name"])
            if codecs and (codecs.forward, codecs.backward) == (row["forward"], row["backward"]):
                self._rows.setdefault(row["name"], []).append(row)
        self._dense = {row["seed"]: row for row in self._rows.get("dense", [])}
        self._seeds = {
            row["seed"] for name in self.names if name != "dense" for row in self._rows[name]
        }

    @property
    def names(self) -> list[str]:
        """The arms that there are, in the order of the grid."""
        return [name for name in self._codecs if name in self._rows]

    @property
    def noise(self) -> float | None:
        """What seeds of dense differ by, in units of harm; None while there is only one."""
        scores = [self._number(row) for row in self._dense.values()]
        if len(scores) < 2:
            return None
        return (max(scores) - min(scores)) / (1.0 if self.is_accuracy else mean(scores))

    @property
    def too_small(self) -> str:
        """Why these runs decide nothing, if so."""
        return too_small(self.noise, self.steps)

    def score(self, name: str, compressed: bool = True) -> float:
        """Accuracy or loss of an arm, mean over its seeds; nan if a run of it diverged.

        Of dense the seeds count that other arms have too, so that it can stand beside them.
        """
        rows = self._rows[name]
        shared = [row for row in rows if row["seed"] in self._seeds]
        return mean(self._number(row, compressed) for row in shared or rows)

    def harms(self) -> Harms | None:
        """How much worse than dense of their seed arms are; None while noise is unknown."""
        if self.noise is None:
            return None
        found = {
            name: (self._harm(name, compressed=True), self._harm(name, compressed=False))
            for name in self.names
        }
        return Harms(found, self.noise, self.is_accuracy)

    def _harm(self, name: str, compressed: bool) -> float:
        return mean(self._harm_of(row, compressed) for row in self._rows[name])

    def _harm_of(self, row: Row, compressed: bool) -> float:
        score = self._number(row, compressed)
        dense = self._number(self._dense.get(row["seed"], next(iter(self._dense.values()))))
        return dense - score if self.is_accuracy else score / dense - 1

    def arms(self) -> list[Row]:
        """A row for each arm."""
        harms = self.harms()
        unit = "image" if self.is_accuracy else "token"
        found = []
        for name in self.names:
            first, codecs = self._rows[name][0], self._codecs[name]
            found.append(
                {
                    "ground": self.ground,
                    "arm": name,
                    "forward": codecs.forward,
                    "backward": codecs.backward,
                    "seeds": len(self._rows[name]),
                    self.metric: _finite(self.score(name)),
                    f"{self.metric}, off": _finite(self.score(name, False)),
                    "harm": harms.on(name) if harms else None,
                    "harm, off": harms.off(name) if harms else None,
                    f"bytes per {unit} forward": first["bytes_forward"],
                    f"bytes per {unit} backward": first["bytes_backward"],
                    "ratio": first["ratio"],
                    "error forward": first.get("error_forward"),
                    "error backward": first.get("error_backward"),
                    "for finding": " ".join(map(str, codecs.findings)) or None,
                }
            )
        return found

    def ratio(self, name: str) -> float:
        """How many times fewer bytes than bf16."""
        return float(self._rows[name][0]["ratio"])

    def _number(self, row: Row, compressed: bool = True) -> float:
        value = row[self.metric + ("" if compressed else "_off")]
        return float("nan") if value is None else float(value)


def _finite(value: float) -> float | None:
    return value if value == value else None


def outcome(task: str, reports: list[GroundReport], notes: list[str]) -> Outcome:
    """Findings with their verdicts, and the figures behind them."""
    rows = [r for report in reports for r in judge(report.ground, report.harms(), report.too_small)]
    reasons = [f"{report.ground}: {report.too_small}" for report in reports if report.too_small]
    told = []
    for report in reports:
        harms = report.harms()
        if harms is None or report.noise is None:
            told.append(f"{report.ground}: {report.steps} steps; {report.too_small}")
            continue
        told.append(
            f"{report.ground}: {report.steps} steps; two seeds of dense differ by "
            f"{harms.show(report.noise).lstrip('+')}, so the tolerance is "
            f"{harms.show(harms.tolerance).lstrip('+')}"
        )
    return Outcome(
        name=f"codecs-{task}",
        question=(
            "Which findings of arXiv 2401.07788 on lossy codecs hold here? Every figure is of a "
            "trained model on data that it was not trained on."
        ),
        verdict=_verdict(rows),
        holds=None,
        too_small="; ".join(reasons) if len(reasons) == len(reports) else "",
        rows=rows,
        figure=figure(reports),
        notes=[
            "harm: accuracy lost against dense of the same seed as a share, or loss above it, "
            "relative; with compression at test time, and off: without it",
            "ratio: bf16 both ways over all bytes that crossed in training, headers and the whole "
            "first visits of +aqsgd included",
            "error: how far what arrives in training is from what was sent, relative to it, in the "
            "second half of the training; 1 is as far as nothing at all",
            *told,
            *notes,
        ],
        figures=[row for report in reports for row in report.arms()],
    )


def _verdict(rows: list[Row]) -> str:
    """Each finding's verdicts, as "finding 1: does not hold (scratch, tune)"."""
    parts = []
    for number in dict.fromkeys(row["finding"] for row in rows):
        grounds: dict[str, list[str]] = {}
        for row in rows:
            if row["finding"] == number:
                grounds.setdefault(row["verdict"], []).append(row["ground"])
        told = ", ".join(f"{verdict} ({', '.join(g)})" for verdict, g in grounds.items())
        parts.append(f"finding {number}: {told}")
    return "; ".join(parts) + "."


def figure(reports: list[GroundReport]) -> Figure:
    """A row of four panels for each ground."""
    plot = Figure(figsize=(18, 5.6 * len(reports)), layout="constrained")
    plot.suptitle("What lossy codecs at the cuts cost")
    panels = plot.subplots(len(reports), 4, squeeze=False)
    for report, (bits, shares, feedback, bytes_) in zip(reports, panels, strict=True):
        _draw_bits(bits, report)
        _draw_shares(shares, report)
        _draw_feedback(feedback, report)
        _draw_bytes(bytes_, report)
        bits.set_ylabel(f"{TITLES[report.ground]}\n\n{bits.get_ylabel()}")
        for axis in (shares, feedback):
            axis.set_ylim(*_limits(report))
        for axis in (shares, feedback, bytes_):
            axis.set_ylabel(report.metric)
            axis.grid(alpha=0.3)
    return plot


def _limits(report: GroundReport) -> tuple[float, float]:
    """Room for all figures, but not for a loss that is far off: it would flatten the rest."""
    scores = [report.score(name, on) for name in report.names for on in (True, False)]
    finite = [score for score in scores if score == score]
    low, high = min(finite), max(finite)
    if not report.is_accuracy:
        high = min(high, 1.4 * low)
    margin = 0.06 * (high - low) or 0.01
    return low - margin, high + margin


def _draw_bits(axis: Axes, report: GroundReport) -> None:
    harms = report.harms()
    grid_ = [[float("nan")] * len(BITS) for _ in BITS]
    for row, backward in enumerate(BITS):
        for column, forward in enumerate(BITS):
            name = f"fw{forward}-bw{backward}"
            if name in report.names:
                score = report.score(name)
                harm = harms.on(name) if harms else 0.0
                grid_[row][column] = min(harm, 0.1)
                shown = f"{score:.1%}" if report.is_accuracy else f"{score:.3f}"
                dark = harm > 0.06
                color = "white" if dark else "black"
                axis.text(column, row, shown, ha="center", va="center", color=color)
    axis.imshow(grid_, cmap="Oranges", vmin=0, vmax=0.1, origin="lower", aspect="auto")
    axis.set_xticks(range(len(BITS)), [str(bits) for bits in BITS])
    axis.set_yticks(range(len(BITS)), [str(bits) for bits in BITS])
    axis.set(xlabel="bits forward", ylabel="bits backward")
    axis.set_title(f"{report.metric}, integers; darker is worse")


def _draw_shares(axis: Axes, report: GroundReport) -> None:
    series = {
        "TopK": ("topk{}", True, "o-", "C0"),
        "TopK, off at test": ("topk{}", False, "o--", "C0"),
        "own choice backward": ("topk{}" + SEPARATE, True, "x-", "C3"),
        "TopK + AQ-SGD": ("topk{}+aqsgd", True, "^-", "C2"),
        "TopK + AQ-SGD, off": ("topk{}+aqsgd", False, "^--", "C2"),
    }
    for label, (form, compressed, style, color) in series.items():
        points = [n for n in range(1, 101) if form.format(n) in report.names]
        if points:
            scores = [report.score(form.format(n), compressed) for n in points]
            axis.plot(points, scores, style, color=color, label=label, markersize=5)
    axis.set_xscale("log")
    ticks = [n for n in range(1, 101) if f"topk{n}" in report.names]
    axis.set_xticks(ticks, [str(n) for n in ticks])
    axis.minorticks_off()
    _draw_dense(axis, report)
    axis.set(xlabel="% of elements kept", title="TopK")
    legend_below(axis)


def _draw_feedback(axis: Axes, report: GroundReport) -> None:
    plain = f"topk{FEEDBACK_SHARE}"
    names = [n for n in (plain, *(f"{plain}+{kind}" for kind in FEEDBACK)) if n in report.names]
    places = range(len(names))
    on = [report.score(name) for name in names]
    off = [report.score(name, compressed=False) for name in names]
    axis.vlines(places, on, off, color="0.7", zorder=1)
    axis.scatter(places, on, marker="o", color="C0", label="on at test", s=45)
    axis.scatter(places, off, marker="o", color="white", edgecolor="C0", label="off at test", s=45)
    kinds = [name.removeprefix(plain).removeprefix("+") or "none" for name in names]
    axis.set_xticks(places, kinds)
    axis.margins(x=0.2)
    _draw_dense(axis, report)
    axis.set(xlabel="kind of feedback", title=f"error feedback around TopK {FEEDBACK_SHARE} %")
    legend_below(axis)


def _draw_bytes(axis: Axes, report: GroundReport) -> None:
    names: list[Point] = []
    beyond = []
    better = max if report.is_accuracy else min
    low, high = _near_dense(report)
    for number, (family, (_, marker)) in enumerate(FAMILIES.items()):
        mine = [name for name in report.names if _family(name) == family]
        scores = {n: better(report.score(n), report.score(n, compressed=False)) for n in mine}
        beyond += [name for name, score in scores.items() if not low <= score <= high]
        near = [name for name in mine if name not in beyond]
        ratios = [report.ratio(name) for name in near]
        color = f"C{number}"
        axis.scatter(
            ratios, [scores[n] for n in near], marker=marker, color=color, label=family, s=30
        )
        names += [(report.ratio(n), scores[n], n, color) for n in near]
    _draw_dense(axis, report)
    axis.set_xscale("log")
    axis.margins(x=0.15)
    axis.xaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_ylim(low, high)
    outside = "\n" + textwrap.fill(f"far off: {', '.join(beyond)}", 48) if beyond else ""
    axis.set_xlabel(f"times fewer bytes than bf16{outside}")
    axis.set_title("the better of on and off, over bytes")
    legend_below(axis)
    name_points(axis, names, size=6)


def _family(name: str) -> str:
    return next(family for family, (part, _) in FAMILIES.items() if part in name)


def _near_dense(report: GroundReport) -> tuple[float, float]:
    """Where arms are told apart: a quarter of the accuracy, or of the loss, from the best one."""
    low, high = _limits(report)
    if report.is_accuracy:
        return max(low, high - 0.25), high
    return low, min(high, 1.25 * low)


def _draw_dense(axis: Axes, report: GroundReport) -> None:
    if "dense" not in report.names:
        return
    dense, harms = report.score("dense"), report.harms()
    if harms:
        width = harms.tolerance * (1.0 if report.is_accuracy else dense)
        axis.axhspan(dense - width, dense + width, color="0.9", zorder=0)
    axis.axhline(dense, color="0.4", linewidth=1, label="dense, and the tolerance")
