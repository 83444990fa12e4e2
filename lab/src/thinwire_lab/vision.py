"""Something real to classify where there is no CIFAR-10: printed characters.

The images are drawn from fonts that come with matplotlib, so every machine has them: 94 characters
in 16 styles, each turned, scaled, shifted and noised afresh.

Shapes: B images, S pixels a side.
"""

import functools
from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont  # matplotlib itself needs it
from torch import Tensor
from torch.nn import functional as F

from thinwire.paths import cache_folder

CHARACTERS = [chr(code) for code in range(33, 127)]
FONTS = [
    f"{family}{style}"
    for family, styles in {
        "DejaVuSans": ("", "-Bold", "-Oblique", "-BoldOblique"),
        "DejaVuSansMono": ("", "-Bold", "-Oblique", "-BoldOblique"),
        "DejaVuSerif": ("", "-Bold", "-Italic", "-BoldItalic"),
        "STIXGeneral": ("", "Bol", "Italic", "BolIta"),
    }.items()
    for style in styles
]
SIDE = 24
TURN, STRETCH, SHIFT, NOISE = 0.1, 0.1, 0.05, 0.1  # radians; shares of the size; of full black
MEAN, SPREAD = 0.08, 0.26  # of the pixels, taken off so that images are centred
_CANVAS = 2 * SIDE  # drawn at twice the size: averaging after the turn keeps edges smooth
_TYPE_SIZE = 36


@functools.cache
def character_images() -> Tensor:
    """Every character in every font, upright (font, character, 48, 48), black 1 on white 0."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    images = np.zeros((len(FONTS), len(CHARACTERS), _CANVAS, _CANVAS), dtype=np.float32)
    for row, name in enumerate(FONTS):
        place, plain = str(folder / f"{name}.ttf"), ImageFont.Layout.BASIC
        font = ImageFont.truetype(place, _TYPE_SIZE, layout_engine=plain)
        for column, character in enumerate(CHARACTERS):
            image = Image.new("L", (_CANVAS, _CANVAS))
            middle = (_CANVAS / 2, _CANVAS / 2)
            ImageDraw.Draw(image).text(middle, character, fill=255, font=font, anchor="mm")
            images[row, column] = np.asarray(image, dtype=np.float32) / 255
    return torch.from_numpy(images)


def character_batch(size: int, seed: int, number: int) -> tuple[Tensor, Tensor]:
    """Images (B, 1, S, S) and classes (B) of one batch: a function of seed and number alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    fonts_B = torch.randint(len(FONTS), (size,), generator=generator)
    classes_B = torch.randint(len(CHARACTERS), (size,), generator=generator)
    angle_B, scale_B, x_B, y_B = torch.rand(4, size, generator=generator) * 2 - 1
    angle_B, scale_B = angle_B * TURN, 1 + scale_B * STRETCH
    cos_B, sin_B = angle_B.cos() / scale_B, angle_B.sin() / scale_B
    rows = [cos_B, -sin_B, x_B * 2 * SHIFT, sin_B, cos_B, y_B * 2 * SHIFT]
    turns_B23 = torch.stack(rows, dim=1).view(size, 2, 3)
    places = F.affine_grid(turns_B23, [size, 1, _CANVAS, _CANVAS], align_corners=False)
    upright = character_images()[fonts_B, classes_B].unsqueeze(1)
    images = F.avg_pool2d(F.grid_sample(upright, places, align_corners=False), 2)
    images += NOISE * torch.randn(images.shape, generator=generator)
    return (images - MEAN) / SPREAD, classes_B


def letters(train_count: int = 1024, test_count: int = 512) -> Path:
    """An .npz of printed letters from A to J, 24 x 24 pixels, made once."""
    path = cache_folder() / "lab" / f"letters-{train_count}-{test_count}.npz"
    if path.exists():
        return path
    images: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    first = CHARACTERS.index("A")
    while sum(map(len, labels)) < train_count + test_count:
        images_B, classes_B = character_batch(1024, seed=0, number=len(labels))
        wanted_B = (classes_B >= first) & (classes_B < first + 10)
        shades = ((images_B[wanted_B] * SPREAD + MEAN).clamp(0, 1) * 255).round()
        images.append(shades.byte().permute(0, 2, 3, 1).numpy())
        labels.append((classes_B[wanted_B] - first).numpy())
    x, y = np.concatenate(images), np.concatenate(labels)
    train, test = slice(train_count), slice(train_count, train_count + test_count)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, x_train=x[train], y_train=y[train], x_test=x[test], y_test=y[test])
    return path
