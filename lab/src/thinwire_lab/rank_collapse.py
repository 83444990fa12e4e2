"""`thinwire lab rank-collapse`: do the matrices that write to the stream lose rank in training?

The subspace method holds writers in a few directions and hopes to lose little, because writers and
their gradients are said to become of low rank by themselves. This watches them in a transformer
language model without any constraint, and in a ViT, an MLP-Mixer and a CNN beside it, all of one
width, depth, optimizer and starting rule, so that what is the transformer's own can be told.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.data import Corpus, DataConfig, prepare
from thinwire.engine.chain import Chain
from thinwire.engine.feed import Feed
from thinwire.model import StageOptimizer, learning_rate
from thinwire.model.llama import WRITERS
from thinwire.paths import cache_folder
from thinwire.settings import Settings
from thinwire_lab.arms import own_settings
from thinwire_lab.decide import too_short
from thinwire_lab.experiment import Say, steps_of, words
from thinwire_lab.outcome import Outcome, Row
from thinwire_lab.plots import BLUE, GREEN, ORANGE, SKY, canvas, shared_legend
from thinwire_lab.vision import CHARACTERS, character_batch, classifier

LEAST_STEPS = 200  # in fewer, models have hardly learned and ranks have not settled
IMAGES = 48  # per step: about as many patches as the language model has tokens
PROBE = 4  # batches that gradients are measured on: never trained on, the same at every step
FALLEN = 0.5  # below this share of where it started, a stable rank counts as collapsed
LANGUAGE = "transformer LM"
IMAGE_MODELS = {"ViT": "vit", "MLP-Mixer": "mixer", "CNN": "cnn"}
COLOURS = {LANGUAGE: BLUE, "ViT": SKY, "MLP-Mixer": ORANGE, "CNN": GREEN}
TRANSFORMERS = {LANGUAGE, "ViT"}
PLACES = np.linspace(0, 1, 65)  # in a spectrum, as shares of the rank, for mean spectra
SHARE = "share of full rank"


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


def look_at(matrices: Iterable[Tensor]) -> tuple[dict[str, float], np.ndarray]:
    """What the spectra of matrices say, as means, and their mean spectrum over its largest value.

    A convolution counts as (channels out, channels in x places).
    """
    figures, spectra = [], []
    for matrix in matrices:
        flat = matrix.detach().flatten(1)
        singular = torch.linalg.svdvals(flat.double().cpu())
        rank, full = stable_rank(singular), min(flat.shape)
        random = random_stable_rank(*flat.shape)
        figures.append((rank, rank / full, rank / random, energy_rank(singular) / full))
        normalised = (singular / singular[0].clamp(min=1e-300)).numpy()
        spectra.append(np.interp(PLACES, np.linspace(0, 1, len(normalised)), normalised))
    names = ("stable rank", SHARE, "share of random", "90 % energy in")
    spectrum = np.mean(spectra, axis=0)
    found = dict(zip(names, _means(figures), strict=True))
    quarter, half = spectrum[[len(PLACES) // 4, len(PLACES) // 2]].tolist()
    return {**found, "σ at 1/4": quarter, "σ at 1/2": half}, spectrum


def _means(rows: Iterable[tuple[float, ...]]) -> list[float]:
    return [float(np.mean(column)) for column in zip(*rows, strict=True)]


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


def tasks(corpus: Corpus, settings: Settings) -> list[Task]:
    """Llama blocks without any boundary, on text, and image classifiers on printed characters."""
    model, seed = settings.model, settings.run.seed
    chain = Chain(settings)
    feed = Feed(corpus, settings, chain.device)

    def text(step: int) -> tuple[Tensor, Tensor]:
        batch = feed.training(step, 0)
        return batch.inputs, batch.targets

    def images(step: int) -> tuple[Tensor, Tensor]:
        drawn, classes = character_batch(IMAGES, seed, step)
        return drawn.to(chain.device), classes.to(chain.device)

    found = [Task(LANGUAGE, chain.stages[0], text, chain.logits)]
    for name, kind in IMAGE_MODELS.items():
        network = classifier(kind, model.dim, model.layers, model.ffn, seed).to(chain.device)
        found.append(Task(name, network, images, network))
    return found


@dataclass
class Trail:
    """What one model's training left: rows for the table, spectra for the picture."""

    rows: list[Row] = field(default_factory=list)
    spectra: dict[str, list[np.ndarray]] = field(default_factory=dict)  # of what, look by look

    def course(self, what: str, figure: str = SHARE) -> dict[int, float]:
        """A figure of the weights or the gradients, by the updates done."""
        return {row["step"]: row[figure] for row in self.rows if row["what"] == what}

    def look(self, task: Task, step: int, steps: int) -> None:
        """Weights as they are, gradients over examples that come after all training steps."""
        probes = []
        for number in range(steps, steps + PROBE):
            loss, right = task.loss(number)
            (loss / PROBE).backward()
            probes.append((float(loss.detach()), right))
        loss_and_right = dict(zip(("loss", "accuracy"), _means(probes), strict=True))
        gradients = [p.grad for p in task.writers() if p.grad is not None]
        for what, matrices in (("weight", task.writers()), ("gradient", gradients)):
            found, spectrum = look_at(matrices)
            self.spectra.setdefault(what, []).append(spectrum)
            place = {"model": task.name, "what": what, "step": step}
            self.rows.append({**place, **found, **loss_and_right})
        task.model.zero_grad()


def follow(task: Task, settings: Settings, say: Say) -> Trail:
    """Train a model and look at its writers and their gradients on the way."""
    steps = settings.train.steps
    parameters = dict(task.model.named_parameters())
    optimizer = StageOptimizer(parameters, {}, settings.optim)
    trail, start = Trail(), time.perf_counter()
    for step in range(steps + 1):
        if step in checkpoints(steps):
            trail.look(task, step, steps)
            weights, gradients = trail.rows[-2:]
            say(
                f"{task.name:<15} step {step:>4}  loss {weights['loss']:.3f}  stable rank of "
                f"weights {weights['stable rank']:.1f}, of gradients "
                f"{gradients['stable rank']:.1f}  ({time.perf_counter() - start:.0f} s)"
            )
        if step < steps:
            loss, _ = task.loss(step)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters.values(), settings.optim.clip)
            optimizer.step(learning_rate(settings.optim, step, steps))
    return trail


def judge(trails: dict[str, Trail]) -> tuple[bool, str]:
    """Whether the transformers' writers collapse and the others' do not, in words."""
    collapsed, ways = [], []
    for name, trail in trails.items():
        first, *_, last = shares = list(trail.course("weight").values())
        if last < FALLEN * first:
            collapsed.append(name)
        ways.append(f"{name} {first:.0%} to {last:.0%} (lowest {min(shares):.0%})")
    where = {0: "no model", len(trails): "every model"}.get(len(collapsed), ", ".join(collapsed))
    learned = [f"{name} {trail.rows[-1]['accuracy']:.0%}" for name, trail in trails.items()]
    return set(collapsed) == TRANSFORMERS, (
        f"The stable rank of writers' weights fell below {FALLEN:.0%} of its start in {where}. As "
        f"a share of full rank, first to last: {', '.join(ways)}. Final accuracy: "
        f"{', '.join(learned)}."
    )


def figure(trails: dict[str, Trail]) -> Figure:
    """Above: stable rank over training. Below: mean spectra, before and after."""
    title = "Stable rank and spectra of the matrices that write to the stream"
    plot, axes = canvas(title, (12, 8.5), 2, 2)
    for what, over, spectra in zip(("weight", "gradient"), axes[:2], axes[2:], strict=True):
        for name, trail in trails.items():
            style: Row = {"color": COLOURS[name], "label": name}
            shares = trail.course(what)
            over.plot(list(shares), list(shares.values()), marker="o", markersize=4, **style)
            first, *_, last = trail.spectra[what]
            spectra.plot(PLACES, first, color=COLOURS[name], linestyle=":", linewidth=1.3)
            spectra.plot(PLACES, last, linewidth=1.8, **style)
        over.set_xscale("symlog", linthresh=1)
        over.xaxis.set_major_formatter("{x:g}")
        over.set(title=f"writers' {what}s", xlabel="updates (0, then logarithmic)", ylim=(0, None))
        spectra.set(xlabel=f"place in the spectrum ({SHARE})", yscale="log", ylim=(1e-3, 1.3))
    axes[0].set_ylabel(f"stable rank, {SHARE}")
    axes[2].set_ylabel("singular value over the largest\ndotted: before, solid: after")
    shared_legend(axes[0], columns=4)
    return plot


def run(options: argparse.Namespace, say: Say) -> Outcome:
    """Follow the writers of four kinds of model through training."""
    steps = steps_of(options)
    chosen = {
        "run": {"seed": options.seed, "device": options.device},
        "optim": {"warmup": min(20, steps)},
        "train": {"steps": steps},
    }
    settings = own_settings("rank_collapse", chosen)
    model = settings.model
    corpus = prepare(DataConfig(), model.vocab, cache_folder())
    trails = {task.name: follow(task, settings, say) for task in tasks(corpus, settings)}
    holds, verdict = judge(trails)
    facts = {"depth": model.layers, "dim": model.dim, "vocab": model.vocab, "probe": PROBE}
    return Outcome(
        **words("rank_collapse", **facts, characters=len(CHARACTERS), fallen=FALLEN),
        verdict=verdict,
        holds=holds,
        too_small=too_short(steps, LEAST_STEPS),
        rows=[row for trail in trails.values() for row in trail.rows],
        figure=figure(trails),
    )
