"""run.toml: reading it, and overriding keys from the command line."""

import tomllib
import typing
from pathlib import Path
from typing import Any

from thinwire.engine import Settings
from thinwire.errors import ConfigError
from thinwire.typed import nearest, parse_literal


def load_settings(path: Path | None, overrides: list[str]) -> Settings:
    """Settings from a TOML file (or the defaults) with `section.key=value` overrides applied."""
    values = _read(path) if path is not None else {}
    for override in overrides:
        apply_override(values, override)
    return Settings.from_plain(values)


def apply_override(values: dict[str, Any], override: str) -> None:
    """Put one `section.key=value` into the plain values, read as the key's own type."""
    place, equals, text = override.partition("=")
    section, dot, key = place.strip().partition(".")
    if not equals or not dot:
        raise ConfigError(
            f'--set {override!r} must look like section.key=value, as "train.steps=50"'
        )
    sections = typing.get_type_hints(Settings)
    if section not in sections:
        raise ConfigError(f'unknown section "{section}"{nearest(section, sections)}')
    parsed = parse_literal(text.strip(), sections[section], key, f"{section}.{key}")
    table = values.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{section} must be a table of keys, got {table!r}")
    table[key] = parsed


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: `thinwire init {path}` writes one") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
