"""What a user should know about settings that work: what overrides a preset, what has no effect."""

from collections.abc import Callable
from typing import NamedTuple

from thinwire.settings.crossing import (
    MOST_LOGGED_STEPS,
    checkpoint_interval,
    logged_bytes,
    logged_steps,
)
from thinwire.settings.recipe import stale_rates
from thinwire.settings.tree import Settings


class _Use(NamedTuple):
    """When a key has an effect."""

    key: str
    when: str
    holds: Callable[[Settings], bool]


_CHAT = 'data.source = "chat" or "hf"'
_USES = [
    _Use("optim.matrix_lr", 'optim.name = "muon"', lambda s: s.optim.name == "muon"),
    _Use("optim.floor", 'optim.schedule = "cosine"', lambda s: s.optim.schedule == "cosine"),
    _Use(
        "boundary.ratio",
        "a narrow boundary.mode and boundary.rank = 0",
        lambda s: s.boundary.mode != "dense" and s.relaxed().boundary.rank == 0,
    ),
    _Use("boundary.basis_seed", "a narrow boundary.mode", lambda s: s.boundary.mode != "dense"),
    _Use(
        "boundary.basis_rate",
        "boundary.basis_update_every",
        lambda s: s.boundary.basis_update_every > 0,
    ),
    _Use("lora.alpha", "lora.rank", lambda s: s.lora.rank > 0),
    _Use("lora.targets", "lora.rank", lambda s: s.lora.rank > 0),
    _Use("train.audit_replaces", "train.audit", lambda s: s.train.audit),
    _Use("data.path", "another data.source", lambda s: s.data.source != "stdlib"),
    _Use(
        "data.text_key", 'data.source = "text" or "hf"', lambda s: s.data.source in ("text", "hf")
    ),
    _Use(
        "data.valid_fraction",
        "an empty data.valid_path and data.valid_split",
        lambda s: not (s.data.valid_path or s.data.valid_split),
    ),
    _Use("data.split", 'data.source = "hf"', lambda s: s.data.source == "hf"),
    _Use("data.valid_split", 'data.source = "hf"', lambda s: s.data.source == "hf"),
    _Use("data.template", _CHAT, lambda s: s.data.source in ("chat", "hf")),
    _Use("data.learn", _CHAT, lambda s: s.data.source in ("chat", "hf")),
]


def remarks(settings: Settings) -> list[str]:
    """One line for each setting that another one overrides or leaves without effect."""
    found = []
    sizes = settings.model.unlike_preset()
    if sizes:
        changes = ", ".join(f"{key} {value} (not {own})" for key, (value, own) in sizes.items())
        found.append(f'model.preset = "{settings.model.preset}" is changed: {changes}')
    found += filter(None, [stale_rates(settings), _short_patience(settings), _small_log(settings)])
    plain, default = settings.relaxed().to_plain(), Settings().to_plain()
    for use in _USES:
        section, key = use.key.split(".")
        value = plain[section][key]
        if value != default[section][key] and not use.holds(settings):
            found.append(f"{use.key} = {value!r} has no effect without {use.when}")
    return found


def _small_log(settings: Settings) -> str:
    room, every = settings.train.log_mb, checkpoint_interval(settings)
    if room and settings.pipeline.stages > 1 and not logged_steps(settings):
        need = -(-logged_bytes(settings, 1) >> 20)
        return f"train.log_mb = {room} holds no step: a stage sends up to {need} MB in one"
    if every < 1 or every in (settings.train.checkpoint_every, MOST_LOGGED_STEPS):
        return ""
    if every >= settings.train.steps:  # the run ends before
        return ""
    return f"a checkpoint follows every {every} steps, before train.log_mb = {room} is full"


def _short_patience(settings: Settings) -> str:
    patience, outage = settings.run.patience, settings.link.outage
    if not 0 < patience < outage:
        return ""
    return (
        f"run.patience = {patience:g} is shorter than link.outage = {outage:g}: while a link is "
        "down, the run waits for link.outage"
    )
