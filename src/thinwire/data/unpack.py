"""Compressed files as streams of bytes, in bounded memory, and never without an end."""

import gzip
import io
import lzma
import zlib
from typing import IO, Any, cast

import zstandard

from thinwire.data.files import SourceFile
from thinwire.errors import DataError

BROKEN = (OSError, EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError)

# Text becomes 3 to 10 times smaller when packed; monotonous logs a hundred times.
LARGEST_RATIO = 500
ALWAYS_ALLOWED_BYTES = 256 << 20

_BUFFER = 1 << 20
# A few bytes of zstd can stand for 128 KiB, so that this may become 32 MiB, but no more.
_ZSTD_STEP = 1 << 10


def unpacked(raw: IO[bytes], file: SourceFile, packing: str) -> IO[bytes]:
    """The bytes of a file; one that grows without measure when unpacked is an error."""
    if not packing:
        return raw
    return cast(IO[bytes], io.BufferedReader(_Limited(_stream(raw, packing), file), _BUFFER))


def _stream(raw: IO[bytes], packing: str) -> Any:
    if packing == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if packing == ".xz":
        return lzma.LZMAFile(raw)
    return _ZstdFrames(raw)


def refuse_bomb(file: SourceFile, size: int) -> None:
    """Refuse a packed file that has this size unpacked, if that is far more than it has on disk."""
    limit = max(ALWAYS_ALLOWED_BYTES, LARGEST_RATIO * file.size)
    if size > limit:
        raise DataError(
            f"{file.path} has {file.size:,} bytes and unpacks to more than {limit:,}: over "
            f"{LARGEST_RATIO} times as many (and {ALWAYS_ALLOWED_BYTES >> 20} MiB) are taken for a "
            "decompression bomb. If you trust the file, decompress it first (.parquet: to .jsonl)"
        )


class _Limited(io.RawIOBase):
    """A stream that ends in an error once it is far longer than the file that it comes from."""

    def __init__(self, stream: Any, file: SourceFile) -> None:
        self._stream = stream
        self._file = file
        self._done = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._stream.readinto(buffer)
        self._done += count
        refuse_bomb(self._file, self._done)
        return count


class _ZstdFrames(io.RawIOBase):
    """Decompressed bytes of concatenated zstd frames; a frame cut short is an error.

    The library's own stream reader ends quietly there, which would train on part of a file.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._frame: Any = None
        self._waiting = memoryview(b"")  # decompressed, not yet asked for

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._waiting:
            ended = self._frame is None or self._frame.eof
            packed = self._frame.unused_data if self._frame and ended else b""
            packed = packed or self._raw.read(_ZSTD_STEP)
            if not packed:
                if not ended:
                    raise EOFError("the compressed file ends in the middle of a frame")
                return 0
            if ended:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._waiting = memoryview(self._frame.decompress(packed))
        count = min(len(buffer), len(self._waiting))
        buffer[:count] = self._waiting[:count]
        self._waiting = self._waiting[count:]
        return count
