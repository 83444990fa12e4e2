"""Arms: the training runs of an experiment. An arm is data: settings that it changes in a base that
all arms share, a seed, a number of steps, and tags by which reports decide.
"""

import argparse
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.errors import ConfigError
from thinwire.recipes import RATES, SHEETS, is_muon, rates_of, sized
from thinwire.settings import Settings, apply_override, machine_cores, merged, threads_per_stage
from thinwire_lab.experiment import EXPERIMENTS, sheet

if TYPE_CHECKING:
    from thinwire.data import Corpus

Values = dict[str, dict[str, Any]]
"""Plain settings: section -> key -> value."""

DENSE = "dense"
_COMMA = re.compile(r",(?![^(]*\))")  # not within a codec's parentheses
_NO_GROUND = {
    *("data.source", "data.tokenizer", "data.valid_fraction"),  # its fingerprint says these
    *("run.seed", "train.steps"),  # of the arm
    *("train.eval_every", "pipeline.schedule", "pipeline.window", "run.compile"),  # no result here
}
_OPEN: Values = {"boundary": {"rank": 0, "ratio": 0.0, "anchor": "auto"}}


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

    Named in this way, settings that are added later leave logs valid.
    """
    chosen = {f"{section}.{key}" for section, keys in dense.changes.items() for key in keys}
    settings, usual = (
        each.of_scope("result") for each in (dense.settings(base), Settings.from_plain({}))
    )
    told = {
        f"{section}.{key}": value
        for section, keys in settings.items()
        for key, value in keys.items()
        if f"{section}.{key}" not in _NO_GROUND | chosen and value != usual[section][key]
    }
    names = {"data": data.fingerprint, "settings": told, "weights": weights.stem if weights else ""}
    start = {"base": base, "data": str(data.folder), "from": str(weights or "")}
    return Ground(names, {**start, **shared})


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
        changes = arm.all_changes()
        for override in overrides:
            place = override.partition("=")[0].strip()
            section, _, key = place.partition(".")
            chosen = changes.get(section, {})
            if key in chosen and chosen[key] != base[section][key]:
                option = sheet("common")["instead"].get(place)
                use = f": use {option}" if option else ""
                raise ConfigError(
                    f"--set {override}: the experiment chooses {place} itself{use} "
                    f"({chosen[key]!r} for {arm.line})"
                )
        settings(arm, base)


def split_patterns(patterns: str) -> list[str]:
    """What stands between the commas; those in parentheses belong to a codec."""
    return [part.strip() for part in _COMMA.split(patterns) if part.strip()]


def with_rates(base: Values) -> Values:
    """A base with the recipes' rates for its model, where it does not set them itself.

    They are rates of Muon: a base with another optimizer stays as it is.
    """
    return merged({"optim": RATES[rates_of(_preset(base))]}, base) if is_muon(base) else base


def _preset(base: Values) -> str:
    return Settings.as_asked({"model": base["model"]}).model.preset


def recipe_grid(
    names: str,
    base: Values,
    lrs: Sequence[float],
    stages: Sequence[int],
    seeds: Sequence[int],
    steps: int,
    dense_seeds: Sequence[int] = (),
) -> list[Arm]:
    """Recipes as arms: what `thinwire init --recipe` writes, each at every number of stages,
    learning rate and seed. A name may have settings behind it ("thin32 boundary.table=128", or
    "thin32 pipeline.schedule=1f1b pipeline.delay=1").

    Plain dense is in any grid, for the first number of stages only, where it shows the noise. What
    a recipe sets by the size of the model is that of the base's, if it trains with Muon.
    """
    lines = [line for line in split_patterns(names) if line != DENSE]
    dense = itertools.product([DENSE], stages[:1], lrs, dense_seeds or seeds)
    others = itertools.product(lines, stages, lrs, seeds)
    return [
        Arm(line, seed, steps, merged(_recipe(line, base), {
            "pipeline": {"stages": count}, "optim": {"lr": lr},
        }))
        for line, count, lr, seed in itertools.chain(dense, others)
    ]  # fmt: skip


def _recipe(line: str, base: Values) -> Values:
    """What a recipe sets at the cut and for this model, and the settings behind its name."""
    name, *own = line.split()
    known = SHEETS | sheet("convergence")["controls"]
    if name not in known:
        raise ConfigError(f'--recipes "{line}": a recipe is one of {", ".join(known)}')
    chosen = {section: known[name][section] for section in ("boundary", "codec")}
    of_size = sized(name, _preset(base)) if is_muon(base) else {}
    changes = merged(merged(_OPEN, chosen), {"pipeline": {"schedule": "gpipe"}, **of_size})
    for override in own:
        apply_override(changes, override)
    return changes
