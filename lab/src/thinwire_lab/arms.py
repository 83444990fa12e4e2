"""Arms: the training runs of an experiment. An arm is data: settings that it changes in a base that
all arms share, a seed, a number of steps, and tags by which reports decide.
"""

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.errors import ConfigError
from thinwire.settings import Settings, apply_override, machine_cores, merged, threads_per_stage
from thinwire_lab.experiment import EXPERIMENTS, sheet

if TYPE_CHECKING:
    from thinwire.data import Corpus

Values = dict[str, dict[str, Any]]
"""Plain settings: section -> key -> value."""

_COMMA = re.compile(r",(?![^(]*\))")  # not within a codec's parentheses
_NO_GROUND = {
    *("data.source", "data.tokenizer", "data.valid_fraction"),  # its fingerprint says these
    *("run.seed", "train.steps"),  # of the arm
    *("train.eval_every", "pipeline.schedule", "pipeline.window", "run.compile"),  # no result here
}


@dataclass(frozen=True)
class Arm:
    """One training run of an experiment."""

    label: str
    """What is compared; arms of one label differ in learning rate, seed or steps alone."""
    seed: int
    steps: int
    changes: Values = field(default_factory=dict)
    """Settings that this arm has and its base has not."""
    tags: dict[str, Any] = field(default_factory=dict)
    """What reports decide by, and no setting says."""

    @property
    def line(self) -> str:
        """The arm in a line of progress."""
        stages, lr = self.get("pipeline.stages"), self.get("optim.lr")
        place = f"{stages} stages  " if stages else ""
        rate = f"  lr {lr:g}" if lr else ""
        return f"{place}{self.label}{rate}  seed {self.seed}  {self.steps} steps"

    def get(self, place: str) -> Any:
        """The value of a `section.key` that this arm changes; None if it does not."""
        section, _, key = place.partition(".")
        return self.changes.get(section, {}).get(key)

    def all_changes(self) -> Values:
        """Its changes with seed and steps."""
        return merged(self.changes, {"run": {"seed": self.seed}, "train": {"steps": self.steps}})

    def settings(self, base: Values) -> Settings:
        """The settings of this arm on a base."""
        return Settings.from_plain(merged(base, self.all_changes()))

    def settings_beside(self, base: Values, processes: int) -> Settings:
        """The same in one of so many processes: with no more threads than its share of the cores.

        A thread that waits for others spins, on a core that they may need. Two arms of one stage
        on two cores, each with two threads, took ten times as long.
        """
        settings = self.settings(base)
        share = max(1, machine_cores() // processes)
        threads = settings.run.threads or min(threads_per_stage(settings), share)
        return dataclasses.replace(settings, run=dataclasses.replace(settings.run, threads=threads))

    def is_same(self, other: "Arm") -> bool:
        """Whether both train alike, whatever they are called."""
        mine, theirs = (vars(arm) | {"label": "", "tags": {}} for arm in (self, other))
        return mine == theirs


@dataclass(frozen=True)
class Ground:
    """What the arms of a grid share. Only figures from the same ground compare."""

    names: dict[str, Any]
    """What the log says of it, and sets it apart from others."""
    shared: dict[str, Any]
    """Plain values that every arm's process needs."""
    trainer: str = "thinwire_lab.measure"
    """Module whose `train(arm, shared)` returns the figures."""


def ground_of(
    dense: Arm, base: Values, data: "Corpus", weights: Path | None = None, **shared: Any
) -> Ground:
    """The ground of such arms on a base: its data, the weights they start from, if any, and the
    settings that decide a result and that arms do not choose, where not at their defaults.
    """
    chosen = {f"{section}.{key}" for section, keys in dense.changes.items() for key in keys}
    told = differences(dense.settings(base))
    names = {
        "data": data.fingerprint,
        "settings": {place: value for place, value in told.items() if place not in chosen},
        "weights": weights.stem if weights else "",
    }
    start = {"base": base, "data": str(data.folder), "from": str(weights or "")}
    return Ground(names, {**start, **shared})


def differences(settings: Settings) -> dict[str, Any]:
    """What decides a result and is not at its default, as section.key: value.

    Named in this way, settings that are added later leave logs valid. Left out is what belongs to
    the arm, what data has a fingerprint of its own for, and what changes nothing in one process.
    """
    plain, usual = (each.of_scope("result") for each in (settings, Settings.from_plain({})))
    return {
        f"{section}.{key}": value
        for section, keys in plain.items()
        for key, value in keys.items()
        if f"{section}.{key}" not in _NO_GROUND and value != usual[section][key]
    }


def base_of(options: argparse.Namespace, small: Values, kind: type = Settings) -> Values:
    """The settings that all arms share: small ones, and what --set changes in them.

    What the experiment does not use is refused.
    """
    values = merged(small, {"run": {"device": options.device}})
    if any(override.startswith("model.preset=") for override in options.set):
        values["model"] = {}  # a preset is a whole shape, not a patch on the small one
    for override in options.set:
        apply_override(values, override, kind)
        place = override.partition("=")[0].strip()
        if any(fnmatchcase(place, unused) for unused in EXPERIMENTS[options.name].unused):
            raise ConfigError(
                f"--set {override}: lab {options.name} does not use {place}; leave it out"
            )
    return values


def small_settings(size: str) -> Values:
    """Settings of a small model that common.toml has under that name."""
    return sheet("common")["settings"][size]


def own_settings(module: str, chosen: Values, quick: bool = False) -> Settings:
    """The settings on an experiment's sheet, its quick ones if asked, and those that are chosen."""
    told = sheet(module)
    values = merged(told["settings"], told["quick"]) if quick else told["settings"]
    return Settings.from_plain(merged(values, chosen))


def width_of(base: Values) -> int:
    """The width of a base's model."""
    return Settings.from_plain({"model": base["model"], "pipeline": {"stages": 1}}).model.dim


def check_arms(
    arms: Iterable[Arm],
    base: Values,
    overrides: Sequence[str],
    settings: Callable[[Arm, Values], object] = Arm.settings,
) -> None:
    """Refuse an arm that cannot work, or that overrides what was set, before any one trains."""
    for arm in arms:
        refuse_overridden(arm.all_changes(), base, overrides, arm.line)
        settings(arm, base)


def refuse_overridden(changes: Values, base: Values, overrides: Sequence[str], arm: str) -> None:
    """Refuse a `section.key=value` that an arm would override without a word."""
    for override in overrides:
        place = override.partition("=")[0].strip()
        section, _, key = place.partition(".")
        chosen = changes.get(section, {})
        if key in chosen and chosen[key] != base[section][key]:
            option = sheet("common")["instead"].get(place)
            use = f": use {option}" if option else ""
            raise ConfigError(
                f"--set {override}: the experiment chooses {place} itself{use} "
                f"({chosen[key]!r} for {arm})"
            )


def chosen_lines(
    patterns: str | None, grid: Sequence[str], line: re.Pattern[str], form: str
) -> list[str]:
    """Lines of a grid that `--arms` asks for, and lines of one's own, which have this form."""
    found: list[str] = []
    for pattern in split_patterns(patterns) if patterns else ["*"]:
        fitting = [known for known in grid if fnmatchcase(known, pattern)]
        if not fitting and not line.fullmatch(pattern):
            raise ConfigError(
                f'--arms "{pattern}" matches no arm of the grid and is not an arm itself; write '
                f"{form}. The grid: {'; '.join(grid)}"
            )
        found += fitting or [pattern]
    return found


def split_patterns(patterns: str) -> list[str]:
    """What stands between the commas; those in parentheses belong to a codec."""
    return [part.strip() for part in _COMMA.split(patterns) if part.strip()]
