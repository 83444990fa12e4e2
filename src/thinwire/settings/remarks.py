"""What a user should know about settings that work: what overrides a preset, what has no effect."""

import re

from thinwire.settings import crossing
from thinwire.settings.file import stale_rates
from thinwire.settings.tree import Settings

_USED_WITH = [
    ("optim.matrix_lr", 'optim.name = "muon"'),
    ("optim.floor", 'optim.schedule = "cosine"'),
    ("boundary.ratio", "boundary.mode"),
    ("boundary.ratio", "boundary.rank = 0"),
    ("boundary.basis_seed", "boundary.mode"),
    ("boundary.basis_rate", "boundary.basis_update_every"),
    ("lora.alpha", "lora.rank"),
    ("lora.targets", "lora.rank"),
    ("train.audit_replaces", "train.audit"),
    ("data.path", "data.source"),
    ("data.text_key", 'data.source = "text" or "hf"'),
    ("data.valid_fraction", 'data.valid_path = ""'),
    ("data.valid_fraction", 'data.valid_split = ""'),
    ("data.split", 'data.source = "hf"'),
    ("data.valid_split", 'data.source = "hf"'),
    ("data.template", 'data.source = "chat" or "hf"'),
    ("data.learn", 'data.source = "chat" or "hf"'),
]
"""What a key needs to have an effect: another key with one of these values, or not its default."""


def remarks(settings: Settings) -> list[str]:
    """One line for each setting that another one overrides or leaves without effect."""
    found = []
    sizes = settings.model.unlike_preset()
    if sizes:
        changes = ", ".join(f"{key} {value} (not {own})" for key, (value, own) in sizes.items())
        found.append(f'model.preset = "{settings.model.preset}" is changed: {changes}')
    found += filter(None, [stale_rates(settings), _small_log(settings)])
    plain, default = settings.relaxed().to_plain(), Settings().to_plain()
    for place, need in _USED_WITH:
        (section, key), (other, _, wanted) = place.split("."), need.partition(" = ")
        part, name = other.split(".")
        is_met = str(plain[part][name]) in re.findall(r'\w+|(?<=")(?=")', wanted)  # words, or ""
        is_met |= not wanted and plain[part][name] != default[part][name]
        if plain[section][key] != default[section][key] and not is_met:
            without = need if wanted else f"another {need}"
            found.append(f"{place} = {plain[section][key]!r} has no effect without {without}")
    return found


def _small_log(settings: Settings) -> str:
    room, every = settings.train.log_mb, crossing.checkpoint_interval(settings)
    if room and settings.pipeline.stages > 1 and not crossing.logged_steps(settings):
        need = -(-crossing.logged_bytes(settings, 1) >> 20)
        return f"train.log_mb = {room} holds no step: a stage sends up to {need} MB in one"
    if every < 1 or every in (settings.train.checkpoint_every, crossing.MOST_LOGGED_STEPS):
        return ""
    if every >= settings.train.steps:  # the run ends before
        return ""
    return f"a checkpoint follows every {every} steps, before train.log_mb = {room} is full"
