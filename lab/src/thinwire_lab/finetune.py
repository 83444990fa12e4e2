"""`thinwire lab finetune`: what each byte saved costs where a trained model learns other text.

A model is trained on one text, or taken as it is, and fine-tuned on another over every way to make
a cut thin, with the same batches. A model that was trained without a cut must survive it: the
table shows the loss before the first step too.
"""

import argparse
import hashlib
import json
import pydoc_data.topics
import re
import sys
import tempfile
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from thinwire.data import Corpus
from thinwire.engine.build import choose_device, prepare_torch
from thinwire.engine.chain import Chain
from thinwire.engine.checkpoint import MANIFEST, Checkpoint, partial_folder, write_shard
from thinwire.engine.feed import Feed
from thinwire.engine.state import StageState, restore_weights
from thinwire.errors import ConfigError
from thinwire.paths import cache_folder
from thinwire.report import PlainDisplay
from thinwire.run.commit import commit
from thinwire.run.prepare import prepare_corpus
from thinwire.run.start import adopted, make_start, open_origin
from thinwire.settings import Settings, merged
from thinwire_lab.arms import (
    Arm,
    Ground,
    Values,
    base_of,
    check_arms,
    chosen_lines,
    ground_of,
)
from thinwire_lab.codecs import steps_for
from thinwire_lab.decide import at_best_rate, compared, noise_note, noise_of, one_seed, too_short
from thinwire_lab.experiment import Say, sheet
from thinwire_lab.frontier import DENSE, equal_bytes, figure, is_on_edge
from thinwire_lab.measure import mean_width, train_measured
from thinwire_lab.outcome import Outcome, Row
from thinwire_lab.pool import Session, Trained, train_arms

BASE_RATE = 3e-3  # of the first training; that of fine-tuning is a third
LEAST_STEPS = 200  # shorter runs do not separate the arms
NO_LOSS = 0.02  # above dense, relative: what counts as free at this scale
_SPEC = re.compile(r"(dense|random)(?: (d/)?(\d+))? ([^/]+)/(.+)")
_FORM = '"CUT [RANK] FORWARD/BACKWARD", such as "random d/8 int8/int4"'


def run(options: argparse.Namespace, say: Say) -> Outcome:
    """Train the model to begin with, fine-tune it over every chosen cut, and draw the map."""
    base = base_of(options, sheet("finetune")["settings"]["quick" if options.quick else "usual"])
    lines, display = specs(options.arms, options.quick), PlainDisplay(sys.stderr)
    session = Session.of(options, say)
    source = options.model or pretrained(base, options, session)
    origin = Checkpoint.open(source)
    base = merged(base, {"model": vars(origin.settings.model)})
    tuning = merged(base, {"data": _data(options, origin), "train": {"init_from": str(source)}})
    settings = Settings.from_plain(tuning)
    text = prepare_corpus(settings, display)
    examples = Feed(text, settings, torch.device("cpu")).example_count
    steps = steps_for(options.epochs, examples, settings.train.batch)
    rates = options.lrs or [BASE_RATE / 3]
    arms = make_arms(lines, settings.model.dim, rates, options.seeds, steps)
    check_arms(arms, tuning, options.set)
    shared = ground_of(arms[0], tuning, text)
    weights = origin.manifest.get("manifest_sha256", "")[:12]
    ground = Ground({**shared.names, "weights": weights}, shared.shared, __name__)
    runs = train_arms(arms, ground, session)
    found = [run for run in runs if run.arm.steps == steps]
    return outcome(found, f"{options.epochs} epochs of {text.summary()}")


def specs(patterns: str | None, quick: bool) -> list[str]:
    """The chosen lines of the grid, and lines of one's own; dense, to compare with, is in any."""
    grid = sheet("finetune")["grid"]["quick" if quick else "usual"]
    return list(dict.fromkeys([DENSE, *chosen_lines(patterns, grid, _SPEC, _FORM)]))


def make_arms(
    lines: Sequence[str], dim: int, lrs: Sequence[float], seeds: Sequence[int], steps: int
) -> list[Arm]:
    """Each line at every learning rate; dense with all seeds, which shows the noise."""
    arms = []
    for line in lines:
        matched = _SPEC.fullmatch(line)
        assert matched is not None, f"{line} is no line of a grid"
        cut, divides, number, forward, backward = matched.groups()
        rank = max(1, dim // int(number)) if divides else int(number or 0)
        boundary: dict[str, Any] = {"mode": "dense", "rank": 0}
        if cut != "dense":
            boundary = {"mode": "projected", "rank": rank}
        for lr in lrs:
            changes: Values = {
                "boundary": boundary,
                "codec": {"forward": forward, "backward": backward},
                "optim": {"lr": lr, "warmup": max(1, steps // 10)},
            }
            for seed in seeds if line == DENSE else seeds[:1]:
                arms.append(Arm(line, seed, steps, changes, {"cut": cut}))
    return arms


def train(arm: Arm, shared: dict[str, Any]) -> Row:
    """What an arm's process does: start from the weights as a run would, and train."""
    settings = arm.settings_beside(shared["base"], shared["processes"])
    silent = PlainDisplay(StringIO())
    prepare_torch(settings, choose_device(settings.run.device, 0))
    data = Corpus.open(Path(shared["data"]))
    origin = open_origin(settings, silent)
    assert origin is not None, "every arm starts from weights"
    settings = adopted(settings, origin.settings)
    with tempfile.TemporaryDirectory() as folder:
        made = make_start(origin, settings, Path(folder), data, silent)
        chain = Chain(settings, Feed(data, settings, choose_device(settings.run.device, 0)))
        for stage in chain.stages:
            restore_weights(stage, chain.builder.space, made)
    return train_measured(chain, mean_width(chain.settings), points=10)


def pretrained(base: Values, options: argparse.Namespace, session: Session) -> Path:
    """A dense model of a single stage, trained on another text unless it is there already."""
    steps = options.base_steps or (60 if options.quick else 1000)
    own: Values = {
        "pipeline": {"stages": 1, "split": []},
        "optim": {"lr": BASE_RATE, "warmup": max(1, steps // 10)},
        "train": {"steps": steps},
    }
    settings = Settings.from_plain(merged(base, own))
    corpus = prepare_corpus(settings, PlainDisplay(sys.stderr))
    told = json.dumps([settings.hash, corpus.fingerprint])
    place = cache_folder() / "lab" / f"model-{hashlib.sha256(told.encode()).hexdigest()[:12]}"
    if any(place.glob(f"checkpoints/*/{MANIFEST}")):
        return place
    session.say(f"a model of {steps} steps, to be fine-tuned")
    chain = Chain(settings, Feed(corpus, settings, choose_device(settings.run.device, 0)))
    for step in range(steps):
        chain.train_step(step)
    session.say(f"its validation loss: {chain.evaluate():.4f}")
    state = StageState(settings, chain.stages[0], chain.updates[0], [])
    shard = write_shard(partial_folder(place, steps), 0, state.shard())
    facts = {
        "settings": settings.to_plain(),
        "corpus": corpus.fingerprint,
        **vars(chain.updates[0].versions),
    }
    commit(place, steps, [shard], facts, corpus.tokenizer())
    return place


def _data(options: argparse.Namespace, origin: Checkpoint) -> dict[str, Any]:
    """What is learned: other text, in the tokens that the model knows."""
    if origin.tokenizer is None:
        raise ConfigError(f"{origin.folder} holds no tokenizer: other text cannot be read for it")
    return {
        "source": "text",
        "path": options.tune_on or pydoc_data.topics.__file__,
        "tokenizer": str(origin.tokenizer),
        "valid_fraction": 0.1 if options.tune_on else 0.9 if options.quick else 0.6,
    }


def table(runs: list[Trained]) -> list[Row]:
    """A row for each line of the grid at its best learning rate, fewest bytes last."""
    groups: dict[str, list[Trained]] = {}
    for run in runs:
        groups.setdefault(run.arm.label, []).append(run)
    best = {spec: at_best_rate(group) for spec, group in groups.items()}
    dense = [run for run in best.get(DENSE, []) if run.loss is not None]
    if not dense:
        raise ConfigError(f"{DENSE} could not be trained: there is nothing to compare with")
    lines = []
    for label, group in best.items():
        arm, curve = group[0].arm, group[0].figures["curve"]
        place = {"mode": arm.tags["cut"], "rank": arm.get("boundary.rank") or None}
        lines.append({"arm": label, **place, "loss before": curve[0][1], **compared(group, dense)})
    for line in lines:
        line["edge"] = is_on_edge(line, lines)
    return sorted(lines, key=lambda line: -line["bytes per token"])


def outcome(runs: list[Trained], what: str) -> Outcome:
    """The map as a report, with the thinnest cut that costs next to nothing."""
    lines = table(runs)
    dense = next(line for line in lines if line["arm"] == DENSE)
    noise, steps = noise_of(dense), runs[0].arm.steps
    free = max(noise or 0.0, NO_LOSS)
    thin = [line for line in lines if line["gap"] is not None and line["gap"] <= free]
    best = max(thin, key=lambda line: line["ratio"])
    plot = figure(lines, noise)
    plot.suptitle("Fine-tuning: loss against bytes at a cut")
    return Outcome(
        name="finetune",
        question="Fine-tuning a trained model: what does each byte saved at the cut cost in loss?",
        verdict=(
            f"The thinnest cut within {free:.1%} of dense bf16 is {best['arm']}: "
            f"{best['ratio']:.0f}x fewer bytes, {best['gap']:+.1%}."
        ),
        holds=None,
        too_small=too_short(steps, LEAST_STEPS) or one_seed(noise),
        rows=lines,
        figure=plot,
        notes=[
            "loss before: validation loss with the cut in place, before the first step",
            "gap: validation loss after fine-tuning relative to dense bf16 of the same seed at "
            "equal tokens, compression on; edge: no other arm is better in both bytes and loss",
            noise_note(noise),
            f"{steps} steps: {what}; arms other than dense have one seed",
            *equal_bytes(lines),
        ],
    )
