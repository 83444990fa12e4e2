"""Which images a step trains on, and how each is varied: functions of numbers alone."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.data import Order
from thinwire.data.image_batches import (
    IGNORED,
    ImageOrder,
    augmented,
    evaluation_batch,
    evaluation_batch_count,
    normalised,
)
from thinwire.data.images import LabelledImages
from thinwire.data.order import shuffled
from thinwire.errors import ConfigError, DataError


def labelled(count: int, side: int = 8, channels: int = 3) -> LabelledImages:
    rng = np.random.default_rng(9)
    pixels = rng.integers(256, size=(count, channels, side, side), dtype=np.uint8)
    return LabelledImages(pixels, np.arange(count, dtype=np.uint16) % 10)


def pixels_of(count: int, side: int = 8) -> Tensor:
    return torch.from_numpy(labelled(count, side).pixels_NCSS)


def test_every_epoch_visits_each_image_once_in_an_order_of_its_own() -> None:
    order = ImageOrder(labelled(100), batch=12, microbatches=3, seed=5)
    found = [order.microbatch(s, m).examples_B for s in range(25) for m in range(3)]
    epochs = np.concatenate(found).reshape(3, 100)
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [order.epoch_of(step) for step in (0, 8, 9, 16, 17)] == [0, 0, 1, 1, 2]
    other = ImageOrder(labelled(100), batch=12, microbatches=3, seed=6)
    assert not np.array_equal(other.microbatch(0, 0).examples_B, found[0])


def test_the_order_is_that_of_windows_of_text() -> None:
    """A corpus with as many windows as there are images is visited in the same order."""
    text = Order(np.arange(101), context=1, batch=12, microbatches=3, seed=5)
    ours = ImageOrder(labelled(100), batch=12, microbatches=3, seed=5)
    for step, microbatch in itertools.product((0, 8, 500), range(3)):
        expected = text.microbatch(step, microbatch).examples_B
        assert np.array_equal(ours.microbatch(step, microbatch).examples_B, expected)


def test_places_may_span_several_epochs() -> None:
    whole = shuffled(0, 50, 7, seed=1)
    assert np.array_equal(shuffled(11, 30, 7, seed=1), whole[11:41])
    assert all(sorted(whole[e : e + 7]) == list(range(7)) for e in range(0, 49, 7))


def test_a_batch_holds_the_images_of_its_examples() -> None:
    images = labelled(100)
    batch = ImageOrder(images, batch=12, microbatches=3, seed=5).microbatch(7, 1)
    assert batch.place == 7 * 12 + 4
    assert np.array_equal(batch.pixels_BCSS, images.pixels_NCSS[batch.examples_B])
    assert np.array_equal(batch.labels_B, batch.examples_B % 10)
    for array in (batch.pixels_BCSS, batch.labels_B, batch.examples_B):
        assert type(array) is np.ndarray and array.flags.writeable and array.flags.c_contiguous
    assert batch.pixels_BCSS.dtype == np.uint8
    assert batch.labels_B.dtype == batch.examples_B.dtype == np.int64


@pytest.mark.parametrize("wrong", [{"batch": 7}, {"batch": 0}, {"microbatches": 0}])
def test_impossible_sizes_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="microbatches"):
        ImageOrder(labelled(20), **{"batch": 6, "microbatches": 3, "seed": 0, **wrong})


def test_too_few_images_and_no_such_microbatch() -> None:
    with pytest.raises(DataError, match="20 training images, fewer than one batch of 21"):
        ImageOrder(labelled(20), 21, 1, 0)
    order = ImageOrder(labelled(20), 6, 3, 0)
    for step, microbatch in ((-1, 0), (0, 3), (0, -1)):
        with pytest.raises(ValueError, match="no microbatch"):
            order.microbatch(step, microbatch)


@pytest.mark.parametrize("size", [1, 4, 6, 10, 23])
def test_each_test_image_counts_once_in_batches_of_one_size(size: int) -> None:
    images = labelled(10)
    count = evaluation_batch_count(images, size)
    batches = [evaluation_batch(images, size, number) for number in range(count)]
    assert {len(batch.labels_B) for batch in batches} == {size}
    counted = np.concatenate([b.examples_B[b.labels_B != IGNORED] for b in batches])
    assert sorted(counted) == list(range(10))
    assert counted.tolist() != list(range(10)), "sets are often sorted by class"
    for batch in batches:
        assert np.array_equal(batch.pixels_BCSS, images.pixels_NCSS[batch.examples_B])
        kept = batch.labels_B != IGNORED
        assert np.array_equal(batch.labels_B[kept], images.labels_N[batch.examples_B[kept]])
    with pytest.raises(ValueError, match="no batch"):
        evaluation_batch(images, size, len(batches))
    assert evaluation_batch_count(images, 1, limit=3) == 3
    assert evaluation_batch_count(images, 10, limit=3) == 1


def test_what_fills_a_batch_up_adds_nothing_to_the_loss() -> None:
    logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    labels = torch.from_numpy(evaluation_batch(labelled(10), 6, 1).labels_B)
    expected = F.cross_entropy(logits[:4], labels[:4])
    assert torch.equal(F.cross_entropy(logits, labels), expected)


def one_by_one(pixels_BCSS: Tensor, views: list[tuple[int, int, bool]]) -> Tensor:
    """Crops written out: a black canvas, the image on it, the part that is seen, its mirror."""
    seen = []
    for image, (down, right, flipped) in zip(pixels_BCSS.numpy(), views, strict=True):
        channels, side, _ = image.shape
        canvas = np.zeros((channels, side + 8, side + 8), dtype=np.uint8)
        canvas[:, 4 : side + 4, 4 : side + 4] = image
        view = canvas[:, down : down + side, right : right + side]
        seen.append(view[:, :, ::-1] if flipped else view)
    return torch.from_numpy(np.stack(seen))


def views_of(seed: int, place: int, count: int) -> list[tuple[int, int, bool]]:
    """What `augmented` does, read off images with two marked pixels in the middle."""
    marked = torch.zeros(count, 1, 17, 17, dtype=torch.uint8)
    marked[:, :, 8, 8], marked[:, :, 8, 9] = 2, 1
    found = augmented(marked, seed, place)
    middles = (found == 2).nonzero()
    assert len(middles) == count
    seen = []
    for number, _, row, column in middles.tolist():
        flipped = bool(found[number, 0, row, column - 1] == 1)
        right = 12 - (16 - column if flipped else column)
        seen.append((12 - row, right, flipped))
    return seen


def test_augmentation_is_a_crop_of_the_padded_image_and_a_flip() -> None:
    pixels = pixels_of(40, 10)
    found = augmented(pixels, seed=3, place=1000)
    assert found.dtype == torch.uint8 and found.shape == pixels.shape
    assert torch.equal(found, one_by_one(pixels, views_of(3, 1000, 40)))


def test_augmentation_follows_the_place_alone() -> None:
    pixels = pixels_of(24, 10)
    whole = augmented(pixels, seed=3, place=96)
    parts = [augmented(pixels[at : at + 6], 3, 96 + at) for at in range(0, 24, 6)]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(augmented(pixels, seed=4, place=96), whole)
    assert not torch.equal(augmented(pixels, seed=3, place=97), whole)
    assert torch.equal(
        augmented(pixels, 3, 96, padding=0).sort(dim=3).values, pixels.sort(3).values
    )


def test_every_view_is_as_likely_as_any_other() -> None:
    count = 162 * 200
    views = views_of(0, 0, count)
    times = dict.fromkeys(itertools.product(range(9), range(9), (False, True)), 0)
    for view in views:
        times[view] += 1
    # of 162 counts around 200 none strays by five spreads, and together they stray as chance does
    assert max(abs(n - 200) for n in times.values()) < 5 * 200**0.5
    chi_square = sum((n - 200) ** 2 / 200 for n in times.values())
    assert abs(chi_square - 161) < 5 * (2 * 161) ** 0.5
    repeats = sum(a == b for a, b in itertools.pairwise(views))
    assert abs(repeats - count / 162) < 5 * (count / 162) ** 0.5


def test_normalised_images_have_mean_zero_and_spread_one() -> None:
    scaled = labelled(40).pixels_NCSS / 255
    mean_C, std_C = tuple(scaled.mean((0, 2, 3))), tuple(scaled.std((0, 2, 3)))
    pixels = pixels_of(40)
    found = normalised(pixels, mean_C, std_C, torch.float64)
    assert found.mean((0, 2, 3)).abs().max() < 1e-12
    assert (found.square().mean((0, 2, 3)) - 1).abs().max() < 1e-12
    narrow = normalised(pixels, mean_C, std_C, torch.float32)
    assert narrow.dtype == torch.float32
    assert (narrow - found).abs().max() < 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_augmentation_is_the_same_on_a_gpu() -> None:
    pixels = pixels_of(40, 10)
    assert torch.equal(augmented(pixels.cuda(), 3, 5).cpu(), augmented(pixels, 3, 5))
