"""The findings of arXiv 2401.07788 (Rudakov et al.), and rules that hold them against our figures.

All rules speak of harm: how much worse than dense of the same seed an arm is. For images that is
accuracy lost, as a share; for language it is the loss above that of dense, relative to it. A
difference counts from a stated floor on, and between models only if it is also more than twice what
two seeds of dense differ by: that is the tolerance. Nothing is decided where arms are missing,
where the noise could have made the difference, or where the runs as a whole are too small: a few
steps, one seed of dense, or seeds of dense that are far apart.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from thinwire.lab.decide import one_seed, too_short
from thinwire.lab.experiment import Row

HOLDS, PARTLY, FAILS = "holds", "in part", "does not hold"
OPEN, SMALL = "not tested", "too small to decide"  # arms are missing; the runs are too small
LEAST_STEPS = 100  # of any arm; the shortest that has decided something had 176
MOST_NOISE = 0.02  # by which two seeds of dense may differ: accuracy as a share, or relative loss
ACCURACY_FLOOR = 0.005  # 50 of the 10,000 test images
LOSS_FLOOR = 0.005
SEVERE = 0.02
"""The accuracy that the paper's "does not harm severely" may cost, as we read it."""
FAILED = 0.2  # a model with more harm has not learned what to be tested for
WORST = 10.0  # the harm of an arm that diverged
BITS = (2, 4, 8)
FEEDBACK = ("ef", "ef-mixed", "ef21")
FEEDBACK_SHARE = 10
SEPARATE = "-own"
"""Ends the name of an arm whose backward chooses its own elements."""


@dataclass(frozen=True)
class Decision:
    """What the figures say of a finding."""

    verdict: str
    figure: str


class Harms:
    """How much worse than dense the arms of one ground are."""

    def __init__(self, harms: dict[str, tuple[float, float]], noise: float, is_accuracy: bool):
        """`harms`: of each arm with compression at test time, and without it."""
        self.is_accuracy = is_accuracy
        self.floor = ACCURACY_FLOOR if is_accuracy else LOSS_FLOOR
        self.tolerance = max(2 * noise, self.floor)
        self._on = {name: _bounded(on) for name, (on, _) in harms.items()}
        self._off = {name: _bounded(off) for name, (_, off) in harms.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._on

    def on(self, name: str) -> float:
        """Tested with compression."""
        return self._on[name]

    def off(self, name: str) -> float:
        """Tested without."""
        return self._off[name]

    def best(self, name: str) -> float:
        """Tested in the way that suits the model."""
        return min(self._on[name], self._off[name])

    def differs(self, difference: float) -> bool | None:
        """Whether one model is worse than another by so much; None where noise hides it."""
        if difference > self.tolerance:
            return True
        return False if difference <= 2 * self.floor - self.tolerance else None

    def shares(self, form: str = "topk{}") -> dict[int, str]:
        """The arms of such a name, by the percentage that TopK keeps, mildest first."""
        return {n: form.format(n) for n in range(100, 0, -1) if form.format(n) in self}

    def show(self, harm: float) -> str:
        """A harm, or a difference of two, in its unit."""
        if harm >= WORST:
            return "diverged"
        return f"{100 * harm:+.1f} points" if self.is_accuracy else f"{harm:+.1%}"


def _bounded(harm: float) -> float:
    return min(harm, WORST) if math.isfinite(harm) else WORST


@dataclass(frozen=True)
class Finding:
    """A claim, the grounds on which it can be tested, and the rule that does it."""

    number: int
    claim: str
    grounds: tuple[str, ...]
    rule: str
    decide: Callable[[Harms], Decision]


def too_small(noise: float | None, steps: int) -> str:
    """Why runs decide nothing, whatever their figures; empty if they may."""
    if noise is not None and not noise <= MOST_NOISE:  # NaN: dense diverged
        return f"two seeds of dense differ by {noise:.1%}, and may differ by {MOST_NOISE:.0%}"
    return too_short(steps, LEAST_STEPS) or one_seed(noise)


def judge(ground: str, harms: Harms | None, reason: str = "") -> list[Row]:
    """A row for each finding that can be tested on this ground; `reason`: it is too small."""
    rows = []
    for finding in FINDINGS:
        if ground not in finding.grounds:
            continue
        found = finding.decide(harms) if harms is not None else Decision(SMALL, reason)
        if reason and found.verdict != OPEN:
            found = Decision(SMALL, found.figure)
        rows.append(
            {
                "finding": finding.number,
                "ground": ground,
                "claim": finding.claim,
                "our figure": found.figure,
                "verdict": found.verdict,
                "rule": finding.rule,
            }
        )
    return rows


def _bits(harms: Harms) -> Decision:
    shown, forward_is_worse, backward_is_worse = [], [], []
    for few in BITS:
        for many in BITS:
            forward, backward = f"fw{few}-bw{many}", f"fw{many}-bw{few}"
            if few < many and forward in harms and backward in harms:
                shown.append(
                    f"{forward} {harms.show(harms.on(forward))} against "
                    f"{backward} {harms.show(harms.on(backward))}"
                )
                difference = harms.on(backward) - harms.on(forward)
                backward_is_worse.append(harms.differs(difference))
                forward_is_worse.append(harms.differs(-difference))
    if not shown:
        return Decision(OPEN, "needs pairs such as fw4-bw8 and fw8-bw4")
    verdict = OPEN
    if any(backward_is_worse):
        verdict = PARTLY if any(forward_is_worse) else HOLDS
    elif any(forward_is_worse):
        verdict = FAILS
    return Decision(verdict, "; ".join(shown))


def _least_share(harms: Harms) -> Decision:
    shares = harms.shares()
    if not {10, 5} <= shares.keys():
        return Decision(OPEN, "needs topk10 and topk5")
    least = None
    for share, name in shares.items():  # mildest first: the floor is where harm begins
        if harms.on(name) > max(SEVERE, harms.tolerance):
            break
        least = share
    listed = _listed(harms, shares, harms.on)
    floor = "even the mildest harms" if least is None else f"the least is {least} %"
    return Decision(HOLDS if least == 10 else FAILS, f"{floor}: {listed}")


def _tested_as_trained(harms: Harms) -> Decision:
    shares = {share: name for share, name in harms.shares().items() if share <= 20}
    if not shares:
        return Decision(OPEN, "needs topk20 or less")
    lost = {name: harms.off(name) - harms.on(name) for name in shares.values()}
    listed = _listed(harms, shares, lost.__getitem__)
    verdict = _verdict([drop > harms.floor for drop in lost.values()])
    return Decision(verdict, f"without compression at test time: {listed}")


def _feedback(harms: Harms) -> Decision:
    plain = f"topk{FEEDBACK_SHARE}"
    names = [f"{plain}+{kind}" for kind in FEEDBACK if f"{plain}+{kind}" in harms]
    if plain not in harms or not names:
        return Decision(OPEN, f"needs {plain} and {plain}+ef")
    improves = [harms.differs(harms.best(plain) - harms.best(name)) for name in names]
    as_good = [
        harms.off(name) - harms.on(name) <= harms.floor and harms.on(name) < FAILED
        for name in names
    ]
    verdict = _verdict([*(_not(better) for better in improves), *as_good])
    listed = "; ".join(
        f"{name} {harms.show(harms.on(name))}, off {harms.show(harms.off(name))}"
        for name in [plain, *names]
    )
    return Decision(verdict, listed)


def _by_example(harms: Harms) -> Decision:
    with_memory, plain = harms.shares("topk{}+aqsgd"), harms.shares()
    both = [share for share in with_memory if share in plain]
    mild, strong = [s for s in both if s >= 30], [s for s in both if s < 30]
    if not mild or not strong:
        return Decision(OPEN, "needs topk30 and topk10, each with and without +aqsgd")
    more = {s: harms.best(with_memory[s]) - harms.best(plain[s]) for s in both}
    hurts = {s: harms.differs(more[s]) for s in both}
    verdict = _verdict([hurts[s] for s in strong])
    if verdict == HOLDS:
        verdict = _verdict([_not(hurts[s]) for s in mild] + [True])
    listed = ", ".join(f"{s} % {harms.show(more[s])}" for s in both)
    return Decision(verdict, f"beyond TopK alone: {listed}")


def _tuning(harms: Harms) -> Decision:
    shares = harms.shares()
    mild, strong = [s for s in shares if s >= 30], [s for s in shares if s <= 20]
    if not mild or 20 not in strong:
        return Decision(OPEN, "needs topk30 and topk20")
    hurts = {share: harms.differs(harms.on(name)) for share, name in shares.items()}
    first = next((share for share in shares if hurts[share]), None)
    begins = "no share harms" if first is None else f"harm begins at {first} %"
    verdict = _verdict([hurts[s] for s in strong] + [_not(hurts[s]) for s in mild])
    return Decision(verdict, f"{begins}: {_listed(harms, shares, harms.on)}")


def _shared_mask(harms: Harms) -> Decision:
    own = harms.shares("topk{}" + SEPARATE)
    both = {share: name for share, name in own.items() if f"topk{share}" in harms}
    if not both:
        return Decision(OPEN, f"needs topk10 and topk10{SEPARATE}")
    more = {name: harms.on(name) - harms.on(f"topk{share}") for share, name in both.items()}
    listed = _listed(harms, both, more.__getitem__)
    verdict = _verdict([harms.differs(value) for value in more.values()])
    return Decision(verdict, f"its own positions backward: {listed}")


def _verdict(parts: list[bool | None]) -> str:
    """Of a claim whose parts are true, false, or hidden by noise."""
    if None in parts:
        return SMALL
    return HOLDS if all(parts) else PARTLY if any(parts) else FAILS


def _not(answer: bool | None) -> bool | None:
    return None if answer is None else not answer


def _listed(harms: Harms, shares: dict[int, str], harm: Callable[[str], float]) -> str:
    return ", ".join(f"{share} % {harms.show(harm(name))}" for share, name in shares.items())


FINDINGS = (
    Finding(
        1,
        "gradients need milder compression than activations",
        ("cifar", "scratch", "tune"),
        "of two arms with the bits of forward and backward exchanged, the one with fewer bits "
        "backward is worse by more than the tolerance, and never the other one",
        _bits,
    ),
    Finding(
        2,
        "TopK 10 % is the least that does not harm ResNet-18 on CIFAR-10 severely",
        ("cifar",),
        f"down to 10 % and not below, harm is at most {SEVERE:.0%} of the images, or the tolerance",
        _least_share,
    ),
    Finding(
        3,
        "a model trained with TopK must be tested with TopK",
        ("cifar", "scratch", "tune"),
        "at 20 % and less, testing the same model without compression is worse by more than the "
        "floor",
        _tested_as_trained,
    ),
    Finding(
        4,
        "error feedback does not improve training, but the model is nearly as good without "
        "compression at test time",
        ("cifar", "scratch", "tune"),
        "no kind is better than TopK alone by more than the tolerance; all have learned (harm "
        f"below {FAILED:.0%}), and switching compression off costs none more than the floor",
        _feedback,
    ),
    Finding(
        5,
        "AQ-SGD with TopK below 30 % hurts",
        ("cifar", "tune"),
        "below 30 % it is worse than TopK alone by more than the tolerance, from 30 % on not; "
        "each tested in the way that suits it",
        _by_example,
    ),
    Finding(
        6,
        "fine-tuning a language model degrades from TopK 20 % on",
        ("tune",),
        "harm is above the tolerance at 20 % and less, and not at 30 % and more",
        _tuning,
    ),
    Finding(
        7,
        "with language models the backward must reuse the forward's indices",
        ("scratch", "tune"),
        "choosing its own is worse by more than the tolerance",
        _shared_mask,
    ),
)
