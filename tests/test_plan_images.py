"""Plans of image models, whose cuts each have a size of their own."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from test_plan import RATE
from thinwire.boundary import ImageBoundary
from thinwire.codec import Leg, Place, parse_codec
from thinwire.model import Stage, architecture
from thinwire.plan import (
    make_plan,
    measure_flops,
    plan_text,
    plan_to_plain,
)
from thinwire.settings import Settings
from thinwire.settings.crossing import frame_bytes, stream_width


def image_settings(**changes: object) -> Settings:
    values = {
        "model": {"preset": "resnet18", "dim": 8},
        "data": {"source": "images", "path": "unread"},
        "pipeline": {"stages": 4, "microbatches": 4},
        "codec": {"forward": "topk(0.1)", "backward": "int4(tensor)"},
        "optim": {"name": "sgd", "warmup": 0},
        "train": {"batch": 16},
        **changes,
    }
    return Settings.from_plain(values)


@pytest.mark.parametrize("blocks", [range(8), range(2), range(3, 6), range(6, 8)])
def test_the_costs_of_images_are_those_that_torch_counts(blocks: range) -> None:
    """Operations of convolutions and the classifier, and what the backward will read."""
    family = architecture(image_settings().model)
    stage = Stage(family.stage_layers(blocks))
    is_first, images = blocks.start == 0, 4
    x = torch.randn(images, 3, 32, 32)
    if not is_first:
        x = ImageBoundary().decode(torch.randn(family.stream_shape(blocks.start, images)), None)
    own = {t.data_ptr() for t in (*stage.parameters(), *stage.buffers())}
    kept: dict[int, int] = {}

    def note(saved: torch.Tensor) -> torch.Tensor:
        if saved.data_ptr() not in own:
            storage = saved.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with (
        FlopCounterMode(display=False) as counter,
        torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved),
    ):
        stage(x.requires_grad_(not is_first))
    assert family.forward_flops(blocks, images) == counter.get_total_flops()
    assert family.kept_bytes(blocks, images, 4, 4) == pytest.approx(sum(kept.values()), rel=0.03)


def test_each_cut_of_an_image_model_is_planned_with_its_own_size() -> None:
    settings = image_settings()
    shapes = [(4, 1024, 8), (4, 256, 16), (4, 64, 32)]
    for cut, shape in enumerate(shapes):
        wanted = []
        for name, leg in (("topk(0.1)", Leg.FORWARD), ("int4(tensor)", Leg.BACKWARD)):
            payload = parse_codec(name).pack(torch.randn(shape), Place(leg, 0, 0))
            wanted.append(len(payload) + 64)
        assert frame_bytes(settings, cut) == tuple(wanted)
        assert stream_width(settings, cut) == shape[1] * shape[2]
    plan = make_plan(settings, RATE)
    assert sum(plan.parameters) == architecture(settings.model).parameter_count()
    assert plan.memory_bytes[0] > plan.memory_bytes[1], "the first group has the most pixels"
    text = plan_text(plan)
    for wanted in (
        "8 blocks of width 8 and more, 10 classes of images of 3 x 32 x 32",
        "step: 16 images in 4 microbatches",
        "images/s",
        "cut 2, per microbatch",
        "bytes per image",
    ):
        assert wanted in text
    assert "token" not in text and "each cut" not in text
    plain = plan_to_plain(plan)
    assert plain["unit"] == "image" and len(plain["cuts"]) == 3
    assert plain["tokens_per_s"] == 16 / plain["step_seconds"]


def test_a_machine_is_measured_with_a_block_of_images() -> None:
    assert 0 < measure_flops(image_settings(), repeats=1) < float("inf")
    family = architecture(image_settings().model)
    one = family.probe(1, 0.0)
    assert one.shape == (1, 8, 32, 32) and one.plan.name == "layer1.0"
    assert family.probe(100, 2.5 * one.flops).shape[0] == 2
    assert family.probe(100, 1e15).shape[0] == 100
    stage = Stage([one.plan])
    with FlopCounterMode(display=False) as counter:
        stage(torch.randn(one.shape))
    assert one.flops == counter.get_total_flops()
