"""What a stage is between two steps, as one object: for disk, another machine, or to undo a step.

Names are global, so a state restores from a checkpoint of any number of stages, or from another
stage's tensors in memory.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from thinwire.codec import Leg
from thinwire.engine.build import StageBuilder
from thinwire.engine.checkpoint import partial_folder, write_shard
from thinwire.engine.cut import CutEnd, memory_prefix
from thinwire.engine.keeper import BASIS, COVARIANCE, NEXT_BASIS, NEXT_MEASURES
from thinwire.engine.reports import ShardFailed, ShardWritten
from thinwire.engine.rows import SEEN, names_of_rows
from thinwire.engine.source import Snapshot, Source
from thinwire.engine.step_end import StageUpdate
from thinwire.errors import CheckpointError
from thinwire.model import Space, Stage
from thinwire.settings import Settings

OPTIMIZER = "optimizer/"
"""The optimizer's state is in a checkpoint as optimizer/PARAMETER/NAME."""
BEFORE = "before/"
"""With delayed updates, weights without the last update are in a checkpoint as before/PARAMETER."""


class StageState:
    """Weights, moments, the basis and its gradients, what codecs remember."""

    def __init__(
        self, settings: Settings, stage: Stage, update: StageUpdate, ends: Iterable[CutEnd]
    ):
        self.step = 0  # steps done, refused ones included
        self._settings = settings
        self._stage = stage
        self._update = update
        self._ends = list(ends)

    def tensors(self) -> dict[str, Tensor]:
        """All of it by global name, as it is: a later step changes these tensors.

        Only what a run leaves to the next one, a move of the basis, is the last stage's alone.
        """
        update = self._update.latest
        tensors: dict[str, Tensor] = {
            **update.stage.global_parameters(),
            **{BEFORE + name: p for name, p in update.before().items()},
            **{OPTIMIZER + name: t for name, t in update.optimizer.state_tensors().items()},
        }
        if update.keeper is not None:
            tensors |= update.keeper.state_tensors()
        if update.rows is not None:
            tensors |= update.rows.state_tensors()
        for end in self._ends:
            tensors |= end.state_tensors()
        return tensors

    def shard(self) -> dict[str, Tensor]:
        """What this stage saves: all but its copies of what the stage below saves."""
        copies = self._stage.global_parameters().keys() - self._stage.owned_parameters().keys()
        if self._stage.incoming is not None:
            copies |= {BASIS, SEEN}
        return {name: tensor for name, tensor in self.tensors().items() if name not in copies}

    def save(self, run_folder: Path, index: int) -> ShardWritten | ShardFailed:
        """Write this stage's part of a checkpoint; why not, where that fails."""
        try:
            shard = write_shard(partial_folder(run_folder, self.step), index, self.shard())
        except CheckpointError as error:
            return ShardFailed(self.step, str(error))
        agreements = {str(end.cut): end.agreements() for end in self._ends}
        return ShardWritten(self.step, self._update.versions, shard, agreements)

    def snapshot(self) -> Snapshot:
        """A copy that later steps do not change."""
        tensors = {name: tensor.detach().clone() for name, tensor in self.tensors().items()}
        return Snapshot(tensors, self._settings, self.step, self._update.latest.versions)

    def restore(self, source: Source) -> None:
        """Become what the source holds; CheckpointError says what of it is missing or unfit."""
        update = self._update.of_step(source.step + 1)  # the latest of two, or the only one
        optimizer, keeper = update.optimizer, update.keeper
        restore_weights(update.stage, keeper.space if keeper is not None else None, source)
        optimizer.load_state_tensors(_moments(source, optimizer.remembered()))
        if keeper is not None:
            keeper.load(source)
        if self._update.rows is not None:
            self._update.rows.load(source)
        for end in self._ends:
            end.load(source)
        update.version = source.versions.weight_version
        update.restore_twin(self._before(source))
        self.step = source.step

    def _before(self, source: Source) -> dict[str, Tensor]:
        """Weights without the last update; none where they are the same, or had no delay."""
        is_there = any(name.startswith(BEFORE) for name in source.names())
        if self._update.twin is None or not is_there:
            return {}
        found = source.tensors(BEFORE + name for name in self._stage.trained_parameters())
        return {name.removeprefix(BEFORE): tensor for name, tensor in found.items()}

    def fingerprint(self) -> str:
        """A hash of every bit of it, and of the numbers of its step and versions."""
        digest = hashlib.sha256(f"step {self.step}, {self._update.latest.versions}".encode())
        for name, tensor in sorted(self.tensors().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def names_for_stage(settings: Settings, stage: int, names: Iterable[str]) -> set[str]:
    """Those of a state's tensors that a stage of these settings restores from.

    Beside what it would save itself: what stages below have learned for it, and the shared basis.
    """
    built, split = StageBuilder(settings, torch.device("meta")).build(stage), settings.split()
    exact = {*built.global_parameters()}
    exact |= {BEFORE + name for name in built.trained_parameters()}
    prefixes = [f"{OPTIMIZER}{name}/" for name in built.trained_parameters()]
    for cut, is_lower in ((stage - 1, False), (stage, True)):
        if 0 <= cut < len(split) - 1:
            prefixes += [memory_prefix(split[cut].stop, leg, is_lower) for leg in Leg]
    shared = {BASIS, NEXT_BASIS} | (
        {COVARIANCE, NEXT_MEASURES} if built.outgoing is None else set()
    )
    begins, names = tuple(prefixes), set(names)
    found = {name for name in names if name in exact | shared or name.startswith(begins)}
    return found | names_of_rows(settings, stage, names)


@torch.no_grad()
def restore_weights(stage: Stage, space: Space | None, source: Source) -> None:
    """Fill a stage (and the basis, if it has moved) from a state of any split."""
    state = stage.global_parameters()
    loaded = source.tensors(state)
    for name, tensor in state.items():
        if loaded[name].shape != tensor.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(loaded[name].shape)} in {source}, the model needs "
                f"{tuple(tensor.shape)}"
            )
        tensor.copy_(loaded[name])
    if space is not None and BASIS in source.names():
        space.basis_DK.copy_(source.tensor(BASIS))
        space.version = source.versions.basis_version


def _moments(source: Source, parameters: Iterable[str]) -> dict[str, Tensor]:
    """The optimizer's state for these parameters, by `parameter/state name`.

    Once there was an update, each must have some: without it a run goes on differently.
    """
    owners = {
        name: name.removeprefix(OPTIMIZER).rpartition("/")[0]
        for name in source.names()
        if name.startswith(OPTIMIZER)
    }
    wanted = set(parameters)
    missing = wanted - set(owners.values())
    if source.versions.weight_version > 0 and missing:
        raise CheckpointError(
            f"{source} has no optimizer state for {len(missing)} parameters, such as "
            f"{min(missing)}: training cannot continue exactly"
        )
    found = source.tensors(name for name, owner in owners.items() if owner in wanted)
    return {name.removeprefix(OPTIMIZER): tensor for name, tensor in found.items()}
