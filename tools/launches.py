"""What narrow ends cost a stage on this GPU, launched kernel by kernel and replayed as graphs.

A middle stage of a recipe's model computes microbatches, forward and backward, with the ends of its
cuts as settings have them and with dense ones, by turns. Times are medians, in milliseconds per
microbatch: of ten in a row, and of one that is waited for.

    python tools/launches.py run.toml [--set section.key=value ...]
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from thinwire.engine.build import StageBuilder, choose_device, prepare_torch
from thinwire.engine.passes import GraphPasses, Passes, autocast_for, weights_rounded_once
from thinwire.model.config import BoundaryConfig
from thinwire.settings import Settings, load_settings

ROUNDS, ROW = 20, 10


class Drawn:
    """Token ids as a batch has them."""

    def __init__(self, settings: Settings, device: torch.device):
        shape = settings.microbatch_size, settings.model.context
        self.inputs = torch.randint(settings.model.vocab, shape, device=device)

    def loss_of(self, stage: object, microbatches: int) -> tuple[None, int]:
        """A middle stage has none."""
        return None, 1


def rows(settings: Settings, device: torch.device) -> dict[str, Callable[[int], None]]:
    """Ways to compute so many microbatches on a middle stage."""
    builder = StageBuilder(settings, device)
    batch = Drawn(settings, device)
    found: dict[str, Callable[[int], None]] = {}
    for name, kind in (("launched", Passes), ("replayed", GraphPasses)):
        stage = builder.build(1)
        builder.initialise(stage)
        passes = kind(stage, autocast_for(settings.run.precision, device))
        received = torch.randn(builder.wire_spec.shape, device=device, dtype=builder.dtype)
        gradient = torch.randn_like(received)

        def compute(count: int, passes=passes, received=received, gradient=gradient) -> None:
            with weights_rounded_once():
                for _ in range(count):
                    passed = passes.forward(received.detach().clone(), batch, 1)
                    passed.backward(gradient.to(passed.output.dtype))
            for parameter in passes.stage.parameters():
                parameter.grad = None

        found[name] = compute
    return found


def seconds(compute: Callable[[int], None], count: int) -> float:
    """Of so many microbatches in a row."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    compute(count)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def main() -> None:
    """Measure both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    options = parser.parse_args()
    narrow = load_settings(options.config, options.set)
    device = choose_device("cuda", 0)
    prepare_torch(narrow, device)
    dense = dataclasses.replace(narrow, boundary=BoundaryConfig(mode="dense")).resolved()
    ways = {"dense": rows(dense, device), "narrow": rows(narrow, device)}
    measured: dict[tuple[str, str, int], list[float]] = {}
    for number in range(ROUNDS + 2):  # the first two warm up
        for count in (ROW, 1):
            for ends, computes in ways.items():
                for name, compute in computes.items():
                    taken = seconds(compute, count)
                    if number > 1:
                        measured.setdefault((ends, name, count), []).append(taken)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("              ten in a row: dense  narrow    more   waited for: dense  narrow    more")
    for name in ("launched", "replayed"):
        line = f"{name:12}"
        for count in (ROW, 1):
            one, other = (1e3 * statistics.median(measured[ends, name, count]) for ends in ways)
            line += f"  {one:18.3f}  {other:6.3f}  {other / one - 1:+6.1%}"
        print(line)


if __name__ == "__main__":
    main()
