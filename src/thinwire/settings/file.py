"""run.toml: reading it, overriding keys from the command line, and what to know about it; recipes,
settings that were measured together, for the model that is asked for.
"""

import contextlib
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.model import ModelConfig
from thinwire.recipes import BEST, RATES, SHEETS, is_muon, rates_of, sized
from thinwire.settings.tree import Settings, apply_override, merged

CONFIG = "config.toml"  # what a run's folder holds
_OF_A_RECIPE = ("boundary", "codec", "optim")
_USED_WITH = [
    ("optim.matrix_lr", 'optim.name = "muon"'),
    ("optim.floor", 'optim.schedule = "cosine"'),
    ("boundary.ratio", "boundary.mode"),
    ("boundary.ratio", "boundary.rank = 0"),
    ("boundary.basis_seed", "boundary.mode"),
    ("boundary.basis_rate", "boundary.basis_update_every"),
    ("lora.alpha", "lora.rank"),
    ("lora.targets", "lora.rank"),
    ("train.audit_replaces", "train.audit"),
    ("data.path", "data.source"),
    ("data.text_key", 'data.source = "text" or "hf"'),
    ("data.valid_fraction", 'data.valid_path = ""'),
    ("data.valid_fraction", 'data.valid_split = ""'),
    ("data.split", 'data.source = "hf"'),
    ("data.valid_split", 'data.source = "hf"'),
    ("data.template", 'data.source = "chat" or "hf"'),
    ("data.learn", 'data.source = "chat" or "hf"'),
]
"""What a key needs to have an effect: another key with one of these values, or not its default."""


def load_settings(path: Path | None, overrides: list[str], allow_plugins: bool = False) -> Settings:
    """Settings from a TOML file (or the defaults) with `section.key=value` overrides. The folder of
    a run may come from someone else, so its plugins need `allow_plugins`.
    """
    values = {} if path is None else _read_place(path)
    before = values.get("model")
    preset = before.get("preset") if isinstance(before, dict) else None
    for override in overrides:
        apply_override(values, override)
    asked = Settings.as_asked(values)
    if path is not None and asked.model.preset != (preset or ModelConfig().preset):
        # Sizes in the file were meant for its own preset: they must not reshape another in silence.
        named = {override.partition("=")[0].strip() for override in overrides}
        stale = {
            f"model.{key} = {value}": f"--set model.{key}={preset_value}"
            for key, (value, preset_value) in asked.model.unlike_preset().items()
            if f"model.{key}" not in named
        }
        if stale:
            raise ConfigError(
                f"--set model.preset={asked.model.preset} contradicts {path}, which sets "
                f"{', '.join(stale)}. For the preset's own sizes delete these keys there or add "
                f"{' '.join(stale.values())}; to keep one, repeat it with --set"
            )
    if path is not None and path.is_dir() and asked.codec.plugins and not allow_plugins:
        raise ConfigError(
            f"{path / CONFIG} names plugins, which are code that this command would run: "
            f"{', '.join(asked.codec.plugins)}. If you trust them, add --allow-plugins"
        )
    return asked.resolved()


def _read_place(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        name = path if path.suffix == ".toml" else "run.toml"  # else a run folder was meant
        missing = f"give a settings file (`thinwire init {name}` writes one) or the folder of a run"
        return read_toml(path, missing)
    if not (path / CONFIG).is_file():
        raise ConfigError(
            f"{path} is a folder without a {CONFIG}: give a run.toml, or the folder of a run"
        )
    values = read_toml(path / CONFIG, "give the folder of a run")
    folder = path if path.name not in ("", "..") else path.resolve()
    run = values.setdefault("run", {})
    if isinstance(run, dict):  # else it is refused with everything else
        run.update(out=str(folder.parent), name=folder.name)
    return values


def read_toml(path: Path, if_missing: str) -> dict[str, Any]:
    """The values of a TOML file; `if_missing` is what to do where there is no such file."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: {if_missing}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:  # also of bytes that are no text
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


@dataclass(frozen=True)
class Recipe:
    """A recipe for one model, with changes by `--set`."""

    name: str
    asked: Settings  # changes included
    about: list[str]  # what it is and what it costs, line by line


def make_recipe(name: str | None, overrides: list[str]) -> Recipe:
    """The recipe of this name, or the best, for a model; its rates are Muon's alone."""
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
    measured = [f"{section}." for section in _OF_A_RECIPE]
    measured += [f"{section}.{key}=" for section, keys in of_size.items() for key in keys]
    if own := [change for change in overrides if change.startswith(tuple(measured))]:
        about.append(f"Changed by --set, so these figures do not apply: {', '.join(own)}")
    return Recipe(name, Settings.as_asked(merged(values, changes)), about)


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


def _about_rates(name: str, preset: str, of_size: dict[str, dict[str, Any]]) -> list[str]:
    source = rates_of(preset)
    tuned = "" if preset == source else f" (those of {source}: not tuned at this size)"
    own = ["The learning rates", *(f"{part}.{key}" for part in of_size for key in of_size[part])]
    return [
        f"{' and '.join(own)} are for {preset}{tuned}.",
        "They do not follow model.preset as the rank does: use",
        f"thinwire init --recipe {name} --set model.preset=NAME.",
    ]


def remarks(settings: Settings) -> list[str]:
    """One line for each setting that another one overrides or leaves without effect."""
    found = []
    sizes = settings.model.unlike_preset()
    if sizes:
        changes = ", ".join(f"{key} {value} (not {own})" for key, (value, own) in sizes.items())
        found.append(f'model.preset = "{settings.model.preset}" is changed: {changes}')
    found += filter(None, [_stale_rates(settings), _small_log(settings)])
    plain, default = settings.relaxed().to_plain(), Settings().to_plain()
    for place, need in _USED_WITH:
        (section, key), (other, _, wanted) = place.split("."), need.partition(" = ")
        part, name = other.split(".")
        is_met = str(plain[part][name]) in re.findall(r'\w+|(?<=")(?=")', wanted)  # words, or ""
        is_met |= not wanted and plain[part][name] != default[part][name]
        if plain[section][key] != default[section][key] and not is_met:
            without = need if wanted else f"another {need}"
            found.append(f"{place} = {plain[section][key]!r} has no effect without {without}")
    return found


def _small_log(settings: Settings) -> str:
    from thinwire.settings import crossing  # codecs are slow to import

    room, every = settings.train.log_mb, crossing.checkpoint_interval(settings)
    if room and settings.pipeline.stages > 1 and not crossing.logged_steps(settings):
        need = -(-crossing.logged_bytes(settings, 1) >> 20)
        return f"train.log_mb = {room} holds no step: a stage sends up to {need} MB in one"
    if every < 1 or every in (settings.train.checkpoint_every, crossing.MOST_LOGGED_STEPS):
        return ""
    if every >= settings.train.steps:  # the run ends before
        return ""
    return f"a checkpoint follows every {every} steps, before train.log_mb = {room} is full"


def _stale_rates(settings: Settings) -> str:
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
