"""Folders outside a run. Floor 0."""

import os
from pathlib import Path

from thinwire.errors import ConfigError


def expanded(path: str | Path, what: str) -> Path:
    """The path with `~` and `~user` filled in; `what` names it where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user, or one without a home
        raise ConfigError(
            f"{what} = {path} names an unknown home folder: write the path in full"
        ) from None


def data_folder() -> Path:
    """Where a machine keeps what it cannot make again: THINWIRE_DATA, or the user's data folder."""
    chosen = os.environ.get("THINWIRE_DATA")
    if chosen:
        return expanded(chosen, "THINWIRE_DATA")
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "thinwire"


def peers_folder() -> Path:
    """Where a machine keeps what is its own in the runs of others."""
    return data_folder() / "peers"


def peer_folder(run_id: str) -> Path:
    """Where a machine keeps what is its own in the run of another host, such as its key."""
    return peers_folder() / run_id


def cache_folder() -> Path:
    """Where prepared corpora are kept: THINWIRE_CACHE, or the user's cache folder."""
    chosen = os.environ.get("THINWIRE_CACHE")
    if chosen:
        return expanded(chosen, "THINWIRE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "thinwire"
