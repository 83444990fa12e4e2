"""Where a run begins: its settings in a few lines, its data, and the weights that it goes on from.

A run that is resumed goes on from a checkpoint of its own (`open_resume`). A new run may take the
weights of a checkpoint (`train.init_from`): they become its own checkpoint of step 0, made stage by
stage (`make_start`), from which it is resumed. Steps, data order, moments and codecs begin anew.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from thinwire.data import Corpus, Tokenizer, prepare
from thinwire.data.tokenizer import RESERVED
from thinwire.engine.build import StageBuilder, choose_device, model_weights
from thinwire.engine.checkpoint import SEAL, Checkpoint, content_hash, partial_folder, write_shard
from thinwire.engine.conversion import MOST_LOST, Transfer, projected_cuts, why_not_folded
from thinwire.engine.cut import are_cuts_learned, check_memory
from thinwire.engine.feed import Feed
from thinwire.engine.state import StageState
from thinwire.engine.step_end import StageUpdate
from thinwire.errors import CheckpointError, ConfigError, DataError
from thinwire.model import ModelConfig, rate_changes
from thinwire.model.layers import is_adapter
from thinwire.paths import cache_folder, expanded
from thinwire.report import Display
from thinwire.run.checkpoints import ORIGIN, claim_folder, commit, facts_of, open_newest
from thinwire.settings import Settings, threads_per_stage
from thinwire.settings.file import remarks

FREE = {"preset", "context", "embed_std"}  # keys of the model that change no weight's meaning
# Settings that say what the weights mean and what comes next; all others may change.
FIXED_ON_RESUME = {
    *("model.*", "boundary.*", "lora.*", "run.seed", "run.precision", "optim.name"),
    *("data.source", "data.tokenizer", "data.valid_fraction", "data.text_key", "data.split"),
    *("data.valid_split", "data.template", "data.learn", "train.batch", "train.init_from"),
}


@contextlib.contextmanager
def opened(
    settings: Settings,
    display: Display,
    resume: Path | None = None,
    allow_plugins: bool = False,
    goes_on: bool = False,
) -> Iterator[tuple[Settings, Checkpoint | None, Checkpoint | None]]:
    """Begin a run, and hold its folder: the settings with what comes along with the weights, the
    checkpoint from which it goes on, and the weights that it has at first, perhaps of another run.
    `resume`: a checkpoint, or the folder of a run. `goes_on`: the folder holds this very run.
    """
    for line in describe(settings):
        display.phase("config", line)
    checkpoint = open_resume(resume, settings, display, allow_plugins) if resume else None
    weights = checkpoint or open_origin(settings, display, allow_plugins)
    if weights is not None:
        settings = adopted(settings, weights.settings)
    with claim_folder(settings.run.folder, checkpoint, goes_on):
        display.opened(settings.run.folder)
        yield settings, checkpoint, weights


def describe(settings: Settings) -> list[str]:
    """What a run is, in a few lines: its size, and the settings that are not at their defaults."""
    weights = model_weights(settings)
    frozen = f", {weights.trained:,} of them trained," if settings.lora.rank else ""
    size = f"{weights.count:,} parameters{frozen} in {settings.pipeline.stages} stages"
    steps = f"{settings.train.steps} steps of {settings.tokens_per_step:,} tokens"
    first = f"{settings.run.name}: {size}, {steps}, hash {settings.hash}"
    asked, defaults = settings.relaxed().to_plain(), Settings().to_plain()
    changed = [
        f"{section}.{key} = {value}"
        for section, keys in asked.items()
        for key, value in keys.items()
        if value != defaults[section][key] and (section, key) != ("run", "name")
    ]
    own = [f"set: {', '.join(changed)}"] if changed else []
    return [first, *own, *(f"note: {remark}" for remark in remarks(settings))]


def prepare_data(
    settings: Settings,
    display: Display,
    weights: Checkpoint | None = None,
    resumed: Checkpoint | None = None,
) -> Corpus:
    """The tokenised data of these settings, perhaps from the cache. Text is read with the tokenizer
    of the `weights`, unless settings name one; a run that is `resumed` keeps its data.
    """
    config = settings.data
    if weights and weights.tokenizer and not config.tokenizer:
        own = Tokenizer.load(weights.tokenizer)
        is_older = any(own.id_of(token) is None for token in RESERVED)  # today's would be another
        if settings.train.init_from or is_older:
            config = replace(config, tokenizer=str(weights.tokenizer))
    told = partial(display.progress, unit="B")
    data = prepare(config, settings.model.vocab, cache_folder(), told)
    display.phase("data", data.summary())
    for note in data.notes:
        display.note(note)
    Feed(data, settings, torch.device("cpu"))  # too little of it is refused here, not later
    if resumed and (corpus := resumed.manifest["corpus"]) != data.fingerprint:
        other = f"another corpus (fingerprint {corpus}, now {data.fingerprint})"
        raise CheckpointError(f"{resumed.folder} was trained on {other}: resume with the same data")
    return data


def open_resume(
    place: Path, settings: Settings, display: Display, allow_plugins: bool = False
) -> Checkpoint:
    """The checkpoint to continue from, verified and compatible with the settings."""
    checkpoint, notes = open_newest(place, allow_plugins, settings.codec.plugins)
    saved = checkpoint.settings
    settings = adopted(settings, saved)
    boundary = settings.boundary
    before, now = ([len(blocks) for blocks in one.split()] for one in (saved, settings))
    if before != now and boundary.mode != "dense" and boundary.mode == saved.boundary.mode:
        raise ConfigError(
            f"cannot resume {checkpoint.folder} with {now} blocks in its stages: the model learned "
            f'with {before}, and with boundary.mode = "{boundary.mode}" its cuts are part of it. '
            f"Keep pipeline.stages = {len(before)} and pipeline.split = {before}. "
            f"{_anew(checkpoint)}"
        )
    _refuse_changes(checkpoint, settings)
    old, new = (saved.optim, saved.train.steps), (settings.optim, settings.train.steps)
    notes += [*_inexact(saved, settings), *check_memory(settings, checkpoint)]
    notes += rate_changes(*old, *new, checkpoint.step)
    for note in filter(None, notes):
        display.note(note)
    return checkpoint


def _anew(checkpoint: Checkpoint) -> str:
    return (
        f"`--init-from {checkpoint.folder} --set run.name=NAME` starts a new run with these "
        "weights, as far as they fit (docs/finetuning.md says what each change costs); steps, data "
        "order and optimizer begin anew"
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
        is_same_model = not any(place.startswith("model.") for place in changed)
        way = _anew(checkpoint) if is_same_model else "Start a new run instead"
        values = f"other values of {', '.join(changed)} (in the checkpoint: {changed})"
        what = f"cannot resume {checkpoint.folder} with {values}"
        raise ConfigError(f"{what}: the weights depend on them. {way}")
    if checkpoint.step >= settings.train.steps:
        done, most = f"{checkpoint.folder} has done {checkpoint.step} steps", settings.train.steps
        raise ConfigError(f"{done} already: raise train.steps (now {most}) to continue")


def _inexact(saved: Settings, settings: Settings) -> list[str]:
    notes, but = [], "the run continues, but not bit for bit as it would have"
    for key in ("delay", "microbatches"):
        if (then := getattr(saved.pipeline, key)) != getattr(settings.pipeline, key):
            notes.append(f"pipeline.{key} was {then} before: {but}")
    exact = _crosses_exactly(saved) and _crosses_exactly(settings)
    if saved.split() != settings.split() and not exact:
        elsewhere = "the layers are split differently than before"
        notes.append(f"{elsewhere}, and what crosses a cut is rounded: {but}")
    before, now = threads_per_stage(saved), threads_per_stage(settings)
    if before != now and choose_device(settings.run.device, 0).type == "cpu":
        notes.append(
            f"each stage now has {now} threads instead of {before} and adds numbers in another "
            f"order: {but}. For an exact continuation set run.threads = {before}"
        )
    return notes


def _crosses_exactly(settings: Settings) -> bool:
    """Whether a cut changes no bit, so that it does not matter where the cuts are."""
    exact = {"fp64"} if settings.run.precision == "fp64" else {"fp32", "fp64"}
    cuts = range(settings.pipeline.stages - 1)
    used = {name for cut in cuts for name in settings.codec.names(cut)}
    return settings.boundary.mode == "dense" and used <= exact


def open_origin(
    settings: Settings, display: Display, allow_plugins: bool = False
) -> Checkpoint | None:
    """The checkpoint of `train.init_from`, if it is set, verified and of the same shape."""
    if not settings.train.init_from:
        if settings.lora.rank:
            raise ConfigError(
                f"lora.rank = {settings.lora.rank} trains adapters beside frozen weights, but a "
                "new run without train.init_from starts with random weights, which would stay "
                "random: name the model to fine-tune with --init-from, or set lora.rank = 0"
            )
        return None
    place = expanded(settings.train.init_from, "train.init_from")
    if (place / "config.json").is_file():
        way = f"make a checkpoint of it first, `thinwire import {place} --to models/NAME`"
        raise CheckpointError(f"train.init_from = {place} is a Hugging Face folder: {way}")
    origin, notes = open_newest(place, allow_plugins, settings.codec.plugins)
    _refuse_other_model(origin, settings)
    if settings.boundary.is_constrained and (why := why_not_folded(origin.settings)):
        mode = f'boundary.mode = "{settings.boundary.mode}"'
        what = f"{origin.folder} cannot become a model with {mode}"
        raise ConfigError(f"{what}: {why}. Use dense or projected")
    for note in notes + _notes(origin, adopted(settings, origin.settings)):
        display.note(note)
    if origin.tokenizer is not None and not settings.data.tokenizer:
        display.phase("data", f"tokenizer of {origin.folder}, which its weights were trained with")
    return origin


def adopted(settings: Settings, saved: Settings) -> Settings:
    """The settings of a run that goes on from weights, with what is as much a part of these: the
    seed of a basis, the size of a fixed token table, and cuts that learned something, where the
    split is left open. `saved`: the settings of the origin, or later of the run's own checkpoint.
    """
    model, boundary, pipeline = settings.model, settings.boundary, settings.pipeline
    train = settings.train
    if not train.init_from:
        train = replace(train, init_from=saved.train.init_from)
    if train.init_from:
        model = replace(model, embed_std=saved.model.embed_std)
        are_constrained = boundary.is_constrained and saved.boundary.is_constrained
        if are_constrained or boundary.mode == saved.boundary.mode:
            boundary = replace(boundary, basis_seed=saved.boundary.basis_seed)
    now, then = (
        (s.model.layers, s.pipeline.stages, s.boundary.mode, s.boundary.free_layers)
        for s in (settings, saved)
    )
    if not pipeline.split and now == then and all(map(are_cuts_learned, (settings, saved))):
        pipeline = replace(pipeline, split=saved.pipeline.split)
    return replace(settings, model=model, boundary=boundary, pipeline=pipeline, train=train)


def keys_for(place: str) -> list[str]:
    """`section.key=value` of a run that starts from these weights: the model's shape, and where."""
    settings = Checkpoint.open(expanded(place, "--init-from")).settings.relaxed()
    usual = vars(ModelConfig())
    model = {key: value for key, value in vars(settings.model).items() if value != usual[key]}
    model.pop("embed_std", None)  # comes along with the weights
    return [*(f"model.{key}={value}" for key, value in model.items()), f"train.init_from={place}"]


def make_start(
    origin: Checkpoint, settings: Settings, folder: Path, data: Corpus, display: Display
) -> Checkpoint:
    """The checkpoint of step 0 of a new run, with the weights of its origin, stage by stage."""
    eager = replace(settings, run=replace(settings.run, compile=False))
    builder = StageBuilder(eager, torch.device("cpu"))
    transfer = Transfer(origin, builder)
    shards, stages = [], settings.pipeline.stages
    for index in range(stages):
        stage = builder.build(index)
        builder.initialise(stage)
        transfer.fill(stage)
        state = StageState(StageUpdate(builder, stage, index))
        shards.append(write_shard(partial_folder(folder, 0), index, state.shard()))
        display.progress("start", index + 1, stages, "stages from earlier weights")
    source = {"path": str(origin.folder), "step": origin.step, SEAL: content_hash(origin.manifest)}
    facts = facts_of(settings, data, {}) | {ORIGIN: source}
    made = commit(folder, 0, shards, facts, data.tokenizer(), data.template())
    if fresh := [name for name in transfer.fresh if not is_adapter(name)]:
        display.note(f"not in {origin.folder}, so they start anew: {', '.join(fresh)}")
    if transfer.lost > MOST_LOST:
        display.note(
            f"{100 * transfer.lost:.1f} % of the weights that the subspace is to hold lie outside "
            "it and are lost (relative size): that ruins a trained model. Use boundary.mode = "
            '"dense" or "projected", or train from the start'
        )
    display.phase("start", f"weights of {origin.folder} (step {origin.step}) in {made}")
    return Checkpoint.open(made, allow_plugins=True)


def _refuse_other_model(origin: Checkpoint, settings: Settings) -> None:
    saved, now = (vars(s.model) for s in (origin.settings, settings))
    differing = [
        f"model.{key} = {value} (not {now[key]})"
        for key, value in saved.items()
        if key not in FREE and value != now[key] and not (key == "vocab" and value < now[key])
    ]
    if differing:
        shape = f"the model of {origin.folder} has another shape: {', '.join(differing)}"
        raise ConfigError(f"{shape}. Set these keys as it has them; model.vocab may only grow")
    # Ids must stand for the same text, else trained weights mean nothing.
    asked, own = settings.data.tokenizer, origin.tokenizer
    if own is None and not asked and settings.data.source != "tokens":
        raise DataError(
            f"{origin.folder} holds no tokenizer, so text cannot be given the ids that its weights "
            "know: set data.tokenizer to the one that its token ids were made with"
        )
    if asked and own and not Tokenizer.load(asked).has_vocabulary_of(Tokenizer.load(own)):
        raise DataError(
            f"data.tokenizer = {asked} has another vocabulary than {own}, which the weights were "
            "trained with: leave data.tokenizer empty to use that one"
        )


def _notes(origin: Checkpoint, settings: Settings) -> list[str]:
    saved, notes = origin.settings, []
    if settings.model.vocab > saved.model.vocab:
        stay = ", and stay so: lora.rank = 0 would train them" if settings.lora.rank else ""
        grows = f"model.vocab grows from {saved.model.vocab} to {settings.model.vocab}"
        notes.append(f"{grows}: the rows of new tokens start anew{stay}")
    if settings.model.context > saved.model.context:
        notes.append(
            f"model.context = {settings.model.context} is longer than the {saved.model.context} "
            f"tokens that {origin.folder} was trained with: later positions are new to it"
        )
    before, now = (projected_cuts(s).values() for s in (saved, settings))
    if gone := {*before} - {*now}:
        blocks = ", ".join(str(block) for block, _ in sorted(gone))
        gone_cuts = f"projected cuts, which this run has no more before block {blocks}"
        higher = "its loss starts higher than it ended"
        notes.append(f"{origin.folder} was trained with {gone_cuts}: {higher}")
    if {*now} - {*before}:
        notes.append(
            f"the cuts of this run are new to {origin.folder}, and their random basis drops most "
            'of what crosses, which ruins a trained model: boundary.mode = "dense" keeps all of it'
        )
    return notes
