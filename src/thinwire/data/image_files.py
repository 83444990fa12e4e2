"""Read labelled images from disk: CIFAR-10's binary batches, an .npz, or folders of pictures.

Only the files' layout is known here. What is read comes in pieces, training images first, so that a
set of pictures may be larger than memory.

Shapes: N images, C channels, S pixels a side.
"""

import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from thinwire.data.files import SourceFile, existing, reading, source_file, walk
from thinwire.data.unpack import refuse_bomb
from thinwire.errors import DataError

SIDES = ("train", "test")
PICTURE_KINDS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm")
CIFAR_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
CIFAR_BATCHES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]  # in this order
CIFAR_FOLDER = "cifar-10-batches-bin"  # as the archive names it

_CIFAR_SHAPE = (3, 32, 32)
_RECORD = 1 + 3 * 32 * 32  # a label, then the red, the green and the blue pixels
_PIECE = 1024  # pictures read at a time
_ARCHIVES = (".tar.gz", ".tgz", ".tar")
_BROKEN = (
    OSError,
    EOFError,
    ValueError,
    MemoryError,
    zlib.error,
    zipfile.BadZipFile,
    tarfile.TarError,
    SyntaxError,  # as Pillow calls some damage
    Image.DecompressionBombError,
)
_ADVICE = "it is truncated, damaged or of another kind: get it again"
_EXPECTED = (
    f"expected CIFAR-10's binary batches ({CIFAR_BATCHES[0]} and so on, or their "
    ".tar.gz), an .npz with x_train, y_train, x_test and y_test, or a folder of pictures as "
    "train/CLASS/NAME.png and test/CLASS/NAME.png"
)


class Piece(NamedTuple):
    """Some images of one side, in order, and how many bytes on disk were read up to here."""

    side: str
    pixels_NCSS: np.ndarray
    labels_N: np.ndarray
    consumed: int


@dataclass(frozen=True)
class ImageFiles:
    """Labelled images on disk, found but not yet read."""

    files: list[SourceFile]
    classes: tuple[str, ...]  # by label; empty where only the labels tell how many there are
    read: Callable[[], Iterator[Piece]]


def find_images(path: str) -> ImageFiles:
    """What is at `path`, by its names; DataError says what was expected."""
    root = existing(path, "images")
    with reading(root, (PermissionError,)):
        return _found(root)


def _found(root: Path) -> ImageFiles:
    if not root.is_dir():
        file = source_file(root)
        if root.name.lower().endswith(".npz"):
            return ImageFiles([file], (), lambda: _read_npz(file))
        if root.name.lower().endswith(_ARCHIVES):
            return ImageFiles([file], CIFAR_CLASSES, lambda: _read_cifar_archive(file))
        raise DataError(f"{root} is not an image dataset: {_EXPECTED}")
    if any((root / side).is_dir() for side in SIDES):
        return _find_pictures(root)
    for folder in (root, root / CIFAR_FOLDER):
        missing = [name for name in CIFAR_BATCHES if not (folder / name).exists()]
        if len(missing) < len(CIFAR_BATCHES):
            return _cifar_folder(folder, missing)
    if (root / "data_batch_1").exists():
        raise _pickled(root)
    raise DataError(f"no images in {root}: {_EXPECTED}")


def _cifar_folder(folder: Path, missing: list[str]) -> ImageFiles:
    _refuse_missing(folder, missing)
    files = [source_file(folder, name) for name in CIFAR_BATCHES]

    def raw_of(name: str) -> bytes:
        with reading(folder / name, _BROKEN, _ADVICE):
            return (folder / name).read_bytes()

    size = sum(file.size for file in files)
    return ImageFiles(files, CIFAR_CLASSES, lambda: _read_cifar(folder, size, raw_of))


def _read_cifar_archive(file: SourceFile) -> Iterator[Piece]:
    found: dict[str, bytes] = {}
    with reading(file.path, _BROKEN, _ADVICE), tarfile.open(file.path) as archive:
        for member in archive:
            name = Path(member.name).name
            if name == "data_batch_1":
                raise _pickled(file.path)
            if member.isfile() and name in CIFAR_BATCHES:
                refuse_bomb(file, member.size + sum(map(len, found.values())))
                if (stream := archive.extractfile(member)) is not None:
                    found[name] = stream.read()
    _refuse_missing(file.path, [name for name in CIFAR_BATCHES if name not in found])
    yield from _read_cifar(file.path, file.size, found.__getitem__)


def _read_cifar(root: Path, size: int, raw_of: Callable[[str], bytes]) -> Iterator[Piece]:
    """Records of a label and three planes; every batch has as many as the first one."""
    count = 0
    for number, name in enumerate(CIFAR_BATCHES, 1):
        raw, where = raw_of(name), root / name
        count = count or len(raw) // _RECORD
        if count == 0 or len(raw) != count * _RECORD:
            wanted = f"{count} images as in the first batch" if count else "at least one image"
            raise DataError(
                f"{where} has {len(raw)} bytes, but {wanted} of {_RECORD} bytes each would be "
                f"{max(1, count) * _RECORD}: it is truncated or damaged; download it again"
            )
        records = np.frombuffer(raw, dtype=np.uint8).reshape(count, _RECORD)
        labels_N = records[:, 0].astype(np.int64)
        _check_labels(labels_N, len(CIFAR_CLASSES), str(where))
        side = "test" if name == CIFAR_BATCHES[-1] else "train"
        pixels_NCSS = records[:, 1:].reshape(count, *_CIFAR_SHAPE)
        yield Piece(side, pixels_NCSS, labels_N, size * number // len(CIFAR_BATCHES))


def _read_npz(file: SourceFile) -> Iterator[Piece]:
    """Images and labels by the names that Keras, MedMNIST and others give them."""
    if not zipfile.is_zipfile(file.path):  # arrays only: nothing that is read here can run
        raise DataError(
            f"{file.path} is not an .npz file, or is truncated: download or write it again"
        )
    classes, shape, first = 0, (), ""
    with reading(file.path, _BROKEN, _ADVICE):
        with zipfile.ZipFile(file.path) as packed:
            refuse_bomb(file, sum(member.file_size for member in packed.infolist()))
        with np.load(file.path, allow_pickle=False) as archive:
            for number, side in enumerate(SIDES, 1):
                x = _chosen(file, archive.files, f"x_{side}", f"{side}_x", f"{side}_images")
                y = _chosen(file, archive.files, f"y_{side}", f"{side}_y", f"{side}_labels")
                pixels_NCSS = _channels_first(archive[x], f"{file.path}: {x}")
                labels_N = _plain_labels(archive[y], len(pixels_NCSS), f"{file.path}: {y}")
                first, shape = first or x, shape or pixels_NCSS.shape[1:]
                if pixels_NCSS.shape[1:] != shape:
                    raise DataError(
                        f"{file.path}: {x} has images of {_size(pixels_NCSS.shape[1:])}, {first} "
                        f"of {_size(shape)}: all must have one size"
                    )
                classes = classes or int(labels_N.max()) + 1
                _check_labels(labels_N, classes, f"{file.path}: {y}")
                if side == "train" and len(np.unique(labels_N)) < classes:
                    lacking = np.setdiff1d(np.arange(classes), labels_N)[0]
                    raise DataError(
                        f"{file.path}: {y} goes up to {classes - 1}, but no image has the label "
                        f"{lacking}: classes must be numbered from 0 without gaps"
                    )
                yield Piece(side, pixels_NCSS, labels_N, file.size * number // len(SIDES))


def _chosen(file: SourceFile, names: list[str], *wanted: str) -> str:
    named = {name.lower(): name for name in names}
    for name in wanted:
        if name in named:
            return named[name]
    raise DataError(
        f"{file.path} has no array {' or '.join(wanted)} (it holds {', '.join(names) or 'nothing'})"
        ": add it, or rename the right one"
    )


def _channels_first(images: np.ndarray, where: str) -> np.ndarray:
    if images.dtype != np.uint8:
        raise DataError(
            f"{where} holds {images.dtype}: pixels must be uint8, 0 for black to 255; convert them"
        )
    pixels = images[:, None] if images.ndim == 3 else images
    if pixels.ndim == 4 and pixels.shape[1] == pixels.shape[2] and pixels.shape[3] in (1, 3):
        pixels = pixels.transpose(0, 3, 1, 2)
    if pixels.ndim != 4 or pixels.shape[1] not in (1, 3) or pixels.shape[2] != pixels.shape[3]:
        raise DataError(
            f"{where} has the shape {images.shape}: square images are needed, grey or of three "
            "channels, as (N, S, S), (N, S, S, C) or (N, C, S, S)"
        )
    if pixels.size == 0:
        raise DataError(f"{where} has the shape {images.shape}: there are no images in it")
    return pixels


def _plain_labels(labels: np.ndarray, count: int, where: str) -> np.ndarray:
    if labels.shape not in ((count,), (count, 1)) or labels.dtype.kind not in "iu":
        raise DataError(
            f"{where} has the shape {labels.shape} and holds {labels.dtype}: one integer is "
            f"needed for each of the {count} images"
        )
    return labels.reshape(count).astype(np.int64)


def _find_pictures(root: Path) -> ImageFiles:
    """Pictures by side and class; hidden names and other kinds of files are left out."""
    found: dict[str, list[SourceFile]] = {}
    for side in SIDES:
        if not (root / side).is_dir():
            raise DataError(f"{root} has no folder {side}: {_EXPECTED}")
        names = [name for name in walk(root / side) if name.lower().endswith(PICTURE_KINDS)]
        if not names:
            kinds = ", ".join(PICTURE_KINDS)
            raise DataError(f"no pictures ({kinds}) under {root / side}: {_EXPECTED}")
        loose = [name for name in names if "/" not in name]
        if loose:
            raise DataError(
                f"{root / side / loose[0]} is in no class: move it to {side}/CLASS/{loose[0]}"
            )
        found[side] = [source_file(root / side, name) for name in names]
    classes = sorted({_class_of(file) for file in found["train"]})
    unknown = [file for file in found["test"] if _class_of(file) not in classes]
    if unknown:
        raise DataError(
            f"{unknown[0].path} has class {_class_of(unknown[0])}, which has no "
            f"training pictures: train/ has {', '.join(classes[:12])}"
        )
    files = found["train"] + found["test"]
    return ImageFiles(files, tuple(classes), lambda: _read_pictures(found, classes))


def _read_pictures(found: dict[str, list[SourceFile]], classes: list[str]) -> Iterator[Piece]:
    """All become RGB; none is decoded before it is known to have the size of the first."""
    label_of = {name: label for label, name in enumerate(classes)}
    first = found["train"][0]
    with _picture(first) as picture:
        size = picture.size
    if size[0] != size[1]:
        raise DataError(
            f"{first.path} has {_size(size)} pixels: pictures must be square; crop or scale "
            "them first"
        )
    consumed = 0
    for side, files in found.items():
        for at in range(0, len(files), _PIECE):
            piece = files[at : at + _PIECE]
            pixels_NSSC = np.empty((len(piece), *size, 3), dtype=np.uint8)
            for row, file in enumerate(piece):
                with _picture(file) as picture:
                    if picture.size != size:
                        raise DataError(
                            f"{file.path} has {_size(picture.size)} pixels, {first.path} has "
                            f"{_size(size)}: all must have one size; crop or scale them first"
                        )
                    pixels_NSSC[row] = np.asarray(picture.convert("RGB"))
                consumed += file.size
            labels_N = np.array([label_of[_class_of(file)] for file in piece], dtype=np.int64)
            yield Piece(side, pixels_NSSC.transpose(0, 3, 1, 2), labels_N, consumed)


@contextmanager
def _picture(file: SourceFile) -> Iterator[Image.Image]:
    """The picture with its size known and its pixels not yet read."""
    with reading(file.path, _BROKEN, _ADVICE), Image.open(file.path) as picture:
        yield picture


def _class_of(file: SourceFile) -> str:
    return file.name.split("/")[0]


def _check_labels(labels_N: np.ndarray, classes: int, where: str) -> None:
    outside = np.flatnonzero((labels_N < 0) | (labels_N >= classes))
    if len(outside):
        raise DataError(
            f"{where}: image {outside[0]} has the label {labels_N[outside[0]]}, but the {classes} "
            f"classes are numbered 0..{classes - 1}: it is damaged, or of another format"
        )


def _refuse_missing(where: Path, missing: list[str]) -> None:
    if missing:
        raise DataError(
            f"{where} has no {', '.join(missing)}: CIFAR-10 has five training batches and "
            "a test batch; download the others too"
        )


def _pickled(where: Path) -> DataError:
    return DataError(
        f"{where} holds the Python version of CIFAR-10, whose batches are pickles: opening one "
        "could run anything that is in it. Get the binary version, cifar-10-binary.tar.gz"
    )


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
