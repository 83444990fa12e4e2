"""Folders outside a run."""

import os
from pathlib import Path

from thinwire.errors import ConfigError


def expanded(path: str | Path, what: str) -> Path:
    """The path with `~` and `~user` filled in; `what` names it where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user, or one without a home
        unknown = f"{what} = {path} names an unknown home folder"
        raise ConfigError(f"{unknown}: write the path in full") from None


def data_folder() -> Path:
    """Where a machine keeps what it cannot make again: THINWIRE_DATA, or the user's data folder."""
    return _user_folder("THINWIRE_DATA", "XDG_DATA_HOME", ".local/share")


def cache_folder() -> Path:
    """Where prepared corpora are kept: THINWIRE_CACHE, or the user's cache folder."""
    return _user_folder("THINWIRE_CACHE", "XDG_CACHE_HOME", ".cache")


def _user_folder(variable: str, xdg: str, usual: str) -> Path:
    if chosen := os.environ.get(variable):
        return expanded(chosen, variable)
    return Path(os.environ.get(xdg) or Path.home() / usual) / "thinwire"


def peers_folder() -> Path:
    """Where a machine keeps what is its own in the runs of others, such as its key."""
    return data_folder() / "peers"
