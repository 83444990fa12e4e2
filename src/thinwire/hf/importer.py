"""A model of Hugging Face becomes a checkpoint of step 0, in as many stages as a run will have.

    models/NAME/
        manifest.json, stage-0.safetensors, ...   a checkpoint like any other
        tokenizer.json, chat template, ...        as they came with the model
        run.toml                                  settings for fine-tuning it

It comes from a local folder, a GGUF file, or a name on the hub. All is checked before anything is
written. Weights are then copied tensor by tensor, in the number format that they have; a run reads
them into its own precision. The folder appears in one rename.
"""

import contextlib
import functools
import hashlib
import io
import json
import math
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.data import Tokenizer, chat
from thinwire.data.sources import read_json, reading
from thinwire.engine.build import StageBuilder
from thinwire.engine.checkpoint import (
    FORMAT,
    IMPORTED,
    MANIFEST,
    TOKENIZER,
    Shard,
    sealed,
    sha256_of,
)
from thinwire.errors import CheckpointError, ConfigError, DataError
from thinwire.folders import write_file
from thinwire.hf import folder as files
from thinwire.hf.shape import is_tied, shape_of
from thinwire.lazy import needs
from thinwire.model.llama import EMBEDDING
from thinwire.paths import expanded
from thinwire.settings import Settings
from thinwire.typed import to_toml

RUN_TOML = "run.toml"
LONGEST_CONTEXT = 2048  # unless another one is asked for: memory grows with it
_TABLE, _OUTPUT = f"{EMBEDDING}.weight", "lm_head.weight"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HEAD = """\
# Fine-tunes {name}: a new run whose weights begin as those of {place}.
# Start it: thinwire train {file}          Its cost beforehand: thinwire plan {file}
#
# - Your text: set data.source and data.path. Until then it trains on Python's own source code.
# - Weights are read into fp32 whatever they are stored in; run.precision = "bf16" computes in bf16
#   on a GPU, with weights kept in fp32.
# - All channels cross the cuts, in 8 bits forward and 4 backward, which changes a trained model
#   little. A narrow boundary.mode with a random basis would ruin what it has learned.
# - AdamW at a small rate and with little decay: larger ones forget what the model knows.
# - lora.rank = 16 trains small adapters (LoRA) instead of all weights; optim.lr = 2e-4 suits them.
"""


@dataclass(frozen=True)
class Origin:
    """A model as it was found: config.json, tokenizer, and weights that are not read yet."""

    name: str
    config: dict[str, Any]
    folder: Path  # it has the tokenizer; what stands beside that goes where the model goes
    listed: dict[str, files.Kept]
    read: files.Read
    notes: list[str]


@contextlib.contextmanager
def opened(place: str) -> Iterator[Origin]:
    """The model at a place, for as long as its files are needed."""
    path = expanded(place, "the model to import")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(
                f"{path} is a file: give the folder of the model (with its config.json), or a .gguf"
            )
        with tempfile.TemporaryDirectory(prefix="thinwire-gguf-") as scratch:
            yield _gguf(path, Path(scratch))
    elif path.is_dir():
        yield _folder(path, path.resolve().name)
    else:
        yield _folder(_fetched(place), place)


def _folder(folder: Path, name: str) -> Origin:
    if (folder / MANIFEST).is_file() and not (folder / files.CONFIG).is_file():
        raise ConfigError(f"{folder} is a checkpoint of thinwire already: use it as it is")
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs and not (folder / files.CONFIG).is_file():
        raise ConfigError(f"{folder} holds GGUF files: name one of them, such as {ggufs[0]}")
    config = read_json(folder / files.CONFIG)
    shape_of(config)  # refused before all else, as the most likely and the cheapest
    path = folder / TOKENIZER
    if not path.is_file():
        raise DataError(
            f"{folder} has no {TOKENIZER}. An older kind of tokenizer is converted by "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers"
        )
    weights = files.FolderWeights(folder)
    return Origin(name, config, folder, weights.listed, weights.read, [])


def _fetched(name: str) -> Path:
    """The folder in which the hub's library keeps its copy of a model, completed if need be."""
    if not _HUB_NAME.fullmatch(name) or name.endswith(".gguf"):
        raise ConfigError(f"{name} does not exist: give a folder, a .gguf file or a hub name")
    hub = needs("huggingface_hub", "hf", f"fetching {name} from the Hugging Face hub")
    advice = (
        "it is no folder here, and is asked for at the Hugging Face hub: check the name and the "
        "network, or fetch the folder elsewhere and give its path"
    )
    with reading(name, (Exception,), advice):  # of the hub, of HTTP, of the network: of many kinds
        first = Path(hub.snapshot_download(name, allow_patterns=[files.CONFIG]))
        shape_of(read_json(first / files.CONFIG))  # before gigabytes are fetched
        wanted = [files.CONFIG, TOKENIZER, *files.BESIDE, *_WEIGHTS]
        return Path(hub.snapshot_download(name, allow_patterns=wanted))


def _gguf(path: Path, scratch: Path) -> Origin:
    """A GGUF file, dequantised to float32 by transformers, which holds the whole model."""
    transformers = needs("transformers", "hf", f"importing {path}")
    gguf = needs("gguf", "hf", f"importing {path}")
    # The library checks little: anything may come of a damaged file.
    with reading(path, (Exception,), "it is not a GGUF file, or truncated"):
        reader = gguf.GGUFReader(path)
        kinds = {k: f for k, f in reader.fields.items() if k.endswith(".rope.scaling.type")}
        scaling = [key for key, field in kinds.items() if field.contents() != "none"]
        scaling += [t.name for t in reader.tensors if t.name.startswith("rope_freqs")]
    if scaling:  # what the library would leave out without a word
        raise ConfigError(
            f"{path} has scaled rotary positions ({scaling[0]}), which transformers drops from "
            "GGUF files: import the model's folder of safetensors instead"
        )
    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    folder = str(path.resolve().parent)
    trying = reading(path, (Exception,), "transformers opens GGUF files, but not this one")
    with trying, contextlib.redirect_stderr(io.StringIO()):  # warnings and bars of the library
        config = transformers.AutoConfig.from_pretrained(folder, **where).to_dict()
        shape_of(config)
        transformers.AutoTokenizer.from_pretrained(folder, **where).save_pretrained(scratch)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **where)
    note = (
        "transformers dequantised the GGUF file to float32, with the whole model in memory. "
        "Training changes these weights; they are not rounded to the file's few bits again"
    )
    tensors = model.state_dict()
    listed = {name: files.Kept(tuple(tensor.shape), "F32") for name, tensor in tensors.items()}
    return Origin(path.stem, config, scratch, listed, tensors.__getitem__, [note])


def import_model(
    place: str,
    target: Path,
    stages: int,
    context: int = 0,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """Write the folder of an import, all of it or nothing; returns what a user is told of it."""
    ours = MANIFEST, IMPORTED, "imported model"
    check = functools.partial(files.check_target, target, force, *ours)
    check()
    with opened(place) as found:
        origin = _untied(found)
        settings, notes = _planned(origin, stages, context)
        parts = _matched(origin, settings)
        with files.new_folder(target) as folder:
            _write(folder, origin, settings, parts, target.absolute(), progress)
            check()  # another process may have been quicker
    model, tensors = settings.model, [kept for part in parts for kept in part.values()]
    parameters = sum(math.prod(kept.shape) for kept in tensors)
    types = {str(files.TYPES[kept.dtype]).removeprefix("torch.") for kept in tensors}
    about = (
        f"imported {origin.name} ({origin.config['model_type']}, {parameters:,} parameters, "
        f"{' and '.join(sorted(types))}) as {target}: {model.layers} blocks in {stages} stages, "
        f"context {model.context:,}"
    )
    return [about, *(f"note: {note}" for note in notes)]


def _planned(origin: Origin, stages: int, context: int) -> tuple[Settings, list[str]]:
    """The settings of the model as it will be kept, and what there is to say of it."""
    longest = shape_of(origin.config).context
    model = shape_of(origin.config, context or min(longest, LONGEST_CONTEXT))
    values = {
        "run": {"name": "imported"},
        "model": asdict(model),
        "pipeline": {"stages": stages},
        # Whoever generates with an imported model gets what it says, with nothing lost at cuts.
        "codec": {"forward": "fp32", "backward": "fp32"},
    }
    settings = Settings.from_plain(values)
    notes = list(origin.notes)
    if model.context > longest:
        notes.append(
            f"the model knows {longest:,} positions, and a context of {model.context:,} goes "
            "beyond them: expect poor text there until it is trained on such sequences"
        )
    elif model.context < longest and not context:
        notes.append(
            f"sequences have {model.context:,} tokens, the model can see {longest:,}: --context "
            "changes that"
        )
    entries, vocab = Tokenizer.load(origin.folder / TOKENIZER).vocab_size, model.vocab
    if entries > vocab:
        raise DataError(f"the tokenizer has {entries:,} entries, the embedding {vocab:,} rows")
    if is_tied(origin.config):
        notes.append(
            "the model ties its output head to its embedding. Here the two stand on the first and "
            "the last stage, so they are untied and the head becomes a copy: "
            f"{vocab * model.dim:,} more parameters to train and keep"
        )
    return settings, notes


def _write(
    folder: Path,
    origin: Origin,
    settings: Settings,
    parts: list[dict[str, files.Kept]],
    target: Path,
    progress: Callable[[int, int], None],
) -> None:
    """All files of an import, into the folder that will be the target."""
    size = sum(kept.bytes for part in parts for kept in part.values())
    done, shards = 0, []

    def read(name: str) -> Tensor:
        nonlocal done
        tensor = origin.read(name)
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{name} holds values that are not finite: it is damaged")
        done += tensor.nbytes
        progress(done, size)
        return tensor

    for index, stage in enumerate(parts):
        path = folder / f"stage-{index}.safetensors"
        files.write_tensors(path, stage, read)
        shards.append(Shard(path.name, sha256_of(path), path.stat().st_size, sorted(stage)))
    Tokenizer.load(origin.folder / TOKENIZER).save(folder / TOKENIZER)
    for path in (origin.folder / name for name in files.BESIDE):
        if path.is_file():
            write_file(folder / path.name, path.read_bytes())
    write_file(folder / RUN_TOML, run_toml(origin.name, settings, target).encode())
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
        IMPORTED: origin.name,
    }
    if (folder / chat.CONFIG).is_file():
        manifest["template_sha256"] = sha256_of(folder / chat.CONFIG)
    write_file(folder / MANIFEST, json.dumps(sealed(manifest), indent=1).encode())


def _untied(origin: Origin) -> Origin:
    """The same with the one matrix of a tied model as both embedding and head."""
    both = _TABLE, _OUTPUT
    held = [name for name in both if name in origin.listed]  # some writers keep the head's name
    if not is_tied(origin.config) or not held:
        return origin

    def digest(name: str) -> bytes:  # of one tensor in memory at a time
        tensor = origin.read(name).contiguous().flatten()
        return hashlib.sha256(tensor.view(torch.uint8).numpy().data).digest()

    if len(held) == 2 and digest(_OUTPUT) != digest(_TABLE):
        raise CheckpointError(
            f"{origin.name}: config.json says tie_word_embeddings = true, but {_OUTPUT} differs "
            f"from {_TABLE}: set it to false to use both"
        )
    listed = origin.listed | dict.fromkeys(both, origin.listed[held[0]])
    return replace(
        origin, listed=listed, read=lambda name: origin.read(held[0] if name in both else name)
    )


def _matched(origin: Origin, settings: Settings) -> list[dict[str, files.Kept]]:
    """The tensors of each stage as the origin has them, all of which fit."""
    listed = {
        name: kept
        for name, kept in origin.listed.items()
        if not name.endswith(".rotary_emb.inv_freq")  # computed from the config, by everyone
    }
    builder, count = StageBuilder(settings, torch.device("meta")), settings.pipeline.stages
    stages = [builder.build(index).global_parameters() for index in range(count)]
    expected = {name: tuple(p.shape) for stage in stages for name, p in stage.items()}
    missing, extra = expected.keys() - listed.keys(), listed.keys() - expected.keys()
    for odd, what in ((missing, "lacks"), (extra, "also holds")):
        if odd:
            raise CheckpointError(
                f"{origin.name} is not the model that its config.json describes: it {what} "
                f"{len(odd)} tensors, such as {min(odd)}"
            )
    for name, shape in expected.items():
        if listed[name].shape != shape:
            raise CheckpointError(
                f"{name} has shape {listed[name].shape}, its config.json asks for {shape}"
            )
        if listed[name].dtype not in files.TYPES:
            raise CheckpointError(
                f"{name} is stored as {listed[name].dtype}; weights must be one of "
                f"{', '.join(files.TYPES)}: take the folder of the weights that are not quantised"
            )
    return [{name: listed[name] for name in stage} for stage in stages]


def run_toml(name: str, imported: Settings, folder: Path) -> str:
    """Settings for fine-tuning the model of an import in its (absolute) folder."""
    # The folder's name, of what the name of a run may have.
    kept = re.sub(r"[^\w .@+-]", "-", folder.name).encode()[:80].decode(errors="ignore")
    values = {
        "run": {"name": f"{kept.strip(' .-_@+') or 'imported'}-tuned"},
        "model": asdict(imported.relaxed().model),
        "data": {"tokenizer": str(folder / TOKENIZER)},
        "pipeline": {"stages": imported.pipeline.stages},
        "boundary": {"mode": "dense"},
        "codec": {"forward": "int8", "backward": "int4"},
        "optim": {"name": "adamw", "lr": 2e-5, "weight_decay": 0.01},
        "train": {"steps": 200, "batch": 8, "init_from": str(folder)},
    }
    asked = Settings.as_asked(values)
    asked.resolved()
    # Within a comment, where a line break would end it.
    name, place, file = (" ".join(str(each).split()) for each in (name, folder, folder / RUN_TOML))
    head = _HEAD.format(name=name, place=place, file=shlex.quote(file))
    return f"{head}\n{to_toml(asked)}"
