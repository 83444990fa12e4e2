"""What all prepared data has in common: a folder that appears whole, never changes, can be checked.

Its manifest names the files beside it with their sizes and hashes, and is written last.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from thinwire.errors import DataError

try:
    import fcntl
except ImportError:  # not everywhere; without it nothing left behind is removed
    fcntl = None  # type: ignore[assignment]

FORMAT = 2
MANIFEST = "manifest.json"
_PARTIAL = ".partial-"

_SAMPLES, _SAMPLE_BYTES = 64, 1 << 20


@contextmanager
def partial_folder(cache: Path, name: str) -> Iterator[Path]:
    """A folder under `cache` to write in; what is not put in its place is gone afterwards.

    What earlier processes left when they were killed is removed as well.
    """
    partial: Path | None = None
    with ExitStack() as held:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            _sweep(cache)
            partial = _new_folder(cache, name, held)
            yield partial
        except OSError as error:
            raise DataError(f"cannot write the prepared data to {cache}: {error}") from error
        finally:
            if partial is not None:
                shutil.rmtree(partial, ignore_errors=True)


def _new_folder(cache: Path, name: str, held: ExitStack) -> Path:
    """A folder that is locked for as long as it is held: nobody sweeps it away."""
    while True:
        partial = Path(tempfile.mkdtemp(prefix=f"{name}{_PARTIAL}", dir=cache))
        partial.chmod(0o755)  # as an ordinary folder: other users may run stages
        held.enter_context(_locked(partial, wait=True))
        if partial.is_dir():  # nobody took it for left behind before it was locked
            return partial


def _sweep(cache: Path) -> None:
    """Remove unfinished folders whose process has ended; the system let go of their locks."""
    for partial in cache.glob(f"*{_PARTIAL}*"):
        with _locked(partial, wait=False) as is_ours:
            if is_ours:
                shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(folder: Path, wait: bool) -> Iterator[bool]:
    """Hold the lock of a folder, if the system has such locks and no other process holds it."""
    descriptor = -1
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        is_ours = True
    except (OSError, AttributeError):  # no such folder, held by another, or no locks here
        is_ours = False
    try:
        yield is_ours
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def put_in_place(partial: Path, folder: Path) -> None:
    """Give a complete folder its name, unless another run has made the same meanwhile.

    Names go to the disk in the order in which they are given: the folder is there whole or not
    at all, also after a loss of power.
    """
    _sync_folder(partial)
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def close_to_disk(stream: IO[bytes]) -> None:
    """Close a file once all of it is on the disk."""
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()


def write_manifest(folder: Path, manifest: dict[str, Any], names: list[str]) -> None:
    """Write what is said of a folder, with the sizes and hashes of these files in it."""
    files = {name: _file_entry(folder / name) for name in names}
    with (folder / MANIFEST).open("wb") as stream:
        stream.write(json.dumps({"format": FORMAT, **manifest, "files": files}, indent=2).encode())
        close_to_disk(stream)


@contextmanager
def opening(folder: Path) -> Iterator[dict[str, Any]]:
    """The manifest of a folder, to open it with; what does not fit is a DataError that says so.

    Every file is checked by size and by a hash of 64 blocks of 1 MiB spread over it,
    which is all of a file up to 64 MiB.
    """
    manifest = _read_manifest(folder)
    try:
        for name, entry in manifest["files"].items():
            _check_file(folder, name, entry)
        yield manifest
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(folder, f"its {MANIFEST} is not usable ({error!r})") from error
    except OSError as error:
        raise damaged(folder, f"{error}") from error


def damaged(folder: Path, reason: str) -> DataError:
    """The error for a folder that is not as it was made."""
    return DataError(
        f"the prepared data at {folder} is damaged: {reason}; "
        "delete the folder, and it will be prepared again"
    )


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise DataError(f"no prepared data at {folder}: prepare it on this machine first")
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(folder, f"its {MANIFEST} cannot be read ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise damaged(folder, f"its {MANIFEST} is not of format {FORMAT}")
    return manifest


def _file_entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sample": _sample(path)}


def _sample(path: Path) -> str:
    """Hash of blocks spread evenly over a file: quick for any size, complete for small ones."""
    digest = hashlib.blake2b(digest_size=16)
    size = path.stat().st_size
    stride = max(size // _SAMPLES, _SAMPLE_BYTES)
    with path.open("rb") as stream:
        for at in range(0, size, stride):
            stream.seek(at)
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _check_file(folder: Path, name: str, entry: dict[str, Any]) -> None:
    path = folder / name
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise damaged(folder, f"{name} has {size} bytes instead of {entry['bytes']}")
    if _sample(path) != entry["sample"]:
        raise damaged(folder, f"{name} was altered")
