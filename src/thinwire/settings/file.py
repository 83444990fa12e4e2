"""run.toml: reading it, and overriding keys from the command line."""

import tomllib
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.model import ModelConfig
from thinwire.settings.tree import Settings, apply_override

CONFIG = "config.toml"  # what a run's folder holds


def load_settings(path: Path | None, overrides: list[str], allow_plugins: bool = False) -> Settings:
    """Settings from a TOML file (or the defaults) with `section.key=value` overrides applied.

    A folder stands for the run in it: its config.toml, and itself as the run's folder. Such a
    folder may come from someone else, so the plugins that it names need `allow_plugins`.
    """
    asked = load_asked(path, overrides)
    if path is not None and path.is_dir() and asked.codec.plugins and not allow_plugins:
        raise ConfigError(
            f"{path / CONFIG} names plugins, which are code that this command would run: "
            f"{', '.join(asked.codec.plugins)}. If you trust them, add --allow-plugins"
        )
    return asked.resolved()


def load_asked(path: Path | None, overrides: list[str]) -> Settings:
    """The same, but as it was asked for: a preset and "auto" are not filled in."""
    values = _read_place(path) if path is not None else {}
    before = values.get("model")
    preset = before.get("preset") if isinstance(before, dict) else None
    for override in overrides:
        apply_override(values, override)
    asked = Settings.as_asked(values)
    if path is not None and asked.model.preset != (preset or ModelConfig().preset):
        _refuse_stale_sizes(path, asked.model, overrides)
    return asked


def _refuse_stale_sizes(path: Path, model: ModelConfig, overrides: list[str]) -> None:
    """Sizes in the file were meant for its own preset: they must not reshape another in silence."""
    named = {override.partition("=")[0].strip() for override in overrides}
    stale = {
        f"model.{key} = {value}": f"--set model.{key}={preset_value}"
        for key, (value, preset_value) in model.unlike_preset().items()
        if f"model.{key}" not in named
    }
    if stale:
        raise ConfigError(
            f"--set model.preset={model.preset} contradicts {path}, which sets "
            f"{', '.join(stale)}. For the preset's own sizes delete these keys there or add "
            f"{' '.join(stale.values())}; to keep one, repeat it with --set"
        )


def _read_place(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        return _read(path)
    if not (path / CONFIG).is_file():
        raise ConfigError(
            f"{path} is a folder without a {CONFIG}: give a run.toml, or the folder of a run"
        )
    values = _read(path / CONFIG)
    folder = path if path.name not in ("", "..") else path.resolve()
    run = values.setdefault("run", {})
    if isinstance(run, dict):  # else it is refused with everything else
        run.update(out=str(folder.parent), name=folder.name)
    return values


def _read(path: Path) -> dict[str, Any]:
    name = path if path.suffix == ".toml" else "run.toml"  # else a run folder was meant
    return read_toml(
        path, f"give a settings file (`thinwire init {name}` writes one) or the folder of a run"
    )


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
