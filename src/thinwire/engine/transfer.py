"""The weights of one run as the start of another: of any split, precision or boundary.

What both models hold in the same form is copied, bit for bit. What they hold in different forms
goes through the plain weights (engine/fold.py): of a subspace model to free weights nothing is
lost; into a subspace only the part that lies in it is taken, and how much is lost is counted. A
vocabulary may grow: rows of tokens that the source does not know keep their starting values.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.engine.build import StageBuilder
from thinwire.engine.fold import Folded
from thinwire.engine.keeper import BASIS
from thinwire.engine.merge import merged
from thinwire.engine.source import Source
from thinwire.errors import CheckpointError
from thinwire.model import Stage, architecture
from thinwire.model.adapter import is_adapter
from thinwire.settings import Settings
from thinwire.subspace import Space, project

HELD, COORDINATES = "held", "coordinates"
MOST_LOST = 1e-3  # of a model's weights that rounding may explain


class Transfer:
    """Fills the stages of a new run from a source, one after the other."""

    def __init__(self, source: Source, settings: Settings):
        self.fresh: list[str] = []  # what the source does not have, and starts anew
        # Adapters go along where the new run has the same ones; else they are merged.
        source = source if _keeps_adapters(source.settings, settings) else merged(source)
        self._source = source
        self._settings = settings
        self._names = source.names()
        self._saved_forms = _forms(source.settings)
        self._keeps_space = _same_space(source.settings, settings)
        self._folded: Folded | None = None
        self._lost = self._size = 0.0  # squares, of what was to lie in the subspace

    @property
    def lost(self) -> float:
        """The relative size of what did not fit into the subspace."""
        return math.sqrt(self._lost / self._size) if self._size else 0.0

    def take_space(self, space: Space | None) -> None:
        """Go on with the source's basis where both runs share one."""
        if space is not None and self._keeps_space and BASIS in self._names:
            space.basis_DK.copy_(self._source.tensors([BASIS])[BASIS])

    @torch.no_grad()
    def fill(self, builder: StageBuilder, stage: Stage) -> None:
        """Lay the source's weights over the starting weights of a stage."""
        state = stage.owned_parameters()
        forms = _forms_of(stage)
        for name, tensor in state.items():
            if _is_of_a_cut(name) or is_adapter(name):
                self._take_own(name, tensor)
            elif self._is_alike(name, forms):
                self._put(tensor, self._source.tensors([name])[name], name)
            else:
                self._take_folded(name, builder, stage)

    def _take_own(self, name: str, tensor: Tensor) -> None:
        """Of a cut or an adapter: the source's if it has the same one, else it starts anew."""
        if name in self._names and (not _is_of_a_cut(name) or self._keeps_cut(name)):
            saved = self._source.tensors([name])[name]
            if self._fits(saved, tensor):
                self._put(tensor, saved, name)
                return
        self.fresh.append(name)

    def _keeps_cut(self, name: str) -> bool:
        """A table goes along only with the basis that it was trained beside."""
        saved, now = self._source.settings, self._settings
        cut = name.rpartition(".")[0]
        if _ranks(saved).get(cut) != _ranks(now).get(cut):
            return False
        return saved.boundary.basis_seed == now.boundary.basis_seed

    def _is_alike(self, name: str, forms: Mapping[str, str]) -> bool:
        """Whether the source's tensor means here what it meant there."""
        saved, now = self._saved_forms.get(name), forms.get(name)
        return saved == now and (now is None or self._keeps_space)

    def _take_folded(self, name: str, builder: StageBuilder, stage: Stage) -> None:
        self._folded = self._folded or Folded(self._source)
        full = self._folded.tensors([name])[name]
        parameter = stage.global_parameters()[name]
        layers, held = stage.reparametrised(), {h.name: h for h in stage.held_parameters()}
        if name not in layers and name not in held:
            self._put(parameter, full, name)
            return
        assert builder.space is not None, "only a model with a space holds weights in it"
        axis = layers[name].axis if name in layers else held[name].axis
        if axis == 1 and builder.space.table_VD is not None:  # the embedding
            full = full - builder.space.table_VD[: len(full)].to(full)
        basis_DK = builder.space.basis_DK.to(full)
        inside = project(full, basis_DK, axis)
        self._size += float(full.double().square().sum())
        self._lost += float((full - inside).double().square().sum())
        if name in layers:
            layers[name].set_full(full)
        else:
            self._put(parameter, inside, name)

    def _fits(self, value: Tensor, target: Tensor) -> bool:
        """Whether a tensor has the shape that is needed, or its first rows: one for each token."""
        grows = self._source.settings.model.vocab, self._settings.model.vocab
        more_rows = (*value.shape[:1], *target.shape[:1]) == grows
        return value.shape == target.shape or (more_rows and value.shape[1:] == target.shape[1:])

    def _put(self, target: Tensor, value: Tensor, name: str) -> None:
        if not self._fits(value, target):
            raise CheckpointError(
                f"{name} has shape {tuple(value.shape)} in {self._source}, the model needs "
                f"{tuple(target.shape)}"
            )
        (target[: len(value)] if value.dim() else target).copy_(value)


def _is_of_a_cut(name: str) -> bool:
    return name.startswith("boundary.")


def _ranks(settings: Settings) -> dict[str, int]:
    """The rank of each projected cut, by the name under which its parameters are saved."""
    if settings.boundary.mode != "projected":
        return {}
    name_of = architecture(settings.model).block_name
    above = settings.split()[1:]
    return {f"boundary.{name_of(blocks.start)}": settings.boundary.rank for blocks in above}


def _same_space(saved: Settings, now: Settings) -> bool:
    """Whether both hold one shared basis, and the same fixed token table."""
    return all(
        (
            saved.boundary.mode != "dense",
            saved.boundary.is_constrained == now.boundary.is_constrained,
            saved.boundary.rank == now.boundary.rank,
            saved.boundary.basis_seed == now.boundary.basis_seed,
            saved.model.embed_std == now.model.embed_std,
        )
    )


def _keeps_adapters(saved: Settings, now: Settings) -> bool:
    """Whether both have the same adapters, beside matrices of the same form: folding merges."""
    forms = _forms(saved)
    alike = forms == _forms(now) and (not forms or _same_space(saved, now))
    return saved.lora == now.lora and alike


def _forms(settings: Settings) -> dict[str, str]:
    """Which tensors of a model are not plain: held in the subspace, or coordinates in it."""
    builder = StageBuilder(settings, torch.device("meta"))
    stages = (builder.build(index) for index in range(settings.pipeline.stages))
    return {name: form for stage in stages for name, form in _forms_of(stage).items()}


def _forms_of(stage: Stage) -> dict[str, str]:
    held = {held.name: HELD for held in stage.held_parameters()}
    return held | dict.fromkeys(stage.reparametrised(), COORDINATES)
