"""Records of files: lines of JSON, lists of it, and rows of Parquet, one at a time."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple

from thinwire.data.files import SourceFile, kind_and_packing, reading
from thinwire.data.unpack import BROKEN, refuse_bomb, unpacked
from thinwire.errors import DataError
from thinwire.lazy import needs

LONGEST_BYTES = 64 << 20  # of a line of JSON, or of the texts in a row of Parquet
LARGEST_LIST_BYTES = 1 << 30  # of a file that is one list of JSON, which is held whole
_ROWS = 64  # of Parquet, read at a time


class Record(NamedTuple):
    """An object of JSON or a row, where it stands, and how far reading has come on disk."""

    values: Any
    where: str
    position: int


def read_records(files: Iterable[SourceFile]) -> Iterator[Record]:
    """The records of all files in order; positions go on from file to file."""
    before = 0
    for file in files:
        kind, packing = kind_and_packing(file.path.name)
        with reading(file.path, BROKEN, "repair or remove it"), file.path.open("rb") as raw:
            stream = unpacked(raw, file, packing)
            if kind == ".parquet":
                records = parquet_rows(file, stream, packing, list)
            else:
                records = json_records(file, raw, stream)
            for values, where, position in records:
                yield Record(values, where, before + min(position, file.size))
        before += file.size


def json_records(file: SourceFile, raw: IO[bytes], stream: IO[bytes]) -> Iterator[Record]:
    """The objects of a file: one per line, or all in one list."""
    start = stream.peek(64)[:64] if hasattr(stream, "peek") else b""
    if not start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        yield from json_lines(file, raw, stream)
        return
    text = stream.read(LARGEST_LIST_BYTES + 1)
    if len(text) > LARGEST_LIST_BYTES:
        raise DataError(
            f"{file.path} is one list of more than {LARGEST_LIST_BYTES >> 30} GiB of JSON, which "
            "cannot be read in parts: write one object per line (.jsonl)"
        )
    listed = _parsed(text, str(file.path))
    for number, values in enumerate(listed, 1):
        yield Record(values, f"{file.path}, entry {number}", file.size * number // len(listed))


def json_lines(file: SourceFile, raw: IO[bytes], stream: IO[bytes]) -> Iterator[Record]:
    """What each line of JSON holds; empty lines are left out."""
    lines = iter(lambda: stream.readline(LONGEST_BYTES + 1), b"")
    for number, line in enumerate(lines, 1):
        where = f"{file.path}, line {number}"
        _refuse_longer(len(line), where)
        if line.strip():
            yield Record(_parsed(line, where), where, raw.tell())


def parquet_rows(
    file: SourceFile, stream: IO[bytes], packing: str, choose: Callable[[list[str]], list[str]]
) -> Iterator[Record]:
    """The rows of a Parquet file, of the columns that are chosen by their names."""
    pyarrow = needs("pyarrow", extra="data", what=str(file.path))
    parquet = needs("pyarrow.parquet", extra="data", what=str(file.path))
    with tempfile.TemporaryFile() as on_disk:
        if packing:  # Parquet is read from its end, so it must be on disk unpacked
            shutil.copyfileobj(stream, on_disk)
            on_disk.seek(0)
            stream = on_disk
        try:
            table = parquet.ParquetFile(stream)
            columns = choose(table.schema_arrow.names)
            rows = size = 0
            for batch in table.iter_batches(batch_size=_ROWS, columns=columns):
                held = [batch.column(name) for name in columns]
                # One at a time: a short file can hold long texts.
                for index in range(batch.num_rows):
                    values = {n: c[index].as_py() for n, c in zip(columns, held, strict=True)}
                    rows += 1
                    length = _length(values)
                    size += length
                    where = f"{file.path}, row {rows}"
                    _refuse_longer(length, where)
                    refuse_bomb(file, size)  # a text that is repeated is stored once
                    yield Record(values, where, file.size * rows // table.metadata.num_rows)
        except pyarrow.ArrowException as error:
            raise DataError(f"cannot read {file.path} as Parquet: {error}") from error


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error}); repair or remove it") from error


def _length(value: Any) -> int:
    """Characters of all texts in a value."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_length, value.values()))
    return sum(map(_length, value)) if isinstance(value, list) else 0


def _refuse_longer(size: int, where: str) -> None:
    """One document is held in memory whole, so its size has a limit."""
    if size > LONGEST_BYTES:
        raise DataError(
            f"{where}: one document of more than {LONGEST_BYTES >> 20} MiB, which is the limit: "
            "the file is damaged, or the document must be split into several"
        )
