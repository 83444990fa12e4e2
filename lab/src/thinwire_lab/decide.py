"""When runs are too small to decide anything: the same rules for every experiment.

A run decides nothing if it has too few steps, if nobody knows how much chance moves its loss
(dense has one seed), or if the effect is no larger than that. Each rule returns the reason in
words, or nothing.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from thinwire_lab.outcome import Row
from thinwire_lab.pool import Trained

CAST_NOISE = 0.008  # of a loss after 400 steps, when only the wire's cast changed
RATES = ("optim.lr", "optim.table_lr")  # that arms of one label may sweep


def at_best_rate(runs: Iterable[Trained]) -> list[Trained]:
    """Of runs of one label those at the learning rates whose mean loss over the seeds is least."""
    by_rate: dict[object, list[Trained]] = {}
    for run in runs:
        by_rate.setdefault((*map(run.arm.get, RATES),), []).append(run)
    return min(by_rate.values(), key=lambda group: fmean(map(_finite, group)))


def _finite(run: Trained) -> float:
    return math.inf if run.loss is None else run.loss


def gap_to_dense(runs: Sequence[Trained], dense: Sequence[Trained]) -> float:
    """The loss above dense, relative to it: dense of the same seed, or its mean for other seeds."""
    by_seed = {run.arm.seed: _finite(run) for run in dense}
    usual = fmean(by_seed.values())
    return fmean(_finite(run) / by_seed.get(run.arm.seed, usual) - 1 for run in runs)


def compared(runs: Sequence[Trained], dense: Sequence[Trained]) -> Row:
    """Bytes and loss of the runs of one label, against dense; no loss where one diverged."""
    arm, figures = runs[0].arm, runs[0].figures
    losses = [run.loss for run in runs if run.loss is not None]
    settled = len(losses) == len(runs)
    return {
        "bytes per token": figures["bytes_forward"] + figures["bytes_backward"],
        "ratio": figures["ratio"],
        "lr": arm.get("optim.lr"),
        "seeds": len(runs),
        "valid loss": fmean(losses) if settled else None,
        "spread": max(losses) - min(losses) if settled and len(losses) > 1 else None,
        "gap": gap_to_dense(runs, dense) if settled and dense else None,
    }


def noise_of(dense: Row | None) -> float | None:
    """What the seeds of dense differ by, relative to their mean; None with one seed."""
    return dense["spread"] / dense["valid loss"] if dense and dense["spread"] is not None else None


def too_short(steps: int, least: int) -> str:
    """Fewer steps than a question needs."""
    return f"{steps} steps, where at least {least} are needed" if steps < least else ""


def one_seed(noise: float | None) -> str:
    """Noise that nobody has measured."""
    return "dense has one seed, so the noise is unknown" if noise is None else ""


def noise_note(noise: float | None) -> str:
    """The noise floor to print beside a table of losses, most of them from one seed."""
    seeds = "dense has one seed" if noise is None else f"the dense seeds differ by {noise:.2%}"
    return (
        f"noise: {seeds}; changing only the wire's cast moved a loss after 400 steps by up "
        f"to {CAST_NOISE:.1%}, so do not read smaller differences as effects"
    )
