"""A trained model in one process: how well it does, and text, from a checkpoint of any split."""

import functools
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.codec import Leg
from thinwire.data import Tokenizer
from thinwire.engine import Checkpoint
from thinwire.engine.build import choose_device
from thinwire.engine.chain import Joined
from thinwire.engine.feed import Feed
from thinwire.engine.state import restore_weights
from thinwire.errors import CheckpointError, ConfigError, DataError
from thinwire.model import Past
from thinwire.report import Display
from thinwire.run.ledger import bits_per_byte
from thinwire.run.prepare import prepare_data


class Model(Joined):
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
        by_token = (cut.lower.codecs[Leg.FORWARD].by_token for cut in self.cuts)
        return not self.compression or all(by_token)

    def __call__(self, inputs: Tensor, number: int = 0, pasts: list[Past] | None = None) -> Tensor:
        """Logits of every position or image; `number` tells a microbatch or token from the next.

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
        return self.checkpoint.weaknesses() + ([] if self.crosses_by_token else [slow])

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run; CheckpointError when it trained on bare token ids."""
        if self.checkpoint.tokenizer is None:
            raise CheckpointError(
                f"{self.checkpoint.folder} holds no tokenizer (it was trained on token shards "
                "without one): set data.tokenizer when training to be able to generate text"
            )
        return Tokenizer.load(self.checkpoint.tokenizer)

    def evaluate(self, display: Display, batches: int = 0) -> dict[str, Any]:
        """Loss on the run's own validation data, over as many microbatches as training used."""
        settings = self.settings
        for weakness in self.checkpoint.weaknesses():
            display.note(weakness)
        data = prepare_data(settings, display)
        if data.fingerprint != self.checkpoint.manifest["corpus"]:
            raise DataError(
                "the data is no longer what this checkpoint was trained on, so its validation "
                "set may contain training data: restore the original data"
            )
        told = functools.partial(display.progress, "eval", unit="microbatches")
        feed = Feed(data, settings, self.device, batches)
        score = self.validate(feed, self.checkpoint.step, self.compression, told)
        found = {
            "checkpoint": str(self.checkpoint.folder),
            "step": self.checkpoint.step,
            "compression": "on" if self.compression else "off",
            "valid_loss": score.loss,
        }
        ratio = bits_per_byte(score.loss, *feed.validation_text)
        return {**found, **settings.model.task.figures(score, ratio)}

    def generate(self, prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> str:
        """The prompt and its continuation. The same seed gives the same text on a machine."""
        return "".join(self.stream(prompt, tokens, temperature, top_k, seed))

    def stream(
        self,
        prompt: str,
        tokens: int,
        temperature: float,
        top_k: int,
        seed: int,
        cache: bool = True,
    ) -> Iterator[str]:
        """The prompt, then its continuation in pieces of whole characters, as they are chosen.

        A model sees its context at most: of a longer prompt the last part. When the window is full
        its older half is dropped, and the rest is computed anew. `cache` keeps what attention has
        computed of a window, where codecs let each token cross by itself; it changes no token.
        """
        if no_text := self.settings.model.task.no_text:
            raise ConfigError(f"{self.checkpoint.folder} holds a model that {no_text}")
        if tokens < 1 or temperature < 0 or top_k < 0:
            raise ConfigError("tokens must be at least 1, temperature and top-k not negative")
        tokenizer = self.tokenizer()
        ids = tokenizer.encode(prompt)
        if not ids:
            if tokenizer.end_of_text is None:
                raise ConfigError(
                    "an empty prompt begins a new text, but the tokenizer of "
                    f"{self.checkpoint.folder} has no token between texts: give a prompt"
                )
            ids = [tokenizer.end_of_text]
        logits = itertools.islice(self._logits_behind(ids, cache and self.crosses_by_token), tokens)
        return _continued(prompt, ids, tokenizer, _Choice(temperature, top_k, seed), logits)

    def _logits_behind(self, ids: list[int], cached: bool) -> Iterator[Tensor]:
        """What the model says of the token that follows `ids`, each time that they have grown."""
        context = self.settings.model.context
        first = seen = max(0, len(ids) - context)  # the window's first id; ids that the pasts hold
        pasts = self._new_pasts() if cached else None
        for number in itertools.count():
            if len(ids) - first > context:
                first = seen = len(ids) - max(1, context // 2)
                pasts = self._new_pasts() if cached else None
            ids_BT = torch.tensor([ids[seen if cached else first :]], device=self.device)
            seen = len(ids)
            with torch.no_grad():
                logits_V = self(ids_BT, number, pasts)[0, -1].float().cpu()
            yield logits_V

    def _new_pasts(self) -> list[Past]:
        return [stage.new_past() for stage in self.stages]


def _continued(
    prompt: str, ids: list[int], tokenizer: Tokenizer, choice: "_Choice", logits: Iterator[Tensor]
) -> Iterator[str]:
    yield prompt
    text = _TextOf(tokenizer, ids)
    for logits_V in logits:
        chosen = choice(logits_V)
        if chosen == tokenizer.end_of_text:
            break
        ids.append(chosen)
        yield text.whole_characters()
    yield text.rest()


class _TextOf:
    """The text of ids as they come: a character may be spread over several of them.

    Each piece is read together with the one before, since some tokenizers write a token otherwise
    where it stands first.
    """

    def __init__(self, tokenizer: Tokenizer, ids: list[int]):
        self._tokenizer = tokenizer
        self._ids = ids
        self._before, self._told = max(0, len(ids) - 1), len(ids)

    def whole_characters(self) -> str:
        """What has been added, or nothing while its last character is not complete."""
        return "" if self._untold().endswith("\ufffd") else self.rest()

    def rest(self) -> str:
        """What has been added, complete or not."""
        untold = self._untold()
        self._before, self._told = self._told, len(self._ids)
        return untold

    def _untold(self) -> str:
        known = self._tokenizer.decode(self._ids[self._before : self._told])
        return self._tokenizer.decode(self._ids[self._before :])[len(known) :]


class _Choice:
    """Chooses tokens by their logits, the same ones for the same seed."""

    def __init__(self, temperature: float, top_k: int, seed: int):
        self._temperature, self._top_k = temperature, top_k
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits_V: Tensor) -> int:
        if self._temperature == 0:
            return int(logits_V.argmax())
        if self._top_k:
            worst = torch.topk(logits_V, min(self._top_k, len(logits_V))).values[-1]
            logits_V = logits_V.masked_fill(logits_V < worst, -math.inf)
        shares_V = torch.softmax(logits_V / self._temperature, -1)
        return int(torch.multinomial(shares_V, 1, generator=self._generator))
