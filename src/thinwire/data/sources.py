"""The files of a source: found in a defined order, unpacked, and read one record at a time.

Texts are plain, JSON lines or Parquet, conversations JSON or Parquet, each also compressed. All of
it streams: at most one document, or 16 million characters of a larger plain file, is held at a
time, so a corpus may be far larger than memory.
"""

import codecs
import gzip
import io
import json
import lzma
import os
import shutil
import stat
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import zstandard

from thinwire.errors import DataError, ThinwireError, first_line
from thinwire.lazy import needs
from thinwire.paths import expanded

TEXT_KINDS = (".txt", ".md", ".py", ".tokens", ".jsonl", ".parquet")
CHAT_KINDS = (".jsonl", ".json", ".parquet")
PACKINGS = (".xz", ".gz", ".zst")
SEPARATOR = "<|endoftext|>"
WHOLE_CHARACTERS = 16_000_000
PIECE_CHARACTERS = 1_000_000
LONGEST_BYTES = 64 << 20  # of a line of JSON, or of the texts in a row of Parquet
# Text becomes 3 to 10 times smaller when packed; monotonous logs a hundred times.
LARGEST_RATIO = 500
ALWAYS_ALLOWED_BYTES = 256 << 20

# Third-party packages, test suites and generated folders are not the library's own prose.
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_BROKEN = (OSError, EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError)
_BUFFER = 1 << 20
# A few bytes of zstd can stand for 128 KiB, so that this may become 32 MiB, but no more.
_ZSTD_STEP = 1 << 10
_ROWS = 64  # of Parquet, read at a time
_SAVED = ("state.json", "dataset_dict.json")  # what datasets' save_to_disk leaves


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus: where it is, its name in the source, and what `stat` said."""

    path: Path
    name: str
    size: int
    mtime_ns: int
    ctime_ns: int


class SourceRecord(NamedTuple):
    """An object of JSON or a row, where it stands, and how far reading has come on disk."""

    values: Any
    where: str
    position: int


def kind_and_packing(name: str) -> tuple[str, str]:
    """`"a.jsonl.zst"` -> `(".jsonl", ".zst")`; the packing is empty for an unpacked file."""
    stem, packing = os.path.splitext(name.lower())
    if packing in PACKINGS:
        return os.path.splitext(stem)[1], packing
    return packing, ""


def stdlib_files() -> list[SourceFile]:
    """The .py files of the running Python's standard library, without its test suites."""
    # Not "platstdlib": inside a virtual environment that is the environment, not the library.
    root = Path(sysconfig.get_path("stdlib"))

    def belongs(name: str) -> bool:
        # config-* and _sysconfigdata* are generated when Python is built and name local paths.
        return name not in _NOT_STDLIB and not name.startswith(("config-", "_sysconfigdata"))

    names = [name for name in walk(root, belongs) if name.endswith(".py")]
    if not names:
        raise DataError(
            f"no .py files of the standard library under {root}: this Python was installed "
            'without them; use data.source = "text" with a path of your own'
        )
    return [source_file(root, name) for name in names]


def text_files(path: str, setting: str = "data.path", source: str = "text") -> list[SourceFile]:
    """The supported files at `path`, a file or a folder read recursively, but no hidden ones."""
    root = existing(path, source, setting)
    kinds = CHAT_KINDS if source == "chat" else TEXT_KINDS
    supported = ", ".join(kinds)
    if not root.is_dir():
        if kind_and_packing(root.name)[0] not in kinds:
            raise DataError(
                f"{root} is not a kind of file that can be read as {source}; "
                f"supported: {supported}, also compressed as {', '.join(PACKINGS)}"
            )
        return [source_file(root)]
    found = walk(root)
    names = [name for name in found if kind_and_packing(name)[0] in kinds]
    if not names:
        others = sorted({os.path.splitext(name)[1] or name for name in found})
        holds = f"it holds only {', '.join(others[:8])}" if others else "it is empty"
        raise DataError(f"no {source} to read under {root}: {holds}; supported: {supported}")
    return [source_file(root, name) for name in names]


def existing(path: str, source: str, setting: str = "data.path") -> Path:
    """The path of the config, or an error when it is not set or not there."""
    if not path:
        raise DataError(f'data.source = "{source}" needs {setting}: set it to a file or a folder')
    root = expanded(path, setting)
    if not os.path.lexists(root):
        raise DataError(f"{setting} = {path} does not exist: correct it or create it")
    return root


def source_file(root: Path, name: str = "") -> SourceFile:
    """What `stat` says of `root`, or of a file under it, which must be a regular file."""
    path = root / name
    with reading(path):  # a symbolic link may be broken or endless
        info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise DataError(f"{path} is not a regular file: remove it or choose another data.path")
    return SourceFile(path, name or path.name, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def walk(root: Path, belongs: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Sorted relative paths under `root`, all parts visible and `belongs`; links are followed."""

    def inside(folder: Path, parents: list[os.stat_result]) -> Iterator[str]:
        with reading(folder):
            here = folder.stat()
            names = [n for n in os.listdir(folder) if not n.startswith(".") and belongs(n)]
        if any(os.path.samestat(here, parent) for parent in parents):
            raise DataError(
                f"{folder} is a symbolic link to a folder that contains it, a loop: remove it"
            )
        for path in (folder / name for name in names):
            if os.path.isdir(path):
                yield from inside(path, [*parents, here])
            else:
                yield str(path.relative_to(root))

    return sorted(inside(root, []), key=lambda name: name.split("/"))


@contextmanager
def reading(
    place: Path | str,
    broken: tuple[type[Exception], ...] = (OSError,),
    advice: str = "repair or remove it, or choose another data.path",
) -> Iterator[None]:
    """Turn what a reader raises where it cannot read into a DataError."""
    try:
        yield
    except ThinwireError:
        raise
    except broken as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DataError(f"cannot read {place}: {reason}; {advice}") from error


def read_json(path: Path, advice: str = "repair it, or fetch it again") -> dict[str, Any]:
    """The object in a JSON file; DataError where there is none."""
    with reading(path, (OSError, ValueError, RecursionError), advice):
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no JSON object")
    return found


def read_records(
    files: Iterable[SourceFile], text_key: str = "", skip_undecodable: bool = False
) -> Iterator[SourceRecord]:
    """The records of all files in order; positions go on from file to file. Under `text_key` they
    have what plain files hold, and what stands in this column of Parquet, which alone is read.
    """
    before = 0
    for file in files:
        kind, packing = kind_and_packing(file.name)
        with reading(file.path, _BROKEN, "repair or remove it"), file.path.open("rb") as raw:
            stream = _unpacked(raw, file, packing)
            if kind == ".parquet":
                found = _parquet_rows(file, stream, packing, text_key)
            elif kind in CHAT_KINDS:
                found = _json_records(file, raw, stream)
            else:
                found = _plain_texts(file, raw, stream, text_key, skip_undecodable)
            for values, where, position in found:
                yield SourceRecord(values, where, before + min(position, file.size))
        before += file.size


def text_of(record: SourceRecord, key: str) -> str:
    """The text that a record holds under a key."""
    values = record.values if isinstance(record.values, dict) else {}
    text = values.get(key, 0)
    if text is None:
        return ""  # a record without a text, as a table may have
    if not isinstance(text, str):
        raise DataError(
            f'{record.where}: needs an object with the key "{key}" that holds a string; it has the '
            f"keys: {', '.join([*values][:12]) or 'none'}. Set data.text_key to the key of the text"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:  # an escape such as "\ud800" alone is no character
        raise DataError(f'{record.where}: "{key}" is not valid Unicode ({error.reason})') from error
    return text


def _json_records(file: SourceFile, raw: IO[bytes], stream: IO[bytes]) -> Iterator[SourceRecord]:
    """Objects of JSON: one per line, where empty lines are left out, or all in one list."""
    start = stream.peek(64)[:64]  # type: ignore[attr-defined]
    if not start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        lines = iter(lambda: stream.readline(LONGEST_BYTES + 1), b"")
        for number, line in enumerate(lines, 1):
            where = f"{file.path}, line {number}"
            _refuse_longer(len(line), where)
            if line.strip():
                yield SourceRecord(_parsed(line, where), where, raw.tell())
        return
    listed = _parsed(stream.read(), str(file.path))
    for number, values in enumerate(listed, 1):
        position = file.size * number // len(listed)
        yield SourceRecord(values, f"{file.path}, entry {number}", position)


def _parsed(text: bytes, where: str) -> Any:
    with reading(f"{where}, as JSON", (ValueError, RecursionError), "repair or remove it"):
        return json.loads(text.removeprefix(codecs.BOM_UTF8).decode())


def _parquet_rows(
    file: SourceFile, stream: IO[bytes], packing: str, text_key: str
) -> Iterator[SourceRecord]:
    pyarrow = needs("pyarrow", extra="data", what=str(file.path))
    parquet = needs("pyarrow.parquet", extra="data", what=str(file.path))
    with tempfile.TemporaryFile() as on_disk:
        if packing:  # Parquet is read from its end, so it must be on disk unpacked
            shutil.copyfileobj(stream, on_disk)
            on_disk.seek(0)
            stream = on_disk
        with reading(file.path, (pyarrow.ArrowException,), "repair or remove it"):
            table = parquet.ParquetFile(stream)
            columns = table.schema_arrow.names
            if text_key and text_key not in columns:
                raise DataError(
                    f'{file.path} has no column "{text_key}", but {", ".join(columns)}: set '
                    "data.text_key to the one of the text"
                )
            size, only = 0, [text_key] if text_key else None
            # One row at a time: a short file can hold long texts.
            rows = (
                batch.slice(index, 1)
                for batch in table.iter_batches(batch_size=_ROWS, columns=only)
                for index in range(batch.num_rows)
            )
            for number, row in enumerate(rows, 1):
                (values,) = row.to_pylist()
                # Not row.nbytes, which counts a dictionary of all rows in each of them.
                length = len(str(values))
                size += length
                where = f"{file.path}, row {number}"
                _refuse_longer(length, where)
                _refuse_bomb(file, size)  # a text that is repeated is stored once
                at = file.size * number // table.metadata.num_rows
                yield SourceRecord({k: no_nulls(v) for k, v in values.items()}, where, at)


def no_nulls(value: Any) -> Any:
    """A row of Arrow without the keys that only other rows have: there it holds None for them."""
    if isinstance(value, dict):
        return {key: no_nulls(item) for key, item in value.items() if item is not None}
    return [no_nulls(item) for item in value] if isinstance(value, list) else value


def _refuse_longer(size: int, where: str) -> None:
    """One document is held in memory whole, so its size has a limit."""
    if size > LONGEST_BYTES:
        raise DataError(
            f"{where}: one document of more than {LONGEST_BYTES >> 20} MiB, which is the limit: "
            "the file is damaged, or the document must be split into several"
        )


def _plain_texts(
    file: SourceFile, raw: IO[bytes], stream: IO[bytes], key: str, skip_undecodable: bool
) -> Iterator[SourceRecord]:
    """A plain file is one document, unless separator lines or its size make it several."""
    is_separated = kind_and_packing(file.name)[0] in (".txt", ".tokens")
    # newline="\n" keeps the text byte for byte.
    reader = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="\n")
    held: list[str] = []  # of the document, until it ends or is large
    is_large = False
    try:
        for part, is_last in _parts(reader, is_separated):
            held.append(part)
            is_large = is_large or sum(map(len, held)) > WHOLE_CHARACTERS
            if is_large or is_last:
                for text in held if is_large else ["".join(held)]:
                    yield SourceRecord({key: text}, str(file.path), raw.tell())
                held, is_large = [], not is_last
    except UnicodeDecodeError as error:
        if not skip_undecodable:
            raise DataError(
                f"{file.path} is not UTF-8 text ({error.reason}): convert or remove it"
            ) from error


def _parts(reader: io.TextIOWrapper, is_separated: bool) -> Iterator[tuple[str, bool]]:
    """Parts of about a million characters, to a blank line, each with whether its document ends."""
    lines: list[str] = []
    size = 0
    while line := reader.readline(PIECE_CHARACTERS):  # bounded, also in a file of one line
        is_separator = is_separated and line.strip() == SEPARATOR
        if not is_separator:
            lines.append(line)
            size += len(line)
        is_full = size >= PIECE_CHARACTERS and (not line.strip() or size >= 2 * PIECE_CHARACTERS)
        if is_separator or is_full:
            yield "".join(lines), is_separator
            lines, size = [], 0
    yield "".join(lines), True


def _unpacked(raw: IO[bytes], file: SourceFile, packing: str) -> IO[bytes]:
    """The bytes of a file; one that grows without limit when unpacked is an error."""
    if not packing:
        return raw
    if packing == ".zst":
        chunks = _zstd_chunks(raw)
    else:
        stream: Any = (gzip.open if packing == ".gz" else lzma.open)(raw)
        chunks = iter(lambda: stream.read(_BUFFER), b"")
    return cast(IO[bytes], io.BufferedReader(_Limited(chunks, file), _BUFFER))


class _Limited(io.RawIOBase):
    """Chunks as a stream, which ends in an error once it is far longer than the packed file."""

    def __init__(self, chunks: Iterator[bytes], file: SourceFile) -> None:
        self._chunks, self._file = chunks, file
        self._waiting, self._done = memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._waiting and (chunk := next(self._chunks, None)) is not None:
            self._done += len(chunk)
            _refuse_bomb(self._file, self._done)
            self._waiting = memoryview(chunk)
        count = min(len(buffer), len(self._waiting))
        buffer[:count], self._waiting = self._waiting[:count], self._waiting[count:]
        return count


def _zstd_chunks(raw: IO[bytes]) -> Iterator[bytes]:
    """Decompressed bytes of zstd frames; the library's own reader ends quietly at a cut one."""
    frame: Any = None
    while packed := (frame and frame.unused_data) or raw.read(_ZSTD_STEP):
        if frame is None or frame.eof:
            frame = zstandard.ZstdDecompressor().decompressobj()
        yield frame.decompress(packed)
    if frame is not None and not frame.eof:
        raise EOFError("the compressed file ends in the middle of a frame")


def _refuse_bomb(file: SourceFile, size: int) -> None:
    """Refuse a packed file that has this size unpacked, if that is far more than it has on disk."""
    limit = max(ALWAYS_ALLOWED_BYTES, LARGEST_RATIO * file.size)
    if size > limit:
        raise DataError(
            f"{file.path} unpacks to more than {limit:,} bytes. What grows to over {LARGEST_RATIO} "
            f"times its size (and {ALWAYS_ALLOWED_BYTES >> 20} MiB) is taken for a decompression "
            "bomb: if you trust it, decompress it first (.parquet: to .jsonl)"
        )


class HubDataset:
    """One split of a dataset. `place` is a folder, or NAME[@REVISION][:CONFIG] on the hub."""

    def __init__(self, place: str, split: str) -> None:
        if not place:
            raise DataError(
                'data.source = "hf" needs data.path: NAME or NAME:CONFIG on the hub, or a folder'
            )
        self._place, self._split = place, split
        folder = expanded(place, "data.path")
        self._folder = folder if folder.is_dir() else None
        if self._folder is None and (os.path.lexists(folder) or place.startswith((".", "/", "~"))):
            raise DataError(f"data.path = {place} is not a folder that holds a dataset")
        name, _, self._config = place.partition(":")
        self._name, _, self._revision = name.partition("@")
        self._commit = self._newest() if self._folder is None else None
        self.files = [source_file(folder, name) for name in walk(folder)] if self._folder else []
        # What is the same as long as the records are, beside these files; None if that is unknown.
        known = [self._name, self._revision, self._config, self._commit, split]
        self.identity = ["folder", split] if self._folder else known if self._commit else None

    def records(self) -> Iterator[SourceRecord]:
        """The records in order."""
        with self._reading():
            for number, values in enumerate(self._opened(), 1):
                where = f"{self._place}, record {number} of {self._split}"
                yield SourceRecord({k: no_nulls(v) for k, v in values.items()}, where, number)

    def _newest(self) -> str | None:
        """The commit that the hub has of it now; None where the hub is not asked (offline)."""
        hub = needs("huggingface_hub", extra="data", what='data.source = "hf"')
        with self._reading(), suppress(hub.errors.OfflineModeIsEnabled):
            return hub.HfApi().dataset_info(self._name, revision=self._revision or None).sha
        return None

    def _opened(self) -> Any:
        library = needs("datasets", extra="data", what='data.source = "hf"')
        library.disable_progress_bars()
        if self._folder is None:
            # Offline, what an earlier download has left is all there is, and it is not streamed.
            return library.load_dataset(
                self._name,
                self._config or None,
                split=self._split,
                streaming=self._commit is not None,
                revision=self._commit or self._revision or None,
            )
        if not any((self._folder / name).is_file() for name in _SAVED):
            return library.load_dataset(str(self._folder), split=self._split, streaming=True)
        saved = library.load_from_disk(str(self._folder))
        if not isinstance(saved, library.DatasetDict):
            return saved
        if self._split not in saved:
            raise DataError(
                f'{self._place} has no split "{self._split}", only {", ".join(saved)}: set '
                "data.split to one of them"
            )
        return saved[self._split]

    def _reading(self) -> AbstractContextManager[None]:
        # The libraries raise whatever readers and the network raise.
        return reading(
            self._place,
            (Exception,),
            "check data.path and data.split, and that this machine can reach the Hugging Face hub. "
            "A dataset in a local folder needs no network",
        )
