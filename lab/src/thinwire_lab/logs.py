"""What logs of trained arms say, across calls and machines: arms of one ground, each at its best
learning rate, by number of stages and length.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from thinwire.errors import ConfigError
from thinwire.settings import Settings, merged
from thinwire_lab.arms import DENSE, Values
from thinwire_lab.decide import at_best_rate
from thinwire_lab.pool import Trained, is_known, read_log

DENSE_LABELS = (DENSE, "dense bf16/bf16")  # the latter in logs of an experiment that has left
OURS = Path(__file__).with_name("logs")  # logs of the runs behind our results
Curve = Sequence[tuple[float, float]]
"""Tokens and validation loss, fewest tokens first."""


@dataclass(frozen=True)
class Method:
    """The runs of one label with one number of stages: for each length, those of its best rate."""

    label: str
    stages: int
    by_steps: dict[int, list[Trained]]

    @property
    def longest(self) -> list[Trained]:
        """The runs of the greatest length."""
        return self.by_steps[max(self.by_steps)]

    @property
    def settings(self) -> Settings:
        """What its longest run trained with."""
        return settings_of(self.longest[0])

    def finals(self) -> list[tuple[float, float]]:
        """Tokens and mean last loss of each length, shortest first."""
        return [
            (tokens_of(runs[0]), fmean(run.loss for run in runs if run.loss is not None))
            for _, runs in sorted(self.by_steps.items())
        ]

    def curve(self) -> list[tuple[float, float]]:
        """Tokens and mean loss along its longest runs; empty where the log has no curve."""
        curves = [run.figures.get("curve", []) for run in self.longest]
        return [
            (points[0][0], fmean(loss for _, loss in points))
            for points in zip(*curves, strict=False)
        ]


def read_logs(names: Sequence[Path]) -> list[Trained]:
    """All arms of these logs that did not diverge: files, or names of logs that come with us.

    Arms with settings that thinwire no longer has are left out.
    """
    logs = [name if name.exists() else OURS / name.with_suffix(".jsonl") for name in names]
    for name, log in zip(names, logs, strict=True):
        if not log.exists():
            ours = ", ".join(sorted(path.stem for path in OURS.glob("*.jsonl")))
            raise ConfigError(
                f"{name}: no such log; name logs of thinwire lab convergence with "
                f"--logs, or some that come with the lab ({ours})"
            )
    runs = [run for log in logs for run in read_log(log) if run.loss is not None]
    found = [run for run in runs if is_known(partial(settings_of, run))]
    if not found:
        raise ConfigError(f"no arm has been trained in {', '.join(map(str, logs))}")
    return found


def grounds_of(runs: Iterable[Trained]) -> list[list[Trained]]:
    """Runs that may be compared, together; the most runs first."""
    found: list[list[Trained]] = []
    for run in runs:
        own = next((group for group in found if group[0].ground == run.ground), None)
        if own is None:
            found.append([run])
        else:
            own.append(run)
    return sorted(found, key=len, reverse=True)


def methods_of(runs: Iterable[Trained]) -> list[Method]:
    """The methods among runs of one ground."""
    groups: dict[tuple[int, str], dict[int, list[Trained]]] = {}
    for run in runs:
        place = settings_of(run).pipeline.stages, run.arm.label
        groups.setdefault(place, {}).setdefault(run.arm.steps, []).append(run)
    return [
        Method(label, stages, {steps: at_best_rate(same) for steps, same in lengths.items()})
        for (stages, label), lengths in sorted(groups.items())
    ]


def dense_among(methods: Sequence[Method]) -> Method:
    """The dense method to compare with: other cuts would only round elsewhere."""
    found = [method for method in methods if method.label in DENSE_LABELS]
    if not found:
        raise ConfigError("the log has no dense arm to compare with, in bf16 and with no changes")
    return max(found, key=lambda method: max(method.by_steps))


def settings_of(run: Trained) -> Settings:
    """What a logged arm trained with: what its ground names, and its own changes.

    A log leaves the schedule out, which changes no loss.
    """
    values: Values = {}
    for place, value in run.ground["settings"].items():
        section, _, key = place.partition(".")
        values.setdefault(section, {})[key] = value
    values = merged(values, run.arm.all_changes())
    return Settings.from_plain(merged(values, {"pipeline": {"schedule": "gpipe", "window": 0}}))


def tokens_of(run: Trained) -> float:
    """Tokens that a run trained on."""
    return float(run.arm.steps * settings_of(run).tokens_per_step)


def tokens_at(curve: Curve, loss: float, log: bool = False) -> float:
    """Where a curve first comes down to a loss, on a straight line between its points, or on one
    over the logarithm of the tokens. Where it never does: its end.
    """
    for (before, high), (after, low) in itertools.pairwise(curve):
        if low <= loss:
            share = (high - loss) / (high - low) if high > low else 0.0
            share = min(1.0, max(0.0, share))
            if log:
                return before * (after / before) ** share
            return before + share * (after - before)
    return curve[-1][0]
