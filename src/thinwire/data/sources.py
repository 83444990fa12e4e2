"""Read the documents of text files: plain, JSON lines, Parquet, each also compressed.

Everything streams: at most one document, or 16 million characters of a larger plain file,
is held at a time, so a corpus may be far larger than memory.
"""

import io
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple

from thinwire.data.files import SourceFile, kind_and_packing, reading
from thinwire.data.records import Record, json_lines, parquet_rows
from thinwire.data.unpack import BROKEN, unpacked
from thinwire.errors import DataError

SEPARATOR = "<|endoftext|>"
WHOLE_CHARACTERS = 16_000_000
PIECE_CHARACTERS = 1_000_000


class Document(NamedTuple):
    """One document, and how many bytes on disk have been read up to its end."""

    text: str
    consumed: int


def read_documents(
    files: Iterable[SourceFile], text_key: str = "text", skip_undecodable: bool = False
) -> Iterator[Document]:
    """The documents of all files in order; those without anything but white space are left out.

    `text_key` names what holds the text in an object of JSON and in a row of Parquet.
    """
    before = 0
    for file in files:
        try:
            with reading(file.path, BROKEN, "repair or remove it"), file.path.open("rb") as raw:
                for text, position in _documents_of(file, raw, text_key):
                    if text and not text.isspace():
                        yield Document(text, before + min(position, file.size))
        except UnicodeDecodeError as error:
            if not skip_undecodable:
                raise DataError(
                    f"{file.path} is not UTF-8 text ({error.reason}): convert or remove it"
                ) from error
        before += file.size


def _documents_of(file: SourceFile, raw: IO[bytes], key: str) -> Iterator[tuple[str, int]]:
    """Texts of one file, each with the position on disk that reading has reached."""
    kind, packing = kind_and_packing(file.path.name)
    stream = unpacked(raw, file, packing)
    if kind == ".parquet":
        yield from _parquet_texts(file, stream, packing, key)
        return
    if kind == ".jsonl":
        yield from ((text_of(line, key), line.position) for line in json_lines(file, raw, stream))
        return
    for text in _plain_texts(stream, kind):
        yield text, raw.tell()


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


def text_of(record: Record, key: str) -> str:
    """The text that a record holds under a key."""
    text = record.values.get(key) if isinstance(record.values, dict) else None
    if not isinstance(text, str):
        raise DataError(
            f'{record.where}: needs an object with the key "{key}" that holds a string, but it '
            f"{_description(record.values, key)}; set data.text_key to the key of the text"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:  # an escape such as "\ud800" alone is no character
        raise DataError(f'{record.where}: "{key}" is not valid Unicode ({error.reason})') from error
    return text


def _description(record: Any, key: str) -> str:
    """What a line of JSON holds in place of a text."""
    if not isinstance(record, dict):
        return f"is {_json_kind(record)}"
    if key in record:
        return f"holds {_json_kind(record[key])}"
    keys = ", ".join(f'"{name}"' for name in list(record)[:12])
    return f"has the keys {keys}" if keys else "has no keys"


def _json_kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a string" if isinstance(value, str) else "a number")


def _parquet_texts(
    file: SourceFile, stream: IO[bytes], packing: str, key: str
) -> Iterator[tuple[str, int]]:
    def columns(names: list[str]) -> list[str]:
        if key in names:
            return [key]
        raise DataError(
            f'{file.path} has no column "{key}"; its columns: {", ".join(names)}; set '
            "data.text_key to the column of the text"
        )

    for row in parquet_rows(file, stream, packing, columns):
        text = row.values[key]
        if text is not None and not isinstance(text, str):
            raise DataError(f'{file.path}: column "{key}" holds {type(text).__name__}')
        yield text or "", row.position
