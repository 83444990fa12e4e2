"""What a stage is between two steps, as one object: for disk, another machine, or to undo a step.

Names are global, so a state restores from a checkpoint of any number of stages. A file that comes
from another machine is opened before it counts: it must hold what a stage of these settings saves
and nothing else, all of it finite, and codec memories that are those that its stage reported.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from thinwire.codec import Leg, TensorSpec, build_codecs
from thinwire.data import Corpus
from thinwire.engine.build import StageBuilder
from thinwire.engine.checkpoint import Snapshot, Source, not_finite_in, partial_folder, write_shard
from thinwire.engine.cut import MEMORY, CutEnd, cuts_of, ends_of, memory_prefix
from thinwire.engine.feed import Feed
from thinwire.engine.reports import Agreements, ShardFailed, ShardWritten, Versions
from thinwire.engine.shared import BASIS, COVARIANCE, NEXT_BASIS, NEXT_MEASURES, ROWS, SEEN
from thinwire.engine.step_end import StageUpdate
from thinwire.errors import CheckpointError, ConfigError, printable
from thinwire.model import Space, Stage
from thinwire.model.stage import WEIGHT_TYPES
from thinwire.settings import Settings
from thinwire.settings.crossing import wire_shape

OPTIMIZER = "optimizer/"  # in a checkpoint as optimizer/PARAMETER/NAME
BEFORE = "before/"  # with delayed updates: weights without the last one, as before/PARAMETER
_HEADER_BYTES = 4096  # for a tensor's name, type and place in its file, and more than that


class StageState:
    """Weights, moments, the basis and its gradients, what codecs remember."""

    def __init__(self, update: StageUpdate, ends: Iterable[CutEnd | None] = ()):
        self.step = 0  # steps done, refused ones included
        self.ends = [end for end in ends if end is not None]
        self._update = update

    def tensors(self) -> dict[str, Tensor]:
        """All of it by global name, as it is: a later step changes these tensors."""
        update = self._update.latest
        tensors: dict[str, Tensor] = {
            **update.stage.global_parameters(),
            **{BEFORE + name: p for name, p in update.before().items()},
            **{OPTIMIZER + name: t for name, t in update.optimizer.state_tensors().items()},
        }
        for part in (update.keeper, update.rows, *self.ends):
            tensors |= part.state_tensors() if part is not None else {}
        return tensors

    def shard(self) -> dict[str, Tensor]:
        """What this stage saves: all but its copies of what the stage below saves."""
        stage = self._update.stage
        copies = stage.global_parameters().keys() - stage.owned_parameters().keys()
        if stage.incoming is not None:
            copies |= {BASIS, SEEN}
        return {name: tensor for name, tensor in self.tensors().items() if name not in copies}

    def save(self, run_folder: Path, index: int) -> ShardWritten | ShardFailed:
        """Write this stage's part of a checkpoint; why not, where that fails."""
        try:
            shard = write_shard(partial_folder(run_folder, self.step), index, self.shard())
        except CheckpointError as error:
            return ShardFailed(self.step, str(error))
        return ShardWritten(self.step, self._update.latest.versions, shard, agreements(self.ends))

    def restore(self, source: Source) -> None:
        """Become what the source holds; CheckpointError says what of it is missing or unfit."""
        update = self._update.of_step(source.step + 1)  # the latest of two, or the only one
        restore_weights(update.stage, update.keeper.space if update.keeper else None, source)
        update.optimizer.load_state_tensors(_moments(source, update.stage.trained_parameters()))
        for part in (update.keeper, update.rows, *self.ends):
            if part is not None:
                part.load(source)
        update.version = source.versions.weight_version
        if update.twin is not None:
            # Nothing where the weights before the last update are the same, or had no delay.
            saved = any(name.startswith(BEFORE) for name in source.names())
            before = [BEFORE + name for name in update.stage.trained_parameters() if saved]
            found = source.tensors(before)
            update.restore_twin({name.removeprefix(BEFORE): t for name, t in found.items()})
        self.step = source.step


def agreements(ends: Iterable[CutEnd | None]) -> Agreements:
    """What the other ends of these cuts must remember alike, as it is reported."""
    return {str(end.cut): end.agreements() for end in ends if end is not None}


def names_for_stage(settings: Settings, stage: int, names: Iterable[str]) -> set[str]:
    """Those of a state's tensors that a stage of these settings restores from."""
    built = StageBuilder(settings, torch.device("meta")).build(stage)
    exact = {*built.global_parameters(), BASIS, NEXT_BASIS, SEEN, ROWS + built.names[0]}
    exact |= {BEFORE + name for name in built.trained_parameters()}
    prefixes = [f"{OPTIMIZER}{name}/" for name in built.trained_parameters()]
    for cut, is_lower in cuts_of(settings, stage):
        above = settings.split()[cut].stop
        prefixes += [memory_prefix(above, leg, is_lower) for leg in Leg]
    exact |= {COVARIANCE, NEXT_MEASURES} if built.outgoing is None else set()
    return {name for name in names if name in exact or name.startswith(tuple(prefixes))}


@torch.no_grad()
def restore_weights(stage: Stage, space: Space | None, source: Source) -> None:
    """Fill a stage (and the basis, if it has moved) from a state of any split."""
    state = stage.global_parameters()
    loaded = source.tensors(state)
    for name, tensor in state.items():
        source.check_shape(name, loaded[name], tensor)
        tensor.copy_(loaded[name])
    if space is not None and BASIS in source.names():
        space.basis_DK.copy_(source.tensor(BASIS))
        space.version = source.versions.basis_version


def _moments(source: Source, parameters: Iterable[str]) -> dict[str, Tensor]:
    """The optimizer's state for these parameters. Once there was an update, each has some."""
    wanted = {OPTIMIZER + name for name in parameters}
    owners = {name: name.rpartition("/")[0] for name in source.names()}
    missing = wanted - set(owners.values())
    if source.versions.weight_version > 0 and missing:
        raise CheckpointError(
            f"{source} has no optimizer state for {len(missing)} parameters, such as "
            f"{min(missing).removeprefix(OPTIMIZER)}: training cannot continue exactly"
        )
    found = source.tensors(name for name, owner in owners.items() if owner in wanted)
    return {name.removeprefix(OPTIMIZER): tensor for name, tensor in found.items()}


def most_shard_bytes(settings: Settings, stage: int) -> int:
    """The largest file that a stage's part of a checkpoint can be: none is taken beyond it."""
    needed, allowed = shard_like(settings, stage, Versions(1, 0))
    tensors = [*needed.values(), *allowed.values()]
    size, names = sum(tensor.nbytes for tensor in tensors), len(tensors) + 64
    microbatches = settings.pipeline.microbatches
    for cut, _ in cuts_of(settings, stage):
        for codec in build_codecs(*settings.codec.names(cut)).values():
            if codec.remembers:
                size += 4 * microbatches * 8 * math.prod(wire_shape(settings))
                size += settings.codec.memory_mb << 20 if codec.remembers_examples else 0
                names += 8 * microbatches
    return size + names * _HEADER_BYTES


class ShardCheck:
    """Checks the parts that the stages of a run send; safe to call from several threads."""

    def __init__(self, settings: Settings, data: Corpus, scratch: Path):
        """`scratch`: where codec memories that are too large for memory are restored."""
        self._settings, self._scratch = settings, scratch
        self._feed = Feed(data, settings, torch.device("cpu"))

    def objection(self, stage: int, part: ShardWritten, path: Path) -> str:
        """Why this file is not the part that the stage reported; empty if it is. OSError or
        ConfigError: it cannot be checked on this machine. It is mapped and read tensor by tensor.
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
        # What codecs remember is mapped, and each is read as it is restored.
        saved = {name: file.get_tensor(name) for name in names if name.startswith(MEMORY)}
        source = Snapshot(saved, self._settings, part.step, part.versions)
        dtype = WEIGHT_TYPES[self._settings.run.precision]
        spec = TensorSpec(wire_shape(self._settings), dtype, torch.device("cpu"))
        ends = ends_of(self._settings, stage, spec, self._feed, self._scratch)
        for end in filter(None, ends):
            end.load(source)
            needed |= end.state_tensors()
        if agreements(ends) != part.agreements:
            raise CheckpointError("its codecs do not remember what its stage reported")
        like = {**needed, **allowed}
        for wrong, what in (
            (needed.keys() - names, "are missing"),
            (names - like.keys(), "that its stage does not save"),
        ):
            if wrong:
                raise CheckpointError(f"{len(wrong)} tensors {what}, such as {min(wrong)}")
        for name in sorted(names):
            both = file.get_tensor(name), like[name]
            found, wanted = (f"{one.dtype} of shape {tuple(one.shape)}" for one in both)
            if found != wanted:
                raise CheckpointError(f"{name} is {found}, its stage has {wanted}")
        if name := not_finite_in(file):
            raise CheckpointError(f"{name} has values that are not finite")


def shard_like(
    settings: Settings, stage: int, versions: Versions
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a stage must save, codec memories aside, and what it may beside; without memory."""
    builder = StageBuilder(settings, torch.device("meta"))
    built = builder.build(stage)
    update = StageUpdate(builder, built, stage).latest
    update.version = versions.weight_version
    needed = StageState(update).shard()
    if versions.weight_version > 0:
        needed |= {OPTIMIZER + name: t for name, t in update.optimizer.state_like().items()}
    if builder.space is None or built.outgoing is not None:
        return needed, {}
    basis_DK = builder.space.basis_DK  # its next move is the last stage's to save
    allowed = {
        COVARIANCE: basis_DK.new_empty(2 * basis_DK.shape[:1]),
        NEXT_BASIS: basis_DK,
        NEXT_MEASURES: torch.empty(3, dtype=torch.float64, device="meta"),
    }
    return needed, allowed
