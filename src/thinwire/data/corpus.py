"""A prepared corpus on disk: two files of token ids, the tokenizer, and a manifest.

    train.bin, valid.bin   the ids, nothing else, little-endian uint16 or uint32
    train.loss, valid.loss one byte per id: 1 if it is learned; absent where all ids are
    valid.sizes            UTF-8 bytes that each validation id stands for, little-endian uint32;
                           absent for token shards, whose text is not known
    tokenizer.json         absent for token shards without a tokenizer
    tokenizer_config.json  its chat template; absent where there is none
    manifest.json          sizes and hashes of the others, and what they were made from

The folder appears under its name only when it is complete, and is never changed afterwards.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from thinwire.data.prepared import digest, new_folder, opening
from thinwire.data.template import CONFIG, ChatTemplate
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
    train_learned: np.memmap | None = None  # of each id whether it is learned; None if all are
    valid_learned: np.memmap | None = None
    remarks: tuple[str, ...] = ()  # what else there is to say of how it was made

    @classmethod
    def open(cls, folder: str | Path) -> "Corpus":
        """Open what `prepare` wrote; refuse a folder that is incomplete or was altered."""
        folder = Path(folder)
        with opening(folder, _fingerprint) as manifest:
            dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
            train, valid = (
                np.memmap(folder / f"{side}.bin", dtype=dtype, mode="r") for side in SIDES
            )
            sizes = None
            if SIZES in manifest["files"]:
                sizes = np.memmap(folder / SIZES, dtype=_SIZE, mode="r", shape=valid.shape)
            learned: list[np.memmap | None] = [None, None]
            if manifest.get("learned"):
                learned = [
                    np.memmap(folder / f"{side}.loss", dtype=np.uint8, mode="r", shape=ids.shape)
                    for side, ids in zip(SIDES, (train, valid), strict=True)
                ]
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
                train_learned=learned[0],
                valid_learned=learned[1],
                remarks=tuple(map(str, manifest.get("remarks", []))),
            )

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of these ids; None for token shards that came without one."""
        path = self.folder / TOKENIZER
        return Tokenizer.load(path) if path.exists() else None

    def template(self) -> ChatTemplate | None:
        """The chat template of the tokenizer, if it has one."""
        return ChatTemplate.beside(self.folder / TOKENIZER)

    @property
    def notes(self) -> list[str]:
        """What a user of this corpus should know."""
        return [*self.remarks, *([f"the tokenizer {self.lost}"] if self.lost else [])]

    def summary(self) -> str:
        """One line for the log."""
        kind = "documents" if self.train_learned is None else "conversations"
        documents = f"{self.documents:,} {kind}, " if self.documents else ""
        share = len(self.valid) / (len(self.train) + len(self.valid))
        return (
            f"{self.source} corpus {self.fingerprint[:12]}: {documents}"
            f"{len(self.train):,} training and {len(self.valid):,} validation tokens "
            f"({share:.2%} of all){self._learned_share()}, vocabulary {self.vocab:,}"
        )

    def _learned_share(self) -> str:
        if self.train_learned is None:
            return ""
        share = np.count_nonzero(self.train_learned) / len(self.train_learned)
        return f", {share:.2%} of the training tokens learned"


class Chunk(NamedTuple):
    """Token ids that continue one side of a corpus."""

    side: str
    ids: np.ndarray
    sizes: np.ndarray | None = None  # UTF-8 bytes that each id stands for; in validation text only
    learned: np.ndarray | None = None  # of each id whether it is learned; None if all are


def write_corpus(
    folder: Path,
    source: str,
    vocab: int,
    chunks: Iterable[Chunk],
    tokenizer: Tokenizer | None,
    documents: int = 0,
    lost: Callable[[], str] = str,
    template: ChatTemplate | None = None,
    remarks: Callable[[], list[str]] = list,
) -> None:
    """Write a corpus beside `folder` and rename it there at the end, or leave nothing.

    `lost` and `remarks` are asked once all chunks are there. All chunks say which ids are learned,
    or none does.
    """
    dtype = np.dtype("<u2" if vocab <= 1 << 16 else "<u4")
    valid_bytes = 0
    with new_folder(folder.parent, folder.name, [f"{side}.bin" for side in SIDES]) as writer:
        for side, ids, sizes, learned in chunks:
            if len(ids) and int(ids.max()) >= vocab:
                raise DataError(
                    f"token id {ids.max()} was read, but all ids must be below {vocab}: the source "
                    "changed while it was being read, or its tokenizer is damaged"
                )
            writer.append(f"{side}.bin", ids.astype(dtype).tobytes())
            if sizes is not None:
                writer.append(SIZES, sizes.astype(_SIZE).tobytes())
                valid_bytes += int(sizes.sum(dtype=np.int64))
            if learned is not None:
                writer.append(f"{side}.loss", learned.astype(np.uint8).tobytes())
        for side in SIDES:
            if writer.size(f"{side}.bin") == 0:
                raise DataError(
                    f"no tokens for {side}: the corpus is too small to be split, or all of it is "
                    "in data.valid_path as well"
                )
        masked = [side for side in SIDES if writer.has(f"{side}.loss")]
        if tokenizer is not None:
            writer.append(TOKENIZER, tokenizer.json().encode())
        if template is not None:
            writer.append(CONFIG, template.json().encode())
        facts = {
            "source": source,
            "documents": documents,
            "lost": lost(),
            "vocab": vocab,
            "valid_bytes": valid_bytes,
            "dtype": dtype.name,
            "ids": {side: writer.hash(f"{side}.bin") for side in SIDES},
            "learned": {side: writer.hash(f"{side}.loss") for side in masked},
            "remarks": remarks(),
        }
        writer.finish({**facts, "fingerprint": _fingerprint(facts)})
        writer.settle(folder)


def _fingerprint(manifest: dict[str, Any]) -> str:
    """A hash of the ids themselves and what is said of them, not of where they came from."""
    said = {key: manifest[key] for key in ("dtype", "vocab", "valid_bytes", "ids")}
    return digest(said | ({"learned": learned} if (learned := manifest.get("learned")) else {}))
