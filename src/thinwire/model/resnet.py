"""ResNet-18 for small images as a plain list of named layers.

The form used for CIFAR: a 3x3 stem without pooling, then four groups of two blocks. Each group
after the first halves the side and doubles the channels. Layers, parameters and buffers have the
names of torchvision's resnet18, so a checkpoint's tensors mean the same thing everywhere.

Batch norms learn from gradients and from what they see: their running statistics are persistent
buffers, as much a part of the trained model as its parameters.

Shapes: B images, C channels, S pixels a side, K classes.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.model.llama import LayerPlan

GROUPS = 4
BLOCKS_PER_GROUP = 2
BLOCKS = GROUPS * BLOCKS_PER_GROUP
"""What is split over stages: evenly over four, they are cut after layer1, layer2 and layer3."""

_STEM = 3  # plans before the first block


@dataclass(frozen=True)
class ResNetShape:
    """What may differ between two ResNet-18: the width, and what is classified."""

    width: int = 64
    classes: int = 10
    channels: int = 3
    side: int = 32


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a skip past them, brought to the new shape where that changes."""

    def __init__(self, inputs: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x_BCSS: Tensor) -> Tensor:
        """The activation after this block."""
        skip_BCSS = x_BCSS if self.downsample is None else self.downsample(x_BCSS)
        inner_BCSS = F.relu(self.bn1(self.conv1(x_BCSS)))
        return F.relu(self.bn2(self.conv2(inner_BCSS)) + skip_BCSS)


class MeanOverPixels(nn.Module):
    """One value per channel. A plain mean: its gradient is the same every time on every device."""

    def forward(self, x_BCSS: Tensor) -> Tensor:
        """The mean of each channel (B, C)."""
        return x_BCSS.mean(dim=(2, 3))


def resnet_layers(shape: ResNetShape) -> list[LayerPlan]:
    """The whole model as a list: stem, eight blocks, head."""
    width = shape.width
    return [
        LayerPlan("conv1", lambda: nn.Conv2d(shape.channels, width, 3, padding=1, bias=False)),
        LayerPlan("bn1", lambda: nn.BatchNorm2d(width)),
        LayerPlan("relu", nn.ReLU),
        *(_block(shape, index) for index in range(BLOCKS)),
        LayerPlan("avgpool", MeanOverPixels),
        LayerPlan("fc", lambda: nn.Linear(_channels(shape, BLOCKS), shape.classes)),
    ]


def resnet_stage_layers(shape: ResNetShape, blocks: range) -> list[LayerPlan]:
    """The layers of the stage that holds these blocks: the ends carry stem and head."""
    plans = resnet_layers(shape)
    first = 0 if blocks.start == 0 else _STEM + blocks.start
    last = len(plans) if blocks.stop == BLOCKS else _STEM + blocks.stop
    return plans[first:last]


def stream_shape(shape: ResNetShape, blocks: int, batch: int) -> tuple[int, int, int, int]:
    """What a batch has become after the stem and so many blocks: what crosses a cut there."""
    side = shape.side
    for _ in range(_group(blocks)):
        side = (side + 1) // 2
    return batch, _channels(shape, blocks), side, side


def initialise(name: str, parameter: Tensor, seed: int) -> None:
    """Fill a parameter from its global name and the seed alone, whatever the split.

    Convolutions by the rule of He et al. for what leaves them, the classifier uniformly by its
    inputs, as torchvision has both. Norms start as the identity, the classifier's bias at zero.
    """
    if parameter.ndim < 2:
        nn.init.constant_(parameter, 1.0 if name.endswith("weight") else 0.0)
        return
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    outputs, inputs = parameter.shape[:2]
    with torch.no_grad():
        if parameter.ndim == 4:
            spread = math.sqrt(2 / (outputs * parameter[0, 0].numel()))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
        else:
            uniform = 2 * torch.rand(parameter.shape, generator=generator) - 1
            parameter.copy_(uniform / math.sqrt(inputs))


def _block(shape: ResNetShape, index: int) -> LayerPlan:
    inputs, channels = _channels(shape, index), _channels(shape, index + 1)
    group, number = divmod(index, BLOCKS_PER_GROUP)
    stride = 2 if group > 0 and number == 0 else 1
    name = f"layer{group + 1}.{number}"
    return LayerPlan(name, lambda: BasicBlock(inputs, channels, stride))


def _group(blocks: int) -> int:
    """The group of the last of so many blocks; the stem has the shape of the first."""
    return max(0, blocks - 1) // BLOCKS_PER_GROUP


def _channels(shape: ResNetShape, blocks: int) -> int:
    return shape.width << _group(blocks)
