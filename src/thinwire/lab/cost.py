"""What the subspace method itself costs a stage: `python -m thinwire.lab.cost --preset 2b ...`.

Times one middle stage alone: its layers forward and backward, the two ends of its boundaries, the
projection of gradients, the modified optimizer against AdamW, and a move of the basis.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch

from thinwire.boundary import DenseBoundary
from thinwire.engine.build import (
    StageBuilder,
    autocast_for,
    choose_device,
    prepare_torch,
    weights_rounded_once,
)
from thinwire.engine.keeper import GATHER_SHARE
from thinwire.lab.outcome import Row, machine, markdown_table
from thinwire.optim import StageOptimizer
from thinwire.settings import Settings
from thinwire.subspace import grassmann_step

ROUNDS = 5


def timed(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Median seconds of `work`, after two runs to warm up."""
    seconds = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds[2:])[repeats // 2]


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
    assert builder.space is not None and stage.incoming is not None and stage.outgoing is not None
    ends, constraint = (stage.incoming, stage.outgoing), builder.constraint(stage)
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

    dense_ends = DenseBoundary(model.dim), DenseBoundary(model.dim)
    narrow, dense = [], []
    with weights_rounded_once():
        for _ in range(ROUNDS):  # in turn, so that a drifting clock touches both alike
            stage.incoming, stage.outgoing = ends
            narrow.append(timed(microbatch(settings.boundary.rank), device))
            stage.incoming, stage.outgoing = dense_ends
            dense.append(timed(microbatch(model.dim), device))
    stage.incoming, stage.outgoing = ends
    narrow_s, dense_s = statistics.median(narrow), statistics.median(dense)
    updates = {}
    for name, chosen in (("adamw", None), ("subspace", constraint)):
        optimizer = StageOptimizer(stage.global_parameters(), stage.roles(), settings.optim, chosen)
        kept = {p: p.grad for p in stage.parameters()}

        def update(optimizer: StageOptimizer = optimizer, kept: dict = kept) -> None:
            for parameter, gradient in kept.items():
                parameter.grad = gradient
            optimizer.step(1e-6)

        updates[name] = timed(update, device)
        for parameter, gradient in kept.items():
            parameter.grad = gradient
    projection = timed(constraint.project_gradients, device) if constraint else 0.0
    flat_ND = torch.randn(shape[0] * shape[1], model.dim, device=device)
    gather = timed(lambda: flat_ND.T @ flat_ND, device)
    covariance_DD = flat_ND.T @ flat_ND
    basis_DK = builder.space.basis_DK
    move = timed(lambda: grassmann_step(covariance_DD, basis_DK, 0.5), device, 3)
    dense_step = microbatches * dense_s + updates["adamw"]
    ends_step = microbatches * (narrow_s - dense_s)
    others = projection + updates["subspace"] - updates["adamw"]
    window = math.ceil(update_every / GATHER_SHARE)
    moved = (microbatches * gather * window + move) / update_every
    table = builder.space.table_VD
    return [
        {"part": "stage with dense ends, per microbatch", "seconds": dense_s},
        {"part": "stage with narrow ends, per microbatch", "seconds": narrow_s},
        {"part": "projection of gradients, per step", "seconds": projection},
        {"part": "update with AdamW", "seconds": updates["adamw"]},
        {"part": "update with the subspace optimizer", "seconds": updates["subspace"]},
        {"part": "gathering gradients for a move, per microbatch", "seconds": gather},
        {"part": "one move of the basis", "seconds": move},
        {"part": f"encode and decode, {microbatches} microbatches", "seconds": ends_step,
         "share of a dense step": ends_step / dense_step},
        {"part": "projection and change of the optimizer", "seconds": others,
         "share of a dense step": others / dense_step},
        {"part": "all extras", "seconds": ends_step + others,
         "share of a dense step": (ends_step + others) / dense_step},
        {"part": f"moves every {update_every} steps, amortised", "seconds": moved,
         "share of a dense step": moved / dense_step},
        {"part": "token table per stage, bytes (any sequence length)",
         "seconds": None if table is None else float(table.numel() * table.element_size())},
    ]  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--mode", default="subspace", choices=("subspace", "reparam"))
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    settings = Settings.from_plain(
        {
            "model": {"preset": options.preset},
            "run": {
                "device": options.device,
                "precision": options.precision,
                "compile": options.compile,
            },
            "boundary": {"mode": options.mode, "rank": options.rank},
            "pipeline": {"stages": options.stages, "microbatches": options.microbatches},
            "train": {"batch": options.microbatches},
        }
    )
    print(f"{options.preset}, rank {options.rank}, {options.precision}, on {machine()}")
    print(markdown_table(measure(settings)))


if __name__ == "__main__":
    main()
