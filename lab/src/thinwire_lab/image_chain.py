"""Trains a ResNet-18 whose stages are joined by thinwire's cuts, in one process.

The lab brings the layers, the images, the loss and plain SGD, as in arXiv 2401.07788; thinwire
packs and unpacks what crosses between the stages.

The model has the form used for CIFAR: a 3x3 stem without pooling, then four groups of two blocks.
Each group after the first halves the side and doubles the channels. Layers have the names of
torchvision's resnet18. Each pixel crosses a cut as a token does, with its channels.

Shapes: B images, C channels, S pixels a side, P = S * S, K classes.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.codec import CodecConfig, Leg, Surroundings, TensorSpec, build_codecs
from thinwire.engine.build import choose_device, prepare_torch
from thinwire.engine.cut import CutEnd
from thinwire.errors import ConfigError
from thinwire.model import Score, token_loss
from thinwire.model.llama import generator_of
from thinwire.schedule import split_layers
from thinwire.settings import Settings, machine_cores
from thinwire.typed import from_plain, option
from thinwire_lab.arms import Arm, Ground, Values, merged
from thinwire_lab.chain import Cut, ThroughCut
from thinwire_lab.images import ImageFeed, ImageSet
from thinwire_lab.measure import Scored, train_measured
from thinwire_lab.outcome import Row

GROUPS, BLOCKS_PER_GROUP = 4, 2
BLOCKS = GROUPS * BLOCKS_PER_GROUP


@dataclass(frozen=True)
class RunSection:
    """`[run]` of a run on images."""

    seed: int = option(0, "seed of weights and order")
    device: str = option("auto", "device", ("auto", "cpu", "cuda", "mps"))
    threads: int = option(0, "CPU threads; 0 = a share of the cores", least=0)


@dataclass(frozen=True)
class ResNetSection:
    """`[model]`: a ResNet-18."""

    dim: int = option(64, "width of the first group", least=1)
    classes: int = option(10, "classes", least=2)
    channels: int = option(3, "channels of an image, 3 or 1", least=1, most=3)
    side: int = option(32, "height and width of an image in pixels", least=1)


@dataclass(frozen=True)
class ImagesSection:
    """`[data]`: where images are."""

    path: str = option("", "CIFAR-10's binary batches, or an .npz")
    augment: bool = option(True, "random shifts of up to 4 pixels and flips in training")


@dataclass(frozen=True)
class StagesSection:
    """`[pipeline]`: into how many stages the blocks are cut."""

    stages: int = option(4, "stages", least=1, most=BLOCKS)


@dataclass(frozen=True)
class SgdSection:
    """`[optim]`: SGD, its rate on a cosine down to zero."""

    lr: float = option(0.01, "peak learning rate", above=0)
    momentum: float = option(0.9, "momentum", least=0, below=1)
    weight_decay: float = option(5e-4, "L2 penalty of all parameters", least=0)


@dataclass(frozen=True)
class LengthSection:
    """`[train]`: the length of a run."""

    batch: int = option(128, "images per step", least=1)
    steps: int = option(100, "updates", least=1)


@dataclass(frozen=True)
class ImageSettings:
    """The settings of a run on images; a batch crosses each cut as one tensor."""

    run: RunSection = RunSection()
    model: ResNetSection = ResNetSection()
    data: ImagesSection = ImagesSection()
    pipeline: StagesSection = StagesSection()
    codec: CodecConfig = field(default_factory=CodecConfig)
    optim: SgdSection = SgdSection()
    train: LengthSection = LengthSection()

    @classmethod
    def from_plain(cls, values: Values) -> "ImageSettings":
        """From nested dictionaries, checked."""
        settings = from_plain(cls, values)
        settings.codec.check(settings.pipeline.stages - 1)
        return settings

    @classmethod
    def of_arm(cls, arm: Arm, base: Values) -> "ImageSettings":
        """The settings of an arm on a base."""
        return cls.from_plain(merged(base, arm.all_changes()))

    @property
    def tokens_per_step(self) -> int:
        """Images of a step."""
        return self.train.batch

    tokens_per_microbatch = tokens_per_step


class ImageChain:
    """All stages in one process, with the cuts between them."""

    def __init__(self, settings: ImageSettings, images: ImageSet):
        self.settings = settings
        device = choose_device(settings.run.device, 0)
        prepare_torch(Settings.from_plain({"run": {"threads": settings.run.threads}}), device)
        _check(settings, images)
        run, model, train = settings.run, settings.model, settings.train
        self.feed = ImageFeed(images, train.batch, run.seed, settings.data.augment, device)
        split = split_layers(BLOCKS, [], settings.pipeline.stages)
        sizes = (model.dim, model.channels, model.classes)
        self.stages = [stage.to(device) for stage in resnet_stages(*sizes, split, run.seed)]
        self.cuts = [self._cut(index, blocks.stop) for index, blocks in enumerate(split[:-1])]
        parameters = [p for stage in self.stages for p in stage.parameters()]
        momentum, decay = settings.optim.momentum, settings.optim.weight_decay
        self._optimizer = torch.optim.SGD(parameters, momentum=momentum, weight_decay=decay)

    def _cut(self, index: int, block: int) -> Cut:
        """The cut above so many blocks."""
        settings, model = self.settings, self.settings.model
        pixels = side_after(model.side, block) ** 2
        shape = (settings.train.batch, pixels, width_after(model.dim, block))
        device = next(self.stages[index].parameters()).device
        spec = TensorSpec(shape, torch.float32, device)
        room = Surroundings(self.feed.example_count, settings.codec.memory_mb << 20, None)

        def end(is_lower: bool) -> CutEnd:
            codecs = build_codecs(*settings.codec.names(index))
            for codec in codecs.values():
                codec.prepare(spec, room)
            seed, examples = settings.run.seed, self.feed.examples
            return CutEnd(codecs, spec, is_lower, index, block, seed, examples)

        return Cut(end(True), end(False), settings.train.batch)

    def logits(self, inputs: Tensor, compressed: bool) -> Tensor:
        """The classes of images, across all cuts."""
        x = inputs
        for index, stage in enumerate(self.stages):
            if index > 0:
                z = to_pixels(x)
                z = ThroughCut.apply(z, self.cuts[index - 1]) if compressed else z
                x = to_planes(z)
            x = stage(x)
        return x

    def train_step(self, step: int) -> float:
        """One update."""
        inputs, labels_B = self.feed.training(step)
        for cut in self.cuts:
            cut.at, cut.training = (step, 0), True
        loss = token_loss(self.logits(inputs, compressed=True), labels_B)
        loss.backward()
        share = 0.5 * (1 + math.cos(math.pi * step / self.settings.train.steps))
        self._optimizer.param_groups[0]["lr"] = self.settings.optim.lr * share
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())

    @torch.no_grad()
    def score(self, compressed: bool = True) -> Scored:
        """Loss and accuracy on the test images."""
        score, right = Score(), 0
        for stage in self.stages:
            stage.eval()
        for number in range(self.feed.validation_count):
            inputs, labels_B = self.feed.validation(number)
            for cut in self.cuts:
                cut.at, cut.training = (self.settings.train.steps, number), False
            logits = self.logits(inputs, compressed)
            score.add(token_loss(logits, labels_B), labels_B)
            right += int((logits.argmax(-1) == labels_B).sum())
        for stage in self.stages:
            stage.train()
        return Scored(score.loss, right / score.count)

    def payload_bytes_per_token(self, leg: Leg) -> float:
        """Mean over the cuts of what one image costs on this leg, without frame headers."""
        return sum(cut.payload_bytes_per_token(leg) for cut in self.cuts) / max(1, len(self.cuts))

    @property
    def width(self) -> float:
        """Numbers that a cut carries for an image, mean over the cuts."""
        sizes = [math.prod(cut.lower.spec.shape[1:]) for cut in self.cuts]
        return sum(sizes) / max(1, len(sizes))


def ground_of_images(arm: Arm, base: Values, images: ImageSet) -> Ground:
    """What arms on these images share."""
    plain = dataclasses.asdict(ImageSettings.of_arm(arm, base))
    told = {
        f"{section}.{key}": plain[section][key]
        for section in ("model", "data", "pipeline", "optim", "train")
        for key in plain[section]
        if key not in ("path", "steps")
    }
    names = {"data": images.fingerprint, "settings": told, "weights": ""}
    return Ground(names, {"base": base, "data": base["data"]["path"]}, __name__)


def train(arm: Arm, shared: dict[str, Any]) -> Row:
    """What an arm's process does."""
    settings = ImageSettings.of_arm(arm, shared["base"])
    share = max(1, machine_cores() // max(shared["processes"], settings.pipeline.stages))
    run = dataclasses.replace(settings.run, threads=settings.run.threads or share)
    chain = ImageChain(dataclasses.replace(settings, run=run), ImageSet.read(shared["data"]))
    return train_measured(chain, chain.width)


def _check(settings: ImageSettings, images: ImageSet) -> None:
    """Refuse images that the model does not read, and codecs that remember examples in a run that
    sees none of them again.
    """
    model, train = settings.model, settings.train
    wanted = (model.channels, model.side, model.side)
    if images.shape != wanted or images.classes > model.classes:
        raise ConfigError(
            f"the images are {images.shape} of {images.classes} classes, but the model reads "
            f"{wanted} of {model.classes}: set model.channels, model.side and model.classes"
        )
    codecs = build_codecs(*settings.codec.names(0)).values()
    seen, there = train.steps * train.batch, len(images.train)
    if seen <= there and any(codec.remembers_examples for codec in codecs):
        raise ConfigError(f"{seen:,} of {there:,} images are seen, each once: nothing to remember")


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
