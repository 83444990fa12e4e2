"""Where a run goes on: the checkpoint, held against the settings that are to continue it."""

from pathlib import Path

from thinwire.engine import Checkpoint
from thinwire.engine.build import choose_device
from thinwire.engine.cut import check_memory
from thinwire.errors import CheckpointError, ConfigError
from thinwire.model import rate_change, share_changes
from thinwire.report import Display
from thinwire.run.proof import open_newest
from thinwire.run.start import adopted
from thinwire.settings import Settings, threads_per_stage

FIXED_ON_RESUME = {
    "model.*",
    "boundary.*",
    "lora.*",
    "data.source",
    "data.tokenizer",
    "data.valid_fraction",
    "data.text_key",
    "data.split",
    "data.valid_split",
    "data.template",
    "data.learn",
    "run.seed",
    "run.precision",
    "optim.name",
    "train.batch",
    "train.init_from",
}
"""Settings that say what the weights mean and what comes next; all others may change."""


def open_resume(
    place: Path, settings: Settings, display: Display, allow_plugins: bool = False
) -> Checkpoint:
    """The checkpoint to continue from, verified and compatible with the settings."""
    checkpoint, choice = open_newest(place, allow_plugins, settings.codec.plugins)
    for note in choice:
        display.note(note)
    saved = checkpoint.settings
    settings = adopted(settings, saved)
    _refuse_moved_cuts(checkpoint, settings)
    _refuse_changes(checkpoint, settings)
    steps = saved.train.steps, settings.train.steps
    notes = [
        *_inexact(saved, settings),
        *check_memory(settings, checkpoint),
        rate_change(saved.optim, steps[0], settings.optim, steps[1], checkpoint.step),
        share_changes(saved.optim, settings.optim),
    ]
    for note in filter(None, notes):
        display.note(note)
    return checkpoint


def _refuse_moved_cuts(checkpoint: Checkpoint, settings: Settings) -> None:
    """Narrow cuts are part of what a model learned: elsewhere they would ruin it."""
    saved, boundary = checkpoint.settings, settings.boundary
    before, now = ([len(blocks) for blocks in s.split()] for s in (saved, settings))
    if before == now or boundary.mode == "dense" or boundary.mode != saved.boundary.mode:
        return
    if not boundary.is_constrained:
        lost = "cuts elsewhere drop what it needs, and what these cuts learned would be lost"
        cost = "its loss starts far above the one that this run reached"
    else:
        free = saved.boundary.free_layers
        lost = f"all blocks but the last {free} are held in the subspace for it"
        cost = "its weights stay as they are"
        if now[-1] < free:
            cost = (
                f"of the last {free} blocks those below the last cut keep only what lies in the "
                'subspace, which ruins a trained model (boundary.mode = "dense" keeps all)'
            )
    raise ConfigError(
        f"cannot resume {checkpoint.folder} with {now} blocks in its stages: the model learned "
        f'with {before}, and with boundary.mode = "{boundary.mode}" its cuts are part of it: '
        f"{lost}. Keep pipeline.stages = {len(before)} and pipeline.split = {before}. "
        f"`--init-from {checkpoint.folder} --set run.name=NAME` starts a new run with other cuts "
        f"from these weights: {cost}, and steps, data order and optimizer begin anew"
    )


def _refuse_changes(checkpoint: Checkpoint, settings: Settings) -> None:
    before, now = checkpoint.settings.to_plain(), settings.to_plain()
    changed = {
        f"{section}.{key}": before[section][key]
        for section, keys in now.items()
        for key in keys
        if {f"{section}.*", f"{section}.{key}"} & FIXED_ON_RESUME
        and before[section][key] != now[section][key]
    }
    if changed:
        way = "Start a new run instead"
        if any(place.startswith("boundary.") for place in changed):
            way += (
                f": with --init-from {checkpoint.folder} it takes these weights along, as far as "
                "they fit (docs/finetuning.md says what each change costs); steps, data order and "
                "optimizer begin anew"
            )
        raise ConfigError(
            f"cannot resume {checkpoint.folder} with other values of {', '.join(changed)} (in the "
            f"checkpoint: {changed}): the weights depend on them. {way}"
        )
    if checkpoint.step >= settings.train.steps:
        raise ConfigError(
            f"{checkpoint.folder} has done {checkpoint.step} steps already: raise train.steps "
            f"(now {settings.train.steps}) to continue"
        )


def _inexact(saved: Settings, settings: Settings) -> list[str]:
    """Why the run will not continue bit for bit as it would have."""
    notes = []
    exact = _crosses_exactly(saved) and _crosses_exactly(settings)
    if saved.split() != settings.split() and not exact:
        notes.append(
            "the layers are split differently than before, and what crosses a cut is rounded: the "
            "run continues, but not bit for bit as it would have"
        )
    before, now = threads_per_stage(saved), threads_per_stage(settings)
    if before != now and choose_device(settings.run.device, 0).type == "cpu":
        notes.append(
            f"each stage now has {now} threads instead of {before} and adds numbers in another "
            "order: the run continues, but not bit for bit as it would have. For an exact "
            f"continuation set run.threads = {before}"
        )
    return notes


def refuse_other_data(checkpoint: Checkpoint, fingerprint: str) -> None:
    """A run goes on with the data that it began with."""
    if (corpus := checkpoint.manifest["corpus"]) != fingerprint:
        raise CheckpointError(
            f"{checkpoint.folder} was trained on another corpus (fingerprint {corpus}, now "
            f"{fingerprint}): resume with the same data"
        )


def _crosses_exactly(settings: Settings) -> bool:
    """Whether a cut changes no bit, so that it does not matter where the cuts are."""
    exact = {"fp64"} if settings.run.precision == "fp64" else {"fp32", "fp64"}
    cuts = range(settings.pipeline.stages - 1)
    used = {name for cut in cuts for name in settings.codec.names(cut)}
    return settings.boundary.mode == "dense" and used <= exact
