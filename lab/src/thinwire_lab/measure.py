"""Train a chain and measure what codecs are judged by: how good the trained model is with
compression at test time and without it, and the bytes that crossed.

Figures: loss and loss_off (compression on and off), accuracy likewise for images, curve (tokens
and loss) and copying (tokens and `copying`) where asked for, bytes_forward and bytes_backward (of
one token or image at one cut, with headers), ratio (bf16 both ways over these), error_forward and
error_backward (`Errors`), seconds.
"""

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn.functional import cross_entropy

from thinwire.codec import Leg
from thinwire.data import Corpus
from thinwire.engine.build import choose_device
from thinwire.engine.feed import Feed
from thinwire.folders import replace_file
from thinwire.wire import HEADER_BYTES
from thinwire_lab.arms import Arm
from thinwire_lab.chain import Chain
from thinwire_lab.outcome import Row

if TYPE_CHECKING:
    from thinwire_lab.image_chain import ImageChain

BF16_BYTES = 2
SAMPLES = 32  # steps whose crossings are looked at, at most
WEIGHED = 100  # steps whose bytes are counted, of a longer run, where the content decides them


class Scored(NamedTuple):
    """How well a model does that is judged by its accuracy too."""

    loss: float
    accuracy: float


class Errors:
    """How far what arrives is from what was sent: |arrived - sent| / |sent| of a whole tensor.

    A mean over the cuts, at steps spread over the second half of the training, when memories of
    codecs have filled. It tells why an arm is harmed: 1 is as bad as sending nothing.
    """

    def __init__(self, steps: int):
        self._first = steps // 2
        self._every = math.ceil((steps - self._first) / SAMPLES)
        self._found: dict[Leg, list[Tensor]] = {leg: [] for leg in Leg}

    def wants(self, step: int) -> bool:
        """Whether crossings of this step are looked at."""
        return step >= self._first and (step - self._first) % self._every == 0

    def add(self, leg: Leg, sent: Tensor, arrived: Tensor) -> None:
        """Look at one crossing. The device is not waited for."""
        size = torch.linalg.vector_norm(sent.float())
        off = torch.linalg.vector_norm(arrived.float() - sent.float())
        self._found[leg].append(torch.where(size > 0, off / size, (off > 0).float()))

    def mean(self, leg: Leg) -> float | None:
        """The mean of all looks at a leg; None without any."""
        found = self._found[leg]
        return float(torch.stack(found).mean()) if found else None


def train(arm: Arm, shared: dict[str, Any]) -> Row:
    """What an arm's process does: train the arm on what its grid shares."""
    settings = arm.settings_beside(shared["base"], shared["processes"])
    data = Corpus.open(shared["data"])
    chain = Chain(settings, Feed(data, settings, choose_device(settings.run.device, 0)))
    if shared["from"]:
        load_weights(chain, Path(shared["from"]))
    width = settings.model.dim if settings.pipeline.stages > 1 else 0
    figures = train_measured(chain, width, shared.get("points", 0))
    if shared.get("to"):
        save_weights(chain, Path(shared["to"]))
    return figures


def train_measured(chain: "Chain | ImageChain", width: float, points: int = 0) -> Row:
    """Train for as long as the settings say; with `points`, a curve of about so many losses too.

    A dense cut would carry `width` numbers for a token or image.
    """
    steps, errors = chain.settings.train.steps, Errors(chain.settings.train.steps)
    due = {steps, *range(0, steps, max(1, steps // points))} if points else set()
    curve, copies, weighing = [], [], max(1, steps // WEIGHED)
    start = time.perf_counter()
    for step in range(steps + 1):
        if step in due:
            tokens = step * chain.settings.tokens_per_step
            curve.append((tokens, chain.score().loss))
            if isinstance(chain, Chain):
                copies.append((tokens, copying(chain)))
        if step < steps:
            for cut in chain.cuts:
                cut.observe = errors.add if errors.wants(step) else None
                cut.weigh = step % weighing == 0
            chain.train_step(step)
    seconds = time.perf_counter() - start
    on, off = chain.score(), chain.score(compressed=False)
    figures: Row = {"loss": on.loss, "loss_off": off.loss}
    if isinstance(on, Scored) and isinstance(off, Scored):
        figures |= {"accuracy": on.accuracy, "accuracy_off": off.accuracy}
    if points:
        figures["curve"] = curve
    if copies:
        figures["copying"] = copies
    figures |= {f"error_{leg.value}": errors.mean(leg) for leg in Leg}
    header = HEADER_BYTES / chain.settings.tokens_per_microbatch
    forward, backward = (chain.payload_bytes_per_token(leg) + header for leg in Leg)
    ratio = 2 * BF16_BYTES * width / (forward + backward)
    sizes = {"bytes_forward": forward, "bytes_backward": backward, "ratio": ratio}
    return {**figures, **sizes, "seconds": seconds}


@torch.no_grad()
def copying(chain: Chain) -> float:
    """How much cheaper a text is, per token, when it is said a second time in the same window.

    Half a window of validation text is said twice. What the second time gains, the model has from
    its context: it has learned to copy. The first sixteenth of each half is left out.
    """
    assert chain.feed is not None, "copying needs a text"
    text = chain.feed.validation(0).inputs
    half = text[:, : text.shape[1] // 2]
    chain.go_to(chain.done, 0)
    logits, skip = chain.logits(torch.cat([half, half], 1)).float(), half.shape[1] // 16
    said = half[:, 1 + skip :].flatten()
    first, second = (
        cross_entropy(part[:, skip : half.shape[1] - 1].flatten(0, 1), said)
        for part in (logits, logits[:, half.shape[1] :])
    )
    return float(first - second)


def save_weights(chain: Chain, path: Path) -> None:
    """Keep the trained weights, under their names in the whole model; whole or not at all."""
    tensors = {
        name: parameter.detach().cpu().contiguous()
        for stage in chain.stages
        for name, parameter in stage.owned_parameters().items()
    }
    replace_file(path, save(tensors))


@torch.no_grad()
def load_weights(chain: Chain, path: Path) -> None:
    """Start from kept weights."""
    tensors = load_file(path)
    for stage in chain.stages:
        for name, parameter in stage.global_parameters().items():
            parameter.copy_(tensors[name])
