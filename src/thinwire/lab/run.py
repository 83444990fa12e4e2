"""`thinwire lab NAME`: runs an experiment and writes what it leaves behind."""

import argparse
import dataclasses
import importlib
import json
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from thinwire.data import prepare_images
from thinwire.engine import Settings, apply_override
from thinwire.engine.feed import Feed
from thinwire.errors import ConfigError
from thinwire.lab import codec_report, codecs, frontier
from thinwire.lab.arms import Say, Session, Values, read_log
from thinwire.lab.bandwidth import run_bandwidth, tokens_to_loss
from thinwire.lab.codecs import Codecs
from thinwire.lab.convergence import Arm, best_by_method, grid, outcome, train_grid
from thinwire.lab.experiment import Outcome, Row, write_outcome
from thinwire.paths import cache_folder
from thinwire.report import PlainDisplay
from thinwire.train import prepare_corpus

EXPERIMENTS = {
    "lossless": "with and without the boundary: loss, activations and every gradient",
    "optimizer": "which optimizers keep weights in the subspace",
    "rank-collapse": "stable rank of writers' weights and gradients over training",
    "subspace": "how a moving basis behaves over a long run",
    "bandwidth": "tokens/s from 10 Mbps to 100 Gbps, measured and simulated",
    "convergence": "what narrow cuts cost in loss, at equal tokens",
    "codecs": "what lossy codecs cost: the findings of arXiv 2401.07788, held against our figures",
    "frontier": "loss against bytes for boundary mode, rank and codec",
}

SMALL: Values = {
    "model": {"preset": "tiny", "layers": 8, "dim": 96, "heads": 4, "kv_heads": 2, "ffn": 256},
    "pipeline": {"stages": 4, "microbatches": 8, "window": 8},
    "train": {"batch": 16, "eval_batches": 8, "eval_every": 0, "checkpoint_every": -1},
}
"""The model of bandwidth and convergence unless `--set` says otherwise: minutes on two cores."""
WHOLE: Values = {**SMALL, "pipeline": {"stages": 4, "microbatches": 1, "schedule": "gpipe"}}
"""The same for codecs and frontier: a batch crosses as one tensor."""
QUICK: Values = {
    "model": {"preset": "tiny", "layers": 4, "dim": 64, "heads": 4, "kv_heads": 2, "ffn": 176,
              "vocab": 512, "context": 64},
    "pipeline": WHOLE["pipeline"],
    "train": SMALL["train"],
}  # fmt: skip
Study = tuple[dict[str, list[Row]], list[str]]  # rows by ground, and what is to be said of them


def run_lab(options: argparse.Namespace) -> None:
    """Run one experiment, write its files, print its verdict."""

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    say(f"{options.name}: {EXPERIMENTS[options.name]}")
    runners: dict[str, Callable[[argparse.Namespace, Say], Outcome]] = {
        "bandwidth": _bandwidth,
        "convergence": _convergence,
        "codecs": _codecs,
        "frontier": _frontier,
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
        "task",
        "arms",
        "seed",
        "steps",
        "epochs",
        "base_steps",
        "tune_on",
        "stages",
        "modes",
        "ranks",
        "lrs",
        "seeds",
        "mbps",
        "device",
        "sweep_steps",
        "dense_microbatches",
        "curves",
    ):
        value = getattr(options, key)
        if value not in (None, 0, "auto"):
            parts.append(f"--{key.replace('_', '-')} {shlex.quote(str(value))}")
    parts += ["--quick"] if options.quick else []
    parts += [f"--set {shlex.quote(override)}" for override in options.set]
    return " ".join(parts)


def _session(options: argparse.Namespace, say: Say) -> Session:
    limit = 60 * options.minutes if options.minutes else math.inf
    parallel = 0 if options.from_log else options.parallel
    log = options.out / f"{options.name}.jsonl"
    return Session(log, parallel, say, time.monotonic() + limit)


def _simple(options: argparse.Namespace, say: Say) -> Outcome:
    modules = {"rank-collapse": "rank_collapse", "subspace": "stability"}
    name = modules.get(options.name, options.name)
    arguments = {"quick": options.quick, "seed": options.seed, "device": options.device}
    if options.steps and name in ("rank_collapse", "stability"):
        arguments["steps"] = options.steps
    module = importlib.import_module(f"thinwire.lab.{name}")
    return module.run(**arguments)


def _base(options: argparse.Namespace, small: Values = SMALL) -> Values:
    values = {section: dict(keys) for section, keys in small.items()}
    if any(override.startswith("model.preset=") for override in options.set):
        values["model"] = {}  # a preset is a whole shape, not a patch on the small one
    values["run"] = {"device": options.device, "seed": options.seed}
    for override in options.set:
        apply_override(values, override)
    return values


def _convergence(options: argparse.Namespace, say: Say) -> Outcome:
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
    session = _session(options, say)
    rows = train_grid(arms, base, corpus, session)
    if options.sweep_steps:
        best = best_by_method(row for row in rows if row["steps"] == options.sweep_steps)
        rates = {(n, method): found["lr"] for (n, _, method), found in best.items()}
        full = [a for a in arms_of(lrs, seeds, steps) if rates.get((a.stages, a.method)) == a.lr]
        rows = train_grid(full, base, corpus, session)
    if not rows:
        raise ConfigError(f"no arm could be trained; see the messages above, and {session.log}")
    return outcome(rows, base, options.tflops * 1e12, command_line(options))


def _codecs(options: argparse.Namespace, say: Say) -> Outcome:
    task = options.task or "cifar"
    wanted = codecs.choose(task, options.arms, options.quick)
    session = _session(options, say)
    study = _on_images if task == "cifar" else _on_text
    found, notes = study(options, wanted, session)
    reports = [codec_report.GroundReport(ground, rows) for ground, rows in found.items() if rows]
    if not reports:
        raise ConfigError(f"no arm could be trained; see the messages above, and {session.log}")
    return codec_report.outcome(task, reports, command_line(options), notes)


def _on_images(
    options: argparse.Namespace, wanted: dict[str, list[Codecs]], session: Session
) -> Study:
    has_images = any(override.startswith("data.path=") for override in options.set)
    if not has_images and not options.quick:
        raise ConfigError(
            "codecs --task cifar needs CIFAR-10: --set data.path=FOLDER of its binary batches, or "
            "any set of images that docs/data.md names; --quick does without"
        )
    base = _base(options, codecs.CIFAR if has_images else codecs.LETTERS)
    if not has_images:
        base["data"]["path"] = str(codecs.letters())
    path, batch = base["data"]["path"], Settings.from_plain(base).train.batch
    images = prepare_images(path, cache_folder())
    session.say(images.summary())
    epochs = options.epochs or (5 if options.quick else 30)
    steps = codecs.steps_of(epochs, len(images.train), batch)
    arms = codecs.make_arms("cifar", wanted["cifar"], _seeds(options), steps)
    rows = codecs.train_ground(arms, base, images, session)
    return {"cifar": rows}, [f"cifar: {epochs} epochs; {images.summary()}"]


def _on_text(
    options: argparse.Namespace, wanted: dict[str, list[Codecs]], session: Session
) -> Study:
    base, display = _base(options, QUICK if options.quick else WHOLE), PlainDisplay(sys.stderr)
    steps = options.steps or (50 if options.quick else 300)
    neutral = Codecs("dense", "bf16", "bf16")
    first = codecs.make_arms("scratch", [neutral], [options.seed], steps)[0]
    corpus = prepare_corpus(first.settings(base), display)
    found, notes = {}, [f"scratch: {corpus.summary()}"]
    if wanted["tune"]:  # a text that cannot be read is refused before the first arm trains
        tuning = codecs.tuning_base(base, corpus, options.tune_on, options.quick)
        text = prepare_corpus(first.settings(tuning), display)
    if wanted["scratch"]:
        arms = codecs.make_arms("scratch", wanted["scratch"], _seeds(options), steps)
        found["scratch"] = codecs.train_ground(arms, base, corpus, session)
    if wanted["tune"]:
        length = options.base_steps or steps
        weights = codecs.base_model(base, corpus, options.seed, length, session)
        if not weights.exists():  # then nothing can be trained from it
            session = dataclasses.replace(session, parallel=0)
        settings, epochs = first.settings(tuning), options.epochs or 3
        examples = Feed(text, settings, torch.device("cpu")).example_count
        steps = codecs.steps_of(epochs, examples, settings.train.batch)
        arms = codecs.make_arms("tune", wanted["tune"], _seeds(options), steps)
        found["tune"] = codecs.train_ground(arms, tuning, text, session, weights)
        notes.append(
            f"tune: {epochs} epochs from a dense model of {length} steps on the text of scratch, "
            f"learning rate {codecs.TUNING_RATE:g} of its; {text.summary()}"
        )
    return found, notes


def _seeds(options: argparse.Namespace) -> list[int]:
    return _numbers(options.seeds, int) or [options.seed, options.seed + 1]


def _frontier(options: argparse.Namespace, say: Say) -> Outcome:
    base = _base(options, QUICK if options.quick else WHOLE)
    arms = frontier.make_arms(
        frontier.specs(options.arms, options.quick),
        Settings.from_plain(base).model.dim,
        _numbers(options.lrs, float) or [3e-3],
        _seeds(options),
        options.steps or (50 if options.quick else 300),
    )
    for arm in arms:
        arm.settings(base)  # an arm that cannot work is refused before the first one trains
    corpus = prepare_corpus(arms[0].settings(base), PlainDisplay(sys.stderr))
    rows = frontier.train_grid(arms, base, corpus, _session(options, say))
    return frontier.outcome(rows, command_line(options))


def _bandwidth(options: argparse.Namespace, say: Say) -> Outcome:
    base = _base(options)
    dim = Settings.from_plain(base).model.dim
    base["train"].setdefault("steps", options.steps or (4 if options.quick else 12))
    base.setdefault("optim", {}).setdefault("warmup", 2)
    rank = (_numbers(options.ranks, int) or [max(1, dim // 16)])[0]
    modes = (options.modes or "subspace").split(",")
    arms: Values = {mode: {"mode": mode, "rank": rank} for mode in modes}
    arms = {"dense": {"mode": "dense", "rank": 0}, **arms}
    rates = _numbers(options.mbps, float) or ([80.0] if options.quick else [10.0, 80.0, 500.0])
    curves = None
    if options.curves is not None:
        curves = read_log(options.curves)
        tokens_to_loss(curves, arms)  # an arm without a curve is refused before any is measured
    with tempfile.TemporaryDirectory(prefix="thinwire-lab-") as scratch:
        return run_bandwidth(
            base,
            arms,
            rates,
            Path(scratch),
            command_line(options),
            say,
            options.dense_microbatches,
            curves,
        )


def _numbers(text: str | None, kind: type) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ConfigError(f"{text!r} must be numbers separated by commas") from None
