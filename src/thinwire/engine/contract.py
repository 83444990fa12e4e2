"""What two neighbours must agree on beside their cut, and what to do where they do not."""

import hashlib
import json
import re
from typing import Any

import thinwire
from thinwire.settings import Settings

RELEASE, EPOCH, SECTIONS = "thinwire", "epoch", "settings"


def terms_between_machines(settings: Settings, epoch: int) -> dict[str, Any]:
    """What processes of one machine share anyway: the release of thinwire, the epoch of the run.

    Beside the hash of all settings that decide the result there is one of each section, so that a
    difference is named.
    """
    sections = settings.of_scope("result").items()
    return {
        RELEASE: thinwire.__version__,
        EPOCH: epoch,
        SECTIONS: {name: _digest(values) for name, values in sections if values},
    }


def remedy(key: str, mine: Any, theirs: Any) -> str:
    """What to do about a difference, mostly a command; nothing where it only follows from others.

    `theirs` may be anything: it comes from the other end.
    """
    if key == RELEASE:
        return release_remedy(str(mine), str(theirs))
    if key == SECTIONS and isinstance(mine, dict) and isinstance(theirs, dict):
        names = [name for name, digest in mine.items() if theirs.get(name) != digest]
        return f"they differ in {', '.join(names)}"
    if key == EPOCH:
        return (
            "the run was formed again meanwhile. Run the `thinwire join` command again on the "
            "machine with the lower number"
        )
    if key == "config_hash":
        return "both ends need the same settings: start both from the same run.toml"
    if key == "corpus":
        return (
            "the prepared data differ: give both machines the same data.path and the same "
            "tokenizer, and start again with --resume"
        )
    if key in ("first_step", "basis", "basis_version", "token_table") or key.endswith("_memory"):
        return "start all stages from the same checkpoint: --resume on the host"
    if key.endswith("_codec"):
        return "give both the same codec settings, and the same plugins where they name one"
    return ""


def release_remedy(mine: str, theirs: str) -> str:
    """Which end is to install which release of thinwire; each is as `thinwire --version` says."""
    if not re.fullmatch(r"[0-9A-Za-z.+!-]{1,40}", theirs):
        return "install the same release on both machines: pip install --upgrade thinwire"
    is_older_here = _numbers(mine) < _numbers(theirs)
    newer, where = (theirs, "on this machine") if is_older_here else (mine, "at the other end")
    return f"run `pip install thinwire=={newer}` {where}, and join again"


def _numbers(release: str) -> list[int]:
    return [int(number[:9]) for number in re.findall(r"\d+", release)]


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
