"""Files written tensor by tensor are what the library of safetensors reads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from thinwire.errors import CheckpointError
from thinwire.hf.folder import INDEX, write_model, write_tensors

TENSORS = {
    "b": torch.arange(6.0).reshape(2, 3),
    "a.weight": torch.randn(5),
    "wide": torch.randn(3, 4).T,
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_library_reads_them_back(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, SHAPES, dtype, TENSORS.__getitem__)
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(loaded[name], tensor.to(dtype))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_tensor_is_read_when_its_turn_comes(tmp_path: Path) -> None:
    asked: list[str] = []

    def read(name: str) -> torch.Tensor:
        asked.append(name)
        return TENSORS[name]

    files = write_model(tmp_path, SHAPES, torch.float32, read, most_bytes=30)
    assert asked == list(TENSORS)
    assert files == [*(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)), INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * (6 + 5 + 12)
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], TENSORS[name])


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"b has shape \(2, 3\), but \(3, 2\)"):
        write_tensors(tmp_path / "x", {"b": (3, 2)}, torch.float32, TENSORS.__getitem__)
