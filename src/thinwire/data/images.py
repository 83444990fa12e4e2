"""A prepared set of labelled images on disk: pixels and labels of two sides, and a manifest.

    train.pixels, test.pixels   nothing but bytes, N x C x S x S
    train.labels, test.labels   little-endian uint16
    manifest.json               sizes and hashes of the others, and what they were made from

As with a corpus of tokens, the folder appears under its name only when it is complete, is never
changed afterwards, and every stage that needs images maps the same files into memory.

Shapes: N images, C channels, S pixels a side.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.data.image_files import SIDES, ImageFiles, find_images
from thinwire.data.prepared import (
    FolderWriter,
    Progress,
    damaged,
    digest,
    found_or_made,
    new_folder,
    opening,
)
from thinwire.errors import DataError

KIND = "images"
FILES = [f"{side}.{part}" for side in SIDES for part in ("pixels", "labels")]
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
        with opening(folder, _fingerprint) as manifest:
            if manifest["kind"] != KIND:
                raise damaged(folder, f"it holds {manifest['kind']}, not {KIND}")
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

    def template(self) -> None:
        """What a tokenizer may have."""
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

    `progress(phase, done, total)` gets the bytes read so far. Only the coordinator calls this.
    """
    cache, found = Path(cache), find_images(path)
    with ExitStack() as leaving:

        def read() -> tuple[str, Callable[[Path], None]]:
            """Read everything once: it is written while its content is hashed."""
            writer = leaving.enter_context(new_folder(cache, KIND, FILES))
            content = _write(found, writer, progress or (lambda phase, done, total: None))
            return content, writer.settle

        return found_or_made(cache, [found.files], [KIND], read, ImageSet.open)


def _write(found: ImageFiles, writer: FolderWriter, report: Progress) -> str:
    """Write all images and what is said of them; returns what tells this set from others."""
    total = sum(file.size for file in found.files)
    counts = dict.fromkeys(SIDES, 0)
    labels, shape = 0, ()
    shades_CV = np.zeros((1, 256), dtype=np.int64)
    for side, pixels_NCSS, labels_N, consumed in found.read():
        writer.append(f"{side}.pixels", pixels_NCSS.tobytes())
        writer.append(f"{side}.labels", labels_N.astype(_LABEL).tobytes())
        counts[side] += len(labels_N)
        labels, shape = max(labels, int(labels_N.max()) + 1), pixels_NCSS.shape[1:]
        if side == "train":
            shades_CV = shades_CV + _count_shades(pixels_NCSS)
        report("reading", consumed, total)
    classes = found.classes or [str(label) for label in range(labels)]
    if len(classes) > np.iinfo(_LABEL).max + 1:
        raise DataError(f"there are {len(classes)} classes: more than a label can hold")
    mean_C, std_C = _mean_and_std(shades_CV)
    facts: dict[str, Any] = {
        "kind": KIND,
        "shape": shape,
        "counts": counts,
        "classes": classes,
        "mean": mean_C,
        "std": std_C,
        "content": {name: writer.hash(name) for name in FILES},
    }
    fingerprint = _fingerprint(facts)
    writer.finish({**facts, "fingerprint": fingerprint})
    return f"{fingerprint} {classes}"


def _count_shades(pixels_NCSS: np.ndarray) -> np.ndarray:
    """How often each value occurs in each channel (C, 256)."""
    channels = range(pixels_NCSS.shape[1])
    return np.stack([np.bincount(pixels_NCSS[:, c].ravel(), minlength=256) for c in channels])


def _mean_and_std(shades_CV: np.ndarray) -> tuple[list[float], list[float]]:
    """Of each channel on a scale to 1, from exact sums: the same however the images came."""
    mean_C, std_C = [], []
    for channel, shades_V in enumerate(shades_CV.tolist()):
        count, total, squares = (
            sum(times * value**power for value, times in enumerate(shades_V)) for power in range(3)
        )
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
    return digest([told, len(manifest["classes"])])
