"""A model of Hugging Face becomes a checkpoint of step 0, in as many stages as a run will have.

    models/NAME/
        manifest.json, stage-0.safetensors, ...   a checkpoint like any other
        tokenizer.json, chat template, ...        as they came with the model
        run.toml                                  settings for fine-tuning it

All is checked before anything is written. Weights are then copied tensor by tensor, in the number
format that they have; a run reads them into its own precision. The folder appears in one rename.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.data.template import CONFIG
from thinwire.engine.build import StageBuilder
from thinwire.engine.checkpoint import FORMAT, MANIFEST, TOKENIZER, Shard, sealed, sha256_of
from thinwire.errors import CheckpointError, ConfigError, DataError
from thinwire.folders import partial_folder, replace_folder, write_file
from thinwire.hf.finetune import run_toml
from thinwire.hf.origin import Origin
from thinwire.hf.shape import is_tied, shape_of
from thinwire.hf.tensors import write_file as write_tensors
from thinwire.hf.weights import TYPES, Kept
from thinwire.model.llama import EMBEDDING
from thinwire.report.human import human_bytes
from thinwire.settings import Settings
from thinwire.typed import to_plain

Progress = Callable[[int, int], None]

IMPORTED = "imported_from"
"""The key by which a manifest says that it is of an import."""
RUN_TOML = "run.toml"
LONGEST_CONTEXT = 2048
"""Of a training sequence, unless another one is asked for: memory grows with it."""
_TABLE, _HEAD = f"{EMBEDDING}.weight", "lm_head.weight"


@dataclass(frozen=True)
class Copied:
    """A tensor of ours, and where it comes from."""

    source: str
    kept: Kept

    @property
    def bytes(self) -> int:
        """On disk."""
        return math.prod(self.kept.shape) * TYPES[self.kept.dtype].itemsize


@dataclass(frozen=True)
class Plan:
    """What an import will write: checked, and not begun."""

    origin: Origin
    settings: Settings
    stages: list[dict[str, Copied]]
    notes: list[str]

    @property
    def bytes(self) -> int:
        """Of all weights, on disk."""
        return sum(copied.bytes for stage in self.stages for copied in stage.values())

    @property
    def parameters(self) -> int:
        """Of the model as it will be trained."""
        return sum(math.prod(c.kept.shape) for stage in self.stages for c in stage.values())

    @property
    def formats(self) -> str:
        """The number formats of its weights, such as bfloat16."""
        found = {c.kept.dtype for stage in self.stages for c in stage.values()}
        return " and ".join(str(TYPES[dtype]).removeprefix("torch.") for dtype in sorted(found))


def plan_import(origin: Origin, stages: int, context: int = 0) -> Plan:
    """Check a model against what a run needs of it; the error names what does not fit."""
    longest = shape_of(origin.config).context
    model = shape_of(origin.config, context or min(longest, LONGEST_CONTEXT))
    values = {
        "run": {"name": "imported"},
        "model": to_plain(model),
        "pipeline": {"stages": stages},
        # Whoever generates with an imported model gets what it says, with nothing lost at cuts.
        "codec": {"forward": "fp32", "backward": "fp32"},
    }
    settings = Settings.from_plain(values)
    notes = [*origin.notes, *_about_context(model.context, longest, bool(context))]
    notes += _about_tokenizer(origin, model.vocab)
    parts, tied = _matched(origin, settings)
    if tied:
        extra = model.vocab * model.dim
        notes.append(
            "the model ties its output head to its embedding. Here the two stand on the first and "
            "the last stage, so they are untied and the head becomes a copy: "
            f"{extra:,} more parameters to train and keep"
        )
    return Plan(origin, settings, parts, notes)


def write_import(plan: Plan, target: Path, force: bool, progress: Progress) -> Path:
    """Write the folder of an import, all of it or nothing; returns it."""
    target = target.absolute()
    check_target(target, force)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < plan.bytes:
            raise CheckpointError(
                f"{target.parent} has {human_bytes(free)} free, the model needs "
                f"{human_bytes(plan.bytes)}: free some space or choose another folder with --to"
            )
        with partial_folder(target.parent, f".{target.name}") as partial:
            shards = _write_stages(plan, partial, progress)
            _write_rest(plan, partial, target, shards)
            check_target(target, force)  # another process may have been quicker
            replace_folder(partial, target)
    except OSError as error:
        raise CheckpointError(
            f"the model cannot be written to {target}: {error}. Nothing was kept of it"
        ) from error
    return target


def check_target(target: Path, force: bool) -> None:
    """Refuse to write over what is there; even by force only over an earlier import."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not _is_import(target):
        raise ConfigError(f"{target} exists and is no imported model: choose another --to")
    if not force:
        raise ConfigError(f"{target} exists already: choose another --to, or use --force")


def _is_import(target: Path) -> bool:
    try:
        manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and IMPORTED in manifest


def _about_context(context: int, longest: int, is_asked: bool) -> list[str]:
    if context > longest:
        return [
            f"the model knows {longest:,} positions, and a context of {context:,} goes beyond "
            "them: expect poor text there until it is trained on such sequences"
        ]
    if context < longest and not is_asked:
        return [
            f"sequences have {context:,} tokens, the model can see {longest:,}: --context "
            "changes that"
        ]
    return []


def _about_tokenizer(origin: Origin, vocab: int) -> list[str]:
    entries = origin.tokenizer.vocab_size
    if entries > vocab:
        raise DataError(
            f"the tokenizer of {origin.name} has {entries:,} entries, but its embedding has "
            f"{vocab:,} rows: they do not belong together"
        )
    if entries < vocab:
        return [f"{vocab - entries:,} rows of the embedding have no token (padding); they are kept"]
    return []


def _matched(origin: Origin, settings: Settings) -> tuple[list[dict[str, Copied]], bool]:
    """The tensors of each stage with their sources, and whether the head was tied."""
    listed = {
        name: kept
        for name, kept in origin.weights.listed().items()
        if not name.endswith(".rotary_emb.inv_freq")  # computed from the config, by everyone
    }
    tied = is_tied(origin.config)
    if tied and _HEAD in listed and not _is_same(origin, _HEAD, _TABLE):
        raise CheckpointError(
            f"{origin.name}: config.json says tie_word_embeddings = true, but {_HEAD} differs "
            f"from {_TABLE}: set it to false to use both"
        )
    stages = []
    expected: dict[str, tuple[int, ...]] = {}
    builder = StageBuilder(settings, torch.device("meta"))
    for index in range(settings.pipeline.stages):
        shapes = {n: tuple(p.shape) for n, p in builder.build(index).global_parameters().items()}
        expected |= shapes
        stages.append(list(shapes))
    source = {name: _TABLE if tied and name == _HEAD else name for name in expected}
    _check_names(origin.name, set(source.values()), set(listed) - ({_HEAD} if tied else set()))
    for name, shape in expected.items():
        _check_tensor(name, shape, listed[source[name]])
    copied = {name: Copied(source[name], listed[source[name]]) for name in expected}
    return [{name: copied[name] for name in names} for names in stages], tied


def _check_names(what: str, expected: set[str], found: set[str]) -> None:
    missing, extra = sorted(expected - found), sorted(found - expected)
    if missing:
        also = f"; it has {extra[0]}, which is none of them" if extra else ""
        raise CheckpointError(
            f"{what} lacks {len(missing)} of the tensors that its config.json asks for, such as "
            f"{missing[0]}{also}"
        )
    if extra:
        raise CheckpointError(
            f"{what} has tensors that its config.json does not ask for ({len(extra)}), such as "
            f"{extra[0]}: it is not the plain model that its config.json describes"
        )


def _check_tensor(name: str, shape: tuple[int, ...], kept: Kept) -> None:
    if kept.shape != shape:
        raise CheckpointError(
            f"{name} has shape {kept.shape}, its config.json asks for {shape}: the files are not "
            "of one model"
        )
    if kept.dtype not in TYPES:
        raise CheckpointError(
            f"{name} is stored as {kept.dtype}; weights must be one of {', '.join(TYPES)}: take "
            "the folder of the weights before they were quantised"
        )


def _is_same(origin: Origin, first: str, second: str) -> bool:
    """Whether two tensors are equal, with one of them in memory at a time."""
    return _digest(origin.weights.read(first)) == _digest(origin.weights.read(second))


def _digest(tensor: Tensor) -> bytes:
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data).digest()


def _write_stages(plan: Plan, folder: Path, progress: Progress) -> list[Shard]:
    done = 0

    def reader(stage: Mapping[str, Copied]) -> Callable[[str], Tensor]:
        def read(name: str) -> Tensor:
            nonlocal done
            tensor = plan.origin.weights.read(stage[name].source)
            if not torch.isfinite(tensor).all():
                raise CheckpointError(f"{name} holds values that are not finite: it is damaged")
            done += stage[name].bytes
            progress(done, plan.bytes)
            return tensor

        return read

    shards = []
    for index, stage in enumerate(plan.stages):
        path = folder / f"stage-{index}.safetensors"
        shapes = {name: copied.kept.shape for name, copied in stage.items()}
        types = {name: TYPES[copied.kept.dtype] for name, copied in stage.items()}
        write_tensors(path, shapes, types, reader(stage))
        shards.append(Shard(path.name, sha256_of(path), path.stat().st_size, sorted(stage)))
    return shards


def _write_rest(plan: Plan, folder: Path, target: Path, shards: list[Shard]) -> None:
    """Tokenizer, settings for fine-tuning, and the manifest, which makes it a checkpoint."""
    settings = plan.settings
    plan.origin.tokenizer.save(folder / TOKENIZER)
    for path in plan.origin.beside:
        write_file(folder / path.name, path.read_bytes())
    write_file(folder / RUN_TOML, run_toml(plan.origin.name, settings, target).encode())
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "step": 0,
        "weight_version": 0,
        "basis_version": 0,
        "settings": settings.to_plain(),
        "config_hash": settings.hash,
        "corpus": "",
        "codec_memory": {},
        "shards": [vars(shard) for shard in shards],
        "tokenizer_sha256": sha256_of(folder / TOKENIZER),
        IMPORTED: plan.origin.name,
    }
    if (folder / CONFIG).is_file():
        manifest["template_sha256"] = sha256_of(folder / CONFIG)
    write_file(folder / MANIFEST, json.dumps(sealed(manifest), indent=1).encode())
