"""Where a model comes from: a local folder, a GGUF file, or a name on the Hugging Face hub."""

import contextlib
import io
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.data import Tokenizer
from thinwire.engine.checkpoint import MANIFEST, TOKENIZER
from thinwire.errors import CheckpointError, ConfigError, DataError
from thinwire.hf.shape import shape_of
from thinwire.hf.tokenizer import BESIDE
from thinwire.hf.weights import FolderWeights, MemoryWeights, Weights, read_json
from thinwire.lazy import needs
from thinwire.paths import expanded

CONFIG = "config.json"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Origin:
    """A model as it was found: config.json, tokenizer, and weights that are not read yet."""

    name: str
    config: dict[str, Any]
    tokenizer: Tokenizer
    beside: list[Path]
    """Files of the tokenizer, chat template and generation, which go where the model goes."""
    weights: Weights
    notes: list[str]


@contextlib.contextmanager
def opened(place: str) -> Iterator[Origin]:
    """The model at a place, for as long as its files are needed."""
    path = expanded(place, "the model to import")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(
                f"{path} is a file: give the folder of the model (with its {CONFIG}), or a .gguf"
            )
        with tempfile.TemporaryDirectory(prefix="thinwire-gguf-") as scratch:
            yield _gguf(path, Path(scratch))
    elif path.is_dir():
        yield _folder(path, path.resolve().name)
    else:
        yield _folder(_fetched(place), place)


def _folder(folder: Path, name: str) -> Origin:
    if (folder / MANIFEST).is_file() and not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} is a checkpoint of thinwire already: use it as it is")
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs and not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} holds GGUF files: name one of them, such as {ggufs[0]}")
    config = read_json(folder / CONFIG)
    shape_of(config)  # refused before all else, as the most likely and the cheapest
    beside = [folder / each for each in BESIDE if (folder / each).is_file()]
    return Origin(name, config, _tokenizer(folder), beside, FolderWeights(folder), [])


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / TOKENIZER
    if not path.is_file():
        raise DataError(
            f"{folder} has no {TOKENIZER}. An older kind of tokenizer is converted by "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers"
        )
    return Tokenizer.load(path)


def _fetched(name: str) -> Path:
    """The folder in which the hub's library keeps its copy of a model, completed if need be."""
    if not _HUB_NAME.fullmatch(name) or name.endswith(".gguf"):
        raise ConfigError(f"{name} does not exist: give a folder, a .gguf file or a hub name")
    hub = needs("huggingface_hub", "hf", f"fetching {name} from the Hugging Face hub")
    try:
        first = Path(hub.snapshot_download(name, allow_patterns=[CONFIG]))
        shape_of(read_json(first / CONFIG))  # before gigabytes are fetched
        wanted = [CONFIG, TOKENIZER, *BESIDE, *_WEIGHTS]
        return Path(hub.snapshot_download(name, allow_patterns=wanted))
    except (CheckpointError, ConfigError):
        raise
    except Exception as error:  # of the hub, of HTTP, of the network: of many kinds
        raise DataError(
            f"{name} is no folder here, and it cannot be fetched from the Hugging Face hub: "
            f"{_first_line(error)}. Check the name and the network, or fetch the folder elsewhere "
            "and give its path"
        ) from error


def _gguf(path: Path, scratch: Path) -> Origin:
    """A GGUF file, dequantised to float32 by transformers, which holds the whole model."""
    transformers = needs("transformers", "hf", f"importing {path}")
    needs("gguf", "hf", f"importing {path}")
    _check_gguf(path)
    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    folder = str(path.resolve().parent)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # warnings and bars of the library
            config = transformers.AutoConfig.from_pretrained(folder, **where).to_dict()
            shape_of(config)
            transformers.AutoTokenizer.from_pretrained(folder, **where).save_pretrained(scratch)
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, **where)
    except ConfigError:
        raise
    except Exception as error:  # the library checks little: anything may come of a damaged file
        raise CheckpointError(f"transformers cannot read {path}: {_first_line(error)}") from error
    beside = [scratch / each for each in BESIDE if (scratch / each).is_file()]
    note = (
        "transformers dequantised the GGUF file to float32, with the whole model in memory. "
        "Training changes these weights; they are not rounded to the file's few bits again"
    )
    weights = MemoryWeights(model.state_dict())
    return Origin(path.stem, config, _tokenizer(scratch), beside, weights, [note])


def _check_gguf(path: Path) -> None:
    """Refuse what transformers would leave out without a word: scaled rotary positions."""
    gguf = needs("gguf", "hf", f"importing {path}")
    try:
        reader = gguf.GGUFReader(path)
        scaling = [
            key
            for key, field in reader.fields.items()
            if key.endswith(".rope.scaling.type") and field.contents() != "none"
        ]
        scaling += [t.name for t in reader.tensors if t.name.startswith("rope_freqs")]
    except Exception as error:  # the library checks little: anything may come of a damaged file
        raise CheckpointError(
            f"{path} is not a GGUF file, or truncated: {_first_line(error)}"
        ) from error
    if scaling:
        raise ConfigError(
            f"{path} has scaled rotary positions ({scaling[0]}), which transformers drops from "
            "GGUF files: import the model's folder of safetensors instead"
        )


def _first_line(error: Exception) -> str:
    """What an error of another library says, without the advice behind it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
