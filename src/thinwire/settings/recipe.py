"""Recipes: settings that were measured together, for the model that is asked for."""

import contextlib
from dataclasses import dataclass, replace
from typing import Any

from thinwire.errors import ConfigError
from thinwire.recipes import BEST, RATES, SHEETS, is_muon, rates_of, sized
from thinwire.settings.tree import Settings, apply_override, merged

_OF_A_RECIPE = ("boundary", "codec", "optim")


@dataclass(frozen=True)
class Recipe:
    """A recipe for one model, with changes by `--set`."""

    name: str
    asked: Settings  # changes included
    about: list[str]  # what it is and what it costs, line by line


def make_recipe(name: str | None, overrides: list[str]) -> Recipe:
    """The recipe of this name, or the best one, for the model and optimizer of the overrides.

    Rates are those of Muon: another optimizer keeps the defaults.
    """
    changes: dict[str, Any] = {}
    for override in overrides:
        apply_override(changes, override)
    model = Settings.as_asked(changes).model
    name = name or BEST
    sheet = SHEETS[name]
    values = {section: dict(sheet[section]) for section in _OF_A_RECIPE if section in sheet}
    about = [f"Recipe {name}:", *sheet["about"].strip().splitlines()]
    of_size: dict[str, dict[str, Any]] = {}
    if "optim" not in sheet and is_muon(changes):
        of_size = sized(name, model.preset)
        values = merged(values | {"optim": RATES[rates_of(model.preset)]}, of_size)
        about += _about_rates(name, model.preset, of_size)
    values = merged(values, changes)
    own = [change for change in overrides if _is_of(change, of_size)]
    if own:
        about.append(f"Changed by --set, so these figures do not apply: {', '.join(own)}")
    return Recipe(name, Settings.as_asked(values), about)


def _is_of(change: str, of_size: dict[str, dict[str, Any]]) -> bool:
    """Whether an override changes what the recipe was measured with."""
    section, _, rest = change.partition(".")
    return section in _OF_A_RECIPE or rest.partition("=")[0] in of_size.get(section, {})


def recipe_of(settings: Settings) -> str:
    """The recipe that the cuts of a run are made by; empty if they are made otherwise."""
    asked, cuts = settings.relaxed(), (settings.boundary, settings.codec)
    for name in SHEETS:
        sheet = make_recipe(name, [f"model.preset={asked.model.preset}"]).asked
        with contextlib.suppress(ConfigError):  # cuts that this model cannot have
            made = replace(asked, boundary=sheet.boundary, codec=sheet.codec).resolved()
            rates = SHEETS[name].get("optim", {}).items()  # where they are part of it
            is_tuned = all(getattr(settings.optim, key) == value for key, value in rates)
            if (made.boundary, made.codec) == cuts and is_tuned:
                return name
    return ""


def stale_rates(settings: Settings) -> str:
    """Says that the learning rates are a recipe's for another model, if they are."""
    optim = settings.relaxed().optim
    preset = settings.model.preset
    for source, rates in RATES.items():
        is_stale = source != rates_of(preset)
        if is_stale and all(getattr(optim, key) == value for key, value in rates.items()):
            return (
                f'optim has the rates of a recipe for model.preset = "{source}", not "{preset}": '
                f"`thinwire init --set model.preset={preset}` writes others"
            )
    return ""


def _about_rates(name: str, preset: str, of_size: dict[str, dict[str, Any]]) -> list[str]:
    source = rates_of(preset)
    tuned = "" if preset == source else f" (those of {source}: not tuned at this size)"
    own = ["The learning rates", *(f"{part}.{key}" for part in of_size for key in of_size[part])]
    return [
        f"{' and '.join(own)} are for {preset}{tuned}.",
        "They do not follow model.preset as the rank does: use",
        f"thinwire init --recipe {name} --set model.preset=NAME.",
    ]
