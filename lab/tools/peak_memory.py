"""The most memory that training takes in this process, beside the planner's estimate of it.

    python lab/tools/peak_memory.py --set lora.rank=16

One stage on a CPU, a few steps, on a corpus of Python's own standard library. What the process
has before the model is built (torch itself) is not counted.
"""

import argparse
import io
import json
import resource
import sys
from pathlib import Path

from thinwire.engine.build import stage_weights
from thinwire.engine.chain import Chain
from thinwire.engine.feed import Feed
from thinwire.plan import stage_memory
from thinwire.report import PlainDisplay
from thinwire.run.prepare import prepare_data
from thinwire.settings import Settings
from thinwire.settings.tree import apply_override

MODEL = {"layers": 8, "dim": 1024, "heads": 16, "kv_heads": 8, "ffn": 2816, "context": 128}
UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss


def settings_of(changes: list[str]) -> Settings:
    """An uncut model of 91 million parameters, with changes by `--set`."""
    values = {
        "run": {"device": "cpu", "threads": 1},
        "model": dict(MODEL),
        "pipeline": {"stages": 1, "microbatches": 1},
        "train": {"batch": 2, "steps": 2},
    }
    for change in changes:
        apply_override(values, change)
    return Settings.from_plain(values)


def resident() -> int:
    """Bytes that this process holds now."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()


def main() -> None:
    """Train a few steps and print both figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    settings = settings_of(parser.parse_args().set)
    feed_data = prepare_data(settings, PlainDisplay(io.StringIO()))
    small = settings_of(["model.layers=1", "model.dim=32", "model.heads=2", "model.kv_heads=1"])
    train(small, feed_data)  # what torch loads on its first step is not the model's
    before = resident()
    train(settings, feed_data)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT - before
    weights = stage_weights(settings, 0)
    figures = {
        "parameters": weights.count,
        "trained": weights.trained,
        "measured_mb": round(peak / 1e6),
        "planned_mb": round(stage_memory(settings, 0, weights, 1) / 1e6),
    }
    print(json.dumps(figures))


def train(settings: Settings, data: object) -> None:
    """All steps of a run, in this process."""
    chain = Chain(settings)
    chain.feed = Feed(data, settings, chain.device)  # type: ignore[arg-type]
    for step in range(settings.train.steps):
        chain.train_step(step)


if __name__ == "__main__":
    main()
