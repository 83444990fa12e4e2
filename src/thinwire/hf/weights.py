"""Weights as Hugging Face keeps them: safetensors, in one file or several with an index.

What is there is listed from the files' headers; a tensor is read when it is asked for.
"""

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from thinwire.errors import CheckpointError
from thinwire.hf.tensors import INDEX, WHOLE

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
"""Number formats of weights, as safetensors spells them."""
_WHY_NO_PICKLE = (
    "holds its weights as pickle (.bin) only. Reading pickle runs code that the file names, so "
    "thinwire never does: take a version with .safetensors files, or convert it where you trust it "
    "(AutoModelForCausalLM.from_pretrained(...).save_pretrained(...))"
)


@dataclass(frozen=True)
class Kept:
    """A tensor as its file lists it."""

    shape: tuple[int, ...]
    dtype: str
    """As safetensors spells it, such as BF16."""


class Weights(ABC):
    """Named tensors of a model, listed before any is read."""

    @abstractmethod
    def listed(self) -> Mapping[str, Kept]:
        """All of them."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One of them, and no other."""


class FolderWeights(Weights):
    """The safetensors files of a folder."""

    def __init__(self, folder: Path):
        """CheckpointError names a file that is missing, truncated or not what the index says."""
        self._folder = folder
        self._files: dict[str, str] = {}
        self._kept: dict[str, Kept] = {}
        for file, names in self._parts().items():
            self._scan(file, names)

    def listed(self) -> Mapping[str, Kept]:
        return self._kept

    def read(self, name: str) -> Tensor:
        with self._opened(self._files[name]) as file:
            return file.get_tensor(name)

    def _parts(self) -> dict[str, set[str] | None]:
        """The files, each with the tensors that the index expects there, if there is an index."""
        folder = self._folder
        if (folder / INDEX).is_file():
            return self._indexed(read_json(folder / INDEX).get("weight_map"))
        if (folder / WHOLE).is_file():
            return {WHOLE: None}
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        if others:
            raise CheckpointError(
                f"{folder} has {others[0]} but neither {WHOLE} nor {INDEX}, which says what is in "
                "which file: the download is not complete, or this is an adapter"
            )
        if list(folder.glob("*.bin")) or list(folder.glob("*.pt*")):
            raise CheckpointError(f"{folder} {_WHY_NO_PICKLE}")
        raise CheckpointError(f"{folder} has no weights: expected {WHOLE}, or {INDEX} with files")

    def _indexed(self, places: Any) -> dict[str, set[str] | None]:
        path = self._folder / INDEX
        if not isinstance(places, dict) or not all(isinstance(f, str) for f in places.values()):
            raise CheckpointError(f"{path} has no weight_map of tensors and their files")
        parts: dict[str, set[str] | None] = {}
        for file in sorted(set(places.values())):
            if Path(file).name != file:
                raise CheckpointError(f"{path} names {file!r}, which is not a file beside it")
            parts[file] = {name for name, place in places.items() if place == file}
        missing = [file for file in parts if not (self._folder / file).is_file()]
        if missing:
            raise CheckpointError(
                f"{self._folder} lacks {len(missing)} of the {len(parts)} files that {INDEX} "
                f"names, such as {missing[0]}: complete the download"
            )
        return parts

    def _scan(self, file: str, expected: set[str] | None) -> None:
        with self._opened(file) as opened:
            names = set(opened.keys())
            if expected is not None and names != expected:
                absent, other = sorted(expected - names), sorted(names - expected)
                what = f"lacks {absent[0]}" if absent else f"also holds {other[0]}"
                raise CheckpointError(
                    f"{self._folder / file} {what}, unlike {INDEX} says: the files are not of "
                    "one model"
                )
            for name in names:
                part = opened.get_slice(name)
                self._kept[name] = Kept(tuple(part.get_shape()), part.get_dtype())
                self._files[name] = file

    @contextlib.contextmanager
    def _opened(self, file: str) -> Iterator[Any]:
        path = self._folder / file
        try:
            with safetensors.safe_open(path, framework="pt") as opened:
                yield opened
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(
                f"{path} cannot be read, it may be truncated: {error}. Fetch it again"
            ) from error


class MemoryWeights(Weights):
    """Tensors that are in memory already."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        names = {dtype: name for name, dtype in TYPES.items()}
        self._tensors = tensors
        self._kept = {
            name: Kept(tuple(tensor.shape), names.get(tensor.dtype, str(tensor.dtype)))
            for name, tensor in tensors.items()
        }

    def listed(self) -> Mapping[str, Kept]:
        return self._kept

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; CheckpointError where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return found
