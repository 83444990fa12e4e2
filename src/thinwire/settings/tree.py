"""All settings of a run in one frozen tree, validated in one place. Resolved (every default filled
in) it travels to the stages, is saved, and is hashed.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.codec import CodecConfig
from thinwire.data import DataConfig
from thinwire.errors import ConfigError, GoneError
from thinwire.model import BoundaryConfig, LoraConfig, ModelConfig, OptimConfig
from thinwire.paths import expanded
from thinwire.schedule import PipelineConfig, Schedule, build, split_layers
from thinwire.typed import Scope, from_plain, nearest, option, parse_literal
from thinwire.wire import LinkConfig

PRECISIONS = ("fp32", "bf16", "fp64")

LONGEST_NAME = 200  # bytes of a folder's name, with room for what is put behind it
VALIDATED_TOKENS = 65_536  # where settings leave that open: a loss of few depends on which they are


@dataclass(frozen=True)
class RunConfig:
    """`[run]`: what the run is called and where it computes."""

    name: str = option("run", "name of the run; its folder is OUT/NAME", scope="keeping")
    out: str = option("runs", "parent folder of all runs", scope="keeping")
    seed: int = option(
        0, "seed of the initial weights, the data order and all other randomness", least=None
    )
    device: str = option(
        "auto", "device of the stages", ("auto", "cpu", "cuda", "mps"), scope="machine"
    )
    precision: str = option(
        "fp32", "fp32; bf16 (autocast, weights stay fp32); fp64 (for exact tests)", PRECISIONS
    )
    threads: int = option(
        0,
        "CPU threads per stage; 0 = an equal share of this machine's cores",
        most=1024,
        scope="machine",
    )
    patience: float = option(
        900.0,
        "end the run after this many seconds without progress; 0 = wait forever",
        scope="keeping",
    )
    on_explosion: str = option(
        "warn",
        "when the loss rises far above its own past: warn (and exit with an error if it ends so), "
        "or stop",
        ("warn", "stop"),
        scope="keeping",
    )
    compile: bool = option(
        False, "compile the layers with torch.compile: slower start, faster steps on a GPU"
    )
    graphs: bool = option(
        False,
        "on an NVIDIA GPU, replay each microbatch as CUDA graphs: faster where microbatches are "
        "small, more memory, the same result",
        scope="machine",
    )
    wandb: str = option(
        "", "project on Weights & Biases that gets the metrics too; empty = none", scope="keeping"
    )

    @property
    def folder(self) -> Path:
        """Where the run is kept."""
        return Path(self.out) / self.name


@dataclass(frozen=True)
class TrainConfig:
    """`[train]`: how long, how much at once, how often to look and to save."""

    steps: int = option(200, "optimizer steps", least=1)
    batch: int = option(
        16, "global batch: sequences per step, over all microbatches", least=1, most=2**24
    )
    init_from: str = option(
        "",
        "start from the weights of this checkpoint, run folder or imported model; empty = from "
        "the seed",
        scope="machine",
    )
    eval_every: int = option(100, "steps between validations; 0 = only first and last")
    eval_batches: int = option(
        -1,
        "microbatches per validation, the same ones in each; -1 = enough for 65,536 tokens, "
        "or all there are; 0 = the whole validation set",
    )
    checkpoint_every: int = option(
        100, "steps between checkpoints; 0 = only at the end, -1 = none", least=-1, scope="keeping"
    )
    log_mb: int = option(
        4096,
        "megabytes of frames that each end of a link keeps on disk since the last checkpoint, so "
        "that a lost stage is computed again and nothing else; a checkpoint is saved before they "
        "are full; 0 = none: a lost stage costs the steps since the last checkpoint",
        scope="keeping",
    )
    audit: bool = option(
        False,
        "whether a stand-by compares what it computes with what the stage that it follows has sent",
        scope="keeping",
    )
    audit_replaces: bool = option(
        False,
        "whether a stand-by takes the place of a stage that it found to send other values; else "
        "the run only says so",
        scope="keeping",
    )
    keep: int = option(
        3,
        "checkpoints to keep; older ones are deleted, but never the last known good one or that "
        "of the best validation",
        least=1,
        scope="keeping",
    )


@dataclass(frozen=True)
class Settings:
    """The whole configuration of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    link: LinkConfig = field(default_factory=LinkConfig)
    boundary: BoundaryConfig = field(default_factory=BoundaryConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "Settings":
        """Build from nested dictionaries, resolve what is left to us, and check everything."""
        return cls.as_asked(values).resolved()

    @classmethod
    def as_asked(cls, values: dict[str, Any]) -> "Settings":
        """Build from nested dictionaries as they are: a preset, "auto" and the like stay so."""
        return from_plain(cls, _without_gone(values))

    def with_keys(self, section: str, **values: Any) -> "Settings":
        """The same but for some keys of a section, unchecked."""
        config = dataclasses.replace(getattr(self, section), **values)
        return dataclasses.replace(self, **{section: config})

    def resolved(self) -> "Settings":
        """The same settings with presets and "auto" filled in, refused if they cannot work."""
        settings = self.with_keys("run", out=str(expanded(self.run.out, "run.out")))._filled()
        _check(settings)
        return settings

    def _filled(self) -> "Settings":
        settings = dataclasses.replace(self, model=self.model.resolved(self.optim.embed_std))
        boundary = settings.boundary.resolved(settings.model.dim, settings.split())
        optim = settings.optim.resolved(self.train.steps)
        if self.train.eval_batches == -1:
            batches = -(-VALIDATED_TOKENS // max(1, settings.tokens_per_microbatch))
            settings = settings.with_keys("train", eval_batches=batches)
        return dataclasses.replace(settings, boundary=boundary, optim=optim)

    def relaxed(self) -> "Settings":
        """The inverse of `resolved`, for people: what a preset or "auto" gives is left to them."""
        freest = self
        for section in dataclasses.fields(self):
            for key, default in vars(getattr(Settings(), section.name)).items():
                freer = freest.with_keys(section.name, **{key: default})
                with contextlib.suppress(ConfigError):  # such as a table, which needs its anchor
                    freest = freer if freer._filled() == self else freest
        return freest

    def with_window(self) -> "Settings":
        """The same with the number that `pipeline.window` stands for."""
        return self.with_keys("pipeline", window=self.schedule().window)

    def to_plain(self) -> dict[str, Any]:
        """Nested dictionaries that `from_plain` reads back to the same settings."""
        return dataclasses.asdict(self)

    def of_scope(self, scope: Scope) -> dict[str, Any]:
        """The settings that decide the result, or keep the run, or are a machine's own affair."""
        return {
            section: {
                field.name: keys[field.name]
                for field in dataclasses.fields(getattr(self, section))
                if field.metadata["scope"] == scope
            }
            for section, keys in self.to_plain().items()
        }

    @property
    def hash(self) -> str:
        """Names the result, whatever the run is called and on which machines it is computed."""
        text = json.dumps(self.of_scope("result"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def microbatch_size(self) -> int:
        """Sequences in one microbatch."""
        return self.train.batch // self.pipeline.microbatches

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one update learns from."""
        return self.train.batch * self.model.context

    @property
    def tokens_per_microbatch(self) -> int:
        """Tokens of one microbatch."""
        return self.tokens_per_step // self.pipeline.microbatches

    def schedule(self) -> Schedule:
        """The training schedule."""
        p = self.pipeline
        return build(p.schedule, p.stages, p.microbatches, p.window, p.delay)

    def split(self) -> list[range]:
        """The blocks of each stage."""
        return split_layers(self.model.layers, self.pipeline.split, self.pipeline.stages)

    def saved_at_validations(self) -> "Settings":
        """The same with a checkpoint at each validation, or more often."""
        every, saved = self.train.eval_every, self.train.checkpoint_every
        is_enough = not every or 0 < saved <= every
        return self if is_enough else self.with_keys("train", checkpoint_every=every)

    def is_evaluation_step(self, done: int) -> bool:
        """Whether a validation follows the update after which `done` updates are done."""
        every = self.train.eval_every
        return done == self.train.steps or (every > 0 and done % every == 0)


_ANY = object()
GONE: dict[str, dict[str, Any]] = {
    "model": {"classes": 0, "channels": 0, "side": 0},
    "data": {"augment": True},
    "boundary": {"basis": "shared", "learn": False, "calibrate": _ANY, "ranks": []},
    "optim": {"momentum": _ANY, "basis_lr": _ANY},
    "link": {"port": 0},
}
"""Keys that have gone, and the values with which they changed nothing."""
GONE_VALUES = [
    *(("model", "preset", "resnet18"), ("data", "source", "images")),
    *(("boundary", "anchor", "trainable"), ("optim", "name", "sgd")),
]


def _without_gone(values: dict[str, Any]) -> dict[str, Any]:
    """The same without keys of an earlier release that changed nothing; refused if they did."""
    kept = dict(values)
    for section, unused in GONE.items():
        keys = values.get(section)
        if not isinstance(keys, dict):
            continue
        kept[section] = {key: value for key, value in keys.items() if key not in unused}
        for key, value in keys.items():
            has_effect = unused.get(key, value) not in (value, _ANY)
            if has_effect or (section, key, value) in GONE_VALUES:
                raise GoneError(f"{section}.{key} = {value!r}")
        if keys.get("mode") == "projected" and keys.get("anchor") == "fixed":
            raise GoneError('boundary.anchor = "fixed" with boundary.mode = "projected"')
    return kept


def merged(
    base: dict[str, dict[str, Any]], changes: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Plain settings with some keys changed; the base stays as it is."""
    values = {section: dict(keys) for section, keys in base.items()}
    for section, keys in changes.items():
        values.setdefault(section, {}).update(keys)
    return values


def apply_override(values: dict[str, Any], override: str, kind: type = Settings) -> None:
    """Put one `section.key=value` into the plain values, read as the type that it has in `kind`."""
    place, equals, text = override.partition("=")
    section, dot, key = place.strip().partition(".")
    if not equals or not dot:
        raise ConfigError(
            f'--set {override!r} must look like section.key=value, such as "train.steps=50"'
        )
    sections = typing.get_type_hints(kind)
    if section not in sections:
        raise ConfigError(f'unknown section "{section}"{nearest(section, sections)}')
    if key in GONE.get(section, {}) and kind is Settings:
        raise GoneError(f"{section}.{key}")
    parsed = parse_literal(text.strip(), sections[section], key, f"{section}.{key}")
    table = values.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{section} must be a table of keys, got {table!r}")
    table[key] = parsed


def machine_cores() -> int:
    """Cores that this process may use: fewer than the machine has inside a container or cpuset."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_stage(settings: Settings) -> int:
    """Compute threads of each stage of a local run: as told, or an even share of the cores."""
    return settings.run.threads or max(1, machine_cores() // settings.pipeline.stages)


def _check(settings: Settings) -> None:
    """Everything that one section alone cannot know."""
    train, pipeline = settings.train, settings.pipeline
    name = settings.run.name
    is_allowed = re.fullmatch(r"[^\W_](?:[\w .@+-]{0,98}[\w@+-])?", name)
    if not is_allowed or len(name.encode()) > LONGEST_NAME:
        raise ConfigError(
            f"run.name = {name!r} must be the name of a folder: letters, digits, spaces and any of "
            f". _ - @ + inside, at most 100 in {LONGEST_NAME} bytes, a letter or digit first"
        )
    if train.batch % pipeline.microbatches:
        raise ConfigError(
            f"train.batch = {train.batch} sequences do not divide into "
            f"pipeline.microbatches = {pipeline.microbatches} equal parts"
        )
    settings.schedule()
    if pipeline.delay and (reason := _against_delay(settings)):
        raise ConfigError(f"pipeline.delay = {pipeline.delay} {reason}; or leave it at 0")
    if settings.run.graphs and (pipeline.recompute or settings.boundary.basis_update_every):
        raise ConfigError(
            "run.graphs = true cannot work with pipeline.recompute = true, nor with a basis that "
            "moves (boundary.basis_update_every): set these to false and 0, or leave it at false"
        )
    settings.codec.check(pipeline.stages - 1)
    settings.lora.check(settings.boundary)


def _against_delay(settings: Settings) -> str:
    """What updates cannot be delayed with, and what to do: what all stages change at once."""
    boundary = settings.boundary
    if settings.pipeline.schedule != "1f1b":
        return 'needs pipeline.schedule = "1f1b": gpipe ends a step before it begins the next'
    if boundary.shares_embedding:
        return (
            'cannot work with boundary.anchor = "embedding", whose rows all stages change at the '
            'end of a step: use boundary.mode = "projected", as the recipes thin32 to thin200 do, '
            "or another anchor"
        )
    if boundary.basis_update_every:
        return (
            "cannot work with a basis that moves, for each of two versions of the weights would "
            "need its own: set boundary.basis_update_every = 0"
        )
    return ""
