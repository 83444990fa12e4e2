"""The host's work for the ends of a cut: a middle stage with narrow ends beside dense ones.

    python lab/tools/launch_cost.py --mode subspace --compile

Tensors are so small that computing them takes no time. What is left is what Python and torch do to
launch the work of a microbatch, which is what narrow ends cost a stage on a fast GPU.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from thinwire.engine.build import StageBuilder
from thinwire.model import Boundary, DenseBoundary, Stage
from thinwire.settings import Settings

CALLS = 100
RANK, DIM, CONTEXT = 4, 64, 8


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", default="subspace", choices=("subspace", "reparam", "projected"))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    stage = middle_stage(options.mode, options.compile)
    kinds: dict[str, tuple[int, Boundary | None, Boundary | None]] = {
        "dense": (DIM, DenseBoundary(), DenseBoundary()),
        "narrow": (RANK, stage.incoming, stage.outgoing),
    }
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):  # in turn, so that a drifting clock touches both alike
        for kind, (width, stage.incoming, stage.outgoing) in kinds.items():
            found[kind].append(seconds_of(microbatch(stage, width)))
    dense, narrow = (statistics.median(found[kind]) for kind in kinds)
    how = "compiled" if options.compile else "not compiled"
    print(
        f"{options.mode}, {how}: dense ends {dense * 1e6:.0f} us per microbatch, narrow ends "
        f"{narrow * 1e6:.0f} us: {(narrow - dense) * 1e6:.0f} us more, {narrow / dense - 1:.1%}"
    )


def middle_stage(mode: str, compiled: bool) -> Stage:
    """The second of four stages of one block each."""
    values = {
        "model": {
            "preset": "tiny", "layers": 4, "dim": DIM, "heads": 2, "kv_heads": 2, "ffn": DIM,
            "vocab": 64, "context": CONTEXT,
        },
        "run": {"compile": compiled, "device": "cpu"},
        "boundary": {
            "mode": mode, "rank": RANK, "anchor": "per-stage" if mode == "projected" else "auto",
        },
        "pipeline": {"stages": 4, "microbatches": 1, "schedule": "gpipe"},
        "train": {"batch": 1},
    }  # fmt: skip
    builder = StageBuilder(Settings.from_plain(values), torch.device("cpu"))
    stage = builder.build(1)
    builder.initialise(stage)
    return stage


def microbatch(stage: Stage, width: int) -> Callable[[], None]:
    """Forward and backward of one microbatch."""
    ids_BT = torch.zeros(1, CONTEXT, dtype=torch.long)
    received = torch.randn(1, CONTEXT, width, requires_grad=True)
    gradient = torch.randn(1, CONTEXT, width)

    def work() -> None:
        stage(received, ids_BT).backward(gradient)
        received.grad = None

    return work


def seconds_of(work: Callable[[], None]) -> float:
    """Mean seconds of a call, after some to warm up."""
    for _ in range(CALLS // 5):
        work()
    start = time.perf_counter()
    for _ in range(CALLS):
        work()
    return (time.perf_counter() - start) / CALLS


if __name__ == "__main__":
    main()
