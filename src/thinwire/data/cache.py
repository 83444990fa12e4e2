"""Find prepared data by the content that it was made from, or have it made."""

import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from thinwire.data.files import SourceFile
from thinwire.data.prepared import FORMAT

# Some filesystems keep times no finer than this.
_CLOCK_TICK_NS = 2_000_000_000


class Scanned(Protocol):
    """What a reading of the source gives: at least a hash of its content."""

    @property
    def content(self) -> str:
        """Hash of the documents, tokens or images, in order, wherever they are stored."""


ScanT = TypeVar("ScanT", bound=Scanned)
OpenedT = TypeVar("OpenedT")


def found_or_made(
    cache: Path,
    files: list[SourceFile],
    key: list[Any],
    read: Callable[[], ScanT],
    make: Callable[[ScanT, Path], None],
    open: Callable[[Path], OpenedT],
) -> OpenedT:
    """Open the folder for the content of `files` and the settings in `key`.

    The content decides, so moved or touched files are the same data. Files that have not
    changed since they were last read, by size and times, are not read again to know it.
    """
    seen = _Seen(cache, files)

    def folder_of(content: str) -> Path:
        return cache / _digest([FORMAT, content, *key])

    content = seen.recall()
    if content is not None and folder_of(content).is_dir():
        return open(folder_of(content))
    scan = read()
    seen.remember(scan.content)
    folder = folder_of(scan.content)
    if not folder.is_dir():
        make(scan, folder)
    return open(folder)


class _Seen:
    """Remembers the content hash of files by their paths, sizes and times of change."""

    def __init__(self, cache: Path, files: list[SourceFile]) -> None:
        listing = [
            [str(file.path.absolute()), file.size, file.mtime_ns, file.ctime_ns] for file in files
        ]
        self._path = cache / "seen" / _digest([FORMAT, listing])
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
        with suppress(OSError):  # a convenience only: without it the files are read again
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", encoding="ascii", dir=self._path.parent, delete=False
            ) as stream:
                stream.write(content)
            Path(stream.name).replace(self._path)


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()
