"""Corpora that are tokens already: `.bin` files with or without a header.

Two layouts are understood. nanoGPT: nothing but little-endian uint16 ids. llm.c and
modded-nanogpt: 256 little-endian int32 (magic, version, count, zeros), then the ids.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.data.sources import SourceFile, existing, reading, source_file, walk
from thinwire.errors import DataError

HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
RAW = "<u2", 50256
WITH_HEADER = {(20240520, 1): RAW, (20240801, 7): ("<u4", 128000)}
"""By the magic and the version in the header: the type of ids, and the one between documents."""
_CHUNK = 1 << 22  # tokens read at a time
_REACH = 1 << 20  # how far from the wanted place the cut looks for an end of text


@dataclass(frozen=True)
class TokenShard:
    """One checked token file."""

    file: SourceFile
    dtype: np.dtype
    end_of_text: int  # the id that its writers put between documents
    offset: int
    count: int

    def read(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """The ids [start, stop) in parts; not mapped, for a mapped file that shrinks is fatal."""
        for at in range(start, stop, _CHUNK):
            count, offset = min(_CHUNK, stop - at), self.offset + at * self.dtype.itemsize
            with reading(self.file.path):
                ids = np.fromfile(self.file.path, self.dtype, count, offset=offset)
            if len(ids) < count:
                raise changed(self.file.path)
            yield ids


class Shards:
    """The token files of a corpus, in name order: those to train on, then those to validate on."""

    def __init__(self, train: list[TokenShard], valid: list[TokenShard]) -> None:
        self._all = train + valid
        self._last = train[-1]
        self.files = [[shard.file for shard in side] for side in (train, valid)]
        self.counts = [sum(shard.count for shard in side) for side in (train, valid)]
        self.size = sum(shard.count * shard.dtype.itemsize for shard in self._all)  # in bytes

    def read(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Ids [start, stop) of all shards laid end to end, a few million at a time."""
        first = 0
        for shard in self._all:
            low, high = max(start - first, 0), min(stop - first, shard.count)
            if low < high:
                yield from shard.read(low, high)
            first += shard.count

    def scan(self, report: Callable[[int], None]) -> tuple[str, int, Path]:
        """A hash of the ids, the largest, and where it is; `report` gets the bytes read so far."""
        content, largest, largest_in, done = self.new_hash(), -1, Path(), 0
        for shard in self._all:
            for ids in shard.read(0, shard.count):
                content.update(ids.astype("<u4"))
                highest = int(ids.max())
                if highest > largest:
                    largest, largest_in = highest, shard.file.path
                done += ids.nbytes
                report(done)
        if largest < 0:
            raise DataError(f"the corpus is empty: no tokens in {self._all[0].file.path.parent}")
        return content.hexdigest(), largest, largest_in

    def new_hash(self) -> Any:
        """Takes the ids of both sides in order, as uint32: their hash wherever they are stored."""
        return hashlib.blake2b(f"{self.counts} tokens".encode(), digest_size=16)

    def validation_start(self, fraction: float, end_of_text: int | None) -> int:
        """Where validation begins: with its shards, or near the last `fraction`, behind a text."""
        total, given = self.counts
        if given:
            return total
        if total < 2:
            raise DataError(f"{total} tokens cannot be split into training and validation")
        length = min(max(1, round(total * fraction)), total - 1)
        cut = total - length
        separator = self._last.end_of_text if end_of_text is None else end_of_text
        reach = min(length // 2, cut // 2, _REACH)
        nearby = [np.empty(0, "<u4"), *self.read(cut - reach, cut + reach)]
        found = np.flatnonzero(np.concatenate(nearby) == separator)
        after = cut - reach + found + 1
        return int(after[np.argmin(np.abs(after - cut))]) if len(found) else cut


def find_shards(path: str, valid_path: str = "") -> Shards:
    """The shards at `path`: one file, or a folder of `*train*.bin` and `*val*.bin`; files that name
    neither train, if all are so. With `valid_path` those found there validate, and no others.
    """
    train, valid = _by_side(path, "data.path")
    if not train:
        raise DataError(
            f"no training shards (*train*.bin) in {path}, only {', '.join(f.name for f in valid)}"
        )
    if valid_path:
        others, named = _by_side(valid_path, "data.valid_path")
        valid = named or others
        both = {file.path.resolve() for file in train} & {file.path.resolve() for file in valid}
        if both:
            raise DataError(
                f"{min(both)} is in data.path and in data.valid_path: validate on other data"
            )
    return Shards([*map(open_shard, train)], [*map(open_shard, valid)])


def _by_side(path: str, setting: str) -> tuple[list[SourceFile], list[SourceFile]]:
    """The .bin files at `path` for training and for validation, by their names."""
    root = existing(path, "tokens", setting)
    if not root.is_dir():
        return [source_file(root)], []
    names = walk(root, lambda name: name.lower().endswith(".bin"))
    if not names:
        raise DataError(f"no .bin token shards in {root}: check {setting}")
    train = [name for name in names if "train" in name.lower()]
    valid = [name for name in names if "val" in name.lower() and name not in train]
    if not train and not valid:
        train = names
    return [source_file(root, name) for name in train], [source_file(root, name) for name in valid]


def open_shard(file: SourceFile) -> TokenShard:
    """Read the header, if there is one, and check that the file is as long as it says."""
    with reading(file.path):
        header = np.fromfile(file.path, "<i4", HEADER_INTS).tolist()
    kind, end_of_text = WITH_HEADER.get((*header[:2],), ("", 0))
    if not kind:
        # A number and then a kilobyte of zeros is a header, not the beginning of a raw shard.
        if len(header) == HEADER_INTS and header[0] and not any(header[4:]):
            raise DataError(
                f"{file.path} begins with a header of magic {header[0]} and version {header[1]}: "
                f"it is no token shard of a supported format ({', '.join(map(str, WITH_HEADER))})"
            )
        if file.size % 2:
            raise DataError(
                f"{file.path} has no known header and an odd size of {file.size} bytes, so it is "
                "not uint16 tokens: it is truncated or of another format; write it again"
            )
        return TokenShard(file, np.dtype(RAW[0]), RAW[1], 0, file.size // 2)
    dtype, count = np.dtype(kind), header[2] if len(header) == HEADER_INTS else 0
    expected = HEADER_BYTES + count * dtype.itemsize
    if file.size != expected:
        raise DataError(
            f"{file.path} has {file.size} bytes, but its header announces {count} tokens, which "
            f"take {expected} bytes: it is truncated or damaged; write it again"
        )
    return TokenShard(file, dtype, end_of_text, HEADER_BYTES, count)


def changed(path: Path) -> DataError:
    """The error for a source that is no longer what it was when it was first read."""
    return DataError(
        f"{path} changed while it was being read: wait until it is written, then retry"
    )
