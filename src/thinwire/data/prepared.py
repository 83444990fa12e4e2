"""What all prepared data has in common: a folder that appears whole, never changes, can be checked.

Its manifest names the files beside it with their sizes and hashes, and is written last.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from thinwire.errors import DataError

FORMAT = 2
MANIFEST = "manifest.json"

_SAMPLES, _SAMPLE_BYTES = 64, 1 << 20


@contextmanager
def partial_folder(cache: Path, name: str) -> Iterator[Path]:
    """A folder under `cache` to write in; what is not put in its place is gone afterwards."""
    partial: Path | None = None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{name}.partial-", dir=cache))
        partial.chmod(0o755)  # as an ordinary folder: other users may run stages
        yield partial
    except OSError as error:
        raise DataError(f"cannot write the prepared data to {cache}: {error}") from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def put_in_place(partial: Path, folder: Path) -> None:
    """Give a complete folder its name, unless another run has made the same meanwhile."""
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


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
