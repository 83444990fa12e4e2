"""The model is ResNet-18 in its CIFAR form: names, logits, gradients and running statistics agree
with the network written out below, where a convolution is a product with patches and a batch norm
two moments. All in float64, so 1e-10 of the largest value is asked for.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.boundary.image import to_pixels
from thinwire.model import ModelConfig, Stage
from thinwire.model.resnet import BLOCKS, ResNet
from thinwire.model.task import ONE_PIXEL_SIDE
from thinwire.schedule import split_layers

EXACT = 1e-10


def image_model(**sizes: int) -> ModelConfig:
    return ModelConfig(preset="resnet18", **sizes).resolved()


EPS, MOMENTUM = 1e-5, 0.1  # of every batch norm, torch's own
SHAPES = {
    "small": image_model(dim=4, classes=5, side=16),
    "odd side, grey": image_model(dim=3, classes=2, channels=1, side=9),
}
TINY = SHAPES["small"]


def lively_stage(shape: ModelConfig) -> Stage:
    """The whole model in float64, every parameter and statistic at a value of its own."""
    stage = Stage(ResNet(shape).layers()).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, value in state_of(stage).items():
            if not value.is_floating_point():
                continue
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            if value.ndim > 1:
                value.copy_(noise * math.sqrt(2 / value[0].numel()))
            elif name.endswith("running_var"):
                value.copy_(1 + noise.abs())
            else:
                value.copy_(noise * 0.3 + (1 if name.endswith("weight") else 0))
    return stage


def state_of(stage: Stage) -> dict[str, Tensor]:
    """Parameters and persistent buffers by global name."""
    return {
        f"{name}.{local}": value
        for name, layer in zip(stage.names, stage.layers, strict=True)
        for local, value in layer.state_dict(keep_vars=True).items()
    }


def torchvision_names() -> list[str]:
    """The state of torchvision's resnet18, in its order."""

    def norm(name: str) -> list[str]:
        kept = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        return [f"{name}.{part}" for part in kept]

    names = ["conv1.weight", *norm("bn1")]
    for group, block in itertools.product((1, 2, 3, 4), (0, 1)):
        at = f"layer{group}.{block}"
        names += [f"{at}.conv1.weight", *norm(f"{at}.bn1")]
        names += [f"{at}.conv2.weight", *norm(f"{at}.bn2")]
        if group > 1 and block == 0:
            names += [f"{at}.downsample.0.weight", *norm(f"{at}.downsample.1")]
    return [*names, "fc.weight", "fc.bias"]


def written_out(state: dict[str, Tensor], images_BCSS: Tensor, training: bool, eps: float = EPS):
    """Logits of the network, and its batch norms' statistics after this batch."""
    after: dict[str, Tensor] = {}

    def convolved(x: Tensor, name: str, stride: int) -> Tensor:
        weight = state[f"{name}.weight"]
        side = weight.shape[-1]
        patches_BPN = F.unfold(x, side, padding=side // 2, stride=stride).mT
        result_BPC = patches_BPN @ weight.flatten(1).T
        new_side = math.isqrt(result_BPC.shape[1])
        return result_BPC.mT.unflatten(2, (new_side, new_side))

    def normed(x: Tensor, name: str) -> Tensor:
        mean_C, var_C = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        if training:
            rows_CN = x.detach().transpose(0, 1).flatten(1)
            seen = rows_CN.mean(1), rows_CN.var(1, unbiased=True)
            after[f"{name}.running_mean"] = (1 - MOMENTUM) * mean_C + MOMENTUM * seen[0]
            after[f"{name}.running_var"] = (1 - MOMENTUM) * var_C + MOMENTUM * seen[1]
            after[f"{name}.num_batches_tracked"] = state[f"{name}.num_batches_tracked"] + 1
            mean_C = x.mean((0, 2, 3))
            var_C = (x - mean_C[:, None, None]).square().mean((0, 2, 3))
        scale_C = state[f"{name}.weight"] / (var_C + eps).sqrt()
        shift_C = state[f"{name}.bias"] - mean_C * scale_C
        return x * scale_C[:, None, None] + shift_C[:, None, None]

    x = normed(convolved(images_BCSS, "conv1", 1), "bn1").clamp(min=0)
    for group, block in itertools.product((1, 2, 3, 4), (0, 1)):
        at, first_of_later = f"layer{group}.{block}", group > 1 and block == 0
        stride = 2 if first_of_later else 1
        inner = normed(convolved(x, f"{at}.conv1", stride), f"{at}.bn1").clamp(min=0)
        if first_of_later:
            x = normed(convolved(x, f"{at}.downsample.0", 2), f"{at}.downsample.1")
        x = (normed(convolved(inner, f"{at}.conv2", 1), f"{at}.bn2") + x).clamp(min=0)
    return x.flatten(2).mean(2) @ state["fc.weight"].T + state["fc.bias"], after


def pictures(shape: ModelConfig, batch: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    size = (batch, shape.channels, shape.side, shape.side)
    images = torch.randn(size, generator=generator, dtype=torch.float64)
    return images, torch.randint(shape.classes, (batch,), generator=generator)


def gradients(logits: Tensor, labels_B: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    loss = F.cross_entropy(logits, labels_B)
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


def distance(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == torch.float64
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def test_the_names_and_the_size_are_those_of_resnet18() -> None:
    with torch.device("meta"):
        stage = Stage(ResNet(image_model()).layers())
    assert list(state_of(stage)) == torchvision_names()
    assert sum(p.numel() for p in stage.parameters()) == 11_173_962  # its 3x3 stem, ten classes


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_model_is_the_network_written_out(shape: str, training: bool) -> None:
    stage = lively_stage(SHAPES[shape]).train(training)
    images, labels_B = pictures(SHAPES[shape])
    before = {name: value.clone() for name, value in state_of(stage).items()}
    weights: dict[str, Tensor] = dict(stage.global_parameters())
    theirs, statistics = written_out({**before, **weights}, images, training)
    ours = stage(images)
    assert distance(ours, theirs) < EXACT
    expected = gradients(theirs, labels_B, weights)
    found = gradients(ours, labels_B, weights)
    assert max(distance(found[name], expected[name]) for name in weights) < EXACT
    assert min(expected[name].abs().max() for name in weights) > 1e-6, "every part matters"

    after = state_of(stage)
    assert (len(statistics) == 3 * 20) == training
    for name in after.keys() - weights.keys():
        if name.endswith("num_batches_tracked"):
            assert after[name] == before[name] + training
        else:
            assert distance(after[name], statistics.get(name, before[name])) < EXACT


@pytest.mark.parametrize("change", ["eps", "statistics"])
def test_the_comparison_sees_a_small_difference(change: str) -> None:
    stage = lively_stage(TINY).eval()
    images, _ = pictures(TINY)
    state = dict(state_of(stage))
    if change == "statistics":
        state["layer4.1.bn2.running_var"] = state["layer4.1.bn2.running_var"] * (1 + 1e-6)
    theirs, _ = written_out(state, images, False, 1.001 * EPS if change == "eps" else EPS)
    assert distance(stage(images), theirs) > 10 * EXACT


@pytest.mark.parametrize("split", [[8], [2, 2, 2, 2], [1] * 8, [1, 4, 3], [7, 1]])
def test_every_split_is_the_whole_model(split: list[int]) -> None:
    whole = lively_stage(TINY)
    state = {name: value.detach().clone() for name, value in state_of(whole).items()}
    images, labels_B = pictures(TINY)
    logits = whole(images)
    expected = gradients(logits, labels_B, dict(whole.global_parameters()))

    x, weights, after = images, {}, {}
    for blocks in split_layers(BLOCKS, split, len(split)):
        stage = Stage(ResNet(TINY).stage_layers(blocks)).double()
        with torch.no_grad():
            for name, value in state_of(stage).items():
                value.copy_(state[name])
        x = stage(x)
        if blocks.stop < BLOCKS:
            assert to_pixels(x).shape == ResNet(TINY).stream_shape(blocks.stop, len(images))
        weights |= stage.global_parameters()
        after |= state_of(stage)
    assert torch.equal(x, logits)
    assert list(after) == list(state)
    found = gradients(x, labels_B, weights)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(torch.equal(after[name], value) for name, value in state_of(whole).items())


def test_four_stages_are_cut_after_the_first_three_groups() -> None:
    stages = split_layers(BLOCKS, [], 4)
    names = [[plan.name for plan in ResNet(image_model()).stage_layers(b)] for b in stages]
    assert names == [
        ["conv1", "bn1", "relu", "layer1.0", "layer1.1"],
        ["layer2.0", "layer2.1"],
        ["layer3.0", "layer3.1"],
        ["layer4.0", "layer4.1", "avgpool", "fc"],
    ]
    crossing = [ResNet(image_model()).stream_shape(blocks.stop, 128) for blocks in stages[:-1]]
    assert crossing == [(128, 32 * 32, 64), (128, 16 * 16, 128), (128, 8 * 8, 256)]
    assert ResNet(image_model()).stream_shape(0, 2) == (2, 32 * 32, 64)


@pytest.mark.parametrize("side", [1, 2, 7, 10, 33])
def test_the_shape_of_the_stream_holds_for_any_side(side: int) -> None:
    shape = image_model(dim=2, side=side)
    x = torch.zeros(2, 3, side, side)
    stage = Stage(ResNet(shape).layers()).eval()
    for name, layer in zip(stage.names, stage.layers, strict=True):
        x = layer(x)
        if name.startswith("layer"):
            group, block = map(int, name.removeprefix("layer").split("."))
            assert to_pixels(x).shape == ResNet(shape).stream_shape(2 * group + block - 1, 2)
    assert x.shape == (2, 10)


@pytest.mark.parametrize("side", [1, 5, ONE_PIXEL_SIDE, ONE_PIXEL_SIDE + 1, 32])
def test_images_up_to_a_known_side_end_as_one_pixel(side: int) -> None:
    _, pixels, _ = ResNet(image_model(side=side)).stream_shape(BLOCKS, 1)
    assert (pixels == 1) == (side <= ONE_PIXEL_SIDE)


def test_weights_start_from_name_and_seed_alone() -> None:
    def started(blocks: range, seed: int) -> dict[str, Tensor]:
        stage = Stage(ResNet(TINY).stage_layers(blocks))
        for name, parameter in reversed(stage.global_parameters().items()):
            ResNet(TINY).initialise(name, parameter, seed)
        return dict(stage.global_parameters())

    whole, part = started(range(BLOCKS), 3), started(range(3, 5), 3)
    assert part and all(torch.equal(whole[name], part[name]) for name in part)
    other = started(range(BLOCKS), 4)
    drawn = {name for name in whole if whole[name].ndim > 1}
    assert {name for name in whole if not torch.equal(whole[name], other[name])} == drawn
    alike = "layer1.0.conv1.weight", "layer1.0.conv2.weight"
    assert not torch.equal(whole[alike[0]], whole[alike[1]])


def test_weights_start_as_he_and_torchvision_have_them() -> None:
    def start(name: str, *shape: int) -> Tensor:
        parameter = torch.nn.Parameter(torch.full(shape, math.nan))
        ResNet(TINY).initialise(name, parameter, 0)
        return parameter.detach()

    # a sample of n normal values has a spread within 4 / sqrt(2n) of the true one
    for name, shape, fan_out in (
        ("layer2.0.conv1.weight", (128, 64, 3, 3), 128 * 9),
        ("layer2.0.downsample.0.weight", (128, 64, 1, 1), 128),
    ):
        weight = start(name, *shape)
        assert abs(weight.std() / math.sqrt(2 / fan_out) - 1) < 4 / math.sqrt(2 * weight.numel())
        assert abs(weight.mean()) < 4 * weight.std() / math.sqrt(weight.numel())
    fc = start("fc.weight", 10, 512)
    assert 0.95 / math.sqrt(512) < fc.abs().max() <= 1 / math.sqrt(512)
    assert abs(fc.std() * math.sqrt(3 * 512) - 1) < 0.05
    assert torch.equal(start("bn1.weight", 64), torch.ones(64))
    assert torch.equal(start("layer4.1.bn2.bias", 512), torch.zeros(512))
    assert torch.equal(start("fc.bias", 10), torch.zeros(10))
