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
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.data.cache import _digest, _Seen
from thinwire.data.corpus import (
    FORMAT,
    MANIFEST,
    _check_file,
    _close,
    _damaged,
    _file_entry,
    _read_manifest,
    _rename,
)
from thinwire.data.image_files import SIDES, ImageFiles, Piece, find_images
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
        """Open what `prepare_images` wrote; refuse a folder that is incomplete or was altered.

        Files are checked as those of a corpus: by size, and by a hash of blocks spread over them.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder)
        try:
            if manifest["kind"] != KIND:
                raise _damaged(folder, f"it holds {manifest['kind']}, not {KIND}")
            for name, entry in manifest["files"].items():
                _check_file(folder, name, entry)
            if manifest["fingerprint"] != _fingerprint(manifest):
                raise _damaged(folder, "the fingerprint does not belong to these files")
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
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(folder, f"its {MANIFEST} is not usable ({error!r})") from error
        except OSError as error:
            raise _damaged(folder, f"{error}") from error

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
    seen = _Seen(cache, found.files)
    name = seen.recall()
    if name is None or not (cache / name).is_dir():
        name = _write(found, cache, progress or (lambda phase, done, total: None))
        seen.remember(name)
    return ImageSet.open(cache / name)


def _write(found: ImageFiles, cache: Path, report: Progress) -> str:
    """Write the set beside its place and rename it there at the end; the name it has there."""
    total = sum(file.size for file in found.files)
    partial: Path | None = None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{KIND}.partial-", dir=cache))
        partial.chmod(0o755)  # as an ordinary folder: other users may run stages
        writer = _Writer(partial)
        try:
            for piece in found.read():
                writer.append(piece)
                report("reading", piece.consumed, total)
            manifest = writer.finish(found.classes)
        finally:
            writer.close()
        name = f"{KIND}-{_digest([manifest['fingerprint'], manifest['classes']])}"
        _rename(partial, cache / name)
        return name
    except OSError as error:
        raise DataError(f"cannot write the prepared images to {cache}: {error}") from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


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
            _close(stream)
        classes = classes or [str(label) for label in range(self._labels)]
        if len(classes) > np.iinfo(_LABEL).max + 1:
            raise DataError(f"there are {len(classes)} classes: more than labels have room for")
        mean_C, std_C = _mean_and_std(self._shades_CV)
        manifest = {
            "format": FORMAT,
            "kind": KIND,
            "shape": self._shape,
            "counts": self._counts,
            "classes": classes,
            "mean": mean_C,
            "std": std_C,
            "content": {name: digest.hexdigest() for name, digest in self._hashes.items()},
            "files": {name: _file_entry(self._folder / name) for name in self._names},
        }
        manifest["fingerprint"] = _fingerprint(manifest)
        with (self._folder / MANIFEST).open("wb") as stream:
            stream.write(json.dumps(manifest, indent=2).encode())
            _close(stream)
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
