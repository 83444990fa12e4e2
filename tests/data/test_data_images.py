"""One set of images whatever form it has on disk, and plain refusals of all else."""

import io
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from thinwire.data import Corpus, DataConfig, prepare, unpack
from thinwire.data import image_files as files_module
from thinwire.data import prepared as prepared_module
from thinwire.data.image_batches import ImageOrder
from thinwire.data.image_files import CIFAR_CLASSES
from thinwire.data.images import ImageSet, prepare_images
from thinwire.errors import DataError

TRAIN_LABELS = np.repeat(np.arange(10), 2)
TEST_LABELS = np.array([0, 3, 3, 9])


def small_images(count: int, seed: int, side: int = 32, channels: int = 3) -> np.ndarray:
    """Images as a person sees them, (N, S, S, C)."""
    rng = np.random.default_rng(seed)
    return rng.integers(256, size=(count, side, side, channels), dtype=np.uint8)


TRAIN, TEST = small_images(20, 1), small_images(4, 2)


def record(label: int, image: np.ndarray) -> bytes:
    return bytes([label]) + b"".join(image[:, :, c].tobytes() for c in range(3))


def write_batches(folder: Path) -> Path:
    """CIFAR's six files, four images in each."""
    folder.mkdir(parents=True)
    for batch in range(5):
        rows = [record(TRAIN_LABELS[i], TRAIN[i]) for i in range(4 * batch, 4 * batch + 4)]
        (folder / f"data_batch_{batch + 1}.bin").write_bytes(b"".join(rows))
    rows = [record(label, image) for label, image in zip(TEST_LABELS, TEST, strict=True)]
    (folder / "test_batch.bin").write_bytes(b"".join(rows))
    (folder / "batches.meta.txt").write_text("\n".join(CIFAR_CLASSES))
    return folder


def write_archive(path: Path, folder: Path) -> Path:
    """The files in another order than their own, as in CIFAR's own archive."""
    with tarfile.open(path, "w:gz") as archive:
        for name in sorted(folder.iterdir(), key=lambda p: p.name[::-1]):
            archive.add(name, f"cifar-10-batches-bin/{name.name}")
    return path


def write_npz(path: Path, **changes: np.ndarray | None) -> Path:
    arrays = {
        "x_train": TRAIN,
        "y_train": TRAIN_LABELS.astype(np.uint8)[:, None],
        "x_test": TEST,
        "y_test": TEST_LABELS.astype(np.uint8)[:, None],
        **changes,
    }
    np.savez_compressed(path, **{name: a for name, a in arrays.items() if a is not None})
    return path


def write_pictures(folder: Path) -> Path:
    for side, images, labels in (("train", TRAIN, TRAIN_LABELS), ("test", TEST, TEST_LABELS)):
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            place = folder / side / CIFAR_CLASSES[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{number:04d}.png")
    (folder / "train" / "bird" / "notes.txt").write_text("left alone")
    return folder


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    return write_batches(tmp_path / "cifar")


@pytest.fixture
def images(cifar: Path, cache: Path) -> ImageSet:
    return prepare_images(str(cifar), cache)


def test_every_form_on_disk_is_the_same_set(
    tmp_path: Path, cifar: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "_PIECE", 3)  # pictures come in several pieces
    first = {"x_train": None, "y_train": None, "x_test": None, "y_test": None}
    planes = {
        "train_images": TRAIN.transpose(0, 3, 1, 2),
        "train_labels": TRAIN_LABELS,
        "Test_Images": TEST.transpose(0, 3, 1, 2),
        "Test_Labels": TEST_LABELS.astype(np.int32),
    }
    forms = [
        cifar,
        write_batches(tmp_path / "unpacked" / "cifar-10-batches-bin").parent,
        write_archive(tmp_path / "cifar-10-binary.tar.gz", cifar),
        write_npz(tmp_path / "keras.npz"),
        write_npz(tmp_path / "planes.npz", **first, **planes),
        write_pictures(tmp_path / "pictures"),
    ]
    sets = [prepare_images(str(form), cache) for form in forms]
    assert len({one.fingerprint for one in sets}) == 1
    assert {one.classes for one in sets} == {CIFAR_CLASSES, tuple("0123456789")}
    for one in sets:
        assert np.array_equal(one.train.pixels_NCSS, TRAIN.transpose(0, 3, 1, 2))
        assert np.array_equal(one.test.pixels_NCSS, TEST.transpose(0, 3, 1, 2))
        assert one.train.labels_N.tolist() == TRAIN_LABELS.tolist()
        assert one.test.labels_N.tolist() == TEST_LABELS.tolist()
        assert (one.channels, one.side) == (3, 32)
    assert "20 training and 4 test images of 3 x 32 x 32, 10 classes" in sets[0].summary()


def test_any_change_of_content_changes_the_fingerprint(tmp_path: Path, cache: Path) -> None:
    pixel, label = TRAIN.copy(), TEST_LABELS.copy()
    pixel[7, 3, 4, 1] ^= 1
    label[2] = 4
    changes = [{}, {"x_train": pixel}, {"y_test": label}, {"x_test": TEST[:3], "y_test": label[:3]}]
    found = {
        prepare_images(str(write_npz(tmp_path / f"{i}.npz", **change)), cache).fingerprint
        for i, change in enumerate(changes)
    }
    assert len(found) == len(changes)


def test_mean_and_spread_are_those_of_the_training_pixels(images: ImageSet) -> None:
    scaled = TRAIN / 255
    assert np.allclose(images.mean_C, scaled.mean((0, 1, 2)), rtol=1e-12)
    assert np.allclose(images.std_C, scaled.std((0, 1, 2)), rtol=1e-12)


def test_grey_images_have_one_channel(tmp_path: Path, cache: Path) -> None:
    grey, grey_test = small_images(20, 3, 28, 1), small_images(4, 4, 28, 1)
    flat = write_npz(tmp_path / "a.npz", x_train=grey[..., 0], x_test=grey_test[..., 0])
    deep = write_npz(tmp_path / "b.npz", x_train=grey, x_test=grey_test)
    sets = [prepare_images(str(path), cache) for path in (flat, deep)]
    assert sets[0].fingerprint == sets[1].fingerprint
    assert sets[0].train.pixels_NCSS.shape == (20, 1, 28, 28)
    assert len(sets[0].mean_C) == 1


def test_a_set_is_read_once_until_it_changes(
    cifar: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_module, "_CLOCK_TICK_NS", -1)
    reports: list[tuple[str, int, int]] = []

    def prepared() -> ImageSet:
        return prepare_images(str(cifar), cache, lambda *report: reports.append(report))

    first = prepared()
    assert [done for _, done, _ in reports] == [4 * 3073 * batch for batch in range(1, 7)]
    assert {total for _, _, total in reports} == {24 * 3073}
    reports.clear()
    assert prepared().folder == first.folder and not reports
    (cifar / "test_batch.bin").write_bytes((cifar / "data_batch_1.bin").read_bytes())
    assert prepared().fingerprint != first.fingerprint and reports


def test_what_was_prepared_stays_as_it_was(images: ImageSet) -> None:
    with pytest.raises(ValueError, match="read-only"):
        images.train.pixels_NCSS[0, 0, 0, 0] = 1


@pytest.mark.parametrize("name", ["train.pixels", "test.labels"])
def test_altered_and_truncated_sets_are_refused(images: ImageSet, name: str) -> None:
    raw = (images.folder / name).read_bytes()
    (images.folder / name).write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    with pytest.raises(DataError, match=f"{name} was altered; delete the folder"):
        ImageSet.open(images.folder)
    (images.folder / name).write_bytes(raw[:-1])
    with pytest.raises(DataError, match=f"{name} has {len(raw) - 1} bytes instead of {len(raw)}"):
        ImageSet.open(images.folder)
    (images.folder / name).unlink()
    with pytest.raises(DataError, match="damaged"):
        ImageSet.open(images.folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mean": [0.5, 0.5, 0.5]}, "fingerprint does not belong"),
        ({"counts": {"train": 2, "test": 4}}, "fingerprint does not belong"),
        ({"kind": "tokens"}, "it holds tokens, not images"),
        ({"files": None}, "not usable"),
    ],
)
def test_an_altered_manifest_is_refused(images: ImageSet, change: dict, message: str) -> None:
    path = images.folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=message):
        ImageSet.open(images.folder)


def test_a_corpus_of_tokens_is_no_image_set_nor_the_other_way_round(
    images: ImageSet, tmp_path: Path, cache: Path
) -> None:
    np.arange(100, dtype="<u2").tofile(tmp_path / "tokens.bin")
    config = DataConfig(source="tokens", path=str(tmp_path / "tokens.bin"))
    corpus = prepare(config, 100, cache)
    with pytest.raises(DataError, match="not usable"):
        ImageSet.open(corpus.folder)
    with pytest.raises(DataError, match="not usable"):
        Corpus.open(images.folder)


def refused(path: Path, cache: Path, message: str) -> None:
    """Refused with this message, and with nothing left behind."""
    with pytest.raises(DataError, match=message):
        prepare_images(str(path), cache)
    assert not cache.exists() or not any(cache.iterdir())


def test_a_path_that_holds_no_images_says_what_was_expected(tmp_path: Path, cache: Path) -> None:
    refused(tmp_path / "nowhere", cache, "does not exist")
    refused(tmp_path, cache, r"no images in .*expected CIFAR-10's binary batches.*npz.*train/CLASS")
    (tmp_path / "a.txt").write_text("text")
    refused(tmp_path / "a.txt", cache, "a.txt is not an image dataset: expected")
    with pytest.raises(DataError, match=r"needs data\.path"):
        prepare_images("", cache)


def test_damaged_batches_are_refused(cifar: Path, cache: Path) -> None:
    path, raw = cifar / "data_batch_3.bin", (cifar / "data_batch_3.bin").read_bytes()
    path.write_bytes(raw[:-1])
    refused(cifar, cache, r"data_batch_3.bin has 12291 bytes, but 4 images as in the first batch")
    path.write_bytes(raw[: 3 * 3073])
    refused(cifar, cache, r"data_batch_3.bin has 9219 bytes.*12292: it is truncated")
    path.write_bytes(raw[: 2 * 3073] + b"\x0a" + raw[2 * 3073 + 1 :])
    refused(cifar, cache, r"batch_3.bin: image 2 has the label 10, .*classes are numbered 0..9")
    path.unlink()
    refused(cifar, cache, "has no data_batch_3.bin: CIFAR-10 has five training batches")
    path.write_bytes(raw)
    (cifar / "data_batch_1.bin").write_bytes(b"")
    refused(cifar, cache, "data_batch_1.bin has 0 bytes, but at least one image")
    (cifar / "test_batch.bin").unlink()
    refused(cifar, cache, "has no test_batch.bin")


def test_damaged_archives_are_refused(tmp_path: Path, cifar: Path, cache: Path) -> None:
    path = write_archive(tmp_path / "c.tar.gz", cifar)
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    refused(path, cache, "cannot read .*c.tar.gz: .*truncated, damaged or of another kind")
    path.write_bytes(b"no archive at all")
    refused(path, cache, "cannot read")
    (cifar / "data_batch_2.bin").unlink()
    refused(write_archive(path, cifar), cache, "c.tar.gz has no data_batch_2.bin")


def test_pickles_are_never_opened(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "python version"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(b"cos\nsystem\n(S'touch harmed'\ntR.")
    refused(folder, cache, "Python version of CIFAR-10.*Get the binary version")
    refused(write_archive(tmp_path / "p.tar.gz", folder), cache, "Python version of CIFAR-10")
    stored = {"x_train": np.array([{"an": "object"}], dtype=object)}
    with io.BytesIO() as buffer:
        np.savez(buffer, **stored, y_train=TRAIN_LABELS, x_test=TEST, y_test=TEST_LABELS)
        (tmp_path / "o.npz").write_bytes(buffer.getvalue())
    refused(tmp_path / "o.npz", cache, "cannot read .*o.npz: Object arrays cannot be loaded")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_test": None}, r"no array x_test or test_x or test_images \(it holds x_train, "),
        ({"y_train": None}, "no array y_train or train_y or train_labels"),
        ({"x_train": TRAIN / 255}, "x_train holds float64: pixels must be uint8"),
        ({"x_train": TRAIN[:, :30]}, r"x_train has the shape \(20, 30, 32, 3\): square images"),
        ({"x_train": TRAIN.reshape(20, -1)}, r"x_train has the shape \(20, 3072\)"),
        ({"x_train": TRAIN[..., :2]}, r"x_train has the shape \(20, 32, 32, 2\)"),
        ({"x_train": TRAIN[:0], "y_train": TRAIN_LABELS[:0]}, "there are no images in it"),
        ({"x_test": TEST[:, :16, :16]}, "x_test has images of 3 x 16 x 16, x_train of 3 x 32 x 32"),
        ({"x_test": TEST[..., 0]}, "x_test has images of 1 x 32 x 32"),
        ({"y_train": TRAIN_LABELS[:19]}, r"y_train has the shape \(19,\).*each of the 20 images"),
        ({"y_train": np.eye(10, dtype=int)[TRAIN_LABELS]}, r"y_train has the shape \(20, 10\)"),
        ({"y_train": TRAIN_LABELS / 1}, "y_train .*holds float64: one integer"),
        ({"y_train": TRAIN_LABELS - 1}, "y_train: image 0 has the label -1"),
        ({"y_train": TRAIN_LABELS + 1}, "y_train goes up to 10, but no image has the label 0"),
        ({"y_test": TEST_LABELS + 1}, "y_test: image 3 has the label 10, but the 10 classes"),
        ({"x_train": TRAIN * 0}, "channel 0 has the same value in every pixel"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path: Path, cache: Path, changes: dict, message: str) -> None:
    refused(write_npz(tmp_path / "a.npz", **changes), cache, message)


def test_damaged_npz_files_are_refused(tmp_path: Path, cache: Path) -> None:
    path = write_npz(tmp_path / "a.npz")
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    refused(path, cache, "a.npz is not an .npz file, or is truncated")
    path.write_bytes(raw[:5000] + bytes(200) + raw[5200:])
    refused(path, cache, "cannot read .*a.npz")
    with path.open("wb") as stream:
        np.save(stream, TRAIN)
    refused(path, cache, "a.npz is not an .npz file")


def test_archives_that_grow_without_measure_are_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpack, "ALWAYS_ALLOWED_BYTES", 500_000)
    monkeypatch.setattr(unpack, "LARGEST_RATIO", 10)
    folder = write_batches(tmp_path / "batches")
    prepare_images(str(write_archive(tmp_path / "a.tar.gz", folder)), tmp_path / "other cache")
    (folder / "data_batch_3.bin").write_bytes(bytes(1_000_000))
    refused(write_archive(tmp_path / "a.tar.gz", folder), cache, "a.tar.gz .* decompression bomb")
    zeros = np.zeros((400, 32, 32, 3), dtype=np.uint8)
    path = write_npz(tmp_path / "a.npz", x_train=zeros, y_train=np.arange(400) % 10)
    refused(path, cache, "a.npz .* decompression bomb")


def test_wrong_pictures_are_refused(tmp_path: Path, cache: Path) -> None:
    root = write_pictures(tmp_path / "pictures")
    cat = root / "train" / "cat" / "0006.png"

    def with_change(name: str) -> Path:
        changed = tmp_path / name
        return Path(shutil.copytree(root, changed))

    mixed = with_change("mixed")
    Image.fromarray(small_images(1, 0, 31)[0]).save(mixed / cat.relative_to(root))
    refused(mixed, cache, r"cat/0006.png has 31 x 31 pixels, .*airplane/0000.png has 32 x 32")
    oblong = with_change("oblong")
    Image.fromarray(TRAIN[0][:20]).save(oblong / "train" / "airplane" / "0000.png")
    refused(oblong, cache, "0000.png has 32 x 20 pixels: pictures must be square")
    broken = with_change("broken")
    (broken / cat.relative_to(root)).write_bytes(cat.read_bytes()[:-900])
    refused(broken, cache, "cannot read .*cat/0006.png: .*truncated")
    (broken / cat.relative_to(root)).write_bytes(b"no picture")
    refused(broken, cache, "cannot read .*cat/0006.png")
    strange = with_change("strange")
    shutil.copytree(strange / "test" / "cat", strange / "test" / "yak")
    refused(strange, cache, r"yak/0001.png has class yak, which has no training")
    loose = with_change("loose")
    shutil.copy(cat, loose / "test" / "lost.png")
    refused(loose, cache, r"test/lost.png is in no class: move it to test/CLASS/lost.png")
    empty = with_change("empty")
    shutil.rmtree(empty / "test")
    refused(empty, cache, "empty has no folder test: expected")
    (empty / "test" / "cat").mkdir(parents=True)
    refused(empty, cache, r"no pictures \(.png, .*\) under .*test")


def test_pictures_of_other_modes_become_rgb(tmp_path: Path, cache: Path) -> None:
    root = write_pictures(tmp_path / "pictures")
    with Image.open(root / "train" / "airplane" / "0000.png") as picture:
        grey = picture.convert("L")
    grey.save(root / "train" / "airplane" / "0000.png")
    found = prepare_images(str(root), cache).train.pixels_NCSS[0]
    assert all(np.array_equal(found[channel], np.asarray(grey)) for channel in range(3))


def test_a_mapped_set_gives_arrays_of_its_own(images: ImageSet) -> None:
    batch = ImageOrder(images.train, batch=4, microbatches=1, seed=0).microbatch(0, 0)
    assert type(batch.pixels_BCSS) is np.ndarray and type(batch.labels_B) is np.ndarray
    assert batch.pixels_BCSS.flags.writeable  # as torch wants it
