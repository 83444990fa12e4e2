"""`thinwire lab codecs`: what lossy codecs cost, and which findings of arXiv 2401.07788 hold here.

There are three grounds. "cifar" trains ResNet-18 on images; "scratch" a language model from random
weights; "tune" continues from a dense language model, on other text and for several epochs. The
arms of a ground share model, data and batch, and differ in what packs the two directions of every
cut. Each trained model is tested with compression and without it.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import pydoc_data.topics
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from thinwire.data import Corpus
from thinwire.data.corpus import TOKENIZER
from thinwire.engine.feed import Feed
from thinwire.errors import ConfigError
from thinwire.paths import cache_folder
from thinwire.report import PlainDisplay
from thinwire.run.start import prepare_data
from thinwire.settings import Settings, merged
from thinwire_lab.arms import (
    Arm,
    Ground,
    Values,
    base_of,
    check_arms,
    ground_of,
    small_settings,
    split_patterns,
)
from thinwire_lab.experiment import Say, sheet, steps_of
from thinwire_lab.findings import GroundReport, outcome
from thinwire_lab.image_chain import ImageSettings, ground_of_images
from thinwire_lab.images import ImageSet
from thinwire_lab.outcome import Outcome
from thinwire_lab.pool import Session, Trained, train_arms
from thinwire_lab.vision import letters

GROUNDS = {"cifar": ("cifar",), "lm": ("scratch", "tune")}
EXAMPLE_MEMORY_MB = 16_384  # a row of each CIFAR image at the first cut of ResNet-18: 6,554 MB
TUNING_RATE = 0.3  # learning rate of fine-tuning, as a share of that from scratch

Entry = dict[str, Any]
"""An arm of codecs.toml: its name, kind and codecs."""
Chosen = dict[str, list[Entry]]  # by ground
Found = tuple[dict[str, list[Trained]], list[str]]  # runs by ground, and what is to be said of them


def run(options: argparse.Namespace, say: Say) -> Outcome:
    """Train the chosen arms and judge the findings."""
    chosen = choose(options.task, options.arms, options.quick)
    is_text, tunes = options.task == "lm", bool(chosen.get("tune"))
    used = {"steps": is_text, "epochs": tunes or not is_text, "base_steps": tunes, "tune_on": tunes}
    for name, is_used in used.items():
        if getattr(options, name) and not is_used:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: no chosen arm of --task {options.task} uses it")
    session = Session.of(options, say)
    study = _on_images if options.task == "cifar" else _on_text
    found, notes = study(options, chosen, session)
    reports = [GroundReport(ground, runs) for ground, runs in found.items() if runs]
    if not reports:
        raise ConfigError(f"no arm could be trained; see the messages above, and {session.log}")
    return outcome(options.task, reports, notes)


def _on_images(options: argparse.Namespace, chosen: Chosen, session: Session) -> Found:
    has_images = any(override.startswith("data.path=") for override in options.set)
    if not has_images and not options.quick:
        raise ConfigError(
            "codecs --task cifar needs CIFAR-10: --set data.path=FOLDER of its binary batches, or "
            "an .npz with x_train, y_train, x_test and y_test; --quick needs none"
        )
    small = sheet("codecs")["settings"]["cifar" if has_images else "letters"]
    base = base_of(options, small, ImageSettings)
    if not has_images:
        base["data"]["path"] = str(letters())
    images = ImageSet.read(base["data"]["path"])
    session.say(images.summary())
    epochs = options.epochs or (5 if options.quick else 30)
    steps = math.ceil(epochs * len(images.train) / ImageSettings.from_plain(base).train.batch)
    arms = make_arms("cifar", chosen["cifar"], options.seeds, steps)
    check_arms(arms, base, options.set, ImageSettings.of_arm)
    runs = train_ground("cifar", arms, ground_of_images(arms[0], base, images), session)
    return {"cifar": runs}, [f"cifar: {epochs} epochs; {images.summary()}"]


def _on_text(options: argparse.Namespace, chosen: Chosen, session: Session) -> Found:
    base = base_of(options, small_settings("quick" if options.quick else "whole"))
    display, steps, seeds = PlainDisplay(sys.stderr), steps_of(options), options.seeds
    dense = make_arms("scratch", grid("scratch")[:1], seeds, steps)[0]
    check_arms([dense], base, options.set)  # all of them change the same settings
    corpus = prepare_data(dense.settings(base), display)
    found, notes = {}, [f"scratch: {corpus.summary()}"]
    if chosen["tune"]:  # a text that cannot be read is refused before the first arm trains
        tuning = tuning_base(base, corpus, options.tune_on, options.quick)
        text = prepare_data(dense.settings(tuning), display)
    if chosen["scratch"]:
        arms = make_arms("scratch", chosen["scratch"], seeds, steps)
        ground = ground_of(arms[0], base, corpus, to="")
        found["scratch"] = train_ground("scratch", arms, ground, session)
    if chosen["tune"]:
        length = options.base_steps or steps
        weights = base_model(base, corpus, seeds[0], length, session)
        if not weights.exists():  # then nothing can be trained from it
            session = dataclasses.replace(session, parallel=0)
        settings, epochs = dense.settings(tuning), options.epochs or 3
        examples = Feed(text, settings, torch.device("cpu")).example_count
        steps = math.ceil(epochs * examples / settings.train.batch)
        arms = make_arms("tune", chosen["tune"], seeds, steps)
        ground = ground_of(arms[0], tuning, text, weights, to="")
        found["tune"] = train_ground("tune", arms, ground, session)
        notes.append(
            f"tune: {epochs} epochs from a dense model of {length} steps on the text of scratch, "
            f"learning rate {TUNING_RATE:g} of its; {text.summary()}"
        )
    return found, notes


def grid(ground: str) -> list[Entry]:
    """The arms of a ground, dense first."""
    every = sheet("codecs")["grid"]["images" if ground == "cifar" else "text"]
    return [entry for entry in every if entry.get("only", ground) == ground]


def choose(task: str, patterns: str | None, quick: bool) -> Chosen:
    """The chosen arms of each ground of a task; where there are any, dense is among them."""
    every = {
        ground: [entry for entry in grid(ground) if entry.get("quick") or not quick]
        for ground in GROUNDS[task]
    }
    names = [f"{ground}/{entry['name']}" for ground, mine in every.items() for entry in mine]
    wanted = set()
    for pattern in split_patterns(patterns) if patterns else ["*"]:
        fitting = {n for n in names if any(fnmatchcase(n, p) for p in (pattern, f"*/{pattern}"))}
        if not fitting:
            raise ConfigError(f'--arms "{pattern}" matches none of {", ".join(names)}')
        wanted |= fitting | {f"{name.partition('/')[0]}/dense" for name in fitting}
    return {
        ground: [entry for entry in mine if f"{ground}/{entry['name']}" in wanted]
        for ground, mine in every.items()
    }


def make_arms(ground: str, entries: Sequence[Entry], seeds: Sequence[int], steps: int) -> list[Arm]:
    """An arm for each, dense with all seeds, which shows the noise.

    They are in the order of training: dense, what decides findings, the rest; of equals the slow
    ones first, which stand last in the grid.
    """

    def turn(entry: Entry) -> tuple[bool, bool, int]:
        return entry["kind"] != "dense", not entry.get("core"), -entries.index(entry)

    return [
        _arm(ground, entry, seed, steps)
        for entry in sorted(entries, key=turn)
        for seed in (seeds if entry["kind"] == "dense" else seeds[:1])
    ]


def _arm(ground: str, entry: Entry, seed: int, steps: int) -> Arm:
    codecs = {leg: entry[leg] for leg in ("forward", "backward")}
    changes: Values = {"codec": {**codecs, "memory_mb": EXAMPLE_MEMORY_MB}}
    if ground != "cifar":
        changes["optim"] = {"warmup": max(1, steps // 10)}
    return Arm(f"{ground}/{entry['name']}", seed, steps, changes, entry)


def train_ground(name: str, arms: list[Arm], ground: Ground, session: Session) -> list[Trained]:
    """Train the arms that the log lacks.

    Returns the runs of that length on that ground, also of other calls, in the order of the grid.
    """
    runs = train_arms(arms, ground, session)
    known = [_arm(name, entry, 0, arms[0].steps) for entry in grid(name)]
    return [
        Trained(dataclasses.replace(arm, seed=run.arm.seed), run.figures)
        for arm in known
        for run in runs
        if (arm.changes, arm.steps) == (run.arm.changes, run.arm.steps)
    ]


def base_model(base: Values, corpus: Corpus, seed: int, steps: int, session: Session) -> Path:
    """Weights of a dense language model to fine-tune, trained unless they are there already.

    They are still not there if training failed, or the session had no time left.
    """
    arm = _arm("base", grid("scratch")[0], seed, steps)
    told = json.dumps([ground_of(arm, base, corpus).names, seed, steps])
    name = f"base-{hashlib.sha256(told.encode()).hexdigest()[:12]}.safetensors"
    path = cache_folder() / "lab" / name
    if session.parallel and not path.exists():
        session.say(f"a dense model of {steps} steps, to be fine-tuned")
        alone = dataclasses.replace(session, log=path.with_suffix(".jsonl"))
        alone.log.unlink(missing_ok=True)
        train_ground("scratch", [arm], ground_of(arm, base, corpus, to=str(path)), alone)
    return path


def tuning_base(base: Values, corpus: Corpus, text: str | None, quick: bool) -> Values:
    """The settings of fine-tuning: other text in the same tokens, a lower learning rate.

    Without a text of one's own it is the language reference that comes with Python.
    """
    tokenizer = corpus.folder / TOKENIZER
    if not tokenizer.exists():
        raise ConfigError(
            "fine-tuning reads other text: data.tokenizer must be set for these tokens"
        )
    data = {
        "source": "text",
        "path": text or pydoc_data.topics.__file__,
        "tokenizer": str(tokenizer),
        "valid_path": "",
        "valid_fraction": 0.9 if quick and not text else 0.1,  # quick: little is trained on
    }
    rate = Settings.from_plain(base).optim.lr * TUNING_RATE
    return merged(base, {"data": data, "optim": {"lr": rate}})
