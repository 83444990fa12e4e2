"""A trained model in one process: how well it does, and text, from a checkpoint of any split."""

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
from thinwire.model import Score
from thinwire.report import Display
from thinwire.train import prepare_data, text_ratio


class Model:
    """The whole model of a checkpoint, on one device, with the tokenizer it was trained with.

    A narrow boundary is part of the model. What codecs do to a tensor at a cut is done here too,
    as in training's own validations, or left out without `compression`.
    """

    def __init__(
        self,
        place: Path,
        device: str = "auto",
        compression: bool = True,
        allow_plugins: bool = False,
    ):
        self.checkpoint = Checkpoint.open(place, allow_plugins)
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
            Cut(self.settings, index, builder.wire_spec(index))
            for index in range(len(self.stages) - 1 if compression else 0)
        ]
        self._autocast = autocast_for(self.settings.run.precision, self.device)

    def __call__(self, inputs: Tensor, number: int = 0) -> Tensor:
        """Logits of every position or image; `number` tells a microbatch or token from the next."""
        x = None
        for index, stage in enumerate(self.stages):
            if x is not None and self.compression:
                cut = self._cuts[index - 1]
                cut.at, cut.training = (self.checkpoint.step, number), False
                x = cut.forward(x)
            with self._autocast():
                x = stage(x, inputs)
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
        """Loss on the run's own validation data, over as many microbatches as training used."""
        settings = self.settings
        data = prepare_data(settings, display)
        if data.fingerprint != self.checkpoint.manifest["corpus"]:
            raise DataError(
                "the data is no longer what this checkpoint was trained on, so its validation "
                "part may contain what was trained on: restore the data"
            )
        feed, score = Feed(data, settings, self.device, batches), Score()
        for microbatch in range(feed.validation_count):
            batch = feed.validation(microbatch)
            logits = self(batch.inputs, microbatch)
            with self._autocast():
                loss = self.stages[-1].loss(logits, batch.targets)
            score.add(loss, logits, batch.targets)
        found = {
            "checkpoint": str(self.checkpoint.folder),
            "step": self.checkpoint.step,
            "compression": "on" if self.compression else "off",
            "valid_loss": score.loss,
        }
        if settings.model.sees_images:
            return {**found, "accuracy": score.accuracy, "images": score.count}
        ratio = text_ratio(feed, score.loss)
        text = {"perplexity": _perplexity(score.loss), "bits_per_byte": ratio}
        return {**found, **text, "tokens": score.count}

    @torch.no_grad()
    def generate(self, prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> str:
        """Continue the prompt. The same seed gives the same text on the same machine."""
        if self.settings.model.sees_images:
            raise ConfigError(
                f"{self.checkpoint.folder} holds a model that tells images apart: it has no text "
                "to continue. `thinwire eval` says how well it does"
            )
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
