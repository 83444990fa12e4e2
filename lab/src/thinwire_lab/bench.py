"""`python -m thinwire_lab.bench`: what the runtime and the links cost here, side by side.

1. the measured step of four stages over slow links, against the simulator's bound for it,
2. the runtime against one plain process, where links are unlimited and compute dominates,
3. the goodput of a link in both directions at once, and what lies below the meter.
"""

import argparse
import io
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from thinwire.data import Corpus
from thinwire.engine.feed import Feed
from thinwire.model import Stage, StageOptimizer, architecture, learning_rate, token_loss
from thinwire.report import PlainDisplay
from thinwire.run.start import prepare_data
from thinwire.settings import Settings, merged
from thinwire.train import train
from thinwire_lab.arms import Values
from thinwire_lab.bench_link import BARE, SIZES, Row, show, show_goodput
from thinwire_lab.bench_link import Path as LinkPath
from thinwire_lab.experiment import sheet

CASES = sheet("bench")


def run_bench(output: Path | None = None) -> None:
    """Run all benchmarks, print their tables, and write the figures if asked."""
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"machine: {machine}\n")
    figures: dict[str, Any] = {"machine": machine}
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as scratch:
        figures["steps"] = bench_steps(scratch)
        figures["runtime"] = bench_runtime(scratch)
    emulated = show_goodput(LinkPath(80, 25), SIZES)
    figures["links"] = emulated + show_goodput(BARE, (1 << 20,))
    if output is not None:
        output.write_text(json.dumps(figures, indent=1) + "\n")


def bench_steps(scratch: str) -> list[Row]:
    """Four stages as processes: each kind of limit, measured and simulated."""
    print("step of 4 stages over emulated links: median seconds, and the simulator's bound\n")
    rows: list[Row] = []
    for name, values in CASES["slow_links"].items():
        settings = settings_of(scratch, name, values)
        summary = train(settings, PlainDisplay(io.StringIO()))
        measured, bound = summary["step_seconds_median"], summary["simulated_step_seconds"]
        rows.append(
            {
                "case": name,
                "link": f"{settings.link.mbps_up:g} Mbps {settings.link.latency_ms:g} ms",
                "measured": measured,
                "bound": bound,
                "ratio": measured / bound,
                "link busy": summary["link_utilisation"],
            }
        )
    show(rows)
    return rows


def bench_runtime(scratch: str) -> list[Row]:
    """Unlimited links: the same work in one plain process (0 stages), and in 1, 2 and 4 stages."""
    print("seconds per step, links unlimited, and their ratio to a plain loop (0 stages)\n")
    values: Values = CASES["runtime"]
    settings = settings_of(scratch, "plain", values)
    quiet = PlainDisplay(io.StringIO())
    seconds = {0: plain_step_seconds(settings, prepare_data(settings, quiet))}
    for stages in (1, 2, 4):
        changed = merged(values, {"pipeline": {"stages": stages}})
        summary = train(settings_of(scratch, f"stages-{stages}", changed), quiet)
        seconds[stages] = summary["step_seconds_median"]
    rows: list[Row] = [
        {
            "stages": stages,
            "seconds": taken,
            "tokens/s": settings.tokens_per_step / taken,
            "ratio": taken / seconds[0],
        }
        for stages, taken in seconds.items()
    ]
    show(rows)
    return rows


def plain_step_seconds(settings: Settings, corpus: Corpus) -> float:
    """Median step of an ordinary loop in this process, with all its threads."""
    model = Stage(architecture(settings.model).layers())
    model.initialise(settings.model, settings.run.seed)
    optimizer = StageOptimizer(model.global_parameters(), model.roles(), settings.optim)
    feed = Feed(corpus, settings, torch.device("cpu"))
    microbatches = settings.pipeline.microbatches
    seconds = []
    for step in range(settings.train.steps):
        start = time.perf_counter()
        for microbatch in range(microbatches):
            batch = feed.training(step, microbatch)
            logits_BTV = model(batch.inputs)
            (token_loss(logits_BTV, batch.targets) / microbatches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.optim.clip)
        optimizer.step(learning_rate(settings.optim, step, settings.train.steps))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def settings_of(scratch: str, name: str, values: Values) -> Settings:
    """One run of the bench: what all share, with these values."""
    run = {"run": {"name": name, "out": scratch, "device": "cpu"}}
    return Settings.from_plain(merged(merged(CASES["base"], run), values))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m thinwire_lab.bench", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results to this JSON file")
    run_bench(parser.parse_args().json)
