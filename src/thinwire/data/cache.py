"""Find prepared data by the content that it was made from, or have it made."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from thinwire.data.files import SourceFile
from thinwire.data.prepared import FORMAT, close_to_disk

# Some filesystems keep times no finer than this.
_CLOCK_TICK_NS = 2_000_000_000


class Scanned(Protocol):
    """What a reading of the source gives: at least a hash of its content."""

    @property
    def content(self) -> str:
        """Hash of the documents, tokens or images, in order, wherever they are stored."""


ScanT = TypeVar("ScanT", bound=Scanned)
OpenedT = TypeVar("OpenedT")


@dataclass(frozen=True)
class Reading:
    """Files by what they are read for, and how they are read: together they decide the content."""

    files: list[list[SourceFile]]
    text_key: str = ""

    def listing(self) -> list[Any]:
        """What tells this reading from any other, as plain values."""
        groups = [
            [[str(file.path.absolute()), file.size, file.mtime_ns, file.ctime_ns] for file in group]
            for group in self.files
        ]
        return [groups, self.text_key]


def found_or_made(
    cache: Path,
    reading: Reading,
    key: list[Any],
    read: Callable[[], ScanT],
    make: Callable[[ScanT, Path], None],
    open: Callable[[Path], OpenedT],
) -> OpenedT:
    """Open the folder for the content of what is read and the settings in `key`.

    The content decides, so moved or touched files are the same data. Files that have not
    changed since they were last read, by size and times, are not read again to know it.
    """
    seen = _Seen(cache, reading)

    def folder_of(content: str) -> Path:
        return cache / _digest([FORMAT, content, *key])

    content = seen.recall()
    if content is not None and os.path.isdir(folder_of(content)):
        return open(folder_of(content))
    scan = read()
    seen.remember(scan.content)
    folder = folder_of(scan.content)
    if not os.path.isdir(folder):  # also where it cannot be looked up, and making it says why
        make(scan, folder)
    return open(folder)


class _Seen:
    """Remembers the content hash of files by their paths, sizes and times of change."""

    def __init__(self, cache: Path, reading: Reading) -> None:
        self._path = cache / "seen" / _digest([FORMAT, reading.listing()])
        files = [file for group in reading.files for file in group]
        self._newest_ns = max(max(file.mtime_ns, file.ctime_ns) for file in files)

    def recall(self) -> str | None:
        """The content hash noted for exactly these files, if there is one."""
        try:
            return self._path.read_text(encoding="ascii")
        except (OSError, ValueError):
            return None

    def remember(self, content: str) -> None:
        """Note the content hash, unless a file is so new that a clock tick may hide a change."""
        if time.time_ns() - self._newest_ns < _CLOCK_TICK_NS:
            return
        partial = self._path.with_name(f"{self._path.name}.partial-{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as stream:
                stream.write(content.encode())
                close_to_disk(stream)
            partial.replace(self._path)
        except OSError:  # a convenience only: without it the files are read again
            with suppress(OSError):
                partial.unlink()


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()
