"""A prepared set of labelled images on disk: pixels and labels of two sides, and a manifest.

    train.pixels, test.pixels   nothing but bytes, N x C x S x S
    train.labels, test.labels   little-endian uint16
    manifest.json               sizes and hashes of the others, and what they were made from

As with a corpus of tokens, the folder appears under its name only when it is complete, is never
changed afterwards, and every stage that needs images maps the same files into memory.

Shapes: N images, C channels, S pixels a side.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.data.cache import Reading, found_or_made
from thinwire.data.image_files import SIDES, ImageFiles, Piece, find_images
from thinwire.data.prepared import (
    close_to_disk,
    damaged,
    opening,
    partial_folder,
    put_in_place,
    write_manifest,
)
from thinwire.errors import DataError

Progress = Callable[[str, int, int], None]

KIND = "images"
_LABEL = np.dtype("<u2")


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """The images of one side, mapped into memory."""

    pixels_NCSS: np.ndarray  # uint8
    labels_N: np.ndarray

    def __len__(self) -> int:
        return len(self.labels_N)


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images to train on and images to test with, and how they came about."""

    folder: Path
    fingerprint: str  # the same wherever pixels, labels and their order are the same
    train: LabelledImages
    test: LabelledImages
    classes: tuple[str, ...]
    mean_C: tuple[float, ...]  # of the training pixels, from 0 for black to 1
    std_C: tuple[float, ...]

    @property
    def channels(self) -> int:
        """Three, or one for grey images."""
        return self.train.pixels_NCSS.shape[1]

    @property
    def side(self) -> int:
        """Pixels a side."""
        return self.train.pixels_NCSS.shape[2]

    @classmethod
    def open(cls, folder: str | Path) -> "ImageSet":
        """Open what `prepare_images` wrote; refuse a folder that is incomplete or was altered."""
        folder = Path(folder)
        with opening(folder) as manifest:
            if manifest["kind"] != KIND:
                raise damaged(folder, f"it holds {manifest['kind']}, not {KIND}")
            if manifest["fingerprint"] != _fingerprint(manifest):
                raise damaged(folder, "the fingerprint does not belong to these files")
            train, test = (_mapped(folder, side, manifest) for side in SIDES)
            return cls(
                folder=folder,
                fingerprint=manifest["fingerprint"],
                train=train,
                test=test,
                classes=tuple(manifest["classes"]),
                mean_C=tuple(manifest["mean"]),
                std_C=tuple(manifest["std"]),
            )

    def tokenizer(self) -> None:
        """What a corpus of text may have, and images never do."""
        return None  # noqa: RET501 -- it is an answer

    @property
    def notes(self) -> list[str]:
        """What a user of this set should know: nothing that its summary does not say."""
        return []

    def summary(self) -> str:
        """One line for the log."""
        return (
            f"image set {self.fingerprint[:12]}: {len(self.train):,} training and "
            f"{len(self.test):,} test images of {self.channels} x {self.side} x {self.side}, "
            f"{len(self.classes)} classes"
        )


def prepare_images(path: str, cache: str | Path, progress: Progress | None = None) -> ImageSet:
    """Make the set of the images at `path` under `cache`, or find it there, and open it.

    `progress(phase, done, total)` is told the bytes read so far. Only the coordinating process
    calls this.
    """
    cache, found = Path(cache), find_images(path)
    with ExitStack() as leaving:

        def read() -> _Written:
            """Read everything once: it is written while its content is hashed."""
            partial = leaving.enter_context(partial_folder(cache, KIND))
            return _write(found, partial, progress or (lambda phase, done, total: None))

        def make(written: _Written, folder: Path) -> None:
            put_in_place(written.folder, folder)

        return found_or_made(cache, Reading([found.files]), [KIND], read, make, ImageSet.open)


@dataclass(frozen=True)
class _Written:
    """A complete set that is not yet in its place."""

    folder: Path
    content: str


def _write(found: ImageFiles, partial: Path, report: Progress) -> _Written:
    total = sum(file.size for file in found.files)
    writer = _Writer(partial)
    try:
        for piece in found.read():
            writer.append(piece)
            report("reading", piece.consumed, total)
        manifest = writer.finish(found.classes)
    finally:
        writer.close()
    return _Written(partial, f"{manifest['fingerprint']} {manifest['classes']}")


class _Writer:
    """Takes images for either side, in order, and closes the folder with a manifest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = [f"{side}.{part}" for side in SIDES for part in ("pixels", "labels")]
        self._hashes = {name: hashlib.blake2b(digest_size=16) for name in self._names}
        self._streams = {name: (folder / name).open("wb") for name in self._names}
        self._counts = dict.fromkeys(SIDES, 0)
        self._labels = 0
        self._shape: tuple[int, ...] = ()
        self._shades_CV: np.ndarray | None = None

    def append(self, piece: Piece) -> None:
        """Add images to the end of their side."""
        side, pixels_NCSS, labels_N, _ = piece
        self._write(f"{side}.pixels", pixels_NCSS.tobytes())
        self._write(f"{side}.labels", labels_N.astype(_LABEL).tobytes())
        self._counts[side] += len(labels_N)
        self._labels = max(self._labels, int(labels_N.max()) + 1)
        self._shape = pixels_NCSS.shape[1:]
        if side == "train":
            shades_CV, before_CV = _count_shades(pixels_NCSS), self._shades_CV
            self._shades_CV = shades_CV if before_CV is None else before_CV + shades_CV

    def finish(self, classes: Sequence[str]) -> dict[str, Any]:
        """Write everything to disk and the manifest last."""
        assert self._shades_CV is not None, "whatever was found has training images"
        for stream in self._streams.values():
            close_to_disk(stream)
        classes = classes or [str(label) for label in range(self._labels)]
        if len(classes) > np.iinfo(_LABEL).max + 1:
            raise DataError(f"there are {len(classes)} classes: more than a label can hold")
        mean_C, std_C = _mean_and_std(self._shades_CV)
        manifest: dict[str, Any] = {
            "kind": KIND,
            "shape": self._shape,
            "counts": self._counts,
            "classes": classes,
            "mean": mean_C,
            "std": std_C,
            "content": {name: digest.hexdigest() for name, digest in self._hashes.items()},
        }
        manifest["fingerprint"] = _fingerprint(manifest)
        write_manifest(self._folder, manifest, self._names)
        return manifest

    def close(self) -> None:
        """Let go of the files; what was not finished is of no use."""
        for stream in self._streams.values():
            stream.close()

    def _write(self, name: str, content: bytes) -> None:
        self._streams[name].write(content)
        self._hashes[name].update(content)


def _count_shades(pixels_NCSS: np.ndarray) -> np.ndarray:
    """How often each value occurs in each channel (C, 256)."""
    channels = range(pixels_NCSS.shape[1])
    return np.stack([np.bincount(pixels_NCSS[:, c].ravel(), minlength=256) for c in channels])


def _mean_and_std(shades_CV: np.ndarray) -> tuple[list[float], list[float]]:
    """Of each channel on a scale to 1, from exact sums: the same however the images came."""
    mean_C, std_C = [], []
    for channel, shades_V in enumerate(shades_CV.tolist()):
        count = sum(shades_V)
        total = sum(value * times for value, times in enumerate(shades_V))
        squares = sum(value * value * times for value, times in enumerate(shades_V))
        spread = count * squares - total * total
        if spread == 0:
            raise DataError(
                f"channel {channel} has the same value in every pixel of the training images: "
                "there is nothing to learn from it; check the images"
            )
        mean_C.append(total / (255 * count))
        std_C.append(math.sqrt(spread) / (255 * count))
    return mean_C, std_C


def _mapped(folder: Path, side: str, manifest: dict[str, Any]) -> LabelledImages:
    count = int(manifest["counts"][side])
    shape = (count, *manifest["shape"])
    return LabelledImages(
        np.memmap(folder / f"{side}.pixels", dtype=np.uint8, mode="r", shape=shape),
        np.memmap(folder / f"{side}.labels", dtype=_LABEL, mode="r", shape=(count,)),
    )


def _fingerprint(manifest: dict[str, Any]) -> str:
    """A hash of the images themselves and their classes' number, not of where they came from."""
    told = {key: manifest[key] for key in ("shape", "counts", "mean", "std", "content")}
    text = json.dumps([told, len(manifest["classes"])], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
