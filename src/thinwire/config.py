"""run.toml: reading it, and overriding keys from the command line."""

import tomllib
from pathlib import Path
from typing import Any

from thinwire.engine import Settings, apply_override
from thinwire.errors import ConfigError


def load_settings(path: Path | None, overrides: list[str]) -> Settings:
    """Settings from a TOML file (or the defaults) with `section.key=value` overrides applied."""
    values = _read(path) if path is not None else {}
    for override in overrides:
        apply_override(values, override)
    return Settings.from_plain(values)


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
