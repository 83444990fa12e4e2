"""`thinwire lab NAME`: runs an experiment and writes what it leaves behind."""

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.engine import Settings, apply_override
from thinwire.errors import ConfigError
from thinwire.lab.bandwidth import run_bandwidth
from thinwire.lab.convergence import Arm, best_by_method, grid, outcome, train_grid
from thinwire.lab.experiment import Outcome, write_outcome
from thinwire.report import PlainDisplay
from thinwire.train import prepare_corpus

EXPERIMENTS = {
    "lossless": "with and without the boundary: loss, activations and every gradient",
    "optimizer": "which optimizers keep weights in the subspace",
    "rank-collapse": "stable rank of writers' weights and gradients over training",
    "subspace": "how a moving basis behaves over a long run",
    "bandwidth": "tokens/s from 10 Mbps to 100 Gbps, measured and simulated",
    "convergence": "what narrow cuts cost in loss, at equal tokens",
}
Values = dict[str, dict[str, Any]]

SMALL: Values = {
    "model": {"preset": "tiny", "layers": 8, "dim": 96, "heads": 4, "kv_heads": 2, "ffn": 256},
    "pipeline": {"stages": 4, "microbatches": 8, "window": 8},
    "train": {"batch": 16, "eval_batches": 8, "eval_every": 0, "checkpoint_every": -1},
}
"""The model of bandwidth and convergence unless `--set` says otherwise: minutes on two cores."""


def run_lab(options: argparse.Namespace) -> None:
    """Run one experiment, write its files, print its verdict."""

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    say(f"{options.name}: {EXPERIMENTS[options.name]}")
    runners: dict[str, Callable[[argparse.Namespace, Callable[[str], None]], Outcome]] = {
        "bandwidth": _bandwidth,
        "convergence": _convergence,
    }
    found = runners.get(options.name, _simple)(options, say)
    place = write_outcome(found, options.out)
    if options.json:
        print(json.dumps(found.to_plain(), indent=1))
        return
    held = {True: "holds: ", False: "does not hold: ", None: ""}[found.holds]
    verdict = held + found.verdict.removeprefix(held)
    print(f"\nVerdict: {verdict}\n\n{place / 'report.md'}\n{place / 'plot.png'}")


def command_line(options: argparse.Namespace) -> str:
    """The command that makes the same figures again."""
    parts = ["thinwire lab", options.name]
    for key in (
        "seed",
        "steps",
        "stages",
        "modes",
        "ranks",
        "lrs",
        "seeds",
        "mbps",
        "device",
        "sweep_steps",
        "dense_microbatches",
    ):
        value = getattr(options, key)
        if value not in (None, 0, "auto"):
            parts.append(f"--{key.replace('_', '-')} {value}")
    parts += ["--quick"] if options.quick else []
    parts += [f"--set {override}" for override in options.set]
    return " ".join(parts)


def _simple(options: argparse.Namespace, say: Callable[[str], None]) -> Outcome:
    modules = {"rank-collapse": "rank_collapse", "subspace": "stability"}
    name = modules.get(options.name, options.name)
    arguments = {"quick": options.quick, "seed": options.seed, "device": options.device}
    if options.steps and name in ("rank_collapse", "stability"):
        arguments["steps"] = options.steps
    module = importlib.import_module(f"thinwire.lab.{name}")
    return module.run(**arguments)


def _base(options: argparse.Namespace) -> Values:
    values = {section: dict(keys) for section, keys in SMALL.items()}
    if any(override.startswith("model.preset=") for override in options.set):
        values["model"] = {}  # a preset is a whole shape, not a patch on the small one
    values["run"] = {"device": options.device, "seed": options.seed}
    for override in options.set:
        apply_override(values, override)
    return values


def _convergence(options: argparse.Namespace, say: Callable[[str], None]) -> Outcome:
    base = _base(options)
    dim = Settings.from_plain(base).model.dim
    steps = options.steps or (20 if options.quick else 300)
    modes = (options.modes or "subspace,reparam,projected").split(",")
    ranks = _numbers(options.ranks, int) or sorted({max(1, dim // n) for n in (8, 32, 100)})
    lrs = _numbers(options.lrs, float) or ([3e-3] if options.quick else [1.5e-3, 3e-3, 6e-3])
    seeds = _numbers(options.seeds, int) or [options.seed]
    if options.quick:
        ranks = ranks[-1:]
    all_stages = _numbers(options.stages, int) or [4]

    def arms_of(rates: list[float], chosen: list[int], length: int) -> list[Arm]:
        return grid(modes, ranks, rates, all_stages, chosen, length)

    arms = arms_of(lrs, seeds[:1] if options.sweep_steps else seeds, options.sweep_steps or steps)
    for arm in arms:
        arm.settings(base)  # an arm that cannot work is refused before the first one trains
    corpus = prepare_corpus(arms[0].settings(base), PlainDisplay(sys.stderr))
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "convergence.jsonl"
    rows = train_grid(arms, base, corpus, log, options.parallel, say)
    if options.sweep_steps:
        best = best_by_method(row for row in rows if row["steps"] == options.sweep_steps)
        rates = {(n, method): found["lr"] for (n, _, method), found in best.items()}
        full = [a for a in arms_of(lrs, seeds, steps) if rates.get((a.stages, a.method)) == a.lr]
        rows = train_grid(full, base, corpus, log, options.parallel, say)
    if not rows:
        raise ConfigError(f"no arm could be trained; see the messages above, and {log}")
    return outcome(rows, base, options.tflops * 1e12, command_line(options))


def _bandwidth(options: argparse.Namespace, say: Callable[[str], None]) -> Outcome:
    base = _base(options)
    dim = Settings.from_plain(base).model.dim
    base["train"].setdefault("steps", options.steps or (4 if options.quick else 12))
    base.setdefault("optim", {}).setdefault("warmup", 2)
    rank = (_numbers(options.ranks, int) or [max(1, dim // 16)])[0]
    modes = (options.modes or "subspace").split(",")
    arms: Values = {mode: {"mode": mode, "rank": rank} for mode in modes}
    arms = {"dense": {"mode": "dense", "rank": 0}, **arms}
    rates = _numbers(options.mbps, float) or ([80.0] if options.quick else [10.0, 80.0, 500.0])
    with tempfile.TemporaryDirectory(prefix="thinwire-lab-") as scratch:
        return run_bandwidth(
            base,
            arms,
            rates,
            Path(scratch),
            command_line(options),
            say,
            options.dense_microbatches,
        )


def _numbers(text: str | None, kind: type) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ConfigError(f"{text!r} must be numbers separated by commas") from None
