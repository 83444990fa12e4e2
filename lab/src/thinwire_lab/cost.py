"""What the subspace method itself costs a stage: `python -m thinwire_lab.cost --preset 2b ...`.

Times one middle stage alone: its layers forward and backward, the two ends of its boundaries, the
projection of gradients, the modified optimizer against AdamW, and a move of the basis.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from thinwire.engine.build import (
    StageBuilder,
    autocast_for,
    choose_device,
    prepare_torch,
    weights_rounded_once,
)
from thinwire.engine.keeper import GATHER_SHARE
from thinwire.errors import ConfigError
from thinwire.model import Constraint, DenseBoundary, StageOptimizer
from thinwire.model.subspace import grassmann_step
from thinwire.settings import Settings
from thinwire_lab.outcome import Row, machine, markdown_table

ROUNDS = 5
QUEUED = 10
SHARE = "share of a dense step"


def timed(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Median seconds of `work`, after two runs to warm up."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds = []
    for _ in range(repeats + 2):
        wait()
        start = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds[2:])[repeats // 2]


class GpuWork(NamedTuple):
    """One run of some work as a GPU sees it."""

    kernels_s: float
    """Seconds that the GPU computes."""
    launches: int
    """Kernels it is given."""
    queued_s: float
    """Seconds until the next run is done, where none is waited for: as in training."""


def watched(work: Callable[[], object], device: torch.device) -> GpuWork:
    """What a GPU does for `work`."""

    def queue() -> None:
        for _ in range(QUEUED):
            work()

    queued = statistics.median(timed(queue, device) for _ in range(ROUNDS)) / QUEUED
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        queue()
        torch.cuda.synchronize(device)
    kernels = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    busy_us = sum(event.time_range.elapsed_us() for event in kernels)
    return GpuWork(busy_us / QUEUED / 1e6, round(len(kernels) / QUEUED), queued)


def measure(settings: Settings, update_every: int = 500) -> list[Row]:
    """The parts of a subspace step on one middle stage, as shares of the dense step.

    The ends of boundaries are timed where they work, as the difference between a stage with narrow
    ends and the same layers with dense ones: alone they would pay for launches that a step hides.
    """
    device = choose_device(settings.run.device, 0)
    prepare_torch(settings, device)
    model, microbatches = settings.model, settings.pipeline.microbatches
    builder = StageBuilder(settings, device)
    stage = builder.build(1)
    builder.initialise(stage)
    assert builder.space is not None
    shape = (settings.microbatch_size, model.context)
    ids_BT = torch.randint(model.vocab, shape, device=device)
    autocast = autocast_for(settings.run.precision, device)

    def microbatch(width: int) -> Callable[[], None]:
        received = torch.randn(*shape, width, device=device, requires_grad=True)
        gradient = torch.randn(*shape, width, device=device)

        def work() -> None:
            with autocast():
                sent = stage(received, ids_BT)
            sent.backward(gradient.to(sent.dtype))
            received.grad = None

        return work

    narrow_ends = settings.boundary.rank, stage.incoming, stage.outgoing
    dense_ends = model.dim, DenseBoundary(), DenseBoundary()
    narrow: list[float] = []
    dense: list[float] = []
    on_gpu: list[GpuWork] = []
    with weights_rounded_once():
        for _ in range(ROUNDS):  # in turn, so that a drifting clock touches both alike
            for found, ends in ((dense, dense_ends), (narrow, narrow_ends)):
                width, stage.incoming, stage.outgoing = ends
                found.append(timed(microbatch(width), device))
        for ends in (dense_ends, narrow_ends) if device.type == "cuda" else ():
            width, stage.incoming, stage.outgoing = ends
            on_gpu.append(watched(microbatch(width), device))
    narrow_s, dense_s = statistics.median(narrow), statistics.median(dense)
    constraint = builder.constraint(stage)
    projection = timed(constraint.project_gradients, device) if constraint else 0.0
    gradients = {parameter: parameter.grad for parameter in stage.parameters()}

    def update_with(held: Constraint | None) -> float:
        optimizer = StageOptimizer(stage.global_parameters(), stage.roles(), settings.optim, held)

        def work() -> None:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            optimizer.step(1e-6)

        return timed(work, device)

    adamw, subspace = update_with(None), update_with(constraint)
    flat_ND = torch.randn(shape[0] * shape[1], model.dim, device=device)
    gather = timed(lambda: flat_ND.T @ flat_ND, device)
    covariance_DD, basis_DK = flat_ND.T @ flat_ND, builder.space.basis_DK
    move = timed(lambda: grassmann_step(covariance_DD, basis_DK, 0.5), device, 3)
    ends_step, others = microbatches * (narrow_s - dense_s), projection + subspace - adamw
    window, table = math.ceil(update_every / GATHER_SHARE), builder.space.table_VD
    parts: dict[str, float | None] = {
        "stage with dense ends, per microbatch": dense_s,
        "stage with narrow ends, per microbatch": narrow_s,
        "projection of gradients, per step": projection,
        "update with AdamW": adamw,
        "update with the subspace optimizer": subspace,
        "gathering gradients for a move, per microbatch": gather,
        "one move of the basis": move,
    }
    extras = {
        f"encode and decode, {microbatches} microbatches": ends_step,
        "projection and change of the optimizer": others,
        "all extras": ends_step + others,
        f"moves every {update_every} steps, amortised": (
            (microbatches * gather * window + move) / update_every
        ),
    }
    dense_step = microbatches * dense_s + adamw
    table_bytes = None if table is None else float(table.numel() * table.element_size())
    return [
        *({"part": part, "seconds": seconds} for part, seconds in parts.items()),
        *_on_the_gpu(*on_gpu),
        *({"part": p, "seconds": s, SHARE: s / dense_step} for p, s in extras.items()),
        {"part": "token table per stage, bytes (any sequence length)", "seconds": table_bytes},
    ]


def _on_the_gpu(*works: GpuWork) -> list[Row]:
    """What the ends cost a GPU, where it was watched: its kernels, and microbatches in a row."""
    if not works:
        return []
    dense, narrow = works
    in_a_row = f"{QUEUED} microbatches in a row, each"
    parts = {
        f"kernels alone with dense ends, {dense.launches} per microbatch": dense.kernels_s,
        f"kernels alone with narrow ends, {narrow.launches} per microbatch": narrow.kernels_s,
        f"dense ends, {in_a_row}": dense.queued_s,
        f"narrow ends, {in_a_row}": narrow.queued_s,
    }
    extras = {
        "encode and decode, kernels alone": (narrow.kernels_s, dense.kernels_s),
        f"encode and decode, {in_a_row}": (narrow.queued_s, dense.queued_s),
    }
    return [
        *({"part": part, "seconds": seconds} for part, seconds in parts.items()),
        *({"part": p, "seconds": n - d, SHARE: n / d - 1} for p, (n, d) in extras.items()),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=1, help="in a microbatch; default 1")
    parser.add_argument("--mode", default="subspace", choices=("subspace", "reparam"))
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", action="store_true")
    told = parser.parse_args()
    values = {
        "model": {"preset": told.preset},
        "run": {"device": told.device, "precision": told.precision, "compile": told.compile},
        "boundary": {"mode": told.mode, "rank": told.rank},
        "pipeline": {"stages": told.stages, "microbatches": told.microbatches},
        "train": {"batch": told.microbatches * told.sequences},
    }
    try:
        settings = Settings.from_plain(values)
    except ConfigError as error:
        parser.error(str(error))
    tokens = settings.microbatch_size * settings.model.context
    shape = f"{told.preset}, rank {told.rank}, {tokens:,} tokens per microbatch"
    print(f"{shape}, {told.precision}, on {machine()}")
    print(markdown_table(measure(settings)))


if __name__ == "__main__":
    main()
