"""A prepared corpus on disk: two files of token ids, the tokenizer, and a manifest.

    train.bin, valid.bin   the ids, nothing else, little-endian uint16 or uint32
    valid.sizes            UTF-8 bytes that each validation id stands for, little-endian uint32;
                           absent for token shards, whose text is not known
    tokenizer.json         absent for token shards without a tokenizer
    manifest.json          sizes and hashes of the others, and what they were made from

The folder appears under its name only when it is complete, and is never changed afterwards.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.data.prepared import (
    close_to_disk,
    damaged,
    opening,
    partial_folder,
    put_in_place,
    write_manifest,
)
from thinwire.data.tokenizer import Tokenizer
from thinwire.errors import DataError

TOKENIZER = "tokenizer.json"
SIZES = "valid.sizes"
SIDES = ("train", "valid")
_SIZE = np.dtype("<u4")


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
    lost: str  # what of the text its tokenizer loses; empty if nothing

    @classmethod
    def open(cls, folder: str | Path) -> "Corpus":
        """Open what `prepare` wrote; refuse a folder that is incomplete or was altered."""
        folder = Path(folder)
        with opening(folder) as manifest:
            if manifest["fingerprint"] != _fingerprint(manifest):
                raise damaged(folder, "the fingerprint does not belong to these files")
            dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
            train, valid = (
                np.memmap(folder / f"{side}.bin", dtype=dtype, mode="r") for side in SIDES
            )
            sizes = None
            if SIZES in manifest["files"]:
                sizes = np.memmap(folder / SIZES, dtype=_SIZE, mode="r", shape=valid.shape)
            return cls(
                folder=folder,
                fingerprint=manifest["fingerprint"],
                train=train,
                valid=valid,
                valid_sizes=sizes,
                vocab=int(manifest["vocab"]),
                valid_bytes=int(manifest["valid_bytes"]),
                source=str(manifest["source"]),
                documents=int(manifest["documents"]),
                lost=str(manifest.get("lost", "")),
            )

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of these ids; None for token shards that came without one."""
        path = self.folder / TOKENIZER
        return Tokenizer.load(path) if path.exists() else None

    @property
    def notes(self) -> list[str]:
        """What a user of this corpus should know."""
        return [f"the tokenizer {self.lost}"] if self.lost else []

    def summary(self) -> str:
        """One line for the log."""
        documents = f"{self.documents:,} documents, " if self.documents else ""
        share = len(self.valid) / (len(self.train) + len(self.valid))
        return (
            f"{self.source} corpus {self.fingerprint[:12]}: {documents}"
            f"{len(self.train):,} training and {len(self.valid):,} validation tokens "
            f"({share:.2%} of all), vocabulary {self.vocab:,}"
        )


class CorpusWriter:
    """Takes token ids for either side, in order, and closes the folder with a manifest."""

    def __init__(self, folder: Path, source: str, vocab: int) -> None:
        self._folder = folder
        self._source = source
        self._vocab = vocab
        self._dtype = np.dtype("<u2" if vocab <= 1 << 16 else "<u4")
        self._streams = {f"{side}.bin": (folder / f"{side}.bin").open("wb") for side in SIDES}
        self._hashes = {side: hashlib.blake2b(digest_size=16) for side in SIDES}
        self._valid_bytes = 0

    def append(self, side: str, ids: np.ndarray, sizes: np.ndarray | None = None) -> None:
        """Add ids to the end of "train" or "valid", there with the bytes of text of each."""
        if len(ids) and int(ids.max()) >= self._vocab:
            raise DataError(
                f"token id {ids.max()} was read where ids are below {self._vocab}: the source "
                "changed while it was being read, or its tokenizer is damaged"
            )
        raw = ids.astype(self._dtype).tobytes()
        self._streams[f"{side}.bin"].write(raw)
        self._hashes[side].update(raw)
        if sizes is not None:
            if SIZES not in self._streams:
                self._streams[SIZES] = (self._folder / SIZES).open("wb")
            self._streams[SIZES].write(sizes.astype(_SIZE).tobytes())
            self._valid_bytes += int(sizes.sum(dtype=np.int64))

    def finish(self, tokenizer: Tokenizer | None, documents: int, lost: str = "") -> None:
        """Write everything to disk and the manifest last; a side without tokens is an error."""
        for side in SIDES:
            if self._streams[f"{side}.bin"].tell() == 0:
                raise DataError(
                    f"no tokens for {side}: the corpus is too small to be split, or all of it is "
                    "in data.valid_path as well"
                )
        for stream in self._streams.values():
            close_to_disk(stream)
        names = list(self._streams)
        if tokenizer is not None:
            tokenizer.save(self._folder / TOKENIZER)
            names.append(TOKENIZER)
        manifest = {
            "source": self._source,
            "documents": documents,
            "lost": lost,
            "vocab": self._vocab,
            "valid_bytes": self._valid_bytes,
            "dtype": self._dtype.name,
            "ids": {side: digest.hexdigest() for side, digest in self._hashes.items()},
        }
        manifest["fingerprint"] = _fingerprint(manifest)
        write_manifest(self._folder, manifest, names)

    def close(self) -> None:
        """Let go of the files; what was not finished is of no use."""
        for stream in self._streams.values():
            stream.close()


@contextmanager
def writing(folder: Path, source: str, vocab: int) -> Iterator[CorpusWriter]:
    """Write a corpus beside `folder` and rename it there at the end, or leave nothing."""
    with partial_folder(folder.parent, folder.name) as partial:
        writer = CorpusWriter(partial, source, vocab)
        try:
            yield writer
        finally:
            writer.close()
        put_in_place(partial, folder)


def _fingerprint(manifest: dict[str, Any]) -> str:
    """A hash of the ids themselves and what is said of them, not of where they came from."""
    told = {key: manifest[key] for key in ("dtype", "vocab", "valid_bytes", "ids")}
    text = json.dumps(told, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
