"""safetensors files written tensor by tensor: memory holds one at a time, whatever the file's size.

The library writes a file from all of its tensors at once. Shapes and types are known before the
tensors are, so the header can stand first, and the tensors follow as they are read.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from thinwire.errors import CheckpointError
from thinwire.folders import flush

Shapes = Mapping[str, tuple[int, ...]]
Read = Callable[[str], Tensor]
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Types = torch.dtype | Mapping[str, torch.dtype]
"""The number format of all tensors, or of each."""
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"


def write_file(path: Path, shapes: Shapes, types: Types, read: Read) -> None:
    """Write one file of these tensors, in this order, and force it to the disk."""
    of = {name: types if isinstance(types, torch.dtype) else types[name] for name in shapes}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * of[name].itemsize
        header[name] = {"dtype": _NAMES[of[name]], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of eight
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            file.write(_bytes_of(name, read(name), shape, of[name]))
    flush(path)


def _bytes_of(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> memoryview:
    """A tensor as it is in the file; nobody else holds it while the next one is read."""
    if tuple(tensor.shape) != tuple(shape):
        raise CheckpointError(
            f"{name} has shape {tuple(tensor.shape)}, but {tuple(shape)} was announced"
        )
    rounded = tensor.detach().cpu().to(dtype).contiguous()
    return rounded.flatten().view(torch.uint8).numpy().data


def write_model(
    folder: Path, shapes: Shapes, dtype: torch.dtype, read: Read, most_bytes: int
) -> list[str]:
    """Write a model as one file, or as several of at most `most_bytes` with an index.

    A tensor is never split, so one that is larger has a file of its own. Returns the files' names.
    """
    parts = list(_parts(shapes, dtype, most_bytes))
    if len(parts) == 1:
        write_file(folder / WHOLE, shapes, dtype, read)
        return [WHOLE]
    files = {}
    for number, names in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        write_file(folder / file, {name: shapes[name] for name in names}, dtype, read)
        files[file] = names
    count = sum(math.prod(shape) for shape in shapes.values())
    index = {
        "metadata": {"total_parameters": count, "total_size": count * dtype.itemsize},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*files, INDEX]


def _parts(shapes: Shapes, dtype: torch.dtype, most_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        own = math.prod(shape) * dtype.itemsize
        if names and size + own > most_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += own
    yield names
