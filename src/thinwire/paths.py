"""Folders outside a run. Floor 0."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where prepared corpora are kept: THINWIRE_CACHE, or the user's cache folder."""
    chosen = os.environ.get("THINWIRE_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "thinwire"
