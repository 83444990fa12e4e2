"""Train a chain and measure what codecs are judged by: how good the trained model is with
compression at test time and without it, and the bytes that crossed.

Figures of a row: loss and loss_off (compression on and off), accuracy and accuracy_off for images,
bytes_forward and bytes_backward (of one token or image at one cut, mean over the cuts, with frame
headers), ratio (bf16 in both directions over these), seconds.
"""

import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from thinwire.codec import Leg
from thinwire.lab.chain import Chain
from thinwire.lab.experiment import Row
from thinwire.wire import HEADER_BYTES

BF16_BYTES = 2


def train_measured(chain: Chain) -> Row:
    """Train for as long as the settings say; returns the figures."""
    start = time.perf_counter()
    for step in range(chain.settings.train.steps):
        chain.train_step(step)
    seconds = time.perf_counter() - start
    on, off = chain.score(), chain.score(compressed=False)
    figures: Row = {"loss": on.loss, "loss_off": off.loss}
    if chain.settings.model.sees_images:
        figures |= {"accuracy": on.accuracy, "accuracy_off": off.accuracy}
    return {**figures, **crossed(chain), "seconds": seconds}


def crossed(chain: Chain) -> Row:
    """Bytes of one token or image at one cut, mean over the cuts; how much less than in bf16."""
    settings = chain.settings
    header = HEADER_BYTES / settings.tokens_per_microbatch
    forward, backward = (chain.payload_bytes_per_token(leg) + header for leg in Leg)
    cuts = range(len(chain.cuts))
    width = sum(settings.stream_width(cut) for cut in cuts) / max(1, len(cuts))
    return {
        "bytes_forward": forward,
        "bytes_backward": backward,
        "ratio": 2 * BF16_BYTES * width / (forward + backward),
    }


def save_weights(chain: Chain, path: Path) -> None:
    """Keep the trained weights, under their names in the whole model; whole or not at all."""
    tensors = {
        name: parameter.detach().cpu().contiguous()
        for stage in chain.stages
        for name, parameter in stage.owned_parameters().items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(path)


@torch.no_grad()
def load_weights(chain: Chain, path: Path) -> None:
    """Start from kept weights."""
    tensors = load_file(path)
    for stage in chain.stages:
        for name, parameter in stage.owned_parameters().items():
            parameter.copy_(tensors[name])
