"""Text from a model: what it reads next, how the next token is chosen, how tokens become text, and
where the text ends. Shapes: V entries of the vocabulary.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinwire.data import Tokenizer
from thinwire.errors import CheckpointError, ConfigError

COLDEST = 1e-6  # a temperature below is 0: logits divided by it would overflow


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: temperature 0 takes the likeliest, top-k 0 and top-p 1 allow all."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < math.inf and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ConfigError(
                f"temperature {self.temperature} and top-k {self.top_k} must not be negative, and "
                f"top-p {self.top_p} must be above 0 and at most 1"
            )


class Choice:
    """Chooses tokens by their logits, the same ones for the same seed."""

    def __init__(self, sampling: Sampling):
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits_V: Tensor) -> int:
        """The next token."""
        if logits_V.isnan().any():
            raise CheckpointError(
                "the model's output is NaN: its training has diverged; use an earlier checkpoint"
            )
        if self._sampling.temperature < COLDEST:
            return int(logits_V.argmax())
        shares_V = shares(logits_V, self._sampling)
        return int(torch.multinomial(shares_V, 1, generator=self._generator))


def shares(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """The probability of each token: of the top-k likeliest, then of the fewest of these that
    make up top-p together; equal ones at the edge of top-k stay in.
    """
    if sampling.top_k:
        worst = torch.topk(logits_V, min(sampling.top_k, len(logits_V))).values[-1]
        logits_V = logits_V.masked_fill(logits_V < worst, -math.inf)
    shares_V = torch.softmax(logits_V / sampling.temperature, -1)
    if sampling.top_p == 1:
        return shares_V
    sorted_V, order_V = shares_V.sort(descending=True, stable=True)
    # What comes before a token must not be enough by itself: so the likeliest always stays.
    kept_V = sorted_V.cumsum(-1) - sorted_V < sampling.top_p
    shares_V = torch.zeros_like(shares_V).scatter(0, order_V, sorted_V * kept_V)
    return shares_V / shares_V.sum()


def extensions(ids: list[int], context: int, cached: bool) -> Iterator[tuple[list[int], bool]]:
    """What a model reads next, each time that `ids` have grown, and whether with an empty past."""
    first = seen = max(0, len(ids) - context)  # the window's first id; ids that the past holds
    is_new = True
    while True:
        if len(ids) - first > context:
            first = seen = len(ids) - max(1, context // 2)
            is_new = True
        read = (ids[seen:], is_new) if cached else (ids[first:], True)
        seen, is_new = len(ids), False
        yield read


class Writing:
    """A text as it is written: iterate once over its pieces of whole characters.

    Pieces may be empty, one for each token: whoever waits can look around.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: list[int],
        chosen: Iterable[int],
        ends: Collection[int | None],
        stop: Collection[str],
    ):
        self.count = 0  # tokens so far, with the one that ended the text
        self.ended_by: Literal["length", "stop"] = "length"
        self._tokenizer, self._ids = tokenizer, list(prompt)
        self._before, self._told = max(0, len(prompt) - 1), len(prompt)
        self._chosen = chosen
        self._ends = ends
        self._stops = [string for string in stop if string]
        self._held = ""

    def __iter__(self) -> Iterator[str]:
        for token in self._chosen:
            self.count += 1
            if token in self._ends:
                self.ended_by = "stop"
                break
            self._ids.append(token)
            shown, is_stopped = self._up_to_stop(self._new_text())
            yield shown
            if is_stopped:
                return
        shown, is_stopped = self._up_to_stop(self._new_text(whole_characters=False))
        yield shown if is_stopped else shown + self._held

    def _new_text(self, whole_characters: bool = True) -> str:
        """What has been added, or nothing while its last character is spread over ids to come.

        It is read together with the piece before, since some tokenizers write a token otherwise
        where it stands first.
        """
        known = self._tokenizer.decode(self._ids[self._before : self._told])
        text = self._tokenizer.decode(self._ids[self._before :])[len(known) :]
        if whole_characters and text.endswith("\ufffd"):
            return ""
        self._before, self._told = self._told, len(self._ids)
        return text

    def _up_to_stop(self, piece: str) -> tuple[str, bool]:
        """What can be shown, up to a stop, and whether that came. What may become one is held."""
        text, self._held = self._held + piece, ""
        found = [at for string in self._stops if (at := text.find(string)) >= 0]
        if found:
            self.ended_by = "stop"
            return text[: min(found)], True
        beginnings = (
            length
            for string in self._stops
            for length in range(min(len(string) - 1, len(text)), 0, -1)
            if text.endswith(string[:length])
        )
        keep = len(text) - max(beginnings, default=0)
        self._held = text[keep:]
        return text[:keep], False
