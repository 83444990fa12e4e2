"""`thinwire lab codecs`: what lossy codecs cost, and which findings of arXiv 2401.07788 hold here.

There are three grounds. "cifar" trains ResNet-18 on images; "scratch" a language model from random
weights; "tune" goes on from a dense language model, on other text and for several epochs. The arms
of a ground share model, data and batch, and differ in what packs the two directions of every cut.
Each trained model is tested with compression and without it.
"""

import dataclasses
import math
import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.data import Corpus
from thinwire.data.corpus import TOKENIZER
from thinwire.engine.build import choose_device
from thinwire.engine.chain import Chain
from thinwire.engine.feed import Data, Feed, open_data
from thinwire.errors import ConfigError
from thinwire.lab.arms import (
    Ground,
    Session,
    TrainingArm,
    Values,
    differences,
    fingerprint,
    fits,
    merged,
    split_patterns,
    train_arms,
)
from thinwire.lab.experiment import Row
from thinwire.lab.findings import BITS, FEEDBACK, FEEDBACK_SHARE, SEPARATE
from thinwire.lab.measure import load_weights, save_weights, train_measured
from thinwire.lab.vision import CHARACTERS, MEAN, SIDE, SPREAD, character_batch
from thinwire.paths import cache_folder
from thinwire.settings import Settings

GROUNDS = {"cifar": ("cifar",), "lm": ("scratch", "tune")}
IMAGE_SHARES = (50, 30, 20, 10, 5, 2)
TOKEN_SHARES = (50, 30, 20, 10, 5)
OWN_SHARES = (30, 10)
MEMORY_SHARES = (50, 30, 10)
CORE = (
    *("dense", "fw4-bw8", "fw8-bw4", "fw2-bw8", "fw8-bw2", "topk30", "topk20", "topk10", "topk5"),
    *("topk30-own", "topk10-own", "topk10+ef", "topk10+ef-mixed", "topk10+ef21"),
    *("topk30+aqsgd", "topk10+aqsgd"),
)
"""These decide every finding. They are trained first, for time may run out."""
QUICK = (
    *("dense", "fw2-bw8", "fw8-bw2", "topk30", "topk20", "topk10", "topk5"),
    *("topk10-own", "topk10+ef", "topk30+aqsgd", "topk10+aqsgd"),
)
EXAMPLE_MEMORY_MB = 16_384  # a row of each CIFAR image at the first cut of ResNet-18: 6,554 MB
TUNING_RATE = 0.3  # learning rate of fine-tuning, as a share of that from scratch

CIFAR: Values = {
    "model": {"preset": "resnet18"},
    "data": {"source": "images"},
    "pipeline": {"stages": 4, "microbatches": 1, "schedule": "gpipe"},
    "optim": {"name": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4, "clip": 0.0,
              "warmup": 0, "schedule": "cosine", "floor": 0.0},
    "train": {"batch": 128, "eval_batches": 0},
}  # fmt: skip
"""The paper's setting, but for the number of epochs."""
LETTERS: Values = {
    **CIFAR,
    "model": {"preset": "resnet18", "dim": 4, "classes": 10, "channels": 1, "side": SIDE},
    "data": {"source": "images", "augment": False},
    "optim": {**CIFAR["optim"], "lr": 0.05},
    "train": {"batch": 32, "eval_batches": 0},
}
"""Printed letters from A to J and a narrow ResNet-18: a first look without CIFAR-10."""
_CLASSES = range(CHARACTERS.index("A"), CHARACTERS.index("J") + 1)


@dataclass(frozen=True)
class Codecs:
    """What packs both directions of an arm's cuts, and the findings that it is for."""

    name: str
    forward: str
    backward: str
    findings: tuple[int, ...] = ()


@dataclass(frozen=True)
class Arm(TrainingArm):
    """One training run."""

    ground: str
    name: str
    forward: str
    backward: str
    seed: int
    steps: int

    @property
    def label(self) -> str:
        """The arm in a line of progress."""
        return f"{self.ground}/{self.name}  seed {self.seed}"

    def changes(self) -> Values:
        """What this arm has of its own."""
        changes: Values = {
            "codec": {
                "forward": self.forward,
                "backward": self.backward,
                "memory_mb": EXAMPLE_MEMORY_MB,
            },
            "run": {"seed": self.seed},
            "train": {"steps": self.steps},
        }
        if self.ground != "cifar":
            changes["optim"] = {"warmup": max(1, self.steps // 10)}
        return changes


def grid(ground: str) -> list[Codecs]:
    """The arms of a ground.

    Images are quantized with one scale for the tensor, and both directions choose their own
    elements, as in the paper. Tokens have a scale each, and gradients go where activations went.
    Where one side has few bits, the other kind of scale is tried too: it shows what scales decide.
    """
    is_images = ground == "cifar"
    found = [Codecs("dense", "bf16", "bf16")]
    by_ending = {"": "(tensor)", "-token": ""} if is_images else {"": "", "-tensor": "(tensor)"}
    for ending, scale in by_ending.items():
        for forward in BITS:
            for backward in BITS:
                is_pair = {forward, backward} in ({4, 8}, {2, 8})
                if is_pair or (is_images and not ending):
                    name = f"fw{forward}-bw{backward}{ending}"
                    codecs = f"int{forward}{scale}", f"int{backward}{scale}"
                    found.append(Codecs(name, *codecs, findings=() if ending else (1,)))

    def back(share: int) -> str:
        return _topk(share) if is_images else "topk(shared)"

    for share in IMAGE_SHARES if is_images else TOKEN_SHARES:
        numbers = (2, 3, 4, 5) if is_images else (3, 4, 5, 6, 7)
        found.append(Codecs(f"topk{share}", _topk(share), back(share), numbers))
    for share in () if is_images else OWN_SHARES:
        found.append(Codecs(f"topk{share}{SEPARATE}", _topk(share), _topk(share), (7,)))
    for kind in FEEDBACK:
        forward_name = f"{_topk(FEEDBACK_SHARE)}+{kind}"
        backward_name = forward_name if is_images else "topk(shared)"
        found.append(Codecs(f"topk{FEEDBACK_SHARE}+{kind}", forward_name, backward_name, (4,)))
    for share in () if ground == "scratch" else MEMORY_SHARES:  # there no example comes back
        found.append(Codecs(f"topk{share}+aqsgd", f"{_topk(share)}+aqsgd", back(share), (5,)))
    return found


def _topk(share: int) -> str:
    return f"topk({share / 100:g})"


def choose(task: str, patterns: str | None, quick: bool) -> dict[str, list[Codecs]]:
    """The chosen arms of each ground of a task; where there are any, dense is among them."""
    every = {
        ground: [codecs for codecs in grid(ground) if not quick or codecs.name in QUICK]
        for ground in GROUNDS[task]
    }
    wanted = split_patterns(patterns) if patterns else ["*"]
    names = [f"{ground}/{codecs.name}" for ground, all_of in every.items() for codecs in all_of]
    for pattern in wanted:
        if not any(fits(name, pattern) for name in names):
            raise ConfigError(f'--arms "{pattern}" matches none of {", ".join(names)}')
    found = {}
    for ground, all_of in every.items():
        mine = [c for c in all_of if any(fits(f"{ground}/{c.name}", p) for p in wanted)]
        found[ground] = [c for c in all_of if mine and (c in mine or c.name == "dense")]
    return found


def make_arms(ground: str, all_codecs: list[Codecs], seeds: list[int], steps: int) -> list[Arm]:
    """An arm for each, dense with all seeds, which shows the noise.

    They are in the order of training: dense, what decides findings, the rest; of equals the slow
    ones first, which stand last in the grid.
    """

    def turn(codecs: Codecs) -> tuple[bool, bool, int]:
        return codecs.name != "dense", codecs.name not in CORE, -all_codecs.index(codecs)

    return [
        Arm(ground, codecs.name, codecs.forward, codecs.backward, seed, steps)
        for codecs in sorted(all_codecs, key=turn)
        for seed in (seeds if codecs.name == "dense" else seeds[:1])
    ]


def train(arm: Row, shared: dict[str, Any]) -> Row:
    """What an arm's process does."""
    settings = Arm(**arm).settings(shared["base"])
    data = open_data(settings, Path(shared["data"]))
    chain = Chain(settings, Feed(data, settings, choose_device(settings.run.device, 0)))
    if shared["from"]:
        load_weights(chain, Path(shared["from"]))
    figures = train_measured(chain)
    if shared["to"]:
        save_weights(chain, Path(shared["to"]))
    return figures


def train_ground(
    arms: list[Arm],
    base: Values,
    data: Data,
    session: Session,
    weights: Path | None = None,
    keep: Path | None = None,
) -> list[Row]:
    """Train the arms that the log lacks, from `weights` if given; returns the ground's rows."""
    neutral = Arm(arms[0].ground, "dense", "bf16", "bf16", 0, 10)
    names = {
        "data": data.fingerprint,
        "base": fingerprint(differences(neutral.settings(base))),
        "weights": weights.stem if weights else "",
    }
    shared = {
        "base": base,
        "data": str(data.folder),
        "from": str(weights or ""),
        "to": str(keep or ""),
    }
    rows = train_arms(arms, Ground("thinwire.lab.codecs", shared, names), session)
    return [row for row in rows if (row["ground"], row["steps"]) == (arms[0].ground, arms[0].steps)]


def base_model(base: Values, corpus: Corpus, seed: int, steps: int, session: Session) -> Path:
    """Weights of a dense language model to fine-tune, trained unless they are there already.

    They are still not there if training failed, or the session had no time left.
    """
    arm = Arm("base", "dense", "bf16", "bf16", seed, steps)
    told = [corpus.fingerprint, differences(arm.settings(base)), seed, steps]
    path = cache_folder() / "lab" / f"base-{fingerprint(told)}.safetensors"
    if session.parallel and not path.exists():
        session.say(f"a dense model of {steps} steps, to be fine-tuned")
        alone = dataclasses.replace(session, log=path.with_suffix(".jsonl"))
        alone.log.unlink(missing_ok=True)
        train_ground([arm], base, corpus, alone, keep=path)
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


def steps_of(epochs: int, examples: int, batch: int) -> int:
    """Updates that make so many epochs."""
    return math.ceil(epochs * examples / batch)


def letters(train_count: int = 1024, test_count: int = 512) -> Path:
    """An .npz of printed letters, ten classes of 24 x 24 pixels, made once."""
    path = cache_folder() / "lab" / f"letters-{train_count}-{test_count}.npz"
    if path.exists():
        return path
    images: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    number = 0
    while sum(map(len, labels)) < train_count + test_count:
        images_B, classes_B = character_batch(1024, seed=0, number=number)
        number += 1
        wanted_B = (classes_B >= _CLASSES.start) & (classes_B < _CLASSES.stop)
        shades = ((images_B[wanted_B] * SPREAD + MEAN).clamp(0, 1) * 255).round()
        images.append(shades.byte().permute(0, 2, 3, 1).numpy())
        labels.append((classes_B[wanted_B] - _CLASSES.start).numpy())
    x, y = np.concatenate(images), np.concatenate(labels)
    end = train_count + test_count
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        x_train=x[:train_count],
        y_train=y[:train_count],
        x_test=x[train_count:end],
        y_test=y[train_count:end],
    )
    return path
