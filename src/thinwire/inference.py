"""A trained model in one process: validation loss and text, from a checkpoint of any split."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.data import Tokenizer
from thinwire.engine import Checkpoint
from thinwire.engine.build import StageBuilder, autocast_for, choose_device, load_weights
from thinwire.engine.cut import Cut
from thinwire.engine.feed import Feed
from thinwire.errors import CheckpointError, ConfigError, DataError
from thinwire.model import token_loss
from thinwire.report import Display
from thinwire.summary import bits_per_byte
from thinwire.train import prepare_corpus


class Model:
    """The whole model of a checkpoint, on one device, with the tokenizer it was trained with.

    A narrow boundary is part of the model. What codecs do to a tensor at a cut is done here too,
    as in training's own validations, or left out without `compression`.
    """

    def __init__(self, place: Path, device: str = "auto", compression: bool = True):
        self.checkpoint = Checkpoint.open(place)
        self.checkpoint.verify()
        self.settings = self.checkpoint.settings
        self.device = choose_device(device, 0)
        builder = StageBuilder(self.settings, self.device)
        self.compression = compression
        self.stages = [builder.build(index) for index in range(self.settings.pipeline.stages)]
        for stage in self.stages:
            load_weights(stage, builder.space, self.checkpoint)
            stage.eval()
        self._cuts = [
            Cut(self.settings, index, builder.wire_spec())
            for index in range(len(self.stages) - 1 if compression else 0)
        ]
        self._autocast = autocast_for(self.settings.run.precision, self.device)

    def __call__(self, ids_BT: Tensor, number: int = 0) -> Tensor:
        """Logits of every position; `number` tells one microbatch or token from the next."""
        x = None
        for index, stage in enumerate(self.stages):
            if x is not None and self.compression:
                cut = self._cuts[index - 1]
                cut.at, cut.training = (self.checkpoint.step, number), False
                x = cut.forward(x)
            with self._autocast():
                x = stage(x, ids_BT)
        assert x is not None
        return x

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run; CheckpointError when it trained on bare token ids."""
        if self.checkpoint.tokenizer is None:
            raise CheckpointError(
                f"{self.checkpoint.folder} holds no tokenizer (it was trained on token shards "
                "without one): set data.tokenizer when training to be able to generate text"
            )
        return Tokenizer.load(self.checkpoint.tokenizer)

    @torch.no_grad()
    def evaluate(self, display: Display, batches: int = 0) -> dict[str, Any]:
        """Loss on the run's own validation text, over as many microbatches as training used."""
        settings = self.settings
        corpus = prepare_corpus(settings, display)
        if corpus.fingerprint != self.checkpoint.manifest["corpus"]:
            raise DataError(
                "the corpus is no longer the one this checkpoint was trained on, so its "
                "validation text may contain what was trained on: restore the data"
            )
        feed = Feed(corpus, settings, self.device, batches)
        losses = []
        for microbatch in range(feed.validation_count):
            batch = feed.validation(microbatch)
            logits_BTV = self(batch.inputs_BT, microbatch)
            with self._autocast():
                losses.append(token_loss(logits_BTV, batch.targets_BT))
        loss = float(torch.stack(losses).double().mean())
        return {
            "checkpoint": str(self.checkpoint.folder),
            "step": self.checkpoint.step,
            "compression": "on" if self.compression else "off",
            "valid_loss": loss,
            "perplexity": _perplexity(loss),
            "bits_per_byte": bits_per_byte(loss, len(corpus.valid), corpus.valid_bytes),
            "tokens": len(losses) * settings.microbatch_size * settings.model.context,
        }

    @torch.no_grad()
    def generate(self, prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> str:
        """Continue the prompt. The same seed gives the same text on the same machine."""
        if tokens < 1 or temperature < 0 or top_k < 0:
            raise ConfigError("tokens must be at least 1, temperature and top-k not negative")
        tokenizer = self.tokenizer()
        start = tokenizer.end_of_text if tokenizer.end_of_text is not None else 0
        ids = tokenizer.encode(prompt) or [start]
        generator = torch.Generator().manual_seed(seed)
        for number in range(tokens):
            window_BT = torch.tensor([ids[-self.settings.model.context :]], device=self.device)
            logits_V = self(window_BT, number)[0, -1]
            chosen = _choose(logits_V.float().cpu(), temperature, top_k, generator)
            if chosen == tokenizer.end_of_text:
                break
            ids.append(chosen)
        return tokenizer.decode(ids)


def _perplexity(loss: float) -> float:
    """e to the loss; infinite where a float cannot hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _choose(
    logits_V: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator
) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k:
        worst = torch.topk(logits_V, min(top_k, len(logits_V))).values[-1]
        logits_V = logits_V.masked_fill(logits_V < worst, -math.inf)
    return int(torch.multinomial(torch.softmax(logits_V / temperature, -1), 1, generator=generator))
