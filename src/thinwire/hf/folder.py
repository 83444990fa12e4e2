"""A model folder as Hugging Face keeps it: its place, its JSON, its safetensors read and written.

What safetensors files hold is listed from their headers, and a tensor is read when it is asked for.
They are written tensor by tensor too, which the library cannot: shapes and types are known before
the tensors are, so the header can stand first. Memory holds one tensor at a time.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from thinwire.data import chat
from thinwire.data.sources import read_json, reading
from thinwire.errors import CheckpointError, ConfigError, DataError
from thinwire.folders import flush, partial_folder, replace_folder

CONFIG = "config.json"
GENERATION = "generation_config.json"
BESIDE = (chat.CONFIG, "special_tokens_map.json", chat.JINJA, GENERATION)
"""What may stand beside a tokenizer.json, and goes where it goes."""
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_SPELLED = {dtype: name for name, dtype in TYPES.items()}
EXPORT_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Shapes = Mapping[str, tuple[int, ...]]
Read = Callable[[str], Tensor]


def check_target(
    folder: Path, replace: bool, mark: str, key: str = "", what: str = "exported model"
) -> None:
    """Refuse to write over what is there; by force only a folder whose `mark` has the `key`."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    is_ours = False
    with contextlib.suppress(DataError):
        is_ours = (folder / mark).is_file() and (not key or key in read_json(folder / mark))
    if not is_ours:
        raise ConfigError(f"{folder} exists and is no {what}: choose another name")
    if not replace:
        raise ConfigError(f"{folder} exists already: choose another name, or use --force")


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A hidden folder that takes the place of `target` at the end; what fails leaves nothing."""
    hidden = f".{target.absolute().name}"
    try:
        with partial_folder(target.absolute().parent, hidden, only=hidden) as folder:
            yield folder
            for path in folder.iterdir():
                flush(path)
            replace_folder(folder, target.absolute())
    except OSError as error:
        raise CheckpointError(
            f"cannot write {target}: {error}. Nothing was left there: choose another place"
        ) from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """A JSON file as people read it."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Kept:
    """A tensor as its file lists it."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it, such as BF16

    @property
    def bytes(self) -> int:
        """On disk."""
        return math.prod(self.shape) * TYPES[self.dtype].itemsize


class FolderWeights:
    """The named tensors in the safetensors files of a folder."""

    def __init__(self, folder: Path):
        """An error names a file that is missing, truncated or not what the index says."""
        self.listed: dict[str, Kept] = {}
        self._folder = folder
        self._files: dict[str, str] = {}
        places, found = self._indexed(), set[tuple[str, str]]()
        for file in sorted({*places.values()}) or [WHOLE]:
            with self._opened(file) as opened:
                for name in opened.keys():  # noqa: SIM118 -- it is no dictionary
                    part = opened.get_slice(name)
                    self.listed[name] = Kept(tuple(part.get_shape()), part.get_dtype())
                    self._files[name] = file
                    found.add((name, file))  # one tensor may be in two files
        if places and (odd := {*places.items()} ^ found):
            raise CheckpointError(
                f"{folder}: {INDEX} and the files do not agree on where {min(odd)[0]} is"
            )

    def read(self, name: str) -> Tensor:
        """One of the tensors, and no other."""
        with self._opened(self._files[name]) as file:
            return file.get_tensor(name)

    def _indexed(self) -> dict[str, str]:
        """In which file each tensor is, by the index; empty without one, for all are in WHOLE."""
        folder, index = self._folder, self._folder / INDEX
        if not index.is_file():
            if (folder / WHOLE).is_file():
                return {}
            has_safetensors = any(folder.glob("*.safetensors"))
            if not has_safetensors and [*folder.glob("*.bin"), *folder.glob("*.pt*")]:
                raise CheckpointError(
                    f"{folder} holds its weights as pickle (.bin) only. Reading pickle runs code "
                    "that the file names, so thinwire never does: take .safetensors, or convert it "
                    "(AutoModelForCausalLM.from_pretrained(...).save_pretrained(...))"
                )
            raise CheckpointError(
                f"{folder} has no weights, neither {WHOLE} nor {INDEX} with its files: the "
                "download is not complete, or this is an adapter"
            )
        places: Any = read_json(index).get("weight_map")
        files = places.values() if isinstance(places, dict) else ()
        if not files or any(not isinstance(f, str) or Path(f).name != f for f in files):
            raise CheckpointError(f"{index} has no weight_map of tensors to files beside it")
        return dict(places)

    @contextlib.contextmanager
    def _opened(self, file: str) -> Iterator[Any]:
        path, broken = self._folder / file, (OSError, safetensors.SafetensorError)
        trying = reading(path, broken, "it is missing or truncated: fetch it again")
        with trying, safetensors.safe_open(path, framework="pt") as opened:
            yield opened


def write_tensors(path: Path, listed: Mapping[str, Kept], read: Read) -> None:
    """Write one file of these tensors, in this order and of these types, to the disk."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, kept in listed.items():
        start, end = end, end + kept.bytes
        header[name] = {"dtype": kept.dtype, "shape": kept.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of eight
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, kept in listed.items():
            tensor = read(name)
            rounded = tensor.detach().cpu().to(TYPES[kept.dtype]).contiguous()
            del tensor  # nobody holds it while the next one is read
            file.write(rounded.flatten().view(torch.uint8).numpy().data)
            del rounded
    flush(path)


def write_model(
    folder: Path, shapes: Shapes, dtype: torch.dtype, read: Read, most_bytes: int
) -> None:
    """Write a model as one file, or as several of at most `most_bytes`; no tensor is split."""
    parts: list[dict[str, Kept]] = [{}]
    size = count = 0
    for name, shape in shapes.items():
        kept = Kept(shape, _SPELLED[dtype])
        if parts[-1] and size + kept.bytes > most_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = kept
        size += kept.bytes
        count += math.prod(shape)
    if len(parts) == 1:
        write_tensors(folder / WHOLE, parts[0], read)
        return
    places: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        write_tensors(folder / file, part, read)
        places |= dict.fromkeys(part, file)
    sizes = {"total_parameters": count, "total_size": count * dtype.itemsize}
    write_json(folder / INDEX, {"metadata": sizes, "weight_map": places})
