"""What a stage's part of a checkpoint can be: for files that come from other machines.

A checkpoint is only as good as what is in it. So a file is opened before it counts: it must hold
the tensors that a stage of these settings saves and no others, of these shapes and types, all of
them finite, and codec memories that a stage can restore and that are those it reported.
"""

import math
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from thinwire.codec import TensorSpec, build_codecs
from thinwire.data import Corpus
from thinwire.engine.build import StageBuilder
from thinwire.engine.checkpoint import not_finite_in
from thinwire.engine.cut import MEMORY, CutEnd
from thinwire.engine.feed import Feed
from thinwire.engine.keeper import COVARIANCE, NEXT_BASIS, NEXT_MEASURES
from thinwire.engine.reports import ShardWritten
from thinwire.engine.source import Snapshot, Versions
from thinwire.engine.state import OPTIMIZER, StageState
from thinwire.engine.step_end import StageUpdate
from thinwire.errors import CheckpointError, ConfigError, printable
from thinwire.model import state_like
from thinwire.settings import Settings
from thinwire.settings.crossing import wire_shape
from thinwire.settings.precision import WEIGHT_TYPES

_HEADER_BYTES = 4096  # for a tensor's name, type and place in its file, and more than that


def most_shard_bytes(settings: Settings, stage: int) -> int:
    """The largest file that a stage's part of a checkpoint can be: none is taken beyond it."""
    needed, allowed = shard_like(settings, stage, Versions(1, 0))
    tensors = [*needed.values(), *allowed.values()]
    size, names = sum(tensor.nbytes for tensor in tensors), len(tensors) + 64
    microbatches = settings.pipeline.microbatches
    for cut in (stage - 1, stage):
        if 0 <= cut < settings.pipeline.stages - 1:
            tensor = 8 * math.prod(wire_shape(settings, cut))
            for codec in build_codecs(*settings.codec.names(cut)).values():
                if codec.remembers:
                    size += 4 * microbatches * tensor
                    size += settings.codec.memory_mb << 20 if codec.remembers_examples else 0
                    names += 8 * microbatches
    return size + names * _HEADER_BYTES


class ShardCheck:
    """Checks the parts that the stages of a run send; safe to call from several threads."""

    def __init__(self, settings: Settings, data: Corpus, scratch: Path):
        """`scratch`: where codec memories that are too large for memory are restored."""
        self._settings = settings
        self._feed = Feed(data, settings, torch.device("cpu"))
        self._scratch = scratch

    def objection(self, stage: int, part: ShardWritten, path: Path) -> str:
        """Why this file is not the part that the stage reported; empty if it is.

        OSError or ConfigError: it cannot be checked on this machine. The file is mapped and read
        tensor by tensor, so a large one takes time, but little memory.
        """
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                self._check(stage, part, file)
        except (OSError, ConfigError):
            raise  # this machine cannot read it, or has no room: the file may be good
        except Exception as error:  # whatever a library stumbles over is in the file
            return printable(str(error), 500)
        return ""

    def _check(self, stage: int, part: ShardWritten, file: Any) -> None:
        names = set(file.keys())
        if names != set(part.shard.tensors):
            raise CheckpointError("it holds other tensors than its stage listed")
        needed, allowed = shard_like(self._settings, stage, part.versions)
        needed |= self._memories(stage, part, file)
        if missing := needed.keys() - names:
            raise CheckpointError(f"{len(missing)} tensors are missing, such as {min(missing)}")
        like = {**needed, **allowed}
        if unknown := names - like.keys():
            raise CheckpointError(
                f"it holds {len(unknown)} tensors that its stage does not save, such as "
                f"{min(unknown)}"
            )
        for name in sorted(names):
            found, wanted = _described(file.get_tensor(name)), _described(like[name])
            if found != wanted:
                raise CheckpointError(f"{name} is {found}, its stage has {wanted}")
        if (name := not_finite_in(file)) is not None:
            raise CheckpointError(f"{name} has values that are not finite")

    def _memories(self, stage: int, part: ShardWritten, file: Any) -> dict[str, Tensor]:
        """What the codecs at the cuts of a stage remember when they are restored from the file."""
        # They are mapped, and each is read as it is restored.
        saved = {name: file.get_tensor(name) for name in file.keys() if name.startswith(MEMORY)}  # noqa: SIM118
        source, agreements = Snapshot(saved, self._settings, part.step, part.versions), {}
        found: dict[str, Tensor] = {}
        for cut, is_lower in ((stage - 1, False), (stage, True)):
            if 0 <= cut < self._settings.pipeline.stages - 1:
                dtype = WEIGHT_TYPES[self._settings.run.precision]
                spec = TensorSpec(wire_shape(self._settings, cut), dtype, torch.device("cpu"))
                end = CutEnd.build(self._settings, cut, is_lower, spec, self._feed, self._scratch)
                end.load(source)
                agreements[str(cut)] = end.agreements()
                found |= end.state_tensors()
        if agreements != part.agreements:
            raise CheckpointError("its codecs do not remember what its stage reported")
        return found


def shard_like(
    settings: Settings, stage: int, versions: Versions
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a stage saves, codec memories aside: all that it must, and what it may beside that.

    As tensors without memory.
    """
    builder = StageBuilder(settings, torch.device("meta"))
    built = builder.build(stage)
    update = StageUpdate.build(builder, built, stage, _Moments)  # type: ignore[arg-type]
    update.latest.version = versions.weight_version
    needed = StageState(settings, built, update, ()).shard()
    if versions.weight_version == 0:
        needed = {name: t for name, t in needed.items() if not name.startswith(OPTIMIZER)}
    if builder.space is None or built.outgoing is not None:
        return needed, {}
    basis_DK = builder.space.basis_DK  # its next move is the last stage's to save
    allowed = {
        COVARIANCE: basis_DK.new_empty(2 * basis_DK.shape[:1]),
        NEXT_BASIS: basis_DK,
        NEXT_MEASURES: torch.empty(3, dtype=torch.float64, device="meta"),
    }
    return needed, allowed


class _Moments:
    """Stands for the optimizer of a stage: its state after an update, and nothing else."""

    def __init__(self, *arguments: Any):
        self._arguments = arguments

    def take_state(self, other: "_Moments") -> None:
        """Its twin's is the same."""

    def state_tensors(self) -> dict[str, Tensor]:
        return state_like(*self._arguments)


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
