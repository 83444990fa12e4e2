"""A prepared corpus on disk: two files of token ids, the tokenizer, and a manifest.

    train.bin, valid.bin   the ids, nothing else, little-endian uint16 or uint32
    tokenizer.json         absent for token shards without a tokenizer
    manifest.json          sizes and hashes of the others, and what they were made from

The folder appears under its name only when it is complete, and is never changed afterwards.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from thinwire.data.tokenizer import Tokenizer
from thinwire.errors import DataError

FORMAT = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
SIDES = ("train", "valid")

_SAMPLES, _SAMPLE_BYTES = 64, 1 << 20


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids of training and validation, mapped into memory, and how they came about."""

    folder: Path
    fingerprint: str  # the same wherever the ids are the same
    train: np.memmap
    valid: np.memmap
    vocab: int  # ids are below this
    valid_bytes: int  # UTF-8 bytes of the validation text, 0 if unknown
    source: str
    documents: int  # 0 if unknown

    @classmethod
    def open(cls, folder: str | Path) -> "Corpus":
        """Open what `prepare` wrote; refuse a folder that is incomplete or was altered.

        Every file is checked by size and by a hash of 64 blocks of 1 MiB spread over it,
        which is all of a file up to 64 MiB.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder)
        try:
            for name, entry in manifest["files"].items():
                _check_file(folder, name, entry)
            if manifest["fingerprint"] != _fingerprint(manifest):
                raise _damaged(folder, "the fingerprint does not belong to these files")
            dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
            train, valid = (
                np.memmap(folder / f"{side}.bin", dtype=dtype, mode="r") for side in SIDES
            )
            return cls(
                folder=folder,
                fingerprint=manifest["fingerprint"],
                train=train,
                valid=valid,
                vocab=int(manifest["vocab"]),
                valid_bytes=int(manifest["valid_bytes"]),
                source=str(manifest["source"]),
                documents=int(manifest["documents"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(folder, f"its {MANIFEST} is not usable ({error!r})") from error
        except OSError as error:
            raise _damaged(folder, f"{error}") from error

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of these ids; None for token shards that came without one."""
        path = self.folder / TOKENIZER
        return Tokenizer.load(path) if path.exists() else None

    def summary(self) -> str:
        """One line for the log."""
        documents = f"{self.documents:,} documents, " if self.documents else ""
        return (
            f"{self.source} corpus {self.fingerprint[:12]}: {documents}"
            f"{len(self.train):,} training and {len(self.valid):,} validation tokens, "
            f"vocabulary {self.vocab:,}"
        )


class CorpusWriter:
    """Takes token ids for either side, in order, and closes the folder with a manifest."""

    def __init__(self, folder: Path, source: str, vocab: int) -> None:
        self._folder = folder
        self._source = source
        self._vocab = vocab
        self._dtype = np.dtype("<u2" if vocab <= 1 << 16 else "<u4")
        self._streams = {side: (folder / f"{side}.bin").open("wb") for side in SIDES}
        self._hashes = {side: hashlib.blake2b(digest_size=16) for side in SIDES}

    def append(self, side: str, ids: np.ndarray) -> None:
        """Add ids to the end of "train" or "valid"."""
        raw = ids.astype(self._dtype).tobytes()
        self._streams[side].write(raw)
        self._hashes[side].update(raw)

    def finish(self, tokenizer: Tokenizer | None, valid_bytes: int, documents: int) -> None:
        """Write everything to disk and the manifest last; a side without tokens is an error."""
        for side, stream in self._streams.items():
            if stream.tell() == 0:
                raise DataError(f"no tokens for {side}: the corpus is too small to be split")
            _close(stream)
        names = [f"{side}.bin" for side in SIDES]
        if tokenizer is not None:
            tokenizer.save(self._folder / TOKENIZER)
            names.append(TOKENIZER)
        manifest = {
            "format": FORMAT,
            "source": self._source,
            "documents": documents,
            "vocab": self._vocab,
            "valid_bytes": valid_bytes,
            "dtype": self._dtype.name,
            "ids": {side: digest.hexdigest() for side, digest in self._hashes.items()},
            "files": {name: _file_entry(self._folder / name) for name in names},
        }
        manifest["fingerprint"] = _fingerprint(manifest)
        with (self._folder / MANIFEST).open("wb") as stream:
            stream.write(json.dumps(manifest, indent=2).encode())
            _close(stream)

    def close(self) -> None:
        """Let go of the files; what was not finished is of no use."""
        for stream in self._streams.values():
            stream.close()


@contextmanager
def writing(folder: Path, source: str, vocab: int) -> Iterator[CorpusWriter]:
    """Write a corpus beside `folder` and rename it there at the end, or leave nothing."""
    partial: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
        partial.chmod(0o755)  # as an ordinary folder: other users may run stages
        writer = CorpusWriter(partial, source, vocab)
        try:
            yield writer
        finally:
            writer.close()
        _rename(partial, folder)
    except OSError as error:
        raise DataError(f"cannot write the prepared corpus to {folder}: {error}") from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _rename(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        # Another run prepared the same content meanwhile: its folder is as good as ours.


def _close(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()


def _file_entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sample": _sample(path)}


def _sample(path: Path) -> str:
    """Hash of blocks spread evenly over a file: quick for any size, complete for small ones."""
    digest = hashlib.blake2b(digest_size=16)
    size = path.stat().st_size
    stride = max(size // _SAMPLES, _SAMPLE_BYTES)
    with path.open("rb") as stream:
        for at in range(0, size, stride):
            stream.seek(at)
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _fingerprint(manifest: dict[str, Any]) -> str:
    """A hash of the ids themselves and what is said of them, not of where they came from."""
    told = {key: manifest[key] for key in ("dtype", "vocab", "valid_bytes", "ids")}
    text = json.dumps(told, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise DataError(f"no prepared corpus at {folder}: prepare it on this machine first")
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(folder, f"its {MANIFEST} cannot be read ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise _damaged(folder, f"its {MANIFEST} is not of format {FORMAT}")
    return manifest


def _check_file(folder: Path, name: str, entry: dict[str, Any]) -> None:
    path = folder / name
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise _damaged(folder, f"{name} has {size} bytes instead of {entry['bytes']}")
    if _sample(path) != entry["sample"]:
        raise _damaged(folder, f"{name} was altered")


def _damaged(folder: Path, reason: str) -> DataError:
    return DataError(
        f"the prepared corpus at {folder} is damaged: {reason}; "
        "delete the folder, and it will be prepared again"
    )
