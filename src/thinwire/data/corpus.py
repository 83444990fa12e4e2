"""A prepared corpus on disk: two files of token ids, the tokenizer, and a manifest.

    train.bin, valid.bin   the ids, nothing else, little-endian uint16 or uint32
    train.loss, valid.loss one byte per id: 1 if it is learned; absent where all ids are
    valid.sizes            UTF-8 bytes that each validation id stands for, little-endian uint32;
                           absent for token shards, whose text is not known
    tokenizer.json         absent for token shards without a tokenizer
    tokenizer_config.json  its chat template; absent where there is none
    manifest.json          sizes and hashes of the others, and what they were made from

The folder is found by the content that it was made from. It appears under its name only when it is
complete, with the manifest written last, and is never changed afterwards.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from thinwire.data.chat import CONFIG, ChatTemplate
from thinwire.data.sources import SourceFile
from thinwire.data.tokenizer import Tokenizer
from thinwire.errors import DataError
from thinwire.folders import flush, partial_folder, put_in_place, replace_file, write_file

Progress = Callable[[str, int, int], None]  # gets the phase, and the bytes read so far and in all

FORMAT = 2
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
SIZES = "valid.sizes"
SIDES = ("train", "valid")
_SIZE = np.dtype("<u4")
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 20
_CLOCK_TICK_NS = 2_000_000_000  # some filesystems keep times no finer than this


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids of training and validation, mapped into memory, and how they came about."""

    folder: Path
    fingerprint: str  # the same wherever the ids are the same
    train: np.memmap
    valid: np.memmap
    valid_sizes: np.memmap | None  # UTF-8 bytes of each validation id's text; None if unknown
    vocab: int  # ids are below this
    valid_bytes: int  # UTF-8 bytes of the validation text, 0 if unknown
    source: str
    documents: int  # 0 if unknown
    train_learned: np.memmap | None = None  # of each id whether it is learned; None if all are
    valid_learned: np.memmap | None = None
    notes: tuple[str, ...] = ()  # what a user of it should know

    @classmethod
    def open(cls, folder: str | Path) -> "Corpus":
        """Open what `prepare` wrote; refuse a folder that is incomplete or was altered."""
        folder = Path(folder)
        if not folder.is_dir():
            raise DataError(f"no prepared data at {folder}: prepare it on this machine first")
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            _check(folder, manifest)
            dtype = np.dtype(manifest["dtype"]).newbyteorder("<")

            def mapped(name: str, kind: Any) -> Any:
                is_there = name in manifest["files"]
                return np.memmap(folder / name, dtype=kind, mode="r") if is_there else None

            return cls(
                folder=folder,
                fingerprint=manifest["fingerprint"],
                train=mapped("train.bin", dtype),
                valid=mapped("valid.bin", dtype),
                valid_sizes=mapped(SIZES, _SIZE),
                vocab=int(manifest["vocab"]),
                valid_bytes=int(manifest["valid_bytes"]),
                source=str(manifest["source"]),
                documents=int(manifest["documents"]),
                train_learned=mapped("train.loss", np.uint8),
                valid_learned=mapped("valid.loss", np.uint8),
                notes=tuple(map(str, manifest.get("remarks", []))),
            )
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(folder, f"{type(error).__name__}: {error}") from error

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of these ids; None for token shards that came without one."""
        path = self.folder / TOKENIZER
        return Tokenizer.load(path) if path.exists() else None

    def template(self) -> ChatTemplate | None:
        """The chat template of the tokenizer, if it has one."""
        return ChatTemplate.beside(self.folder / TOKENIZER)

    def summary(self) -> str:
        """One line for the log."""
        kind, learned = "documents", ""
        if self.train_learned is not None:
            part = np.count_nonzero(self.train_learned) / len(self.train_learned)
            kind, learned = "conversations", f", {part:.2%} of the training tokens learned"
        documents = f"{self.documents:,} {kind}, " if self.documents else ""
        share = len(self.valid) / (len(self.train) + len(self.valid))
        return (
            f"{self.source} corpus {self.fingerprint[:12]}: {documents}"
            f"{len(self.train):,} training and {len(self.valid):,} validation tokens "
            f"({share:.2%} of all){learned}, vocabulary {self.vocab:,}"
        )


def found_or_made(
    cache: Path,
    files: list[list[SourceFile]],
    key: list[Any],
    read: Callable[[], tuple[str, Callable[[Path], None]]],
    how: Any = "",
) -> Corpus:
    """Open the corpus for the content of these files and the settings in `key`. `read` gives a hash
    of the content and a function that makes the folder. Files that have not changed, by size and
    times, since they were read in the same way, `how`, are not read again; None: they always are.
    """
    listing = [
        [[str(file.path.absolute()), file.size, file.mtime_ns, file.ctime_ns] for file in group]
        for group in files
    ]
    noted = cache / "seen" / _digest([FORMAT, [listing, how]])
    folder = None
    if how is not None:
        with suppress(OSError, ValueError):
            folder = cache / _digest([FORMAT, noted.read_text(encoding="ascii"), *key])
    if folder is None or not os.path.isdir(folder):
        content, make = read()
        times = [max(file.mtime_ns, file.ctime_ns) for group in files for file in group]
        is_settled = time.time_ns() - max(times, default=0) >= _CLOCK_TICK_NS
        if how is not None and is_settled:  # or a clock tick may hide a change
            with suppress(OSError):  # a convenience only: without it the files are read again
                replace_file(noted, content.encode())
        folder = cache / _digest([FORMAT, content, *key])
        if not os.path.isdir(folder):  # also where it cannot be looked up, and making it says why
            make(folder)
    return Corpus.open(folder)


class TokenChunk(NamedTuple):
    """Token ids that continue one side of a corpus."""

    side: str
    ids: np.ndarray
    sizes: np.ndarray | None = None  # UTF-8 bytes that each id stands for; in validation text only
    learned: np.ndarray | None = None  # of each id whether it is learned; None if all are


def write_corpus(
    folder: Path,
    source: str,
    vocab: int,
    chunks: Iterable[TokenChunk],
    tokenizer: Tokenizer | None,
    documents: int = 0,
    template: ChatTemplate | None = None,
    remarks: Callable[[], list[str]] = list,
) -> None:
    """Write a corpus beside `folder` and rename it there, or leave nothing; `remarks` come last."""
    dtype = np.dtype("<u2" if vocab <= 1 << 16 else "<u4")
    written: dict[str, tuple[IO[bytes], Any]] = {}  # the file and a hash of it
    valid_bytes = 0
    try:
        with partial_folder(folder.parent, folder.name) as partial, ExitStack() as held:

            def append(name: str, content: bytes) -> None:
                if name not in written:
                    opened = held.enter_context((partial / name).open("wb"))
                    written[name] = opened, hashlib.blake2b(digest_size=16)
                stream, content_hash = written[name]
                stream.write(content)
                content_hash.update(content)

            for side in SIDES:
                append(f"{side}.bin", b"")
            for side, ids, sizes, learned in chunks:
                if len(ids) and int(ids.max()) >= vocab:
                    raise DataError(
                        f"token id {ids.max()} was read, but all ids must be below {vocab}: the "
                        "source changed while it was being read, or its tokenizer is damaged"
                    )
                append(f"{side}.bin", ids.astype(dtype).tobytes())
                if sizes is not None:
                    append(SIZES, sizes.astype(_SIZE).tobytes())
                    valid_bytes += int(sizes.sum(dtype=np.int64))
                if learned is not None:
                    append(f"{side}.loss", learned.astype(np.uint8).tobytes())
            for side in SIDES:
                if written[f"{side}.bin"][0].tell() == 0:
                    raise DataError(
                        f"no tokens for {side}: the corpus is too small to be split, or all of it "
                        "is in data.valid_path as well"
                    )
            if tokenizer is not None:
                append(TOKENIZER, tokenizer.json().encode())
            if template is not None:
                append(CONFIG, template.json().encode())
            hashed = {name: each.hexdigest() for name, (_, each) in written.items()}
            facts = {
                "source": source,
                "documents": documents,
                "vocab": vocab,
                "valid_bytes": valid_bytes,
                "dtype": dtype.name,
                "ids": {side: hashed[f"{side}.bin"] for side in SIDES},
                "learned": {s: hashed[f"{s}.loss"] for s in SIDES if f"{s}.loss" in hashed},
                "remarks": remarks(),
            }
            held.close()
            files = {}
            for path in (partial / name for name in written):
                flush(path)
                files[path.name] = {"bytes": path.stat().st_size, "sample": _sample(path)}
            said = {"format": FORMAT, **facts, "fingerprint": _fingerprint(facts), "files": files}
            write_file(partial / MANIFEST, json.dumps(said, indent=2).encode())
            try:
                put_in_place(partial, folder)
            except OSError:
                if not folder.is_dir():  # another run has made the same meanwhile
                    raise
    except OSError as error:
        raise DataError(f"cannot write the prepared data to {folder.parent}: {error}") from error


def _check(folder: Path, manifest: Any) -> None:
    """Check every file by size and sample, and that the fingerprint is of these files."""
    if manifest["format"] != FORMAT:
        raise _damaged(folder, f"its {MANIFEST} is not of format {FORMAT}")
    for name, entry in manifest["files"].items():
        size = (folder / name).stat().st_size
        if size != entry["bytes"]:
            raise _damaged(folder, f"{name} has {size} bytes instead of {entry['bytes']}")
        if _sample(folder / name) != entry["sample"]:
            raise _damaged(folder, f"{name} was altered")
    if manifest["fingerprint"] != _fingerprint(manifest):
        raise _damaged(folder, "the fingerprint does not belong to these files")


def _damaged(folder: Path, reason: str) -> DataError:
    return DataError(
        f"the prepared data at {folder} is damaged: {reason}; "
        "delete the folder, and it will be prepared again"
    )


def _sample(path: Path) -> str:
    """Hash of 64 blocks of 1 MiB spread evenly over a file: all of it, up to 64 MiB."""
    sample = hashlib.blake2b(digest_size=16)
    size = path.stat().st_size
    with path.open("rb") as stream:
        for at in range(0, size, max(size // _SAMPLES, _SAMPLE_BYTES)):
            stream.seek(at)
            sample.update(stream.read(_SAMPLE_BYTES))
    return sample.hexdigest()


def _fingerprint(manifest: dict[str, Any]) -> str:
    """A hash of the ids themselves and what is said of them, not of where they came from."""
    said = {key: manifest[key] for key in ("dtype", "vocab", "valid_bytes", "ids")}
    return _digest(said | ({"learned": learned} if (learned := manifest.get("learned")) else {}))


def _digest(value: Any) -> str:
    """A hash of plain values."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
