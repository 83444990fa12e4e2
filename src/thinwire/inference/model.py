"""A trained model in one process: its loss and its tokens, from a checkpoint of any split."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.engine import Checkpoint
from thinwire.engine.build import choose_device
from thinwire.engine.chain import Joined
from thinwire.engine.feed import Feed
from thinwire.engine.state import restore_weights
from thinwire.errors import DataError
from thinwire.inference.choice import Choice, Sampling
from thinwire.inference.score import OtherText
from thinwire.inference.text import TextModel, crosses_by_token, extensions
from thinwire.model import Past, Score
from thinwire.report import Display
from thinwire.run.ledger import bits_per_byte
from thinwire.run.start import prepare_data


class Model(Joined, TextModel):
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
        super().__init__(self.checkpoint.settings, choose_device(device, 0))
        self.compression = compression
        for stage in self.stages:
            restore_weights(stage, self.builder.space, self.checkpoint)
            stage.eval()

    @property
    def crosses_by_token(self) -> bool:
        """Whether every codec of this model lets each token cross by itself."""
        return not self.compression or crosses_by_token(self.settings)

    def __call__(self, inputs: Tensor, number: int = 0, pasts: list[Past] | None = None) -> Tensor:
        """Logits of every position; `number` tells a microbatch or token from the next.

        With the past of each stage, of the positions that follow those in it.
        """
        self.go_to(self.checkpoint.step, number, training=False)
        return self.logits(inputs, self.compression, pasts)

    def notes(self) -> list[str]:
        """What whoever generates text with this model should know."""
        slow = (
            "a codec of this run reads more than one token, so every new token recomputes the "
            "whole window; --compression off is faster"
        )
        return [] if self.crosses_by_token else [slow]

    def evaluate(self, display: Display, batches: int = 0) -> dict[str, Any]:
        """Loss on the run's own validation data, over as many microbatches as training used."""
        settings = self.settings
        trained_on = self.checkpoint.manifest["corpus"]
        if not trained_on:  # it was imported: any text is new to us
            own = dataclasses.replace(settings.data, tokenizer=str(self.checkpoint.tokenizer))
            settings = dataclasses.replace(settings, data=own)
            display.note(
                "an imported model has no data of its own: its loss is on Python's source; --data "
                "names another text"
            )
        data = prepare_data(settings, display, self.checkpoint)
        if trained_on and data.fingerprint != trained_on:
            raise DataError(
                "the data is no longer what this checkpoint was trained on, so its validation "
                "set may contain training data: restore the original data"
            )
        told = functools.partial(display.progress, "eval", unit="microbatches")
        feed = Feed(data, settings, self.device, batches)
        score = self.validate(feed, self.checkpoint.step, self.compression, told)
        return self._figures(score, *feed.validation_text)

    @torch.no_grad()
    def evaluate_text(
        self, path: Path, display: Display, batches: int = 0, text_key: str = "text"
    ) -> dict[str, Any]:
        """Loss on all of another text, or on its first `batches` microbatches."""
        display.phase("data", f"{path}, with the tokenizer of {self.checkpoint.folder}")
        shape = self.settings.model
        text = OtherText(path, self.tokenizer(), text_key, shape.context, shape.vocab)
        if text.lost:
            display.note(f"the tokenizer {text.lost}")
        places, score = text.windows(batches), Score()
        for number, window in enumerate(text.read(places, self.device)):
            logits_BTV = self(window.inputs_BT, number)
            score.add(self.loss(logits_BTV, window.targets_BT), window.targets_BT)
            display.progress("eval", number + 1, len(places), "microbatches")
        return {**self._figures(score, *text.size(places)), "data": str(path)}

    def _figures(self, score: Score, tokens: int, size: int) -> dict[str, Any]:
        return {
            "checkpoint": str(self.checkpoint.folder),
            "step": self.checkpoint.step,
            "compression": "on" if self.compression else "off",
            "valid_loss": score.loss,
            "perplexity": _perplexity(score.loss),
            "bits_per_byte": bits_per_byte(score.loss, tokens, size),
            "tokens": score.count,
        }

    def tokens_behind(
        self, ids: Sequence[int], sampling: Sampling, cache: bool = True
    ) -> Iterator[int]:
        ids, cached, choose = list(ids), cache and self.crosses_by_token, Choice(sampling)
        pasts: list[Past] | None = None
        parts = extensions(ids, self.settings.model.context, cached)
        for number, (part, with_empty_past) in enumerate(parts):
            if cached and with_empty_past:
                pasts = [stage.new_past() for stage in self.stages]
            with torch.no_grad():
                logits_BTV = self(torch.tensor([part], device=self.device), number, pasts)
            ids.append(choose(logits_BTV[0, -1].float().cpu()))
            yield ids[-1]


def _perplexity(loss: float) -> float:
    """e to the loss; infinite where a float cannot hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
