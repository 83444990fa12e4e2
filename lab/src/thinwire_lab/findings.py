"""The findings of arXiv 2401.07788 (Rudakov et al.), and rules that hold them against our figures.

All rules speak of harm: how much worse than dense of the same seed an arm is. For images that is
accuracy lost, as a share; for language it is the loss above that of dense, relative to it. A
difference counts from a stated floor on, and between models only if it is also more than twice what
two seeds of dense differ by: that is the tolerance. Nothing is decided where arms are missing,
where the noise could have made the difference, or where the runs as a whole are too small: a few
steps, one seed of dense, or seeds of dense that are far apart.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from thinwire_lab.decide import one_seed, too_short
from thinwire_lab.experiment import sheet
from thinwire_lab.outcome import Outcome, Row
from thinwire_lab.plots import Line, Panel
from thinwire_lab.pool import Trained

HOLDS, PARTLY, FAILS = "holds", "in part", "does not hold"
OPEN, SMALL = "not tested", "too small to decide"  # arms are missing; the runs are too small
LEAST_STEPS = 100  # of any arm; the shortest that has decided something had 176
MOST_NOISE = 0.02  # by which two seeds of dense may differ: accuracy as a share, or relative loss
FLOOR = 0.005  # of accuracy, 50 of the 10,000 test images, or of relative loss
SEVERE = 0.02
"""The accuracy that the paper's "does not harm severely" may cost, as we read it."""
FAILED = 0.2  # a model with more harm has not learned what to be tested for
WORST = 10.0  # the harm of an arm that diverged
FEEDBACK = ("ef", "ef-mixed", "ef21")
FEEDBACK_SHARE = 10

Found = tuple[str, str]
"""The verdict, and our figure."""


@dataclass(frozen=True)
class Harmed:
    """One arm, averaged over its seeds, and how much worse than dense it is."""

    entry: dict[str, Any]  # of codecs.toml
    on: float  # tested with compression
    off: float  # and without
    runs: Sequence[Trained] = ()
    score: float = math.nan  # its accuracy or loss; NaN if a run of it diverged
    score_off: float = math.nan

    @property
    def name(self) -> str:
        """What it is called within its ground."""
        return self.entry["name"]

    @property
    def at(self) -> Any:
        """Bits forward and backward of integers, else the percentage that TopK keeps."""
        return tuple(self.entry["bits"]) if "bits" in self.entry else self.entry.get("share", 100)

    @property
    def best(self) -> float:
        """The harm, tested in the way that suits the model."""
        return min(self.on, self.off)


class Harms:
    """The harms of one ground."""

    def __init__(self, arms: Iterable[Harmed], noise: float, is_accuracy: bool):
        self.is_accuracy = is_accuracy
        self.tolerance = max(2 * noise, FLOOR)
        self._arms = list(arms)

    def of(self, kind: str) -> dict[Any, Harmed]:
        """The arms of a kind by what sets them apart, mildest first."""
        mine = (arm for arm in self._arms if arm.entry["kind"] == kind)
        return {arm.at: arm for arm in sorted(mine, key=lambda arm: arm.at, reverse=True)}

    def differs(self, difference: float) -> bool | None:
        """Whether one model is worse than another by so much; None where noise hides it."""
        if difference > self.tolerance:
            return True
        return False if difference <= 2 * FLOOR - self.tolerance else None

    def show(self, harm: float) -> str:
        """A harm, or a difference of two, in its unit."""
        if harm >= WORST:
            return "diverged"
        return f"{100 * harm:+.1f} points" if self.is_accuracy else f"{harm:+.1%}"

    def listed(self, harms: dict[int, float]) -> str:
        """Harms, or differences, by the share that TopK keeps."""
        return ", ".join(f"{share} % {self.show(harm)}" for share, harm in harms.items())


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
        return None if self.noise is None else Harms(self.arms, self.noise, self.is_accuracy)

    @property
    def told(self) -> str:
        """The noise, and what follows from it."""
        harms = self.harms
        if harms is None or self.noise is None:
            return self.too_small
        noise, tolerance = (harms.show(harm).lstrip("+") for harm in (self.noise, harms.tolerance))
        return f"two seeds of dense differ by {noise}, so the tolerance is {tolerance}"

    def rows(self) -> list[Row]:
        """A row for each arm."""
        unit = "image" if self.is_accuracy else "token"
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
                    self.metric: arm.score if math.isfinite(arm.score) else None,
                    f"{self.metric}, off": arm.score_off if math.isfinite(arm.score_off) else None,
                    "harm": None if self.noise is None else arm.on,
                    "harm, off": None if self.noise is None else arm.off,
                    f"bytes per {unit} forward": figures["bytes_forward"],
                    f"bytes per {unit} backward": figures["bytes_backward"],
                    "ratio": figures["ratio"],
                    "error forward": figures.get("error_forward"),
                    "error backward": figures.get("error_backward"),
                    "for finding": " ".join(map(str, arm.entry.get("findings", []))) or None,
                }
            )
        return found

    def panel(self) -> Panel:
        """The better of both tests over the bytes saved, where arms differ visibly."""
        better = max if self.is_accuracy else min
        scored = [
            (arm, better(arm.score, arm.score_off))
            for arm in self.arms
            if math.isfinite(arm.score) and math.isfinite(arm.score_off)
        ]
        best = better([score for _, score in scored] or [0.0])
        limits = (best - 0.25, best + 0.01) if self.is_accuracy else (0.99 * best, 1.25 * best)
        lines = []
        for kind in dict.fromkeys(arm.entry["kind"] for arm in self.arms):
            mine = [(arm, score) for arm, score in scored if arm.entry["kind"] == kind]
            ratios = [arm.runs[0].figures["ratio"] for arm, _ in mine]
            names = [arm.name for arm, _ in mine]
            lines.append(Line(kind, ratios, [score for _, score in mine], "o", names=names))
        across = "times fewer bytes than bf16"
        return Panel(
            f"{self.ground}: on or off at test", across, self.metric, lines, "x", {}, limits
        )

    def _arm(self, runs: list[Trained]) -> Harmed:
        """Of dense the seeds count that other arms have too, so that it can stand beside them."""
        shared = [run for run in runs if run.arm.seed in self._seeds] or runs
        score, score_off = (fmean(self._score(run, how) for run in shared) for how in ("", "_off"))
        on, off = (fmean(self._harm(run, how) for run in runs) for how in ("", "_off"))
        return Harmed(runs[0].arm.tags, bounded(on), bounded(off), runs, score, score_off)

    def _harm(self, run: Trained, how: str) -> float:
        if not self._dense:
            return math.nan
        score = self._score(run, how)
        dense = self._score(self._dense.get(run.arm.seed, next(iter(self._dense.values()))))
        return dense - score if self.is_accuracy else score / dense - 1

    def _score(self, run: Trained, how: str = "") -> float:
        value = run.figures[self.metric + how]
        return math.nan if value is None else float(value)


def bounded(harm: float) -> float:
    """A harm with a limit, which is also that of an arm that diverged."""
    return min(harm, WORST) if math.isfinite(harm) else WORST


def too_small(noise: float | None, steps: int) -> str:
    """Why runs decide nothing, whatever their figures; empty if they may."""
    if noise is not None and not noise <= MOST_NOISE:  # NaN: dense diverged
        return f"two seeds of dense differ by {noise:.1%}, more than {MOST_NOISE:.0%}"
    return too_short(steps, LEAST_STEPS) or one_seed(noise)


def outcome(task: str, reports: list[GroundReport], notes: list[str]) -> Outcome:
    """Findings with their verdicts, and the figures behind them."""
    rows = [r for report in reports for r in judge(report.ground, report.harms, report.too_small)]
    reasons = [f"{report.ground}: {report.too_small}" for report in reports if report.too_small]
    told = sheet("codecs")
    steps = [f"{report.ground}: {report.steps} steps; {report.told}" for report in reports]
    return Outcome(
        name=f"codecs-{task}",
        question=told["question"],
        verdict=_verdicts(rows),
        holds=None,
        too_small="; ".join(reasons) if len(reasons) == len(reports) else "",
        rows=rows,
        panels=[report.panel() for report in reports],
        notes=[*told["notes"], *steps, *notes],
        figures=[row for report in reports for row in report.rows()],
    )


def _verdicts(rows: list[Row]) -> str:
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


def judge(ground: str, harms: Harms | None, reason: str = "") -> list[Row]:
    """A row for each finding that can be tested on this ground; `reason`: it is too small."""
    rows = []
    for number, finding in enumerate(sheet("codecs")["findings"], 1):
        if ground not in finding["grounds"]:
            continue
        verdict, figure = RULES[number](harms) if harms is not None else (SMALL, reason)
        rows.append(
            {
                "finding": number,
                "ground": ground,
                "claim": finding["claim"],
                "our figure": figure,
                "verdict": SMALL if reason and verdict != OPEN else verdict,
                "rule": finding["rule"],
            }
        )
    return rows


def _bits(harms: Harms) -> Found:
    arms = harms.of("integers")
    pairs = [(arms[f, b], arms[b, f]) for f, b in sorted(arms) if f < b and (b, f) in arms]
    if not pairs:
        return OPEN, "needs pairs such as fw4-bw8 and fw8-bw4"
    backward_is_worse = any(harms.differs(back.on - forth.on) for forth, back in pairs)
    forward_is_worse = any(harms.differs(forth.on - back.on) for forth, back in pairs)
    verdict = OPEN
    if backward_is_worse:
        verdict = PARTLY if forward_is_worse else HOLDS
    elif forward_is_worse:
        verdict = FAILS
    return verdict, "; ".join(
        f"{forth.name} {harms.show(forth.on)} against {back.name} {harms.show(back.on)}"
        for forth, back in pairs
    )


def _least_share(harms: Harms) -> Found:
    on = {share: harm.on for share, harm in harms.of("topk").items()}
    if not {10, 5} <= on.keys():
        return OPEN, "needs topk10 and topk5"
    least = None
    for share, harm in on.items():  # mildest first: the floor is where harm begins
        if harm > max(SEVERE, harms.tolerance):
            break
        least = share
    floor = "even the mildest harms" if least is None else f"the least is {least} %"
    return HOLDS if least == 10 else FAILS, f"{floor}: {harms.listed(on)}"


def _tested_as_trained(harms: Harms) -> Found:
    lost = {share: arm.off - arm.on for share, arm in harms.of("topk").items() if share <= 20}
    if not lost:
        return OPEN, "needs topk20 or less"
    verdict = _verdict([drop > FLOOR for drop in lost.values()])
    return verdict, f"without compression at test time: {harms.listed(lost)}"


def _feedback(harms: Harms) -> Found:
    plain, *kinds = (harms.of(kind).get(FEEDBACK_SHARE) for kind in ("topk", *FEEDBACK))
    tried = [arm for arm in kinds if arm]
    if not plain or not tried:
        return OPEN, f"needs topk{FEEDBACK_SHARE} and topk{FEEDBACK_SHARE}+ef"
    no_better = [_not(harms.differs(plain.best - arm.best)) for arm in tried]
    as_good = [arm.off - arm.on <= FLOOR and arm.on < FAILED for arm in tried]
    return _verdict([*no_better, *as_good]), "; ".join(
        f"{arm.name} {harms.show(arm.on)}, off {harms.show(arm.off)}" for arm in [plain, *tried]
    )


def _by_example(harms: Harms) -> Found:
    plain = harms.of("topk")
    both = {share: arm for share, arm in harms.of("aqsgd").items() if share in plain}
    more = {share: arm.best - plain[share].best for share, arm in both.items()}
    strong = [harms.differs(harm) for share, harm in more.items() if share < 30]
    mild = [_not(harms.differs(harm)) for share, harm in more.items() if share >= 30]
    if not mild or not strong:
        return OPEN, "needs topk30 and topk10, each with and without +aqsgd"
    verdict = _verdict(strong)
    if verdict == HOLDS:
        verdict = _verdict([*mild, True])
    return verdict, f"beyond TopK alone: {harms.listed(more)}"


def _tuning(harms: Harms) -> Found:
    on = {share: arm.on for share, arm in harms.of("topk").items()}
    hurts = {share: harms.differs(harm) for share, harm in on.items()}
    strong = [hurt for share, hurt in hurts.items() if share <= 20]
    mild = [_not(hurt) for share, hurt in hurts.items() if share >= 30]
    if not mild or 20 not in hurts:
        return OPEN, "needs topk30 and topk20"
    first = next((share for share, hurt in hurts.items() if hurt), None)
    begins = "no share harms" if first is None else f"harm begins at {first} %"
    return _verdict(strong + mild), f"{begins}: {harms.listed(on)}"


def _shared_mask(harms: Harms) -> Found:
    plain, own = harms.of("topk"), harms.of("own")
    more = {share: arm.on - plain[share].on for share, arm in own.items() if share in plain}
    if not more:
        return OPEN, "needs topk10 and topk10-own"
    verdict = _verdict([harms.differs(value) for value in more.values()])
    return verdict, f"its own positions backward: {harms.listed(more)}"


def _verdict(parts: list[bool | None]) -> str:
    """Of a claim whose parts are true, false, or hidden by noise."""
    if None in parts:
        return SMALL
    return HOLDS if all(parts) else PARTLY if any(parts) else FAILS


def _not(answer: bool | None) -> bool | None:
    return None if answer is None else not answer


RULES: dict[int, Callable[[Harms], Found]] = dict(
    enumerate(
        [_bits, _least_share, _tested_as_trained, _feedback, _by_example, _tuning, _shared_mask], 1
    )
)
"""What decides each finding of codecs.toml."""
