"""A trained model in one process: its loss and its tokens, from a checkpoint of any split.

Shapes: B windows, T tokens of a window, N tokens of a text.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.data.documents import LostCharacters, Texts
from thinwire.data.sources import read_records, text_files
from thinwire.engine.build import choose_device
from thinwire.engine.checkpoint import Checkpoint
from thinwire.engine.feed import Feed
from thinwire.engine.joined import Joined
from thinwire.engine.state import restore_weights
from thinwire.errors import DataError
from thinwire.inference.text import Choice, Sampling, TextModel
from thinwire.model import Past, Score
from thinwire.report import Display
from thinwire.run.ledger import bits_per_byte
from thinwire.run.start import prepare_data

MOST_WINDOWS = 8  # of any text, at a time
MOST_LOGITS = 1 << 26  # at a time; of these there are several copies, of 256 MiB each


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

    slow = (
        "a codec of this run reads more than one token, so every new token recomputes the whole "
        "window; --compression off is faster"
    )

    @property
    def crosses_by_token(self) -> bool:
        return not self.compression or super().crosses_by_token

    def __call__(self, inputs: Tensor, number: int = 0, pasts: list[Past] | None = None) -> Tensor:
        """Logits of every position; `number` tells a microbatch or token from the next.

        With the past of each stage, of the positions that follow those in it.
        """
        self.go_to(self.checkpoint.step, number)
        return self.logits(inputs, self.compression, pasts)

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
        files = text_files(str(path), "--data")
        texts = Texts([(functools.partial(read_records, files, text_key), 0)], text_key)
        lost = LostCharacters()
        passages = (("valid", document.text) for document in texts.read())
        chunks = list(texts.encode(self.tokenizer, passages, lost))
        ids_N = np.concatenate([np.empty(0, np.int64), *(chunk.ids for chunk in chunks)])
        sizes_N = np.concatenate([np.empty(0, np.int64), *(c.sizes for c in chunks)])
        if len(ids_N) < 2:
            raise DataError(f"{path} has too little text: a loss needs at least two tokens")
        if lost.summary():
            display.note(f"the tokenizer {lost.summary()}")
        places, score, size = self._windows(len(ids_N) - 1)[: batches or None], Score(), 0
        for number, place in enumerate(places):
            part_N = torch.from_numpy(ids_N[place.start : place.stop + 1]).to(self.device)
            shape = -1, min(self.settings.model.context, len(place))
            inputs_BT, targets_BT = part_N[:-1].reshape(shape), part_N[1:].reshape(shape)
            score.add(self.loss(self(inputs_BT, number), targets_BT), targets_BT)
            size += int(sizes_N[place.start + 1 : place.stop + 1].sum())
            display.progress("eval", number + 1, len(places), "microbatches")
        return {**self._figures(score, sum(map(len, places)), size), "data": str(path)}

    def _windows(self, count: int) -> list[range]:
        """So many tokens in windows of the context, without overlap as in training: a few windows
        of one length in each range, the last one shorter.
        """
        context = self.settings.model.context
        at_once = max(1, min(MOST_WINDOWS, MOST_LOGITS // (context * self.settings.model.vocab)))
        step, whole = at_once * context, count - count % context
        found = [range(at, min(at + step, whole)) for at in range(0, whole, step)]
        return found + ([range(whole, count)] if whole < count else [])

    def _figures(self, score: Score, tokens: int, size: int) -> dict[str, Any]:
        return {
            "checkpoint": str(self.checkpoint.folder),
            "step": self.checkpoint.step,
            "compression": "on" if self.compression else "off",
            "valid_loss": score.loss,
            # A float holds no more; NaN stays NaN.
            "perplexity": math.inf if score.loss > 709 else math.exp(score.loss),
            "bits_per_byte": bits_per_byte(score.loss, tokens, size),
            "tokens": score.count,
        }

    def reader(self, sampling: Sampling) -> Callable[[list[int], int, bool], int]:
        choose, cached = Choice(sampling), self.crosses_by_token
        pasts: list[Past] | None = None

        @torch.no_grad()
        def read(part: list[int], number: int, with_empty_past: bool) -> int:
            nonlocal pasts
            if cached and with_empty_past:
                pasts = [stage.new_past() for stage in self.stages]
            logits_BTV = self(torch.tensor([part], device=self.device), number, pasts)
            return choose(logits_BTV[0, -1].float().cpu())

        return read
