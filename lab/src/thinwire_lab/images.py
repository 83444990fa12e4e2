"""Labelled images for the study of codecs: read from disk, shuffled, varied and normalised.

CIFAR-10's binary batches (the folder or its .tar.gz), or an .npz with x_train, y_train, x_test and
y_test. Seed and step decide which images a batch has and how they are cropped and flipped.

Shapes: N images, B of a batch, C channels, S pixels a side.
"""

import hashlib
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.data.order import Shuffled, shuffled
from thinwire.errors import DataError
from thinwire.model.llama import generator_of

SIDES = ("train", "test")
CIFAR_BATCHES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
CIFAR_FOLDER = "cifar-10-batches-bin"  # as the archive names it
CIFAR_CLASSES = 10
IGNORED = -100  # the label of an image that only fills up a batch
PADDING = 4  # pixels by which a crop may lie off the middle
_RECORD = 1 + 3 * 32 * 32  # a label, then the red, the green and the blue pixels


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """The images of one side."""

    pixels_NCSS: np.ndarray  # uint8
    labels_N: np.ndarray

    def __len__(self) -> int:
        return len(self.labels_N)


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images to train on and images to test with."""

    train: LabelledImages
    test: LabelledImages
    classes: int
    mean_C: list[float]  # of the training pixels, from 0 for black to 1
    std_C: list[float]

    @classmethod
    def read(cls, path: str | Path) -> "ImageSet":
        """The images at `path`; DataError says what was expected there."""
        root = Path(path).expanduser()
        try:
            if root.suffix == ".npz":
                train, test = (_of_npz(root, side) for side in SIDES)
            else:
                train, test = _of_cifar(root)
        except (OSError, KeyError, ValueError, tarfile.TarError, zipfile.BadZipFile) as error:
            raise DataError(
                f"cannot read images from {root} ({error}): CIFAR-10's binary batches are needed "
                "(cifar-10-binary.tar.gz or its folder), or an .npz with x_train, y_train, x_test "
                "and y_test"
            ) from error
        classes = int(max(train.labels_N.max(), test.labels_N.max())) + 1
        shades = train.pixels_NCSS
        mean_C, std_C = (way(shades, axis=(0, 2, 3)) / 255 for way in (np.mean, np.std))
        if not std_C.all():
            raise DataError("a channel has the same value in every pixel: check the images")
        return cls(train, test, classes, mean_C.tolist(), std_C.tolist())

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, and pixels a side twice."""
        return self.train.pixels_NCSS.shape[1:]

    @property
    def fingerprint(self) -> str:
        """A hash of the images and labels, whatever file they came from."""
        found = hashlib.blake2b(repr((self.shape, self.classes)).encode(), digest_size=16)
        for images in (self.train, self.test):
            found.update(images.pixels_NCSS.tobytes() + images.labels_N.astype("<u2").tobytes())
        return found.hexdigest()

    def summary(self) -> str:
        """One line for the log."""
        return (
            f"image set {self.fingerprint[:12]}: {len(self.train):,} training and "
            f"{len(self.test):,} test images of {' x '.join(map(str, self.shape))}, "
            f"{self.classes} classes"
        )


class ImageFeed:
    """(step) -> the images of a batch and their classes; examples are the training images."""

    def __init__(
        self, images: ImageSet, batch: int, seed: int, augment: bool, device: torch.device
    ):
        if len(images.train) < batch:
            raise DataError(f"{len(images.train)} training images are fewer than one batch")
        self._images, self._batch, self._augment, self._device = images, batch, augment, device
        self._order = Shuffled(len(images.train), batch, 1, seed)
        self.example_count = len(images.train)
        self.validation_count = -(-len(images.test) // batch)

    def examples(self, step: int, microbatch: int) -> tuple[int, ...]:
        """Which training images a step has."""
        return tuple(self._order.examples(step, microbatch).tolist())

    def training(self, step: int) -> tuple[Tensor, Tensor]:
        """Normalised images (B, C, S, S) of a step and their classes (B)."""
        examples_B = self._order.examples(step, 0)
        pixels_BCSS, labels_B = self._at(self._images.train, examples_B)
        if self._augment:
            pixels_BCSS = augmented(pixels_BCSS, self._order.seed, step)
        return self._normalised(pixels_BCSS), labels_B

    def validation(self, number: int) -> tuple[Tensor, Tensor]:
        """A batch of test images in one shuffled order for all runs, always of the full size.

        Images that come again to fill the last one have a label that counts for nothing.
        """
        test, place = self._images.test, number * self._batch
        examples_B = shuffled(place, self._batch, len(test), seed=0)
        pixels_BCSS, labels_B = self._at(test, examples_B)
        labels_B[len(test) - place :] = IGNORED
        return self._normalised(pixels_BCSS), labels_B

    def _at(self, images: LabelledImages, examples_B: np.ndarray) -> tuple[Tensor, Tensor]:
        pixels_BCSS = torch.from_numpy(np.ascontiguousarray(images.pixels_NCSS[examples_B]))
        labels_B = torch.from_numpy(images.labels_N[examples_B].astype(np.int64))
        return pixels_BCSS.to(self._device), labels_B.to(self._device)

    def _normalised(self, pixels_BCSS: Tensor) -> Tensor:
        wide = pixels_BCSS.float()
        sides = (self._images.mean_C, self._images.std_C)
        mean_C11, std_C11 = (wide.new_tensor(one).view(-1, 1, 1) for one in sides)
        return (wide / 255 - mean_C11) / std_C11


def augmented(pixels_BCSS: Tensor, seed: int, step: int, padding: int = PADDING) -> Tensor:
    """Each image shifted by up to `padding` pixels each way, black moving in, and half of them
    flipped: a function of the seed and the step, on the images' own device.
    """
    batch, channels, side, _ = pixels_BCSS.shape
    device = pixels_BCSS.device
    draw = generator_of(f"augmentation of step {step}", seed)
    down_B, right_B = torch.randint(2 * padding + 1, (2, batch), generator=draw).to(device)
    flip_B = torch.randint(2, (batch,), generator=draw).to(device)
    along_S = torch.arange(side, device=device)
    rows_BS = down_B[:, None] + along_S
    columns_BS = right_B[:, None] + torch.where(flip_B[:, None] == 1, side - 1 - along_S, along_S)
    padded = F.pad(pixels_BCSS, (padding, padding, padding, padding))
    return padded[
        torch.arange(batch, device=device)[:, None, None, None],
        torch.arange(channels, device=device)[:, None, None],
        rows_BS[:, None, :, None],
        columns_BS[:, None, None, :],
    ]


def _of_npz(path: Path, side: str) -> LabelledImages:
    with np.load(path, allow_pickle=False) as archive:
        pixels, labels_N = archive[f"x_{side}"], archive[f"y_{side}"].reshape(-1)
    pixels_NCSS = pixels[:, None] if pixels.ndim == 3 else pixels
    if pixels_NCSS.shape[1] == pixels_NCSS.shape[2]:
        pixels_NCSS = np.ascontiguousarray(pixels_NCSS.transpose(0, 3, 1, 2))
    count, channels, high, wide = pixels_NCSS.shape
    if pixels_NCSS.dtype != np.uint8 or channels not in (1, 3) or high != wide:
        raise ValueError(f"x_{side} is {pixels.dtype} {pixels.shape}, not square uint8 images")
    if len(labels_N) != count or labels_N.min(initial=0) < 0:
        raise ValueError(f"y_{side} has {len(labels_N)} labels for {count} images, none below 0")
    return LabelledImages(pixels_NCSS, labels_N.astype(np.int64))


def _of_cifar(root: Path) -> list[LabelledImages]:
    """Records of a label and three planes: five batches to train on, one to test with."""
    if root.is_file():
        with tarfile.open(root) as archive:
            raw = [archive.extractfile(f"{CIFAR_FOLDER}/{name}").read() for name in CIFAR_BATCHES]  # type: ignore[union-attr]
    else:
        folder = root / CIFAR_FOLDER if (root / CIFAR_FOLDER).is_dir() else root
        raw = [(folder / name).read_bytes() for name in CIFAR_BATCHES]
    sides = []
    for part in (b"".join(raw[:-1]), raw[-1]):
        records = np.frombuffer(part, dtype=np.uint8).reshape(-1, _RECORD)
        labels_N = records[:, 0].astype(np.int64)
        if labels_N.max() >= CIFAR_CLASSES:
            raise ValueError("a label is not that of a class of CIFAR-10")
        sides.append(LabelledImages(records[:, 1:].reshape(-1, 3, 32, 32), labels_N))
    return sides
