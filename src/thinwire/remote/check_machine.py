"""Whether a machine can take part in a run at all: versions, device, memory, disk, open files."""

import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import thinwire
from thinwire.remote.findings import Finding, blocks, fine, note
from thinwire.report.human import human_bytes
from thinwire.wire import raise_descriptor_limit

PYTHON, TORCH = (3, 11), (2, 10)  # as in pyproject.toml
LITTLE_MEMORY, LEAST_MEMORY = 2e9, 0.5e9
LITTLE_DISK, LEAST_DISK = 5e9, 0.2e9
FEW_FILES, FEWEST_FILES = 1024, 256


def check_machine(folder: Path) -> Iterator[Finding]:
    """Look at this machine, which would keep what is its own in this folder."""
    yield check_python(sys.version_info[:2])
    yield from _check_device()
    yield from check_folder(folder)
    yield check_files(raise_descriptor_limit())


def check_python(version: tuple[int, int]) -> Finding:
    """Whether this Python will do."""
    here = f"Python {_dotted(version)} on {platform.system()} {platform.machine()}"
    if version < PYTHON:
        return blocks(
            here,
            f"thinwire needs Python {_dotted(PYTHON)} or newer.",
            f"install Python {_dotted(PYTHON)} or newer, and thinwire into it",
        )
    return fine(f"thinwire {thinwire.__version__}, {here}")


def _check_device() -> Iterator[Finding]:
    try:
        import torch

        from thinwire.remote.measure import device_name, free_memory
    except (ImportError, OSError) as error:  # OSError: a library of the system is missing
        yield blocks(
            f"torch cannot be imported: {error}",
            "A stage computes with it.",
            "install it: pip install torch",
        )
        return
    yield check_torch(torch.__version__)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu" and torch.backends.mps.is_available():
        kind = "mps"
    device = torch.device(kind)
    yield check_memory(free_memory(device), device_name(device))


def check_torch(version: str) -> Finding:
    """Whether this torch will do."""
    matched = re.match(r"(\d+)\.(\d+)", version)
    if matched and (int(matched[1]), int(matched[2])) < TORCH:
        return blocks(
            f"torch {version}",
            f"thinwire needs torch {_dotted(TORCH)} or newer.",
            f"pip install --upgrade 'torch>={_dotted(TORCH)}'",
        )
    return fine(f"torch {version}")


def check_memory(free: int, device: str) -> Finding:
    """Whether a stage of some size fits into the free memory of the device."""
    here = f"device {device}, {human_bytes(free)} of memory free"
    fix = "close other programs, or take part with another machine"
    if free < LEAST_MEMORY:
        return blocks(here, "No stage of a useful size fits into that.", fix)
    if free < LITTLE_MEMORY:
        trouble = (
            "Only a small stage fits: each parameter takes about 16 bytes while it is trained."
        )
        return note(here, trouble, fix)
    return fine(here)


def check_folder(folder: Path) -> Iterator[Finding]:
    """Whether this machine can keep its key and the shards of its stage there."""
    from thinwire.remote.measure import free_disk

    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    fix = "choose another place: thinwire join --folder DIR, or set THINWIRE_DATA"
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        yield blocks(
            f"nothing can be written to {place}",
            f"This machine's key and shards would be kept in {folder}.",
            fix,
        )
        return
    free = free_disk(folder)
    here = f"disk: {human_bytes(free)} free for {folder}"
    if free < LEAST_DISK:
        yield blocks(here, "The shards of a stage do not fit.", f"free some space, or {fix}")
    elif free < LITTLE_DISK:
        yield note(
            here,
            "A shard takes about 12 bytes for each parameter of the stage, and several are kept.",
            f"free some space, or {fix}",
        )
    else:
        yield fine(here)


def check_files(limit: int) -> Finding:
    """Whether this process may open enough files and connections; 0 where there is no limit."""
    here = f"{limit:,} files may be open at once" if limit else "open files are not limited"
    fix = "raise the limit before you join: ulimit -n 4096"
    if 0 < limit < FEWEST_FILES:
        return blocks(here, "Each link takes several; they would soon be used up.", fix)
    if 0 < limit < FEW_FILES:
        return note(here, "A run with many peers may use them up.", fix)
    return fine(here)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
