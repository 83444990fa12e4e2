"""Which images a step trains on and how each is varied, computed from numbers alone.

A place in a run's endless sequence of images decides which image stands there and how it is cropped
and flipped, so neither depends on how a step is split into microbatches, and every stage finds the
same.

Shapes: B images of a microbatch, C channels, S pixels a side, N places.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.data.images import LabelledImages
from thinwire.data.order import Shuffled, shuffled
from thinwire.errors import DataError

IGNORED = -100
"""The label of an image that only fills up a batch: torch's cross-entropy leaves it out."""

PADDING = 4  # pixels by which a crop may lie off the middle

_LOW = np.uint64((1 << 31) - 1)
_STRIDE = np.uint64(0x9E3779B97F4A7C15)  # this and the multipliers below: SplitMix64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """A few images. What is on disk is read when it is asked for: one stage wants the pixels,
    another one the labels.
    """

    images: LabelledImages
    examples_B: np.ndarray  # the image's number, the same in every epoch
    place: int  # of the first image in the run
    counted: int  # images from here on only fill up the batch

    @property
    def pixels_BCSS(self) -> np.ndarray:
        """The images as they are on disk, uint8."""
        return np.ascontiguousarray(self.images.pixels_NCSS[self.examples_B])

    @property
    def labels_B(self) -> np.ndarray:
        """The classes; IGNORED where an image only fills up the batch."""
        labels_B = self.images.labels_N[self.examples_B].astype(np.int64)
        labels_B[self.counted :] = IGNORED
        return labels_B


class ImageOrder(Shuffled):
    """(step, microbatch) -> ImageBatch. The examples are the training images."""

    def __init__(self, images: LabelledImages, batch: int, microbatches: int, seed: int) -> None:
        super().__init__(len(images), batch, microbatches, seed)
        self.images = images
        if len(images) < batch:
            raise DataError(
                f"there are {len(images)} training images, fewer than one batch of {batch}: "
                "lower train.batch, or use more images"
            )

    def microbatch(self, step: int, microbatch: int) -> ImageBatch:
        """The images that belong to one microbatch of one step, both counted from 0."""
        examples_B = self.examples(step, microbatch)
        place = self.place(step, microbatch)
        return ImageBatch(self.images, examples_B, place, len(examples_B))


def evaluation_batch_count(images: LabelledImages, batch: int, limit: int = 0) -> int:
    """Batches that test images make, the last one filled up; at most `limit` unless it is 0."""
    count = -(-len(images) // batch)
    return min(count, limit) if limit else count


def evaluation_batch(images: LabelledImages, batch: int, number: int) -> ImageBatch:
    """Batch `number` of the test images, always of the full size.

    They come in one shuffled order for all runs: many sets are sorted by class, and a few batches
    must be a fair sample of them. A pipeline keeps its shapes, so where images are missing at the
    end others come again, with a label that counts for nothing: each image is tested once.
    """
    place = number * batch
    if not 0 <= place < len(images):
        raise ValueError(f"no batch {number} of {batch} in {len(images)} images")
    examples_B = shuffled(place, batch, len(images), seed=0)
    return ImageBatch(images, examples_B, place, min(batch, len(images) - place))


def augmented(pixels_BCSS: Tensor, seed: int, place: int, padding: int = PADDING) -> Tensor:
    """Each image shifted by up to `padding` pixels each way, black moving in, and half of them
    flipped: a function of the seed and the first image's place, on the images' own device.
    """
    batch, channels, side, _ = pixels_BCSS.shape
    device = pixels_BCSS.device
    draws_B = _draws(seed, place, batch)
    shifts = np.uint64(2 * padding + 1)
    flip_B, down_B, right_B = (
        torch.from_numpy(drawn_B.astype(np.int64)).to(device)
        for drawn_B in (
            draws_B >> np.uint64(63),
            (draws_B & _LOW) % shifts,
            (draws_B >> np.uint64(31) & _LOW) % shifts,
        )
    )
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


def normalised(
    pixels_BCSS: Tensor, mean_C: tuple[float, ...], std_C: tuple[float, ...], dtype: torch.dtype
) -> Tensor:
    """What the model reads: each channel with the training images' mean taken off and their
    spread made 1.
    """
    wide_BCSS = pixels_BCSS.to(dtype)
    mean_C11, std_C11 = (wide_BCSS.new_tensor(one).view(-1, 1, 1) for one in (mean_C, std_C))
    return (wide_BCSS / 255 - mean_C11) / std_C11


def _draws(seed: int, place: int, count: int) -> np.ndarray:
    """64 random bits for each place, by the generator SplitMix64: plain arithmetic modulo 2**64,
    so no version of a library can change them.
    """
    key = hashlib.blake2b(f"thinwire augmentation {seed}".encode(), digest_size=8).digest()
    places_N = np.arange(place, place + count, dtype=np.uint64)
    values_N = (places_N + np.uint64(1)) * _STRIDE + np.uint64(int.from_bytes(key, "little"))
    for shift, multiplier in _ROUNDS:
        values_N = (values_N ^ (values_N >> np.uint64(shift))) * np.uint64(multiplier)
    return values_N
