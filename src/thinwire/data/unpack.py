"""Compressed files as streams of bytes, in bounded memory, and never without an end."""

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from typing import IO, Any, cast

import zstandard

from thinwire.data.files import SourceFile
from thinwire.errors import DataError

BROKEN = (OSError, EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError)

# Text becomes 3 to 10 times smaller when packed; monotonous logs a hundred times.
LARGEST_RATIO = 500
ALWAYS_ALLOWED_BYTES = 256 << 20

_OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
_BUFFER = 1 << 20
# A few bytes of zstd can stand for 128 KiB, so that this may become 32 MiB, but no more.
_ZSTD_STEP = 1 << 10


def unpacked(raw: IO[bytes], file: SourceFile, packing: str) -> IO[bytes]:
    """The bytes of a file; one that grows without limit when unpacked is an error."""
    if not packing:
        return raw
    if packing == ".zst":
        chunks = _zstd_chunks(raw)
    else:
        stream = _OPENERS[packing](raw)
        chunks = iter(lambda: stream.read(_BUFFER), b"")
    return cast(IO[bytes], io.BufferedReader(_Limited(chunks, file), _BUFFER))


def refuse_bomb(file: SourceFile, size: int) -> None:
    """Refuse a packed file that has this size unpacked, if that is far more than it has on disk."""
    limit = max(ALWAYS_ALLOWED_BYTES, LARGEST_RATIO * file.size)
    if size > limit:
        raise DataError(
            f"{file.path} has {file.size:,} bytes and unpacks to more than {limit:,}: a file that "
            f"grows to over {LARGEST_RATIO} times its size (and {ALWAYS_ALLOWED_BYTES >> 20} MiB) "
            "is treated as a decompression bomb. If you trust it, decompress it first (.parquet: "
            "to .jsonl)"
        )


class _Limited(io.RawIOBase):
    """Chunks as a stream, which ends in an error once it is far longer than the packed file."""

    def __init__(self, chunks: Iterator[bytes], file: SourceFile) -> None:
        self._chunks = chunks
        self._file = file
        self._waiting = memoryview(b"")
        self._done = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._waiting:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._done += len(chunk)
            refuse_bomb(self._file, self._done)
            self._waiting = memoryview(chunk)
        count = min(len(buffer), len(self._waiting))
        buffer[:count] = self._waiting[:count]
        self._waiting = self._waiting[count:]
        return count


def _zstd_chunks(raw: IO[bytes]) -> Iterator[bytes]:
    """Decompressed bytes of concatenated zstd frames; a frame cut short is an error.

    The library's own stream reader ends quietly there, which would train on part of a file.
    """
    frame: Any = None
    while packed := (frame and frame.unused_data) or raw.read(_ZSTD_STEP):
        if frame is None or frame.eof:
            frame = zstandard.ZstdDecompressor().decompressobj()
        yield frame.decompress(packed)
    if frame is not None and not frame.eof:
        raise EOFError("the compressed file ends in the middle of a frame")
