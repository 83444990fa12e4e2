"""`thinwire export --to hf`: a checkpoint as a folder that transformers and others open.

The folder is written under a hidden name beside its own, verified, and renamed at the end.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

import thinwire
from thinwire.engine import Checkpoint
from thinwire.engine.conversion import Folded, why_not_folded
from thinwire.engine.source import Source
from thinwire.errors import CheckpointError, ConfigError
from thinwire.folders import flush, partial_folder, replace_folder
from thinwire.hf.card import model_card
from thinwire.hf.cuts import WithCuts, config_with_cuts
from thinwire.hf.shape import config_of
from thinwire.hf.tensors import TYPES, write_model
from thinwire.hf.tokenizer import GENERATION, TokenizerFiles, tokenizer_files, write_json
from thinwire.hf.verify import AUTO_TOKENIZER, Exported, verify
from thinwire.lazy import needs
from thinwire.report import Display
from thinwire.report.human import human_bytes

CONFIG = "config.json"
CARD = "README.md"
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Wanted:
    """How a checkpoint is to be exported."""

    folder: Path
    dtype: str = "fp32"
    replace: bool = False
    verify: bool = True
    tokenizer: Path | None = None
    shard_bytes: int = SHARD_BYTES


def export(checkpoint: Checkpoint, wanted: Wanted, display: Display) -> None:
    """Write the folder, whole and verified, or leave things as they were."""
    check_target(wanted, CONFIG)
    if wanted.verify:
        needs("transformers", "hf", "verifying the export (--no-verify leaves it out)")
    settings = checkpoint.settings
    checkpoint.verify()
    tokenizer = tokenizer_files(checkpoint, wanted.tokenizer)
    why_not = why_not_folded(settings)
    weights = WithCuts(checkpoint) if why_not else Folded(checkpoint)
    if why_not:
        display.note(
            f"this model does not fold into an ordinary Llama. It has {why_not}.\n"
            "It is exported with its cuts: after `import thinwire.hf`, which registers its class, "
            "AutoModelForCausalLM opens it"
        )
    with new_folder(wanted) as folder:
        _write(folder, weights, tokenizer, wanted, display)
        verdict = None
        if wanted.verify:
            display.phase("verify", "opening it with transformers")
            exported = Exported(folder, weights.shapes, _reader(weights), TYPES[wanted.dtype])
            verdict = verify(exported, checkpoint, tokenizer)
            display.phase("verify", str(verdict))
            if verdict.tokenizer_class != AUTO_TOKENIZER:
                display.note(
                    f"{AUTO_TOKENIZER} has rules of its own for models of this type, which give "
                    f"other ids: open the tokenizer with {verdict.tokenizer_class}, as {CARD} says"
                )
        card = model_card(checkpoint, wanted.folder.name, wanted.dtype, not why_not, verdict)
        (folder / CARD).write_text(card, encoding="utf-8")


def _write(
    folder: Path,
    weights: Folded | WithCuts,
    tokenizer: TokenizerFiles,
    wanted: Wanted,
    display: Display,
) -> None:
    settings, dtype = weights.settings, TYPES[wanted.dtype]
    config = (
        config_with_cuts(settings) if isinstance(weights, WithCuts) else config_of(settings.model)
    )
    ends = tokenizer.generation()
    write_json(
        folder / CONFIG,
        {
            **config,
            # Not the one for padding: transformers would take it out of training.
            **{key: value for key, value in ends.items() if key != "pad_token_id"},
            "use_cache": True,
            "torch_dtype": str(dtype).removeprefix("torch."),
            "thinwire_version": thinwire.__version__,
        },
    )
    tokenizer.write(folder)
    if not (folder / GENERATION).exists():
        write_json(folder / GENERATION, ends)
    size = sum(math.prod(shape) for shape in weights.shapes.values()) * dtype.itemsize
    display.phase("write", f"{len(weights.shapes)} tensors, {human_bytes(size)} in {wanted.dtype}")
    write_model(folder, weights.shapes, dtype, _reader(weights), wanted.shard_bytes)


def _reader(weights: Source) -> Callable[[str], Tensor]:
    return lambda name: weights.tensors([name])[name]


def check_target(wanted: Wanted, config: str) -> None:
    """Refuse a place where something stands that nobody asked to replace.

    What may be replaced has a file `config`.
    """
    folder = wanted.folder
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder} exists and is not a folder: choose another name")
    if not wanted.replace:
        raise ConfigError(f"{folder} exists already: choose another name, or use --force")
    if not (folder / config).is_file():
        raise ConfigError(
            f"{folder} holds no {config}, so it is no exported model and is not replaced: choose "
            "another name"
        )


@contextlib.contextmanager
def new_folder(wanted: Wanted) -> Iterator[Path]:
    """A hidden folder that takes the wanted place at the end; what fails leaves nothing."""
    target = wanted.folder.absolute()
    hidden = f".{target.name}"
    try:
        with partial_folder(target.parent, hidden, only=hidden) as folder:
            yield folder
            for path in folder.iterdir():
                flush(path)
            replace_folder(folder, target)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {wanted.folder}: {error}. Nothing was left there; free some space or "
            "choose another place"
        ) from error
