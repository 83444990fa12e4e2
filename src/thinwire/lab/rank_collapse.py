"""`thinwire lab rank-collapse`: do the matrices that write to the stream lose rank in training?

The subspace method holds writers in a few directions and hopes to lose little, because writers and
their gradients are said to become of low rank by themselves. This watches them in a transformer
language model without any constraint, and in a ViT, an MLP-Mixer and a CNN beside it, all of one
width, depth, optimizer and starting rule, so that what is the transformer's own can be told.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.data import Corpus, DataConfig, prepare
from thinwire.engine.build import choose_device, prepare_torch
from thinwire.engine.feed import Feed
from thinwire.lab.decide import too_short
from thinwire.lab.experiment import Say, steps_of
from thinwire.lab.outcome import Outcome, Row
from thinwire.lab.vision import CHARACTERS, character_batch, classifier
from thinwire.model import Stage, llama_layers
from thinwire.model.llama import WRITERS
from thinwire.optim import StageOptimizer, learning_rate
from thinwire.paths import cache_folder
from thinwire.settings import Settings

LEAST_STEPS = 200  # in fewer, models have hardly learned and ranks have not settled
DIM, DEPTH, HIDDEN, VOCAB, CONTEXT = 64, 4, 128, 1024, 64
SEQUENCES, IMAGES = 24, 48  # per step: about 1,600 tokens or patches each
PROBE = 4  # batches that gradients are measured on: never trained on, the same at every step
FALLEN = 0.5  # below this share of where it started, a stable rank counts as collapsed
MODELS = {
    "transformer LM": "#0072B2",
    "ViT": "#56B4E9",
    "MLP-Mixer": "#E69F00",
    "CNN": "#009E73",
}
TRANSFORMERS = ("transformer LM", "ViT")
GRID = np.linspace(0, 1, 65)  # places in a spectrum, as shares of the rank, for mean spectra


def stable_rank(singular: Tensor) -> float:
    """||W||_F^2 / ||W||_2^2 from the singular values, largest first; 0 for a zero matrix."""
    squares = singular.double().square()
    return float(squares.sum() / squares[0]) if squares[0] > 0 else 0.0


def energy_rank(singular: Tensor, share: float = 0.9) -> int:
    """How many directions hold that share of the energy ||W||_F^2."""
    energy = singular.double().square().cumsum(0)
    return int((energy < share * energy[-1] * (1 - 1e-12)).sum()) + 1 if energy[-1] > 0 else 0


def random_stable_rank(rows: int, columns: int) -> float:
    """What a matrix of independent Gaussian entries has: its largest singular value is known."""
    return rows * columns / (math.sqrt(rows) + math.sqrt(columns)) ** 2


def checkpoints(steps: int) -> list[int]:
    """Numbers of updates after which to look: 0, the powers of two, and the last."""
    return sorted({0, steps, *(2**n for n in range(max(1, steps).bit_length()) if 2**n < steps)})


@dataclass(frozen=True)
class Look:
    """The mean over a model's writers of what their spectra say, at one time."""

    stable: float
    stable_share: float  # of the largest possible rank
    of_random: float  # of the stable rank of a random matrix of that shape
    energy_share: float
    spectrum: np.ndarray  # singular values over the largest, at the places of GRID


def look_at(matrices: Iterable[Tensor]) -> Look:
    """Measure matrices; a convolution counts as (channels out, channels in x places)."""
    stable, possible, random, energy, spectra = [], [], [], [], []
    for matrix in matrices:
        flat = matrix.detach().flatten(1)
        singular = torch.linalg.svdvals(flat.double().cpu())
        stable.append(stable_rank(singular))
        possible.append(min(flat.shape))
        random.append(random_stable_rank(*flat.shape))
        energy.append(energy_rank(singular) / min(flat.shape))
        normalised = (singular / singular[0].clamp(min=1e-300)).numpy()
        spectra.append(np.interp(GRID, np.linspace(0, 1, len(normalised)), normalised))
    return Look(
        stable=float(np.mean(stable)),
        stable_share=float(np.mean(np.divide(stable, possible))),
        of_random=float(np.mean(np.divide(stable, random))),
        energy_share=float(np.mean(energy)),
        spectrum=np.mean(spectra, axis=0),
    )


@dataclass
class Task:
    """A model and its data: the batch of a step, and what the model says to it."""

    name: str
    model: nn.Module
    examples: Callable[[int], tuple[Tensor, Tensor]]
    logits: Callable[[Tensor], Tensor]

    def loss(self, step: int) -> tuple[Tensor, float]:
        """The loss on the batch of that number, and the share of right answers."""
        inputs, targets = self.examples(step)
        logits_NV, targets_N = self.logits(inputs).flatten(0, -2), targets.flatten()
        right = (logits_NV.argmax(-1) == targets_N).float().mean()
        return F.cross_entropy(logits_NV, targets_N), float(right)

    def writers(self) -> list[nn.Parameter]:
        """The matrices that write to the stream."""
        return [p for name, p in self.model.named_parameters() if name.endswith(WRITERS)]


def language_task(corpus: Corpus, settings: Settings, device: torch.device) -> Task:
    """Llama blocks without any boundary, on text."""
    model = Stage(llama_layers(settings.model))
    model.initialise(settings.model, settings.run.seed)
    feed = Feed(corpus, settings, device)

    def examples(step: int) -> tuple[Tensor, Tensor]:
        batch = feed.training(step, 0)
        return batch.inputs, batch.targets

    return Task("transformer LM", model.to(device), examples, lambda ids: model(ids))


def image_task(name: str, seed: int, device: torch.device) -> Task:
    """One of the image classifiers, on printed characters."""
    kind = {"ViT": "vit", "MLP-Mixer": "mixer", "CNN": "cnn"}[name]
    model = classifier(kind, DIM, DEPTH, HIDDEN, seed).to(device)

    def examples(step: int) -> tuple[Tensor, Tensor]:
        images, classes = character_batch(IMAGES, seed, step)
        return images.to(device), classes.to(device)

    return Task(name, model, examples, model)


@dataclass
class Trail:
    """What one model's training left: rows for the table, looks for the picture."""

    rows: list[Row]
    looks: dict[str, dict[int, Look]]  # "weight" or "gradient" -> updates done -> look


def follow(task: Task, settings: Settings) -> Trail:
    """Train a model and look at its writers and their gradients on the way."""
    steps = settings.train.steps
    parameters = dict(task.model.named_parameters())
    optimizer = StageOptimizer(parameters, {}, settings.optim)
    trail = Trail([], {"weight": {}, "gradient": {}})
    start = time.perf_counter()
    for step in range(steps + 1):
        if step in checkpoints(steps):
            _take_look(task, step, steps, trail)
            row = trail.rows[-1]
            say(
                f"{task.name:<15} step {step:>4}  loss {row['loss']:.3f}  stable rank of weights "
                f"{trail.rows[-2]['stable rank']:.1f}, of gradients {row['stable rank']:.1f}  "
                f"({time.perf_counter() - start:.0f} s)"
            )
        if step < steps:
            loss, _ = task.loss(step)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters.values(), settings.optim.clip)
            optimizer.step(learning_rate(settings.optim, step, steps))
    return trail


def _take_look(task: Task, step: int, steps: int, trail: Trail) -> None:
    """Weights as they are, gradients over examples that come after all training steps."""
    losses, rights = [], []
    for number in range(steps, steps + PROBE):
        loss, right = task.loss(number)
        (loss / PROBE).backward()
        losses.append(float(loss.detach()))
        rights.append(right)
    gradients = [p.grad for p in task.writers() if p.grad is not None]
    for what, matrices in (("weight", task.writers()), ("gradient", gradients)):
        look = look_at(matrices)
        trail.looks[what][step] = look
        trail.rows.append(
            {
                "model": task.name,
                "what": what,
                "step": step,
                "stable rank": look.stable,
                "share of full rank": look.stable_share,
                "share of random": look.of_random,
                "90 % energy in": look.energy_share,
                "σ at 1/4": float(look.spectrum[len(GRID) // 4]),
                "σ at 1/2": float(look.spectrum[len(GRID) // 2]),
                "loss": float(np.mean(losses)),
                "accuracy": float(np.mean(rights)),
            }
        )
    task.model.zero_grad()


def fallen(trail: Trail, what: str) -> float:
    """The last stable rank over the first, as shares of the full rank."""
    looks = list(trail.looks[what].values())
    return looks[-1].stable_share / looks[0].stable_share if looks[0].stable_share else 1.0


def judge(trails: dict[str, Trail]) -> tuple[bool, str]:
    """Whether the transformers' writers collapse and the others' do not, in words."""
    collapsed = [name for name, trail in trails.items() if fallen(trail, "weight") < FALLEN]
    holds = set(collapsed) == set(TRANSFORMERS)
    where = {0: "no model", len(trails): "every model"}.get(len(collapsed), ", ".join(collapsed))
    learned = [f"{n} {trail.rows[-1]['accuracy']:.0%}" for n, trail in trails.items() if trail.rows]
    return holds, (
        f"The stable rank of writers' weights fell below {FALLEN:.0%} of its start in {where}. As "
        f"a share of full rank, first to last: {_ways(trails)}. Final accuracy: "
        f"{', '.join(learned)}."
    )


def _ways(trails: dict[str, Trail]) -> str:
    parts = []
    for name, trail in trails.items():
        shares = {step: look.stable_share for step, look in trail.looks["weight"].items()}
        first, *_, last = shares.values()
        parts.append(f"{name} {first:.0%} to {last:.0%} (lowest {min(shares.values()):.0%})")
    return ", ".join(parts)


def figure(trails: dict[str, Trail]) -> Figure:
    """Above: stable rank over training. Below: mean spectra, before and after."""
    plot = Figure(figsize=(12, 8.5), layout="constrained")
    axes = plot.subplots(2, 2)
    for column, what in enumerate(("weight", "gradient")):
        over, spectra = axes[0][column], axes[1][column]
        for name, trail in trails.items():
            looks = trail.looks[what]
            shares = [look.stable_share for look in looks.values()]
            over.plot(list(looks), shares, color=MODELS[name], marker="o", markersize=4, label=name)
            first, *_, last = looks.values()
            spectra.plot(GRID, first.spectrum, color=MODELS[name], linestyle=":", linewidth=1.3)
            spectra.plot(GRID, last.spectrum, color=MODELS[name], linewidth=1.8, label=name)
        over.set_xscale("symlog", linthresh=1)
        over.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        over.set(title=f"writers' {what}s", xlabel="updates (0, then logarithmic)", ylim=(0, None))
        spectra.set(xlabel="place in the spectrum (share of full rank)", ylim=(1e-3, 1.3))
        spectra.set_yscale("log")
    axes[0][0].set_ylabel("stable rank, share of full rank")
    axes[1][0].set_ylabel("singular value over the largest\ndotted: before, solid: after")
    plot.suptitle("Stable rank and spectra of the matrices that write to the stream")
    handles, labels = axes[0][0].get_legend_handles_labels()
    plot.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    for axis in axes.flat:
        _plain(axis)
    return plot


def _plain(axis: Axes) -> None:
    axis.grid(color="#E0E0E0", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def lab_settings(steps: int, seed: int, device: str, model: dict[str, Any]) -> Settings:
    """One optimizer, learning rate and batch rule for all models."""
    return Settings.from_plain(
        {
            "run": {"seed": seed, "device": device, "threads": 2},
            "model": model,
            "pipeline": {"stages": 1, "microbatches": 1},
            "optim": {"warmup": min(20, steps)},
            "train": {"steps": steps, "batch": SEQUENCES, "eval_batches": 1},
        }
    )


def compare(corpus: Corpus, settings: Settings) -> dict[str, Trail]:
    """Train every model and follow its writers."""
    device = choose_device(settings.run.device, 0)
    prepare_torch(settings, device)
    trails = {"transformer LM": follow(language_task(corpus, settings, device), settings)}
    for name in ("ViT", "MLP-Mixer", "CNN"):
        trails[name] = follow(image_task(name, settings.run.seed, device), settings)
    return trails


def run(options: argparse.Namespace, say: Say) -> Outcome:
    """Follow the writers of four kinds of model through training."""
    steps, seed, device = steps_of(options), options.seed, options.device
    shape = {"layers": DEPTH, "dim": DIM, "heads": 4, "kv_heads": 2, "ffn": HIDDEN}
    settings = lab_settings(steps, seed, device, {**shape, "vocab": VOCAB, "context": CONTEXT})
    corpus = prepare(DataConfig(), VOCAB, cache_folder())
    trails = compare(corpus, settings)
    holds, verdict = judge(trails)
    return Outcome(
        name="rank-collapse",
        question=(
            "Does training drive the matrices that write to the stream, and their gradients, to "
            "low stable rank? The claim: the weights of transformers, and of no other model."
        ),
        verdict=verdict,
        holds=holds,
        too_small=too_short(steps, LEAST_STEPS),
        rows=[row for trail in trails.values() for row in trail.rows],
        figure=figure(trails),
        notes=[
            "stable rank: ||W||_F^2 / ||W||_2^2, mean over the model's writers; a random matrix "
            "has 25 % of full rank if square and more if not, so step 0 is the baseline for "
            "weights, and `share of random` compares with a random matrix of the same shape",
            f"writers: attention output and feed-forward down projection ({DEPTH} blocks of width "
            f"{DIM}); the mixer's second matrix of each kind; the CNN's second convolution of each "
            "block as (out, in x 9)",
            f"text: Python's standard library, {VOCAB} tokens; images: {len(CHARACTERS)} printed "
            "characters in 16 fonts, turned, scaled, shifted, noised; no example comes twice",
            f"gradients, loss and accuracy: over {PROBE} batches that no step trains on",
            "writers start small in every model (the Llama blocks' rule), so a few dozen of Adam's "
            "updates may outweigh the start: the early dip is perhaps theirs (no control was run)",
            f"collapsed: the share of full rank fell below {FALLEN:.0%} of where it started; one "
            "seed, small models, short training",
        ],
    )


def say(text: str) -> None:
    """Progress, beside whatever the command prints as its result."""
    print(text, file=sys.stderr, flush=True)
