"""Prepared data: folders that are found by the content they were made from, and can be checked.

A folder appears whole and never changes. Its manifest names the files beside it with their sizes
and hashes, and is written last.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from thinwire.data.files import SourceFile
from thinwire.errors import DataError
from thinwire.folders import flush, partial_folder, put_in_place, replace_file, write_file

Progress = Callable[[str, int, int], None]
"""Gets the phase, and the bytes read so far and in all."""

FORMAT = 2
MANIFEST = "manifest.json"
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 20
_CLOCK_TICK_NS = 2_000_000_000  # some filesystems keep times no finer than this

OpenedT = TypeVar("OpenedT")


def found_or_made(
    cache: Path,
    files: list[list[SourceFile]],
    key: list[Any],
    read: Callable[[], tuple[str, Callable[[Path], None]]],
    open: Callable[[Path], OpenedT],
    how: Any = "",
) -> OpenedT:
    """Open the folder for the content of these files and the settings in `key`.

    The content decides, so moved or touched files are the same data: `read` gives a hash of it and
    a function that makes the folder. `files` are listed by what they are read for; those that have
    not changed since they were last read in the same way, `how`, by size and times, are not read
    again to know their content. None: the content is not known before it is read.
    """
    listing = [
        [[str(file.path.absolute()), file.size, file.mtime_ns, file.ctime_ns] for file in group]
        for group in files
    ]
    noted = cache / "seen" / digest([FORMAT, [listing, how]])
    try:
        if how is None:
            raise ValueError("always to be read")
        content = noted.read_text(encoding="ascii")
        folder = cache / digest([FORMAT, content, *key])
    except (OSError, ValueError):
        folder = None
    if folder is None or not os.path.isdir(folder):
        content, make = read()
        times = [max(file.mtime_ns, file.ctime_ns) for group in files for file in group]
        is_settled = time.time_ns() - max(times, default=0) >= _CLOCK_TICK_NS
        if how is not None and is_settled:  # or a clock tick may hide a change
            with suppress(OSError):  # a convenience only: without it the files are read again
                replace_file(noted, content.encode())
        folder = cache / digest([FORMAT, content, *key])
        if not os.path.isdir(folder):  # also where it cannot be looked up, and making it says why
            make(folder)
    return open(folder)


def digest(value: Any) -> str:
    """A hash of plain values."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class FolderWriter:
    """Writes the files of a prepared folder side by side, and a manifest at the end."""

    def __init__(self, folder: Path, names: list[str], held: ExitStack) -> None:
        self._folder = folder
        self._held = held
        self._streams: dict[str, IO[bytes]] = {}
        self._hashes: dict[str, Any] = {}
        for name in names:
            self.append(name, b"")

    def append(self, name: str, content: bytes) -> None:
        """Add to the end of a file, which begins when it is first named."""
        if name not in self._streams:
            self._streams[name] = self._held.enter_context((self._folder / name).open("wb"))
            self._hashes[name] = hashlib.blake2b(digest_size=16)
        self._streams[name].write(content)
        self._hashes[name].update(content)

    def size(self, name: str) -> int:
        """Bytes of a file so far."""
        return self._streams[name].tell()

    def has(self, name: str) -> bool:
        """Whether a file was begun."""
        return name in self._streams

    def hash(self, name: str) -> str:
        """A hash of all that was written to a file."""
        return self._hashes[name].hexdigest()

    def finish(self, facts: dict[str, Any]) -> None:
        """Force everything to the disk, and say last what is there."""
        files = {}
        for name, stream in self._streams.items():
            stream.close()
            flush(self._folder / name)
            size = (self._folder / name).stat().st_size
            files[name] = {"bytes": size, "sample": _sample(self._folder / name)}
        manifest = json.dumps({"format": FORMAT, **facts, "files": files}, indent=2)
        write_file(self._folder / MANIFEST, manifest.encode())

    def settle(self, folder: Path) -> None:
        """Give what is finished its name, unless another run has made the same meanwhile."""
        try:
            put_in_place(self._folder, folder)
        except OSError:
            if not folder.is_dir():
                raise


@contextmanager
def new_folder(cache: Path, name: str, files: list[str]) -> Iterator[FolderWriter]:
    """Write under `cache` what is then settled in its place, or leave nothing."""
    try:
        with partial_folder(cache, name) as partial, ExitStack() as held:
            yield FolderWriter(partial, files, held)
    except OSError as error:
        raise DataError(f"cannot write the prepared data to {cache}: {error}") from error


@contextmanager
def opening(folder: Path, fingerprint: Callable[[Any], str]) -> Iterator[dict[str, Any]]:
    """The manifest of a folder, to open it with; what does not fit is a DataError that says so.

    Every file is checked by size and by a hash of 64 blocks of 1 MiB spread over it, which is all
    of a file up to 64 MiB. `fingerprint` computes from a manifest what it should be.
    """
    if not folder.is_dir():
        raise DataError(f"no prepared data at {folder}: prepare it on this machine first")
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise damaged(folder, f"its {MANIFEST} is not of format {FORMAT}")
        for name, entry in manifest["files"].items():
            size = (folder / name).stat().st_size
            if size != entry["bytes"]:
                raise damaged(folder, f"{name} has {size} bytes instead of {entry['bytes']}")
            if _sample(folder / name) != entry["sample"]:
                raise damaged(folder, f"{name} was altered")
        if manifest["fingerprint"] != fingerprint(manifest):
            raise damaged(folder, "the fingerprint does not belong to these files")
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


def _sample(path: Path) -> str:
    """Hash of blocks spread evenly over a file: quick for any size, complete for small ones."""
    sample = hashlib.blake2b(digest_size=16)
    size = path.stat().st_size
    stride = max(size // _SAMPLES, _SAMPLE_BYTES)
    with path.open("rb") as stream:
        for at in range(0, size, stride):
            stream.seek(at)
            sample.update(stream.read(_SAMPLE_BYTES))
    return sample.hexdigest()
