"""A trained model in one process: its loss and its text, from a checkpoint of any split.

Shapes: B windows, T tokens of a window, N tokens of a text, V entries of the vocabulary.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from thinwire.codec import Leg
from thinwire.data import Tokenizer
from thinwire.data.chat import Chat
from thinwire.data.documents import Texts
from thinwire.data.sources import read_json, read_records, text_files
from thinwire.engine.build import Joined, choose_device
from thinwire.engine.checkpoint import IMPORTED, Checkpoint
from thinwire.engine.feed import Feed
from thinwire.engine.state import restore_weights
from thinwire.errors import CheckpointError, ConfigError, DataError
from thinwire.model import Past, Score
from thinwire.report import Display
from thinwire.run.ledger import bits_per_byte
from thinwire.run.start import prepare_data

MOST_WINDOWS = 8  # of any text, at a time
MOST_LOGITS = 1 << 26  # at a time; of these there are several copies, of 256 MiB each
COLDEST = 1e-6  # a temperature below is 0: logits divided by it would overflow


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: temperature 0 takes the likeliest, top-k 0 and top-p 1 allow all."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 1.0
    seed: int = 0


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
    """The share of each token: of the top-k likeliest and their equals, then of top-p of these."""
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


@dataclass(eq=False)
class Writing:
    """A text as it is written: iterate once over pieces of whole characters, some of them empty."""

    tokenizer: Tokenizer
    prompt: list[int]
    chosen: Iterable[int]
    ends: Collection[int | None]
    stop: Collection[str]
    count: int = 0  # tokens so far, with the one that ended the text
    ended_by: Literal["length", "stop"] = "length"

    def __post_init__(self) -> None:
        self._ids, self._held = list(self.prompt), ""
        self._before, self._told = max(0, len(self._ids) - 1), len(self._ids)

    def __iter__(self) -> Iterator[str]:
        for token in self.chosen:
            self.count += 1
            if token in self.ends:
                self.ended_by = "stop"
                break
            self._ids.append(token)
            yield self._shown(self._new_text())
            if self.ended_by == "stop":
                return
        yield self._shown(self._new_text(is_last=True), is_last=True)

    def _new_text(self, is_last: bool = False) -> str:
        """What has been added; nothing while its last character is spread over ids to come."""
        # Read behind the piece before: some tokenizers write a token otherwise where it is first.
        known = self.tokenizer.decode(self._ids[self._before : self._told])
        text = self.tokenizer.decode(self._ids[self._before :])[len(known) :]
        if text.endswith("\ufffd") and not is_last:
            return ""
        self._before, self._told = self._told, len(self._ids)
        return text

    def _shown(self, piece: str, is_last: bool = False) -> str:
        """What can be shown, up to a stop; what may become one is held back."""
        text, self._held = self._held + piece, ""
        found = [at for string in filter(None, self.stop) if (at := text.find(string)) >= 0]
        if found:
            self.ended_by = "stop"
            return text[: min(found)]
        beginnings = (
            at
            for string in filter(None, self.stop)
            for at in range(max(0, len(text) - len(string) + 1), len(text))
            if string.startswith(text[at:])
        )
        end = len(text) if is_last else min(beginnings, default=len(text))
        self._held = text[end:]
        return text[:end]


class Model(Joined):
    """The whole model of a checkpoint, with its tokenizer, on GPUs of this machine if it has any.
    Codecs do to a tensor what they do in training's validations, or nothing without `compression`.

    It sees its context at most: of a longer prompt the last part. When the window is full its older
    half is dropped, and the rest is computed anew. A key-value cache is kept where codecs let each
    token cross by itself.
    """

    template = ""  # the chat template to ask it with, as data.template chooses one; empty: its own

    def __init__(
        self,
        place: Path,
        device: str = "auto",
        compression: bool = True,
        allow_plugins: bool = False,
    ):
        self.checkpoint = Checkpoint.open(place, allow_plugins)
        self.checkpoint.verify()
        settings = self.checkpoint.settings
        devices = [choose_device(device, stage) for stage in range(settings.pipeline.stages)]
        super().__init__(settings, devices[0], devices=devices)
        self.compression = compression
        for stage, space in zip(self.stages, self.spaces, strict=True):
            restore_weights(stage, space, self.checkpoint)
            stage.eval()

    def __call__(self, inputs: Tensor, number: int = 0, pasts: list[Past] | None = None) -> Tensor:
        """Logits of every position, as `logits` has them; `number` counts batches or tokens."""
        self.go_to(self.checkpoint.step, number)
        return self.logits(inputs, self.compression, pasts)

    def evaluate(self, display: Display, batches: int = 0) -> dict[str, Any]:
        """Loss on the run's own validation data, over as many microbatches as training used."""
        settings = self.settings
        if not (trained_on := self.checkpoint.manifest["corpus"]):
            raise DataError("an imported model has no data of its own: name a text with --data")
        data = prepare_data(settings, display, self.checkpoint)
        if data.fingerprint != trained_on:
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
        passages = (("valid", text) for text, _ in texts.read())
        chunks = list(texts.encode(self.tokenizer, passages))
        ids_N = np.concatenate([np.empty(0, np.int64), *(chunk.ids for chunk in chunks)])
        sizes_N = np.concatenate([np.empty(0, np.int64), *(c.sizes for c in chunks)])
        if len(ids_N) < 2:
            raise DataError(f"{path} has too little text: a loss needs at least two tokens")
        for note in texts.remarks():
            display.note(note)
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
        """So many tokens in windows of the context: a few in each range, the last one shorter."""
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

    @property
    def crosses_by_token(self) -> bool:
        """Whether each token crosses every cut by itself, so that a past can be kept."""
        forward = [lower.codecs[Leg.FORWARD] for lower, _ in self.ends]
        return not self.compression or all(codec.by_token for codec in forward)

    def notes(self) -> list[str]:
        """What whoever generates text with this model should know."""
        if self.crosses_by_token:
            return []
        return [
            "a codec of this run does not pack each token by itself, so every new token recomputes "
            "the whole window; --compression off is faster"
        ]

    def tokens_behind(self, ids: Sequence[int], sampling: Sampling) -> Iterator[int]:
        """The tokens that follow `ids`, without end; each is computed when it is asked for."""
        ids, choose, cached = list(ids), Choice(sampling), self.crosses_by_token
        context, pasts = self.settings.model.context, None
        first = seen = max(0, len(ids) - context)  # the window's first id; ids that pasts hold
        for number in itertools.count():
            if len(ids) - first > context:
                first = seen = len(ids) - max(1, context // 2)
                pasts = None
            if cached and pasts is None:
                pasts = [stage.new_past() for stage in self.stages]
            part, seen = ids[seen if cached else first :], len(ids)
            with torch.no_grad():
                logits_BTV = self(torch.tensor([part], device=self.device), number, pasts)
            ids.append(choose(logits_BTV[0, -1].float().cpu()))
            yield ids[-1]

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run; CheckpointError when it trained on bare token ids."""
        if self.checkpoint.tokenizer is None:
            raise CheckpointError(
                f"{self.checkpoint.folder} holds no tokenizer (it was trained on token shards "
                "without one): set data.tokenizer when training to be able to generate text"
            )
        return Tokenizer.load(self.checkpoint.tokenizer)

    @functools.cached_property
    def chat(self) -> Chat:
        """The chat template with which the model is asked; DataError if none fits it."""
        _ = self.tokenizer  # which says why there is none
        return Chat.open(self.checkpoint.folder, self.template)

    def answer(
        self, messages: Sequence[Mapping[str, str]], tokens: int, sampling: Sampling
    ) -> Writing:
        """The assistant's next message in a conversation."""
        return self.write(self.chat.prompt_ids(messages), tokens, sampling, self.chat.end_ids)

    def encode(self, prompt: str) -> list[int]:
        """The ids of a prompt; an empty one begins a new text."""
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # bytes of another encoding on the command line
            raise ConfigError(f"the prompt is not valid Unicode text: {error.reason}") from None
        # Training here puts nothing ahead of a text; who trained an imported model may have.
        begin = self.tokenizer.begin_ids if IMPORTED in self.checkpoint.manifest else []
        if ids := [*begin, *self.tokenizer.encode(prompt)]:
            return ids
        if self.tokenizer.end_of_text is None:
            raise ConfigError(
                "an empty prompt begins a new text, but the tokenizer of "
                f"{self.checkpoint.folder} has no token between texts: give a prompt"
            )
        return [self.tokenizer.end_of_text]

    def write(
        self,
        ids: list[int],
        tokens: int,
        sampling: Sampling,
        ends: Collection[int] = (),
        stop: Collection[str] = (),
    ) -> Writing:
        """At most so many tokens, to the end of the text, a token of `ends` or a text of `stop`."""
        known = {*ends, self.tokenizer.end_of_text, *self._published_ends}
        chosen = itertools.islice(self.tokens_behind(ids, sampling), tokens)
        return Writing(self.tokenizer, ids, chosen, known, stop)

    @functools.cached_property
    def _published_ends(self) -> set[int]:
        """Ids that end a text by the generation_config.json that came with an imported model."""
        ends = None
        with contextlib.suppress(DataError):
            ends = read_json(self.checkpoint.folder / "generation_config.json").get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        return {end for end in ends if isinstance(end, int)}

    def generate(self, prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> str:
        """The prompt and its continuation. The same seed gives the same text on a machine."""
        sampling = Sampling(temperature, top_k, seed=seed)
        return prompt + "".join(self.write(self.encode(prompt), tokens, sampling))
