"""The data of recipes.toml: what `thinwire init --recipe` knows, for --help and for settings."""

import tomllib
from pathlib import Path
from typing import Any

_SHEET = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SHEETS: dict[str, dict[str, Any]] = _SHEET["recipes"]
RATES: dict[str, dict[str, Any]] = _SHEET["rates"]
RECIPES = tuple(SHEETS)
BEST = "thin32"


def rates_of(preset: str) -> str:
    """The preset whose rates a model gets: its own, or those of 160m where it has none."""
    return preset if preset in RATES else "160m"


def is_muon(values: dict[str, dict[str, Any]]) -> bool:
    """Whether plain settings train with the optimizer of the recipes, or leave that open."""
    return values.get("optim", {}).get("name", "muon") == "muon"


def sized(name: str, preset: str) -> dict[str, dict[str, Any]]:
    """What else depends on the model, as the rates do: for all recipes, and for this one."""
    size = rates_of(preset)
    beside, own = _SHEET["beside_rates"].get(size, {}), SHEETS.get(name, {}).get("sized", {})
    of_size = own.get(size, {})
    return {key: beside.get(key, {}) | of_size.get(key, {}) for key in beside | of_size}
