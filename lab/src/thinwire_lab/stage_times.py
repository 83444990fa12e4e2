"""What a microbatch costs each stage of a pipeline, timed on this device with the ends of its cuts:
the compute that a simulated step is made of. Stages of the same kind are timed once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.build import (
    StageBuilder,
    autocast_for,
    choose_device,
    prepare_torch,
    weights_rounded_once,
)
from thinwire.model import Stage, StageOptimizer
from thinwire.plan import estimate_costs
from thinwire.schedule import Costs
from thinwire.settings import Settings
from thinwire.settings.crossing import wire_shape
from thinwire_lab.cost import timed

REPEATS = 5

Times = list[dict[str, float]]
"""Seconds of each stage: forward and backward of a microbatch, and update."""


def measure_stages(settings: Settings, repeats: int = REPEATS) -> Times:
    """Time every kind of stage: the first, the last, and those between, by their layers."""
    device = choose_device(settings.run.device, 0)
    prepare_torch(settings, device)
    builder = StageBuilder(settings, device)
    found: dict[tuple[int, bool, bool], dict[str, float]] = {}
    times, split = [], settings.split()
    for index, blocks in enumerate(split):
        kind = len(blocks), index == 0, index == len(split) - 1
        if kind not in found:
            found[kind] = _measure(builder, index, repeats)
        times.append(found[kind])
    return times


def costs_of(settings: Settings, times: Times) -> Costs:
    """Costs for the simulator: bytes from the settings, seconds as measured."""
    sizes = vars(estimate_costs(settings, 1.0))
    seconds = {key: [row[key] for row in times] for key in ("forward", "backward", "update")}
    return Costs(**(sizes | seconds))


def _measure(builder: StageBuilder, index: int, repeats: int) -> dict[str, float]:
    settings, device = builder.settings, builder.device
    stage = builder.build(index)
    builder.initialise(stage)
    forward = _forward(builder, stage, index)
    gradient = torch.randn_like(forward())

    def both() -> None:
        forward().backward(gradient)

    with weights_rounded_once():
        there = timed(forward, device, repeats)
        there_and_back = timed(both, device, repeats)
    held = builder.constraint(stage)
    optimizer = StageOptimizer(stage.global_parameters(), stage.roles(), settings.optim, held)
    gradients = {parameter: parameter.grad for parameter in stage.parameters()}

    def update() -> None:
        for parameter, own in gradients.items():
            parameter.grad = own
        optimizer.step(1e-6)

    return {
        "forward": there,
        "backward": max(0.0, there_and_back - there),
        "update": timed(update, device, repeats),
    }


def _forward(builder: StageBuilder, stage: Stage, index: int) -> Callable[[], Tensor]:
    """The forward of one microbatch on a stage, with the loss on the last."""
    settings, device = builder.settings, builder.device
    autocast = autocast_for(settings.run.precision, device)
    shape = settings.microbatch_size, settings.model.context
    ids_BT = torch.randint(settings.model.vocab, shape, device=device)
    is_last = index == settings.pipeline.stages - 1
    received: Any = ids_BT
    if index > 0:
        received = torch.randn(wire_shape(settings, index - 1), device=device, dtype=builder.dtype)
        received.requires_grad_()

    def forward() -> Tensor:
        with autocast():
            sent = stage(received, ids_BT)
            return stage.loss(sent, ids_BT) if is_last else sent

    return forward
