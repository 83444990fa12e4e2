"""Images: read alike from every form, varied by seed and step alone, and cut without a trace."""

import dataclasses
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.errors import DataError
from thinwire_lab.image_chain import ImageChain, ImageSettings
from thinwire_lab.images import CIFAR_BATCHES, CIFAR_FOLDER, ImageFeed, ImageSet, augmented

CPU = torch.device("cpu")


def batches() -> dict[str, bytes]:
    """CIFAR-10 with four images in a batch."""
    rng = np.random.default_rng(0)
    records = [rng.integers(0, 256, (4, 1 + 3 * 32 * 32), dtype=np.uint8) for _ in CIFAR_BATCHES]
    for record in records:
        record[:, 0] = [0, 3, 9, 1]
    return {n: r.tobytes() for n, r in zip(CIFAR_BATCHES, records, strict=True)}


def written(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_folder_an_archive_and_an_npz_hold_the_same_images(tmp_path):
    files = batches()
    found = [ImageSet.read(written(tmp_path, files))]
    with tarfile.open(tmp_path / "cifar.tar.gz", "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{CIFAR_FOLDER}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    found.append(ImageSet.read(tmp_path / "cifar.tar.gz"))
    train, test = found[0].train, found[0].test
    np.savez(tmp_path / "same.npz", x_train=train.pixels_NCSS.transpose(0, 2, 3, 1),
             y_train=train.labels_N, x_test=test.pixels_NCSS.transpose(0, 2, 3, 1),
             y_test=test.labels_N[:, None])  # fmt: skip
    found.append(ImageSet.read(tmp_path / "same.npz"))
    assert len({images.fingerprint for images in found}) == 1
    assert (len(train), len(test), found[0].classes) == (20, 4, 10)
    pixels = train.pixels_NCSS[:, 0] / 255
    assert found[0].mean_C[0] == pytest.approx(pixels.mean())
    assert found[0].std_C[0] == pytest.approx(pixels.std())


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: b"\x0b" + raw[1:]])
def test_damaged_batches_are_refused(damage, tmp_path):
    files = batches()
    files[CIFAR_BATCHES[0]] = damage(files[CIFAR_BATCHES[0]])
    with pytest.raises(DataError, match="cannot read images from"):
        ImageSet.read(written(tmp_path, files))
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz"):
        ImageSet.read(tmp_path / "nothing")


def test_every_test_image_counts_once_and_variations_follow_the_step(tmp_path):
    images = ImageSet.read(written(tmp_path, batches()))
    feed = ImageFeed(images, 3, seed=1, augment=True, device=CPU)
    labels = torch.cat([feed.validation(number)[1] for number in range(feed.validation_count)])
    assert sorted(labels.tolist()) == [-100, -100, 0, 1, 3, 9]
    pixels = torch.from_numpy(images.train.pixels_NCSS[:4].copy())
    varied = augmented(pixels, seed=5, step=7)
    assert torch.equal(varied, augmented(pixels, seed=5, step=7))
    assert not torch.equal(varied, augmented(pixels, seed=6, step=7))
    assert not torch.equal(varied, augmented(pixels, seed=5, step=8))


def test_a_resnet_trains_to_the_same_bits_wherever_it_is_cut(tmp_path):
    images = ImageSet.read(written(tmp_path, batches()))
    base = {"run": {"device": "cpu", "threads": 1}, "train": {"batch": 4}, "model": {"dim": 4},
            "codec": {"forward": "fp32", "backward": "fp32"}}  # fmt: skip
    settings = ImageSettings.from_plain(base)
    whole = dataclasses.replace(settings, pipeline=type(settings.pipeline)(1))
    chains = [ImageChain(one, images) for one in (settings, whole)]
    losses = [[chain.train_step(step) for step in range(3)] for chain in chains]
    assert losses[0] == losses[1] and chains[0].score() == chains[1].score()
    assert len(chains[0].cuts) == 3 and not chains[1].cuts
