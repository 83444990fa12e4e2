"""ResNet-18 for small images, in stages: the model of the study of codecs on images.

The form used for CIFAR: a 3x3 stem without pooling, then four groups of two blocks. Each group
after the first halves the side and doubles the channels. Layers have the names of torchvision's
resnet18. Each pixel crosses a cut as a token does, with its channels.

Shapes: B images, C channels, S pixels a side, P = S * S, K classes.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.model.adapter import generator_of

GROUPS, BLOCKS_PER_GROUP = 4, 2
BLOCKS = GROUPS * BLOCKS_PER_GROUP


def to_pixels(x_BCSS: Tensor) -> Tensor:
    """Planes (B, C, S, S) as pixels (B, P, C), without a copy where channels lie side by side."""
    return x_BCSS.permute(0, 2, 3, 1).flatten(1, 2).contiguous()


def to_planes(z_BPC: Tensor) -> Tensor:
    """The inverse, never with a copy: channels stay side by side."""
    side = math.isqrt(z_BPC.shape[1])
    return z_BPC.unflatten(1, (side, side)).permute(0, 3, 1, 2)


def as_from_a_cut(x_BCSS: Tensor) -> Tensor:
    """Planes laid out as they come from a cut: convolutions on another layout add up in another
    order, so a model that lays out what each block reads computes the same bits wherever it is cut.
    """
    return to_planes(to_pixels(x_BCSS))


class Stem(nn.Conv2d):
    """The first convolution."""

    def forward(self, x_BCSS: Tensor) -> Tensor:
        return super().forward(as_from_a_cut(x_BCSS))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a skip past them, brought to the new shape where that changes."""

    def __init__(self, inputs: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = _conv(inputs, channels, 3, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv(channels, channels, 3)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != channels:
            self.downsample = nn.Sequential(
                _conv(inputs, channels, 1, stride), nn.BatchNorm2d(channels)
            )

    def forward(self, x_BCSS: Tensor) -> Tensor:
        x_BCSS = as_from_a_cut(x_BCSS)
        skip_BCSS = x_BCSS if self.downsample is None else self.downsample(x_BCSS)
        inner_BCSS = F.relu(self.bn1(self.conv1(x_BCSS)))
        return F.relu(self.bn2(self.conv2(inner_BCSS)) + skip_BCSS)


class MeanOverPixels(nn.Module):
    """One value per channel. A plain mean: its gradient is the same every time on every device."""

    def forward(self, x_BCSS: Tensor) -> Tensor:
        return x_BCSS.mean(dim=(2, 3))


def resnet_stages(
    width: int, channels: int, classes: int, blocks: list[range], seed: int
) -> list[nn.Sequential]:
    """The model cut into stages of these blocks; the weights are a function of seed and names."""
    stem = [
        ("conv1", Stem(channels, width, 3, padding=1, bias=False)),
        ("bn1", nn.BatchNorm2d(width)),
        ("relu", nn.ReLU()),
    ]
    head = [("avgpool", MeanOverPixels()), ("fc", nn.Linear(width_after(width, BLOCKS), classes))]
    stages = []
    for own in blocks:
        layers: list[tuple[str, nn.Module]] = [_block(width, index) for index in own]
        layers = [*(stem if own.start == 0 else []), *layers, *(head if own.stop == BLOCKS else [])]
        for name, layer in layers:
            for inner, parameter in layer.named_parameters():
                _initialise(f"{name}.{inner}", parameter, seed)
        stages.append(nn.Sequential(*(layer for _, layer in layers)))
    return stages


def width_after(width: int, blocks: int) -> int:
    """Channels after so many blocks."""
    return width << _group(blocks)


def side_after(side: int, blocks: int) -> int:
    """Pixels a side after so many blocks."""
    return -(-side >> _group(blocks))


def _group(blocks: int) -> int:
    """The group of the last of so many blocks; the stem has the shape of the first."""
    return max(0, blocks - 1) // BLOCKS_PER_GROUP


def _block(width: int, index: int) -> tuple[str, nn.Module]:
    group, number = divmod(index, BLOCKS_PER_GROUP)
    stride = 2 if group > 0 and number == 0 else 1
    block = BasicBlock(width_after(width, index), width_after(width, index + 1), stride)
    return f"layer{group + 1}.{number}", block


@torch.no_grad()
def _initialise(name: str, parameter: Tensor, seed: int) -> None:
    """Convolutions by the rule of He et al. for what leaves them, the classifier uniformly by its
    inputs, as torchvision has both; norms as the identity, the classifier's bias at zero.
    """
    generator = generator_of(name, seed)
    if parameter.ndim < 2:
        nn.init.constant_(parameter, 1.0 if name.endswith("weight") else 0.0)
    elif parameter.ndim == 4:
        spread = math.sqrt(2 / (parameter.shape[0] * parameter[0, 0].numel()))
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    else:
        uniform = 2 * torch.rand(parameter.shape, generator=generator) - 1
        parameter.copy_(uniform / math.sqrt(parameter.shape[1]))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
