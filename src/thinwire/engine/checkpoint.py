"""Checkpoints: one safetensors file per stage and a manifest with hashes, complete or absent.

    checkpoints/step-00000200/
        manifest.json            written last: what is here, of which run, with sha256 of each file
        stage-0.safetensors      parameters and optimizer state under their global names
        stage-1.safetensors
        tokenizer.json           when the corpus has one, so that a checkpoint stands on its own

Stages write into a hidden `.partial-` folder; the coordinator adds the manifest and renames the
folder once all stages have written. A crash or a full disk on the way leaves the previous
checkpoint as it was. Names are global, so any number of stages can load what others wrote.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import save_file
from torch import Tensor

from thinwire.data import Tokenizer
from thinwire.errors import CheckpointError

FORMAT = 1
OPTIMIZER = "optimizer/"
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Shard:
    """One stage's file within a checkpoint, as the manifest lists it."""

    file: str
    sha256: str
    bytes: int
    tensors: list[str]


def checkpoints_folder(run_folder: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_folder / "checkpoints"


def partial_folder(run_folder: Path, step: int) -> Path:
    """Where stages write the checkpoint after `step` updates until it is complete."""
    return checkpoints_folder(run_folder) / f".partial-step-{step:08d}"


def write_shard(folder: Path, stage: int, tensors: dict[str, Tensor]) -> Shard:
    """Write one stage's tensors and flush them to the disk; CheckpointError says why if not."""
    path = folder / f"stage-{stage}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)
        _flush(path)
        return Shard(path.name, _sha256(path), path.stat().st_size, sorted(tensors))
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"stage {stage} cannot write its part of the checkpoint to {folder}: {error}. "
            "Earlier checkpoints are untouched; free some space or choose another run.out"
        ) from error


def commit(
    run_folder: Path,
    step: int,
    shards: list[Shard],
    facts: dict[str, Any],
    tokenizer: Tokenizer | None,
) -> Path:
    """Make the partial checkpoint of `step` the real one, in one rename; returns its folder."""
    partial = partial_folder(run_folder, step)
    final = checkpoints_folder(run_folder) / f"step-{step:08d}"
    manifest = {"format": FORMAT, "step": step, **facts, "shards": [vars(s) for s in shards]}
    try:
        if tokenizer is not None:
            tokenizer.save(partial / TOKENIZER)
            manifest["tokenizer_sha256"] = _sha256(partial / TOKENIZER)
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        _flush(partial / MANIFEST)
        if final.exists():  # the same step again, after a resume from an earlier one
            shutil.rmtree(final)
        partial.rename(final)
        _flush(final.parent)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of step {step} cannot be completed in {partial}: {error}. "
            "Earlier checkpoints are untouched; free some space or choose another run.out"
        ) from error
    return final


def discard_partial(run_folder: Path) -> None:
    """Remove what an interrupted or failed checkpoint left behind."""
    for leftover in checkpoints_folder(run_folder).glob(".partial-step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def prune(run_folder: Path, keep: int) -> None:
    """Keep the newest `keep` checkpoints. The newest is never removed."""
    for old in list_checkpoints(run_folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted(
        path
        for path in checkpoints_folder(run_folder).glob("step-*")
        if (path / MANIFEST).is_file()
    )


class Checkpoint:
    """A complete checkpoint on disk, opened for reading."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder = folder
        self.manifest = manifest
        self.step: int = manifest["step"]
        self.shards = [Shard(**entry) for entry in manifest["shards"]]

    @classmethod
    def open(cls, place: Path) -> "Checkpoint":
        """Open a checkpoint folder, or the newest checkpoint of a run's folder."""
        if not place.exists():
            raise CheckpointError(f"there is no checkpoint at {place}: no such folder")
        folder = place
        if not (place / MANIFEST).is_file():
            found = list_checkpoints(place) or list_checkpoints(place.parent)
            if not found or (place.name != "checkpoints" and not list_checkpoints(place)):
                raise CheckpointError(
                    f"there is no checkpoint at {place}: expected a folder with a {MANIFEST}, "
                    "or the folder of a run that has written one"
                )
            folder = found[-1]
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            if manifest["format"] != FORMAT:
                raise CheckpointError(
                    f"{folder} has checkpoint format {manifest['format']}, this thinwire reads "
                    f"format {FORMAT}: use the version that wrote it"
                )
            return cls(folder, manifest)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / MANIFEST} is damaged: {error!r}") from error

    def verify(self) -> None:
        """Hold every file against its size and hash; CheckpointError names the one that differs."""
        for shard in self.shards:
            path = self.folder / shard.file
            if not path.is_file():
                raise CheckpointError(f"checkpoint {self.folder} lacks {shard.file}")
            size = path.stat().st_size
            if size != shard.bytes:
                raise CheckpointError(
                    f"{path} is truncated or altered: {size} bytes, the manifest says {shard.bytes}"
                )
            if _sha256(path) != shard.sha256:
                raise CheckpointError(f"{path} is altered: its hash is not the manifest's")
        expected = self.manifest.get("tokenizer_sha256")
        if expected and _sha256(self.folder / TOKENIZER) != expected:
            raise CheckpointError(f"{self.folder / TOKENIZER} is altered or missing")

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer that the run used, if it had one."""
        path = self.folder / TOKENIZER
        return path if path.is_file() else None

    def has(self, name: str) -> bool:
        """Whether some stage's file holds this tensor."""
        return any(name in shard.tensors for shard in self.shards)

    def tensors(self, wanted: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of these names, from whichever stage's file holds them."""
        left = set(wanted)
        found: dict[str, Tensor] = {}
        for shard in self.shards:
            here = left.intersection(shard.tensors)
            if not here:
                continue
            with safetensors.safe_open(self.folder / shard.file, framework="pt") as file:
                found.update({name: file.get_tensor(name) for name in sorted(here)})
            left -= here
        if left:
            raise CheckpointError(
                f"checkpoint {self.folder} lacks {len(left)} tensors, such as {min(left)}: "
                "it was written by a model of another shape"
            )
        return found

    def optimizer_tensors(self, parameters: Iterable[str]) -> dict[str, Tensor]:
        """The optimizer's state for these parameters, by `parameter/state name`."""
        prefixes = tuple(f"{OPTIMIZER}{name}/" for name in parameters)
        names = [n for shard in self.shards for n in shard.tensors if n.startswith(prefixes)]
        loaded = self.tensors(names)
        return {name.removeprefix(OPTIMIZER): tensor for name, tensor in loaded.items()}


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return "missing"


def _flush(path: Path) -> None:
    """Force a file or a folder's entries to the disk, where the system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
