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
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from thinwire.data import prepare_images
from thinwire.engine.feed import Feed
from thinwire.errors import ConfigError
from thinwire.lab import codec_report, codecs, frontier
from thinwire.lab.arms import Say, Session, Values, check_arms, merged, read_log
from thinwire.lab.bandwidth import Study, boundaries, run_bandwidth
from thinwire.lab.codecs import Codecs
from thinwire.lab.convergence import Arm, best_by_method, grid, outcome, train_grid
from thinwire.lab.experiment import Outcome, Row, write_outcome
from thinwire.lab.options import EXPERIMENTS, NOT_IN_COMMAND
from thinwire.paths import cache_folder
from thinwire.report import PlainDisplay
from thinwire.settings import Settings, apply_override
from thinwire.train import prepare_corpus

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
Found = tuple[dict[str, list[Row]], list[str]]  # rows by ground, and what is to be said of them


def run_lab(options: argparse.Namespace) -> None:
    """Run one experiment, write its files, print its verdict."""

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    experiment = EXPERIMENTS[options.name]
    command = command_line(options)
    say(f"{options.name}: {experiment.does}")
    runners: dict[str, Callable[[argparse.Namespace, Say], Outcome]] = {
        "bandwidth": _bandwidth,
        "convergence": _convergence,
        "codecs": _codecs,
        "frontier": _frontier,
    }
    found = runners.get(options.name, _simple)(options, say)
    found.command = command
    place = write_outcome(found, options.out)
    if options.json:
        print(json.dumps(found.to_plain(), indent=1))
        return
    print(f"\nVerdict: {found.conclusion}\n\n{place / 'report.md'}\n{place / 'plot.png'}")


def command_line(options: argparse.Namespace) -> str:
    """The command that makes the same figures again."""
    parts = ["thinwire lab", options.name]
    for key, default in EXPERIMENTS[options.name].defaults.items():
        value = getattr(options, key)
        if key in NOT_IN_COMMAND or not value or value == default:
            continue
        flag = f"--{key.replace('_', '-')}"
        if key == "set":
            parts += [f"--set {shlex.quote(override)}" for override in value]
        elif value is True:
            parts.append(flag)
        else:
            text = ",".join(f"{n:g}" for n in value) if isinstance(value, list) else str(value)
            parts.append(f"{flag} {shlex.quote(text)}")
    return " ".join(parts)


def _session(options: argparse.Namespace, say: Say) -> Session:
    limit = 60 * options.minutes if options.minutes else math.inf
    parallel = 0 if options.from_log else options.parallel
    log = options.out / f"{options.name}.jsonl"
    return Session(log, parallel, say, time.monotonic() + limit)


def _simple(options: argparse.Namespace, say: Say) -> Outcome:
    """Experiments whose options are the parameters of their `run`."""
    experiment = EXPERIMENTS[options.name]
    module = importlib.import_module(f"thinwire.lab.{experiment.module}")
    names = [name for name in experiment.defaults if name not in NOT_IN_COMMAND]
    arguments = {name: getattr(options, name) for name in names}
    if experiment.steps is not None:  # then all that --quick decides is how many
        arguments["steps"] = _steps(options)
        del arguments["quick"]
    return module.run(**arguments)


def _steps(options: argparse.Namespace) -> int:
    steps = EXPERIMENTS[options.name].steps
    assert steps is not None, f"{options.name} has no --steps"
    return options.steps or steps[options.quick]


def _base(options: argparse.Namespace, small: Values = SMALL) -> Values:
    """The settings that all arms share. What the experiment does not use is refused."""
    values = {section: dict(keys) for section, keys in small.items()}
    if any(override.startswith("model.preset=") for override in options.set):
        values["model"] = {}  # a preset is a whole shape, not a patch on the small one
    values["run"] = {"device": options.device}
    for override in options.set:
        apply_override(values, override)
        place = override.partition("=")[0].strip()
        if any(fnmatchcase(place, unused) for unused in EXPERIMENTS[options.name].unused):
            raise ConfigError(
                f"--set {override}: lab {options.name} does not use {place}; leave it out"
            )
    return values


def _width(base: Values) -> int:
    return Settings.from_plain({"model": base["model"], "pipeline": {"stages": 1}}).model.dim


def _convergence(options: argparse.Namespace, say: Say) -> Outcome:
    base = _base(options)
    dim = _width(base)
    modes = (options.modes or "subspace,reparam,projected").split(",")
    ranks = sorted({max(1, dim // n) for n in ((8,) if options.quick else (8, 32, 100))})
    lrs = options.lrs or ([3e-3] if options.quick else [1.5e-3, 3e-3, 6e-3])
    seeds, sweep = options.seeds, options.sweep_steps

    def arms_of(rates: list[float], chosen: list[int], dense: list[int], steps: int) -> list[Arm]:
        ranks_ = options.ranks or ranks
        return grid(modes, ranks_, rates, options.stages, chosen, steps, dense)

    two = seeds if len(seeds) > 1 else [seeds[0], seeds[0] + 1]  # dense shows the noise
    full = arms_of(lrs, seeds, two, _steps(options))
    check_arms(full, base, options.set)
    corpus = prepare_corpus(full[0].settings(base), PlainDisplay(sys.stderr))
    session = _session(options, say)
    if sweep:
        swept = train_grid(arms_of(lrs, seeds[:1], seeds[:1], sweep), base, corpus, session)
        best = best_by_method(row for row in swept if row["steps"] == sweep)
        rates = {(n, method): found["lr"] for (n, _, method), found in best.items()}
        full = [arm for arm in full if rates.get((arm.stages, arm.method)) == arm.lr]
    rows = train_grid(full, base, corpus, session)
    if not rows:
        raise ConfigError(f"no arm could be trained; see the messages above, and {session.log}")
    return outcome(rows, base, options.tflops * 1e12)


def _codecs(options: argparse.Namespace, say: Say) -> Outcome:
    task = options.task
    wanted = codecs.choose(task, options.arms, options.quick)
    session = _session(options, say)
    _refuse_unused(options, wanted)
    study = _on_images if task == "cifar" else _on_text
    found, notes = study(options, wanted, session)
    reports = [codec_report.GroundReport(ground, rows) for ground, rows in found.items() if rows]
    if not reports:
        raise ConfigError(f"no arm could be trained; see the messages above, and {session.log}")
    return codec_report.outcome(task, reports, notes)


def _refuse_unused(options: argparse.Namespace, wanted: dict[str, list[Codecs]]) -> None:
    """Refuse options that none of the chosen arms uses."""
    tunes = bool(wanted.get("tune"))
    used = {
        "steps": options.task == "lm",
        "epochs": options.task == "cifar" or tunes,
        "base_steps": tunes,
        "tune_on": tunes,
    }
    for name, is_used in used.items():
        if getattr(options, name) and not is_used:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag}: no chosen arm of --task {options.task} uses it; leave it out"
            )


def _on_images(
    options: argparse.Namespace, wanted: dict[str, list[Codecs]], session: Session
) -> Found:
    has_images = any(override.startswith("data.path=") for override in options.set)
    if not has_images and not options.quick:
        raise ConfigError(
            "codecs --task cifar needs CIFAR-10: --set data.path=FOLDER of its binary batches, or "
            "any image format that docs/data.md lists; --quick needs none"
        )
    base = _base(options, codecs.CIFAR if has_images else codecs.LETTERS)
    if not has_images:
        base["data"]["path"] = str(codecs.letters())
    path, batch = base["data"]["path"], Settings.from_plain(base).train.batch
    images = prepare_images(path, cache_folder())
    session.say(images.summary())
    epochs = options.epochs or (5 if options.quick else 30)
    steps = codecs.steps_of(epochs, len(images.train), batch)
    arms = codecs.make_arms("cifar", wanted["cifar"], options.seeds, steps)
    check_arms(arms, base, options.set)
    rows = codecs.train_ground(arms, base, images, session)
    return {"cifar": rows}, [f"cifar: {epochs} epochs; {images.summary()}"]


def _on_text(
    options: argparse.Namespace, wanted: dict[str, list[Codecs]], session: Session
) -> Found:
    base, display = _base(options, QUICK if options.quick else WHOLE), PlainDisplay(sys.stderr)
    steps, seeds = _steps(options), options.seeds
    neutral = Codecs("dense", "bf16", "bf16")
    first = codecs.make_arms("scratch", [neutral], seeds, steps)[0]
    check_arms([first], base, options.set)  # all of them change the same settings
    corpus = prepare_corpus(first.settings(base), display)
    found, notes = {}, [f"scratch: {corpus.summary()}"]
    if wanted["tune"]:  # a text that cannot be read is refused before the first arm trains
        tuning = codecs.tuning_base(base, corpus, options.tune_on, options.quick)
        text = prepare_corpus(first.settings(tuning), display)
    if wanted["scratch"]:
        arms = codecs.make_arms("scratch", wanted["scratch"], seeds, steps)
        found["scratch"] = codecs.train_ground(arms, base, corpus, session)
    if wanted["tune"]:
        length = options.base_steps or steps
        weights = codecs.base_model(base, corpus, seeds[0], length, session)
        if not weights.exists():  # then nothing can be trained from it
            session = dataclasses.replace(session, parallel=0)
        settings, epochs = first.settings(tuning), options.epochs or 3
        examples = Feed(text, settings, torch.device("cpu")).example_count
        steps = codecs.steps_of(epochs, examples, settings.train.batch)
        arms = codecs.make_arms("tune", wanted["tune"], seeds, steps)
        found["tune"] = codecs.train_ground(arms, tuning, text, session, weights)
        notes.append(
            f"tune: {epochs} epochs from a dense model of {length} steps on the text of scratch, "
            f"learning rate {codecs.TUNING_RATE:g} of its; {text.summary()}"
        )
    return found, notes


def _frontier(options: argparse.Namespace, say: Say) -> Outcome:
    base = _base(options, QUICK if options.quick else WHOLE)
    arms = frontier.make_arms(
        frontier.specs(options.arms, options.quick),
        _width(base),
        options.lrs or [3e-3],
        options.seeds,
        _steps(options),
    )
    check_arms(arms, base, options.set)
    corpus = prepare_corpus(arms[0].settings(base), PlainDisplay(sys.stderr))
    return frontier.outcome(frontier.train_grid(arms, base, corpus, _session(options, say)))


def _bandwidth(options: argparse.Namespace, say: Say) -> Outcome:
    base = merged(_base(options), {"run": {"seed": options.seed}})
    dim = _width(base)
    base.setdefault("optim", {}).setdefault("warmup", 2)
    curves = None if options.curves is None else read_log(options.curves)
    with tempfile.TemporaryDirectory(prefix="thinwire-lab-") as scratch:
        study = Study(
            base,
            boundaries((options.modes or "subspace").split(","), options.ranks or [dim // 16 or 1]),
            options.mbps or ([80.0] if options.quick else [10.0, 80.0, 500.0]),
            _steps(options),
            Path(scratch),
            options.dense_microbatches,
        )
        study.check(options.set)
        return run_bandwidth(study, say, curves)
