"""What comes before the first process: the run in a few lines, and its data."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import torch

from thinwire.data import Corpus, Tokenizer, prepare
from thinwire.data.tokenizer import RESERVED
from thinwire.engine.build import model_weights
from thinwire.engine.checkpoint import Checkpoint
from thinwire.engine.feed import Feed
from thinwire.paths import cache_folder
from thinwire.report import Display
from thinwire.settings import Settings
from thinwire.settings.remarks import remarks
from thinwire.typed import to_plain

DataT = TypeVar("DataT", bound=Corpus)


def describe(settings: Settings) -> list[str]:
    """What a run is, in a line or two: its size, and the settings that are not at their defaults.

    All settings, resolved, stand in the run's config.toml.
    """
    weights, stages = model_weights(settings), settings.pipeline.stages
    frozen = f", {weights.trained:,} of them trained," if settings.lora.rank else ""
    first = (
        f"{settings.run.name}: {weights.count:,} parameters{frozen} in {stages} stages, "
        f"{settings.train.steps} steps of {settings.tokens_per_step:,} tokens, "
        f"hash {settings.hash}"
    )
    asked, defaults = settings.relaxed().to_plain(), to_plain(Settings())
    changed = [
        f"{section}.{key} = {value}"
        for section, keys in asked.items()
        for key, value in keys.items()
        if value != defaults[section][key] and (section, key) != ("run", "name")
    ]
    own = [f"set: {', '.join(changed)}"] if changed else []
    return [first, *own, *(f"note: {remark}" for remark in remarks(settings))]


def prepare_data(settings: Settings, display: Display, weights: Checkpoint | None = None) -> Corpus:
    """The data of these settings, from the cache if it was prepared before.

    A run that starts from weights (`train.init_from`) reads text with their tokenizer, unless its
    settings name one. So does one that goes on with a tokenizer that an earlier release trained:
    today's would be another.
    """
    vocab, config = settings.model.vocab, settings.data
    if weights and weights.tokenizer and not config.tokenizer:
        own = Tokenizer.load(weights.tokenizer)
        if settings.train.init_from or any(own.id_of(token) is None for token in RESERVED):
            config = dataclasses.replace(config, tokenizer=str(weights.tokenizer))
    data = prepare(config, vocab, cache_folder(), _progress(display))
    return _announced(data, settings, display)


def prepare_corpus(settings: Settings, display: Display) -> Corpus:
    """The tokenised corpus of these settings, from the cache if it was prepared before."""
    corpus = prepare(settings.data, settings.model.vocab, cache_folder(), _progress(display))
    return _announced(corpus, settings, display)


def _progress(display: Display) -> Callable[[str, int, int], None]:
    return lambda phase, done, total: display.progress(phase, done, total, "B")


def _announced(data: DataT, settings: Settings, display: Display) -> DataT:
    display.phase("data", data.summary())
    for note in data.notes:
        display.note(note)
    Feed(data, settings, torch.device("cpu"))  # too little of it is refused here, not later
    return data
