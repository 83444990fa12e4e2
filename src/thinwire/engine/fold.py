"""A trained model as plain weights: what export, a new run and other programs read.

A model whose blocks write into a subspace is an ordinary Llama in another form: its embedding is
T_fixed + T_S, and a reparametrised matrix is U A. Cuts then lose nothing, so the folded weights
compute what the trained model computes, up to rounding (codecs are not part of a model). Adapters
(LoRA) are merged first.

Between free weights a narrow cut drops what lies outside its basis, and a token table adds
something in the middle of the model. No plain weights do that: such models do not fold.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.boundary import BoundaryConfig
from thinwire.engine.build import StageBuilder
from thinwire.engine.keeper import BASIS
from thinwire.engine.merge import merged
from thinwire.engine.source import Source
from thinwire.errors import CheckpointError
from thinwire.model import Stage, architecture
from thinwire.settings import Settings
from thinwire.settings.precision import WEIGHT_TYPES
from thinwire.subspace import fixed_table, random_basis

ROWS = 8192  # of a table that are computed at a time
FOLDS = (
    'recipe exact32 (boundary.mode = "subspace") trains narrow cuts whose weights fold; so do '
    '"reparam" and recipe dense'
)


def why_not_folded(settings: Settings) -> str:
    """Why a model of these settings has no plain weights; empty where it folds."""
    boundary, cuts = settings.boundary, settings.pipeline.stages - 1
    if boundary.mode != "projected" or not cuts:
        return ""
    where = "its cut drops" if cuts == 1 else f"each of its {cuts} cuts drops"
    tables = " and adds a row of a learned token table" if boundary.table else ""
    return (
        f'boundary.mode = "projected": {where} what lies outside {boundary.rank} of '
        f"{settings.model.dim} dimensions{tables}, which plain weights cannot do; {FOLDS}"
    )


class Folded(Source):
    """The plain weights of a state, by the names of a Hugging Face Llama.

    Tensors are read and folded when they are asked for: ask for one at a time, and memory holds
    one at a time. `settings` are those of the plain model: its cuts are dense.
    """

    def __init__(self, source: Source):
        source = merged(source)
        super().__init__(source.step, source.versions)
        trained = source.settings
        if why := why_not_folded(trained):
            raise CheckpointError(f"{source} does not fold into plain weights: {why}")
        self._source = source
        self._settings = dataclasses.replace(
            trained, boundary=BoundaryConfig().resolved(trained.model.dim, trained.split())
        )
        self.shapes = {name: tuple(t.shape) for name, t in _state(_whole(self._settings)).items()}
        """Of every folded tensor, in the model's order: known without reading any."""
        self._axes = {n: layer.axis for n, layer in _whole(trained).reparametrised().items()}
        self._basis_DK: Tensor | None = None

    @property
    def settings(self) -> Settings:
        return self._settings

    def names(self) -> set[str]:
        return set(self.shapes)

    def _read(self, names: set[str]) -> dict[str, Tensor]:
        return {name: self._fold(name) for name in sorted(names)}

    def _fold(self, name: str) -> Tensor:
        tensor = self._source.tensors([name])[name]
        tensor = self.in_full(name, tensor)
        if tuple(tensor.shape) != self.shapes[name]:
            raise CheckpointError(
                f"{name} folds to shape {tuple(tensor.shape)} in {self._source}, the model needs "
                f"{self.shapes[name]}"
            )
        if name == self._anchored:
            tensor = tensor + self._table()
        return tensor

    def in_full(self, name: str, coordinates: Tensor) -> Tensor:
        """What the form of this matrix makes of a tensor in its place.

        U A for a writer, E U^T for a table: added up in float64, rounded once.
        """
        axis = self._axes.get(name)
        if axis is None:
            return coordinates
        basis_DK = self._basis().double()
        if axis == 0:
            return (basis_DK @ coordinates.double()).to(coordinates.dtype)
        return _by_rows(coordinates, lambda rows_NK: rows_NK.double() @ basis_DK.T)

    @property
    def _anchored(self) -> str:
        """The embedding to which a fixed table belongs, if one does."""
        boundary = self._source.settings.boundary
        if not boundary.is_constrained or boundary.shares_embedding:
            return ""
        return f"{architecture(self._settings.model).layers()[0].name}.weight"

    def _table(self) -> Tensor:
        model, boundary = self._settings.model, self._source.settings.boundary
        return fixed_table(model.vocab, model.dim, boundary.basis_seed, model.embed_std)

    def _basis(self) -> Tensor:
        """The basis in the precision in which the model computes with it; a moved one is saved."""
        if self._basis_DK is None:
            trained = self._source.settings
            if BASIS in self._source.names():
                basis_DK = self._source.tensors([BASIS])[BASIS]
            else:
                boundary = trained.boundary
                basis_DK = random_basis(trained.model.dim, boundary.rank, boundary.basis_seed)
            self._basis_DK = basis_DK.to(WEIGHT_TYPES[trained.run.precision])
        return self._basis_DK

    def __str__(self) -> str:
        return f"{self._source}, folded into plain weights"


def _whole(settings: Settings) -> Stage:
    """The model of these settings in one stage, without memory."""
    pipeline = dataclasses.replace(settings.pipeline, stages=1, split=[])
    run = dataclasses.replace(settings.run, compile=False)
    one = dataclasses.replace(settings, pipeline=pipeline, run=run)
    return StageBuilder(one, torch.device("meta")).build(0)


def _state(stage: Stage) -> dict[str, Tensor]:
    return {**stage.global_parameters()}


def _by_rows(table: Tensor, widen: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat([widen(rows).to(table.dtype) for rows in table.split(ROWS)])
