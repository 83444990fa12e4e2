"""`thinwire lab rank-collapse`: do the matrices that write to the stream lose rank in training?

The subspace method holds writers in a few directions and hopes to lose little, because writers and
their gradients are said to become of low rank by themselves. This watches them in a transformer
language model without any constraint, and in a ViT, an MLP-Mixer and a CNN beside it, all of one
width, depth, optimizer and starting rule, so that what is the transformer's own can be told.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.data import Corpus, DataConfig, prepare
from thinwire.engine.feed import Feed
from thinwire.model import StageOptimizer, learning_rate
from thinwire.model.llama import WRITERS
from thinwire.paths import cache_folder
from thinwire.settings import Settings
from thinwire_lab.arms import own_settings
from thinwire_lab.chain import Chain
from thinwire_lab.decide import too_short
from thinwire_lab.experiment import Say, steps_of, words
from thinwire_lab.outcome import Outcome, Row
from thinwire_lab.plots import Line, Panel
from thinwire_lab.vision import CHARACTERS, character_batch, classifier

LEAST_STEPS = 200  # in fewer, models have hardly learned and ranks have not settled
IMAGES = 48  # per step: about as many patches as the language model has tokens
PROBE = 4  # batches that gradients are measured on: never trained on, the same at every step
FALLEN = 0.5  # below this share of where it started, a stable rank counts as collapsed
LANGUAGE = "transformer LM"
IMAGE_MODELS = {"ViT": "vit", "MLP-Mixer": "mixer", "CNN": "cnn"}
TRANSFORMERS = {LANGUAGE, "ViT"}
SHARE = "share of full rank"


def stable_rank(singular: Tensor) -> float:
    """||W||_F^2 / ||W||_2^2 from the singular values, largest first; 0 for a zero matrix."""
    squares = singular.double().square()
    return float(squares.sum() / squares[0]) if squares[0] > 0 else 0.0


def checkpoints(steps: int) -> list[int]:
    """Numbers of updates after which to look: 0, the powers of two, and the last."""
    return sorted({0, steps, *(2**n for n in range(max(1, steps).bit_length()) if 2**n < steps)})


def ranks_of(matrices: Iterable[Tensor]) -> Row:
    """The mean stable rank of matrices, and as a share of the full one.

    A convolution counts as (channels out, channels in x places).
    """
    flat = [matrix.detach().flatten(1) for matrix in matrices]
    ranks = [stable_rank(torch.linalg.svdvals(one.double().cpu())) for one in flat]
    shares = [rank / min(one.shape) for rank, one in zip(ranks, flat, strict=True)]
    return {"stable rank": fmean(ranks), SHARE: fmean(shares)}


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
    """What one model's training left: rows for the table."""

    rows: list[Row] = field(default_factory=list)

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
        losses, rights = zip(*probes, strict=True)
        measured = {"loss": fmean(losses), "accuracy": fmean(rights)}
        gradients = [p.grad for p in task.writers() if p.grad is not None]
        for what, matrices in (("weight", task.writers()), ("gradient", gradients)):
            place = {"model": task.name, "what": what, "step": step}
            self.rows.append({**place, **ranks_of(matrices), **measured})
        task.model.zero_grad()


def follow(task: Task, settings: Settings, say: Say) -> Trail:
    """Train a model and look at its writers and their gradients on the way."""
    steps = settings.train.steps
    parameters = dict(task.model.named_parameters())
    optimizer = StageOptimizer(parameters, {}, settings.optim)
    trail = Trail()
    for step in range(steps + 1):
        if step in checkpoints(steps):
            trail.look(task, step, steps)
            weights, gradients = trail.rows[-2:]
            say(
                f"{task.name:<15} step {step:>4}  loss {weights['loss']:.3f}  stable rank of "
                f"weights {weights['stable rank']:.1f}, of gradients {gradients['stable rank']:.1f}"
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


def panels_of(trails: dict[str, Trail]) -> list[Panel]:
    """Stable rank over training."""
    panels = []
    for what in ("weight", "gradient"):
        courses = {name: trail.course(what) for name, trail in trails.items()}
        lines = [
            Line(name, [step + 1 for step in shares], list(shares.values()))
            for name, shares in courses.items()
        ]
        up = f"stable rank, {SHARE}"
        panels.append(Panel(f"writers' {what}s", "updates + 1", up, lines, "x"))
    return panels


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
        panels=panels_of(trails),
    )
