"""What a codec remembers of each training example, bounded, in a file or on the device."""

import hashlib
import os
import shutil
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thinwire.codec.base import Shape, Surroundings, elements
from thinwire.errors import ConfigError

ROWS = torch.bfloat16
_BOOKKEEPING = 5  # bytes per example: whether it was seen, and the checksum of its row


class ExampleMemory:
    """One row of bf16 numbers for each training example, and which of them were ever written.

    In a folder the rows are a memory-mapped file without a name: it goes when the process goes,
    however that ends, and two memories in one folder do not meet. A checksum of every row is kept
    beside it, so that comparing two ends costs a few bytes per example and not the rows. It is made
    when it is asked for, of rows written since: to make it at every write would cost more than all
    else.
    """

    def __init__(self, row_shape: Shape, surroundings: Surroundings, device: torch.device):
        count, row = surroundings.examples, elements(row_shape)
        need = bytes_needed(row_shape, count)
        if need > surroundings.limit_bytes:
            raise ConfigError(
                f"storing {row:,} numbers for each of {count:,} training examples takes "
                f"{need:,} bytes at each end, and the limit is {surroundings.limit_bytes:,}: raise "
                f"codec.memory_mb, train on fewer examples, or choose ef21, which keeps one buffer"
            )
        self._seen = np.zeros(count, dtype=np.bool_)
        self._checksums = np.zeros(count, dtype=np.uint32)
        self._unsummed = np.zeros(count, dtype=np.bool_)
        if surroundings.folder is None:
            self._rows = torch.zeros((count, row), dtype=ROWS, device=device)
        else:
            self._rows = _mapped(count * row, surroundings.folder).view(count, row)

    def seen(self, examples: Sequence[int]) -> bool:
        """Whether all of these were written before."""
        return bool(self._seen[self._checked(examples)].all())

    def read(self, examples: Sequence[int], spot: torch.device) -> Tensor:
        """The rows of these examples, a copy on the device `spot`."""
        return self._rows[torch.from_numpy(self._checked(examples))].to(spot)

    def write(self, examples: Sequence[int], rows: Tensor) -> None:
        """Replace the rows of these examples; of an example that is there twice the last counts."""
        last = {example: number for number, example in enumerate(examples)}
        index = self._checked(list(last))
        kept = rows[torch.tensor(list(last.values()), dtype=torch.int64, device=rows.device)].to(
            ROWS
        )
        self._rows[torch.from_numpy(index)] = kept.to(self._rows.device)
        self._seen[index] = self._unsummed[index] = True

    def fingerprint(self) -> str:
        """Equal for two memories that hold the same rows."""
        self._sum_up()
        return hashlib.sha256(self._seen.tobytes() + self._checksums.tobytes()).hexdigest()

    def state_tensors(self) -> dict[str, Tensor]:
        """All of it, not copied: to be written before the next tensor comes."""
        self._sum_up()
        return {
            "rows": self._rows,
            "seen": torch.from_numpy(self._seen),
            "checksums": torch.from_numpy(self._checksums.view(np.int32)),
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `state_tensors` gave; nothing at all empties the memory."""
        if not tensors:
            self._seen[:] = False
            self._checksums[:] = 0
            self._unsummed[:] = False
            return
        mine = self.state_tensors()
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        wanted = {name: tuple(tensor.shape) for name, tensor in mine.items()}
        if shapes != wanted:
            raise ValueError(f"a memory of examples has {wanted}, but was given {shapes}")
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])

    def _sum_up(self) -> None:
        for example in self._unsummed.nonzero()[0].tolist():
            row = self._rows[example].cpu().contiguous().view(torch.int16).numpy()
            self._checksums[example] = zlib.crc32(row.tobytes())
        self._unsummed[:] = False

    def _checked(self, examples: Sequence[int]) -> np.ndarray:
        index = np.asarray(examples, dtype=np.int64)
        if index.size and not (index.min() >= 0 and index.max() < len(self._seen)):
            raise ValueError(
                f"examples {index.min()}..{index.max()} were named, but there are only "
                f"{len(self._seen)} training examples, from 0"
            )
        return index


def bytes_needed(row_shape: Shape, examples: int) -> int:
    """What remembering rows of this shape takes at one end: examples * (2 * elements + 5)."""
    return examples * (elements(row_shape) * ROWS.itemsize + _BOOKKEEPING)


def _mapped(count: int, folder: Path) -> Tensor:
    """Zeros in a file; its blocks are taken now, since a write to a map cannot report a lack."""
    if count == 0:
        return torch.zeros(0, dtype=ROWS)
    size = count * ROWS.itemsize
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if size > (free := shutil.disk_usage(folder).free):
            raise OSError(f"only {free:,} bytes are free")
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            numbers = np.memmap(file, dtype=np.int16, mode="r+", shape=(count,))
    except OSError as error:
        raise ConfigError(f"{size:,} bytes cannot be kept in {folder}: {error}") from error
    return torch.from_numpy(numbers).view(ROWS)
