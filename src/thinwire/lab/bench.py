"""`thinwire bench`: what the runtime and the links cost on this machine, side by side in one run.

1. the measured step of four stages over slow links, against the simulator's bound for it,
2. the runtime against one plain process, where links are unlimited and compute dominates,
3. the goodput of a link in both directions at once, and what lies below the meter.
"""

import dataclasses
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
from thinwire.lab.bench_link import goodput, print_tables
from thinwire.model import Stage, llama_layers, token_loss
from thinwire.optim import StageOptimizer, learning_rate
from thinwire.report import PlainDisplay
from thinwire.settings import Settings
from thinwire.train import prepare_corpus, train

STEPS = 30
SLOW_LINKS: dict[str, dict[str, dict[str, Any]]] = {
    "compute-bound": {
        "model": {"preset": "tiny"},
        "pipeline": {"stages": 4, "microbatches": 8, "window": 8},
    },
    "latency-bound": {
        "model": {"preset": "tiny", "context": 64},
        "pipeline": {"stages": 4, "microbatches": 4, "window": 4},
        "train": {"batch": 4},
    },
    "link-bound": {
        "model": {"dim": 64, "heads": 2, "kv_heads": 1, "ffn": 64, "vocab": 512},
        "pipeline": {"stages": 4, "microbatches": 8, "window": 8},
        "codec": {"forward": "fp32", "backward": "fp32"},
        "train": {"batch": 32},
    },
}


def run_bench(output: Path | None = None) -> None:
    """Run all benchmarks, print their tables, and write the figures if asked."""
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"machine: {machine}\n")
    figures: dict[str, Any] = {"machine": machine}
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as scratch:
        figures["steps"] = bench_steps(Path(scratch))
        figures["runtime"] = bench_runtime(Path(scratch))
    emulated, bare = goodput(80, 25), goodput(0, 0, sizes=(1 << 20,))
    print_tables(emulated, bare, 80, 25)
    figures["links"] = [dataclasses.asdict(row) for row in emulated + bare]
    if output is not None:
        output.write_text(json.dumps(figures, indent=1) + "\n")


def bench_steps(scratch: Path) -> list[dict[str, Any]]:
    """Four stages as processes: each kind of limit, measured and simulated."""
    print("step of 4 stages over emulated links: measured, and the simulator's bound for the same")
    print("compute times (seconds, median of the steps; ratio of 1 = nothing lost)")
    print(f"{'case':>14} {'link':>16} {'measured':>9} {'bound':>9} {'ratio':>6} {'link busy':>10}")
    rows = []
    for name, values in SLOW_LINKS.items():
        settings = _settings(scratch, name, values)
        summary = train(settings, _quiet())
        measured, bound = summary["step_seconds_median"], summary["simulated_step_seconds"]
        link = f"{settings.link.mbps_up:g} Mbps {settings.link.latency_ms:g} ms"
        busy = summary["link_utilisation"]
        ratio = measured / bound
        print(f"{name:>14} {link:>16} {measured:9.4f} {bound:9.4f} {ratio:6.3f} {busy:10.0%}")
        rows.append(
            {"case": name, "link": link, "measured": measured, "bound": bound, "ratio": ratio}
        )
    print()
    return rows


def bench_runtime(scratch: Path) -> list[dict[str, Any]]:
    """Unlimited links: the same work in one plain process, and in 1, 2 and 4 stages."""
    values: dict[str, dict[str, Any]] = {
        "model": {"preset": "mini", "layers": 8, "context": 128, "vocab": 2048},
        "pipeline": {"stages": 1, "microbatches": 8},
        "link": {"emulate": False},
        "train": {"steps": 6, "batch": 16},
        "optim": {"warmup": 2},
    }
    settings = _settings(scratch, "plain", values)
    plain = plain_step_seconds(settings, prepare_corpus(settings, _quiet()))
    tokens = settings.tokens_per_step
    print("the runtime's cost, links unlimited, compute dominating (the same model and batch)")
    print(f"{'':>14} {'s per step':>10} {'tokens/s':>9} {'against plain':>14}")
    print(f"{'plain loop':>14} {plain:10.3f} {tokens / plain:9,.0f} {1:14.3f}")
    rows = [{"stages": 0, "seconds": plain, "ratio": 1.0}]
    for stages in (1, 2, 4):
        values["pipeline"]["stages"] = stages
        summary = train(_settings(scratch, f"stages-{stages}", values), _quiet())
        seconds = summary["step_seconds_median"]
        print(
            f"{f'{stages} stages':>14} {seconds:10.3f} {tokens / seconds:9,.0f}"
            f" {seconds / plain:14.3f}"
        )
        rows.append({"stages": stages, "seconds": seconds, "ratio": seconds / plain})
    print()
    return rows


def plain_step_seconds(settings: Settings, corpus: Corpus) -> float:
    """Median step of an ordinary loop in this process, with all its threads."""
    device = torch.device("cpu")
    model = Stage(llama_layers(settings.model))
    model.initialise(settings.model, settings.run.seed)
    optimizer = StageOptimizer(model.global_parameters(), model.roles(), settings.optim)
    feed = Feed(corpus, settings, device)
    microbatches = settings.pipeline.microbatches
    seconds = []
    for step in range(settings.train.steps):
        start = time.perf_counter()
        for microbatch in range(microbatches):
            batch = feed.training(step, microbatch)
            logits_BTV = model(None, batch.inputs)
            (token_loss(logits_BTV, batch.targets) / microbatches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.optim.clip)
        optimizer.step(learning_rate(settings.optim, step, settings.train.steps))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def _settings(scratch: Path, name: str, values: dict[str, dict[str, Any]]) -> Settings:
    merged: dict[str, dict[str, Any]] = {
        "run": {"name": name, "out": str(scratch), "device": "cpu"},
        "train": {
            "steps": STEPS,
            "batch": 16,
            "eval_every": 0,
            "eval_batches": 1,
            "checkpoint_every": 0,
        },
        "link": {"mbps_up": 80.0, "mbps_down": 80.0, "latency_ms": 25.0},
    }
    for section, keys in values.items():
        merged.setdefault(section, {}).update(keys)
    return Settings.from_plain(merged)


def _quiet() -> PlainDisplay:
    return PlainDisplay(io.StringIO())
