"""Small image classifiers and something real to classify: printed characters.

The images are drawn from fonts that come with matplotlib, so every machine has them: 94 characters
in 16 styles, each turned, scaled, shifted and noised afresh. There are more classes than channels,
so that the number of classes does not bound the rank of a gradient.

A ViT, an MLP-Mixer and a CNN share one frame: blocks that add to a stream of patches. What writes
to it is called o_proj or down_proj, as in the Llama blocks: the same code finds writers in all.

Shapes: B images, S pixels a side, T patches, D width, P patches a side.
"""

import functools
import math
from collections import OrderedDict
from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont  # matplotlib itself needs it
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.model import ModelConfig
from thinwire.model.llama import WRITERS, Llama, RMSNorm
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
SIDE, PATCH = 24, 4
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


class Residual(nn.Module):
    """The stream plus what a body makes of the normalised stream, as in every pre-norm model.

    A body across patches works on each channel: the mixer's stand-in for attention.
    """

    def __init__(self, norm: nn.Module, body: nn.Module, across_patches: bool = False):
        super().__init__()
        self.norm = norm
        self.body = body
        self._across = across_patches

    def forward(self, x: Tensor) -> Tensor:
        if self._across:
            return x + self.body(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.body(self.norm(x))


class SelfAttention(nn.Module):
    """Attention of all patches to all patches."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, patches, _ = x_BTD.shape
        parts = self.qkv_proj(x_BTD).view(batch, patches, 3, self.heads, -1)
        q_BHTE, k_BHTE, v_BHTE = parts.permute(2, 0, 3, 1, 4)
        mixed_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE)
        return self.o_proj(mixed_BHTE.transpose(1, 2).reshape(batch, patches, -1))


class Classifier(nn.Module):
    """Patches, blocks that add to them, the mean over patches, a class for the image."""

    def __init__(self, dim: int, blocks: list[nn.Module], keeps_grid: bool):
        super().__init__()
        self.patches = nn.Conv2d(1, dim, PATCH, PATCH, bias=False)
        self.positions = nn.Parameter(torch.empty(dim, (SIDE // PATCH) ** 2))
        self.blocks = nn.Sequential(*blocks)
        self.norm = RMSNorm(dim, 1e-5)
        self.head = nn.Linear(dim, len(CHARACTERS), bias=False)
        self._keeps_grid = keeps_grid

    def forward(self, images_B1SS: Tensor) -> Tensor:
        x_BDT = self.patches(images_B1SS).flatten(2) + self.positions
        if self._keeps_grid:
            side = SIDE // PATCH
            x_BTD = self.blocks(x_BDT.unflatten(2, (side, side))).flatten(2).transpose(1, 2)
        else:
            x_BTD = self.blocks(x_BDT.transpose(1, 2))
        return self.head(self.norm(x_BTD.mean(dim=1)))


def classifier(kind: str, dim: int, depth: int, hidden: int, seed: int) -> Classifier:
    """A `vit`, `mixer` or `cnn`, its weights a function of the seed and the parameters' names.

    Writers start by the rule of the Llama blocks, because how fast training changes a spectrum
    depends on how large the weights were. The other matrices are scaled by their inputs: at the
    Llama's fixed spread, images of so few pixels teach these models next to nothing.
    """
    patches = (SIDE // PATCH) ** 2
    blocks: list[nn.Module] = []
    for _ in range(depth):
        if kind == "cnn":
            blocks.append(Residual(_group_norm(dim), _convolutions(dim)))
            continue
        mixes = kind == "mixer"
        mixing = _feed_forward(patches, hidden) if mixes else SelfAttention(dim, 4)
        blocks.append(Residual(RMSNorm(dim, 1e-5), mixing, across_patches=mixes))
        blocks.append(Residual(RMSNorm(dim, 1e-5), _feed_forward(dim, hidden)))
    model = Classifier(dim, blocks, keeps_grid=kind == "cnn")
    start = Llama(ModelConfig(layers=depth))
    for name, parameter in model.named_parameters():
        start.initialise(name, parameter, seed)
        if parameter.ndim > 1 and not name.endswith(WRITERS):
            parameter.data /= parameter.data.std() * math.sqrt(parameter[0].numel())
    return model


def _feed_forward(dim: int, hidden: int) -> nn.Module:
    up, down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)
    return nn.Sequential(OrderedDict(up_proj=up, gelu=nn.GELU(), down_proj=down))


def _convolutions(dim: int) -> nn.Module:
    """The body of a residual block of a CNN; the second convolution writes."""
    up, down = (nn.Conv2d(dim, dim, 3, padding=1, bias=False) for _ in range(2))
    first = OrderedDict(gelu=nn.GELU(), up_proj=up, norm=_group_norm(dim))
    return nn.Sequential(OrderedDict(**first, second_gelu=nn.GELU(), down_proj=down))


def _group_norm(dim: int) -> nn.Module:
    return nn.GroupNorm(8, dim, affine=False)
