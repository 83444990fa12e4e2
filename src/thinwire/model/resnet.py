"""ResNet-18 for small images as a plain list of named layers.

The form used for CIFAR: a 3x3 stem without pooling, then four groups of two blocks. Each group
after the first halves the side and doubles the channels. Layers, parameters and buffers have the
names of torchvision's resnet18, so a checkpoint's tensors mean the same thing everywhere.

Batch norms learn from gradients and from what they see: their running statistics are persistent
buffers, as much a part of the trained model as its parameters.

Shapes: B images, C channels, S pixels a side, K classes.
"""

import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.boundary.image import ImageBoundary, as_from_a_cut
from thinwire.model.base import Architecture, LayerPlan, Probe, generator_of
from thinwire.model.narrow import Narrow

GROUPS = 4
BLOCKS_PER_GROUP = 2
BLOCKS = GROUPS * BLOCKS_PER_GROUP
"""What is split over stages: evenly over four, they are cut after layer1, layer2 and layer3."""


class Stem(nn.Conv2d):
    """The first convolution. It lays pixels out with their channels side by side, which
    convolutions are fastest on; what follows keeps that layout.
    """

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


class _Convolution(NamedTuple):
    """What a convolution reads and writes of one image."""

    inputs: int
    kernel: int
    outputs: int
    side: int

    @property
    def flops(self) -> float:
        """A multiplication and an addition for each weight at each pixel."""
        return 2.0 * self.kernel**2 * self.inputs * self.outputs * self.side**2


class ResNet(Architecture):
    """ResNet-18 of some width for images of some size."""

    dense: ClassVar = ImageBoundary

    def layers(self, narrow: Narrow | None = None) -> list[LayerPlan]:
        """Stem, eight blocks, head."""
        assert narrow is None, "a ResNet writes into no subspace"
        config, width = self._config, self._config.dim

        def stem() -> nn.Module:
            return Stem(config.channels, width, 3, padding=1, bias=False)

        return [
            LayerPlan("conv1", stem, "stem"),
            LayerPlan("bn1", lambda: nn.BatchNorm2d(width)),
            LayerPlan("relu", nn.ReLU),
            *(self._block(index) for index in range(BLOCKS)),
            LayerPlan("avgpool", MeanOverPixels),
            LayerPlan("fc", lambda: nn.Linear(self._channels(BLOCKS), config.classes), "head"),
        ]

    def initialise(self, name: str, parameter: Tensor, seed: int) -> None:
        """Convolutions by the rule of He et al. for what leaves them, the classifier uniformly by
        its inputs, as torchvision has both. Norms start as the identity, the classifier's bias at
        zero.
        """
        if parameter.ndim < 2:
            nn.init.constant_(parameter, 1.0 if name.endswith("weight") else 0.0)
            return
        generator = generator_of(name, seed)
        outputs, inputs = parameter.shape[:2]
        with torch.no_grad():
            if parameter.ndim == 4:
                spread = math.sqrt(2 / (outputs * parameter[0, 0].numel()))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
            else:
                uniform = 2 * torch.rand(parameter.shape, generator=generator) - 1
                parameter.copy_(uniform / math.sqrt(inputs))

    def stream_shape(self, blocks: int, batch: int) -> tuple[int, ...]:
        """Fewer pixels and more channels from group to group; the stem has those of the first."""
        return batch, self._side(blocks) ** 2, self._channels(blocks)

    def logits(self, batch: int) -> int:
        return batch * self._config.classes

    def forward_flops(self, blocks: range, batch: int) -> float:
        """Of the convolutions, and of the classifier on the last stage."""
        convolutions = [c for block in blocks for c in self._convolutions(block)]
        if blocks.start == 0:
            config = self._config
            convolutions.append(_Convolution(config.channels, 3, config.dim, config.side))
        total = batch * sum(convolution.flops for convolution in convolutions)
        if blocks.stop == BLOCKS:
            total += 2.0 * self.logits(batch) * self._channels(BLOCKS)
        return total

    def kept_bytes(self, blocks: range, batch: int, width: int, computed: int) -> int:
        """What comes in, what each convolution gives, and what each rectifier does: two in a
        block, one in the stem.
        """
        kept = math.prod(self.stream_shape(blocks.start, batch))
        if blocks.start == 0:
            kept = 2 * kept + batch * self._config.channels * self._config.side**2
        for block in blocks:
            tensors = len(self._convolutions(block)) + 2
            kept += tensors * math.prod(self.stream_shape(block + 1, batch))
        return kept * computed

    def probe(self, batch: int, most_flops: float) -> Probe:
        """The first block on fewer images where a microbatch would take long."""
        one = sum(convolution.flops for convolution in self._convolutions(0))
        images = max(1, min(batch, int(most_flops / one)))
        side = self._side(0)
        return Probe(self._block(0), (images, self._channels(0), side, side), images * one)

    def describe(self) -> str:
        config = self._config
        return (
            f"{BLOCKS} blocks of width {config.dim} and more, {config.classes} classes of images "
            f"of {config.channels} x {config.side} x {config.side}"
        )

    def _block(self, index: int) -> LayerPlan:
        inputs, channels = self._channels(index), self._channels(index + 1)
        group, number = divmod(index, BLOCKS_PER_GROUP)
        stride = 2 if group > 0 and number == 0 else 1
        name = f"layer{group + 1}.{number}"
        return LayerPlan(name, lambda: BasicBlock(inputs, channels, stride), str(index))

    def _convolutions(self, block: int) -> list[_Convolution]:
        inputs, outputs = self._channels(block), self._channels(block + 1)
        side = self._side(block + 1)
        found = [_Convolution(inputs, 3, outputs, side), _Convolution(outputs, 3, outputs, side)]
        return found if inputs == outputs else [*found, _Convolution(inputs, 1, outputs, side)]

    def _channels(self, blocks: int) -> int:
        return self._config.dim << _group(blocks)

    def _side(self, blocks: int) -> int:
        return -(-self._config.side >> _group(blocks))


def _group(blocks: int) -> int:
    """The group of the last of so many blocks; the stem has the shape of the first."""
    return max(0, blocks - 1) // BLOCKS_PER_GROUP


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
