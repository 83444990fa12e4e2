"""What `thinwire lab codecs` says of its runs: a table of findings, one of arms, and a picture."""

import textwrap
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinwire_lab.findings import (
    FEEDBACK,
    FEEDBACK_SHARE,
    Harmed,
    Harms,
    bounded,
    judge,
    of_kind,
    too_small,
)
from thinwire_lab.labels import Point, legend_below, log_ticks, name_points
from thinwire_lab.outcome import Outcome, Row
from thinwire_lab.pool import Trained

BITS = (2, 4, 8)
TITLES = {
    "cifar": "ResNet-18, images",
    "scratch": "language model from scratch",
    "tune": "language model, fine-tuned",
}
FAMILIES = {  # kinds of arms, and their marker
    "AQ-SGD": (("aqsgd",), "^"),
    "with feedback": (FEEDBACK, "D"),
    "integers": (("integers", "other scales"), "s"),
    "TopK": (("topk", "own"), "o"),
    "dense": (("dense",), "*"),
}


class GroundReport:
    """The runs of one ground, which are in the order of its grid."""

    def __init__(self, ground: str, runs: list[Trained]):
        self.ground = ground
        self.is_accuracy = ground == "cifar"
        self.metric = "accuracy" if self.is_accuracy else "loss"
        self.steps = runs[0].arm.steps
        self._dense = {run.arm.seed: run for run in runs if run.arm.tags["kind"] == "dense"}
        self._seeds = {run.arm.seed for run in runs if run.arm.tags["kind"] != "dense"}
        by_name: dict[str, list[Trained]] = {}
        for run in runs:
            by_name.setdefault(run.arm.tags["name"], []).append(run)
        self.arms = [self._arm(members) for members in by_name.values()]
        scores = [self._score(run) for run in self._dense.values()]
        self.noise = None
        """What seeds of dense differ by, in units of harm; None while there is only one."""
        if len(scores) > 1:
            unit = 1.0 if self.is_accuracy else fmean(scores)
            self.noise = (max(scores) - min(scores)) / unit
        self.too_small = too_small(self.noise, self.steps)
        """Why these runs decide nothing, if so."""

    @property
    def harms(self) -> Harms | None:
        """How much worse than dense of their seed arms are; None while noise is unknown."""
        if self.noise is None:
            return None
        return Harms(self.arms, self.noise, self.is_accuracy)

    def rows(self) -> list[Row]:
        """A row for each arm."""
        unit = "image" if self.is_accuracy else "token"
        knows = self.noise is not None
        found = []
        for arm in self.arms:
            figures = arm.runs[0].figures
            found.append(
                {
                    "ground": self.ground,
                    "arm": arm.name,
                    "forward": arm.entry["forward"],
                    "backward": arm.entry["backward"],
                    "seeds": len(arm.runs),
                    self.metric: _finite(arm.score),
                    f"{self.metric}, off": _finite(arm.score_off),
                    "harm": arm.on if knows else None,
                    "harm, off": arm.off if knows else None,
                    f"bytes per {unit} forward": figures["bytes_forward"],
                    f"bytes per {unit} backward": figures["bytes_backward"],
                    "ratio": figures["ratio"],
                    "error forward": figures.get("error_forward"),
                    "error backward": figures.get("error_backward"),
                    "for finding": " ".join(map(str, arm.entry.get("findings", []))) or None,
                }
            )
        return found

    def _arm(self, runs: list[Trained]) -> Harmed:
        """Of dense the seeds count that other arms have too, so that it can stand beside them."""
        shared = [run for run in runs if run.arm.seed in self._seeds] or runs
        score, score_off = (fmean(self._score(run, how) for run in shared) for how in ("", "_off"))
        on, off = (bounded(fmean(self._harm(run, how) for run in runs)) for how in ("", "_off"))
        return Harmed(runs[0].arm.tags, on, off, runs, score, score_off)

    def _harm(self, run: Trained, how: str) -> float:
        if not self._dense:
            return float("nan")
        score = self._score(run, how)
        dense = self._score(self._dense.get(run.arm.seed, next(iter(self._dense.values()))))
        return dense - score if self.is_accuracy else score / dense - 1

    def _score(self, run: Trained, how: str = "") -> float:
        value = run.figures[self.metric + how]
        return float("nan") if value is None else float(value)


def _finite(value: float) -> float | None:
    return value if value == value else None


def outcome(task: str, reports: list[GroundReport], notes: list[str]) -> Outcome:
    """Findings with their verdicts, and the figures behind them."""
    rows = [r for report in reports for r in judge(report.ground, report.harms, report.too_small)]
    reasons = [f"{report.ground}: {report.too_small}" for report in reports if report.too_small]
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
            "harm: accuracy lost, or relative increase of the loss, against dense with the same "
            "seed; on and off: with and without compression at test time",
            "ratio: bf16 both ways over all bytes that crossed in training, headers and the whole "
            "first visits of +aqsgd included",
            "error: |received - sent| / |sent| in the second half of training; 1 is what sending "
            "nothing would give",
            *(f"{report.ground}: {report.steps} steps; {_noise(report)}" for report in reports),
            *notes,
        ],
        figures=[row for report in reports for row in report.rows()],
    )


def _noise(report: GroundReport) -> str:
    harms = report.harms
    if harms is None or report.noise is None:
        return report.too_small
    noise, tolerance = (harms.show(harm).lstrip("+") for harm in (report.noise, harms.tolerance))
    return f"two seeds of dense differ by {noise}, so the tolerance is {tolerance}"


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
    scores = [score for arm in report.arms for score in (arm.score, arm.score_off)]
    finite = [score for score in scores if score == score]
    low, high = min(finite), max(finite)
    if not report.is_accuracy:
        high = min(high, 1.4 * low)
    margin = 0.06 * (high - low) or 0.01
    return low - margin, high + margin


def _draw_bits(axis: Axes, report: GroundReport) -> None:
    shades = [[float("nan")] * len(BITS) for _ in BITS]
    for (forward, backward), arm in of_kind(report.arms, "integers").items():
        column, row = BITS.index(forward), BITS.index(backward)
        harm = 0.0 if report.noise is None else arm.on
        shades[row][column] = min(harm, 0.1)
        shown = f"{arm.score:.1%}" if report.is_accuracy else f"{arm.score:.3f}"
        color = "white" if harm > 0.06 else "black"
        axis.text(column, row, shown, ha="center", va="center", color=color)
    axis.imshow(shades, cmap="Oranges", vmin=0, vmax=0.1, origin="lower", aspect="auto")
    axis.set_xticks(range(len(BITS)), map(str, BITS))
    axis.set_yticks(range(len(BITS)), map(str, BITS))
    axis.set(xlabel="bits forward", ylabel="bits backward")
    axis.set_title(f"{report.metric}, integers; darker is worse")


def _draw_shares(axis: Axes, report: GroundReport) -> None:
    series = {
        "TopK": ("topk", "score", "o-", "C0"),
        "TopK, off at test": ("topk", "score_off", "o--", "C0"),
        "own choice backward": ("own", "score", "x-", "C3"),
        "TopK + AQ-SGD": ("aqsgd", "score", "^-", "C2"),
        "TopK + AQ-SGD, off": ("aqsgd", "score_off", "^--", "C2"),
    }
    for label, (kind, score, style, color) in series.items():
        scores = {share: getattr(arm, score) for share, arm in of_kind(report.arms, kind).items()}
        if scores:
            axis.plot(*zip(*scores.items(), strict=True), style, color=color, label=label, ms=5)
    axis.set_xscale("log")
    shares = list(of_kind(report.arms, "topk"))
    axis.set_xticks(shares, map(str, shares))
    axis.minorticks_off()
    _draw_dense(axis, report)
    axis.set(xlabel="% of elements kept", title="TopK")
    legend_below(axis)


def _draw_feedback(axis: Axes, report: GroundReport) -> None:
    every = {kind: of_kind(report.arms, kind).get(FEEDBACK_SHARE) for kind in ("topk", *FEEDBACK)}
    arms = {kind: arm for kind, arm in every.items() if arm}
    places = range(len(arms))
    on, off = ([getattr(arm, how) for arm in arms.values()] for how in ("score", "score_off"))
    axis.vlines(places, on, off, color="0.7", zorder=1)
    axis.scatter(places, on, marker="o", color="C0", label="on at test", s=45)
    axis.scatter(places, off, marker="o", color="white", edgecolor="C0", label="off at test", s=45)
    axis.set_xticks(places, ["none" if kind == "topk" else kind for kind in arms])
    axis.margins(x=0.2)
    _draw_dense(axis, report)
    axis.set(xlabel="kind of feedback", title=f"error feedback around TopK {FEEDBACK_SHARE} %")
    legend_below(axis)


def _draw_bytes(axis: Axes, report: GroundReport) -> None:
    names: list[Point] = []
    beyond = []
    better = max if report.is_accuracy else min
    low, high = _near_dense(report)
    for number, (family, (kinds, marker)) in enumerate(FAMILIES.items()):
        near = []
        for arm in report.arms:
            if arm.kind in kinds:
                score, ratio = better(arm.score, arm.score_off), arm.runs[0].figures["ratio"]
                if low <= score <= high:
                    near.append((ratio, score))
                    names.append((ratio, score, arm.name, f"C{number}"))
                else:
                    beyond.append(arm.name)
        across, up = [x for x, _ in near], [y for _, y in near]
        axis.scatter(across, up, marker=marker, color=f"C{number}", label=family, s=30)
    _draw_dense(axis, report)
    axis.set_xscale("log")
    axis.margins(x=0.15)
    log_ticks(axis.xaxis)
    axis.set_ylim(low, high)
    outside = "\n" + textwrap.fill(f"far off: {', '.join(beyond)}", 48) if beyond else ""
    axis.set_xlabel(f"times fewer bytes than bf16{outside}")
    axis.set_title("the better of on and off, over bytes")
    legend_below(axis)
    name_points(axis, names, size=6)


def _near_dense(report: GroundReport) -> tuple[float, float]:
    """Where arms differ visibly: a quarter of the accuracy, or of the loss, from the best one."""
    low, high = _limits(report)
    if report.is_accuracy:
        return max(low, high - 0.25), high
    return low, min(high, 1.25 * low)


def _draw_dense(axis: Axes, report: GroundReport) -> None:
    dense, harms = of_kind(report.arms, "dense").get(100), report.harms
    if dense is None:
        return
    if harms:
        width = harms.tolerance * (1.0 if report.is_accuracy else dense.score)
        axis.axhspan(dense.score - width, dense.score + width, color="0.9", zorder=0)
    axis.axhline(dense.score, color="0.4", linewidth=1, label="dense, and the tolerance")
