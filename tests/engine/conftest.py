"""Runs for the tests of the engine: on tiny images, and with codecs that remember."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_runs import CLASSES, SIDE, TEST, TRAIN
from remembering import ByExample, Delta

from settings_values import with_changes
from thinwire.codec import parse
from thinwire.data import ImageSet, prepare_images
from thinwire.settings import Settings


@pytest.fixture(scope="module")
def npz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise with a bright band that tells the class: a few steps learn something of it."""
    rng = np.random.default_rng(0)
    arrays = {}
    for side, count in (("train", TRAIN), ("test", TEST)):
        labels = np.arange(count) % CLASSES
        images = rng.integers(0, 120, size=(count, SIDE, SIDE, 3), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 2] += 120
        arrays |= {f"x_{side}": images, f"y_{side}": labels}
    path = tmp_path_factory.mktemp("images") / "bands.npz"
    np.savez(path, **arrays)
    return path


@pytest.fixture(scope="module")
def images(npz: Path, tmp_path_factory: pytest.TempPathFactory) -> ImageSet:
    return prepare_images(str(npz), tmp_path_factory.mktemp("cache"))


@pytest.fixture
def image_settings(npz: Path, tmp_path: Path) -> Callable[..., Settings]:
    """A tiny exact run; `section__key=value` changes one key."""

    def make(**changes: Any) -> Settings:
        values: dict[str, dict[str, Any]] = {
            "run": {"name": "test", "out": str(tmp_path), "device": "cpu", "precision": "fp64",
                    "threads": 1},
            "model": {"preset": "resnet18", "dim": 2, "classes": CLASSES, "side": SIDE},
            "data": {"source": "images", "path": str(npz)},
            "pipeline": {"stages": 2, "microbatches": 2, "schedule": "gpipe"},
            "link": {"emulate": False},
            "codec": {"forward": "fp64", "backward": "fp64"},
            "optim": {"name": "sgd", "lr": 0.05, "weight_decay": 0.01, "warmup": 0, "floor": 0.0,
                      "clip": 2.0},
            "train": {"steps": 4, "batch": 10, "eval_every": 2, "eval_batches": 0,
                      "checkpoint_every": 0},
        }  # fmt: skip
        return with_changes(values, changes)

    return make


@pytest.fixture
def run_images(run_in_threads: Callable, images: ImageSet) -> Callable:
    def run(settings: Settings, **options: Any) -> Any:
        return run_in_threads(settings, data=images.folder, **options)

    return run


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The codecs of remembering.py can be named in settings."""
    for codec in (Delta, ByExample):
        monkeypatch.setitem(parse._CODECS, codec.name, codec)


@pytest.fixture
def settings_with(known: None, make_settings: Callable[..., Settings]) -> Callable[..., Settings]:
    """Six float32 steps, saved in the middle, with a codec that remembers in both legs."""

    def make(**changes: Any) -> Settings:
        return make_settings(
            **{
                "run__precision": "fp32",
                "codec__forward": "delta",
                "codec__backward": "delta",
                "train__steps": 6,
                "train__checkpoint_every": 3,
                **changes,
            }
        )

    return make
