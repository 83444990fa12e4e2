"""Read the documents of text files: plain, JSON lines, Parquet, each also compressed.

Everything streams: at most one document, or 16 million characters of a larger plain file,
is held at a time, so a corpus may be far larger than memory.
"""

import gzip
import io
import json
import lzma
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple, cast

import zstandard

from thinwire.data.files import SourceFile, kind_and_packing
from thinwire.errors import DataError

SEPARATOR = "<|endoftext|>"
WHOLE_CHARACTERS = 16_000_000
PIECE_CHARACTERS = 1_000_000

_BROKEN = (OSError, EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError)


class Document(NamedTuple):
    """One document, and how many bytes on disk have been read up to its end."""

    text: str
    consumed: int


def read_documents(
    files: Iterable[SourceFile], skip_undecodable: bool = False
) -> Iterator[Document]:
    """The documents of all files in order; those without anything but white space are left out."""
    before = 0
    for file in files:
        try:
            with file.path.open("rb") as raw:
                for text, position in _documents_of(file, raw):
                    if text and not text.isspace():
                        yield Document(text, before + min(position, file.size))
        except UnicodeDecodeError as error:
            if not skip_undecodable:
                raise DataError(
                    f"{file.path} is not UTF-8 text ({error.reason}): convert or remove it"
                ) from error
        except _BROKEN as error:
            raise DataError(f"cannot read {file.path}: {error}; repair or remove it") from error
        before += file.size


def _documents_of(file: SourceFile, raw: IO[bytes]) -> Iterator[tuple[str, int]]:
    """Texts of one file, each with the position on disk that reading has reached."""
    kind, packing = kind_and_packing(file.path.name)
    stream = _unpacked(raw, packing)
    if kind == ".parquet":
        yield from _parquet_texts(file, stream, packing)
        return
    texts = _jsonl_texts(file, stream) if kind == ".jsonl" else _plain_texts(stream, kind)
    for text in texts:
        yield text, raw.tell()


def _unpacked(raw: IO[bytes], packing: str) -> IO[bytes]:
    if packing == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if packing == ".xz":
        return lzma.LZMAFile(raw)
    if packing == ".zst":
        return io.BufferedReader(_ZstdFrames(raw), 1 << 20)
    return raw


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
            packed = packed or self._raw.read(1 << 16)
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


def _plain_texts(stream: IO[bytes], kind: str) -> Iterator[str]:
    """A plain file is one document, unless separator lines or its size make it several."""
    # newline="\n" keeps the text byte for byte; the limit keeps a file of one line in bounds.
    reader = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="\n")
    lines = iter(lambda: reader.readline(PIECE_CHARACTERS), "")
    held: list[str] = []
    size = 0
    for piece, last in _pieces(lines, separated=kind in (".txt", ".tokens")):
        held.append(piece)
        size += len(piece)
        if size > WHOLE_CHARACTERS:
            yield from held
            held = []
        if last:
            yield "".join(held)
            held, size = [], 0


def _pieces(lines: Iterable[str], separated: bool) -> Iterator[tuple[str, bool]]:
    """Lines joined to pieces of about a million characters that end at a blank line.

    The flag says that a document ends with this piece: at a separator or the end of the file.
    """
    held: list[str] = []
    size = 0
    for line in lines:
        if separated and line.strip() == SEPARATOR:
            yield "".join(held), True
            held, size = [], 0
            continue
        held.append(line)
        size += len(line)
        at_blank_line = size >= PIECE_CHARACTERS and not line.strip()
        if at_blank_line or size >= 2 * PIECE_CHARACTERS:
            yield "".join(held), False
            held, size = [], 0
    yield "".join(held), True


def _jsonl_texts(file: SourceFile, stream: IO[bytes]) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        where = f"{file.path}, line {number}"
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not valid JSON ({error}); repair or remove it") from error
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise DataError(f'{where}: needs an object with the key "text" that holds a string')
        try:
            text.encode()
        except UnicodeEncodeError as error:  # an escape such as "\ud800" alone is no character
            raise DataError(f'{where}: "text" is not valid Unicode ({error.reason})') from error
        yield text


def _parquet_texts(file: SourceFile, stream: IO[bytes], packing: str) -> Iterator[tuple[str, int]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{file.path} needs pyarrow, which is not installed: pip install 'thinwire[parquet]'"
        ) from error
    with tempfile.TemporaryFile() as unpacked:
        if packing:  # Parquet is read from its end, so it must be on disk unpacked
            shutil.copyfileobj(stream, unpacked)
            unpacked.seek(0)
            stream = unpacked
        try:
            table = pyarrow.parquet.ParquetFile(stream)
            columns = table.schema_arrow.names
            if "text" not in columns:
                raise DataError(f'{file.path} has no column "text"; its columns: {columns}')
            rows = 0
            for batch in table.iter_batches(batch_size=1024, columns=["text"]):
                for text in batch.column(0).to_pylist():
                    if text is not None and not isinstance(text, str):
                        raise DataError(f'{file.path}: column "text" holds {type(text).__name__}')
                    rows += 1
                    yield text or "", file.size * rows // table.metadata.num_rows
        except pyarrow.ArrowException as error:
            raise DataError(f"cannot read {file.path} as Parquet: {error}") from error
