"""The entries of a run's book (authority.py), and their file."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError, ThinwireError
from thinwire.folders import replace_private_file
from thinwire.typed import from_plain

_VERSION = 2
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class IssuedInvite:
    """What the host keeps of an invite: not the secret, only by what to know it again."""

    invite_id: str
    secret_hash: str = field(repr=False)
    expires: int
    machines: int  # that it lets in
    used_by: list[str] = field(default_factory=list)  # fingerprints of the keys
    closed: bool = False  # lets in nobody new


@dataclass(frozen=True)
class EnrolledPeer:
    """A peer that was let in: its name, the key that it is known by, and its certificate."""

    name: str
    key: str
    certificate: str
    invite_id: str
    enrolled: float
    kicked: bool = False


@dataclass(frozen=True)
class Entries:
    """All that a book holds."""

    run_name: str
    invites: list[IssuedInvite]
    peers: list[EnrolledPeer]


def write_entries(path: Path, entries: Entries) -> None:
    """Write the file in one piece, for this user alone."""
    plain = {"version": _VERSION, **asdict(entries)}
    replace_private_file(path, json.dumps(plain, indent=1).encode())


def read_entries(path: Path) -> Entries:
    """What the file holds; a damaged one is an error: without it kicked peers could return."""
    try:
        with path.open("rb") as file:
            plain: Any = json.loads(file.read(_MOST_BYTES))
        if plain["version"] != _VERSION:
            raise ConfigError(f"its version is {plain['version']!r}, not {_VERSION}")
        return Entries(
            str(plain["run_name"]),
            [from_plain(IssuedInvite, one, "invite") for one in plain["invites"]],
            [from_plain(EnrolledPeer, one, "peer") for one in plain["peers"]],
        )
    except (OSError, ValueError, KeyError, TypeError, ThinwireError) as error:
        raise ConfigError(
            f"{path} is damaged ({error}): restore it, or remove the folder {path.parent}, which "
            "makes every invite and every peer of the run unknown"
        ) from None
