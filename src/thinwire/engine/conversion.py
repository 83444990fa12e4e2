"""A trained model's weights in other forms: merged, folded, or as the start of another run.

*Merged*: adapters (LoRA) have become part of the matrices that they stood beside: W + (alpha /
rank) B A.

*Folded*: the plain weights that export and other programs read. A model whose blocks write into a
subspace is an ordinary Llama in another form: its embedding is T_fixed + T_S, and a reparametrised
matrix is U A. So the folded weights compute the same, up to rounding. Between free weights a narrow
cut drops what lies outside its basis, and a token table adds something: such models do not fold.

*Transferred*: into a run of any split, precision or boundary. What both models hold in the same
form is copied, bit for bit; the rest goes through the folded weights. How much of it is lost, for
it does not lie in a subspace, is counted. Rows of new tokens keep their starting values.
"""

import dataclasses
import functools
import math

import torch
from torch import Tensor

from thinwire.engine.build import StageBuilder
from thinwire.engine.checkpoint import BASIS, Source
from thinwire.errors import CheckpointError
from thinwire.model import BoundaryConfig, LoraConfig, Stage, architecture
from thinwire.model.layers import DOWN, UP, is_adapter
from thinwire.model.stage import WEIGHT_TYPES
from thinwire.model.subspace import fixed_table, project, random_basis
from thinwire.settings import Settings

ROWS = 8192  # of a table that are computed at a time
FOLDS = (
    'recipe exact32 (boundary.mode = "subspace") trains narrow cuts whose weights fold; so do '
    '"reparam" and recipe dense'
)
MOST_LOST = 1e-3  # of a model's weights that rounding may explain


def merged(source: Source) -> Source:
    """The same model without adapters; the source itself where it has none."""
    return Merged(source) if source.settings.lora.rank else source


class Merged(Source):
    """The tensors of a state with adapters, as of a model without any; no moments of these."""

    def __init__(self, source: Source):
        names = (name for name in source.names() if not is_adapter(name))
        super().__init__(source.step, source.versions, names)
        self.settings = dataclasses.replace(source.settings, lora=LoraConfig())
        self._source, self._scale = source, source.settings.lora.scale

    def _read(self, name: str) -> Tensor:
        ways = [name, self._beside(name, DOWN), self._beside(name, UP)]
        if ways[-1] not in self._source.names():
            return self._source.tensor(name)
        base, down, up = map(self._source.tensor, ways)  # added up in float64, rounded once
        return (base.double() + self._scale * (up.double() @ down.double())).to(up.dtype)

    def _beside(self, name: str, part: str) -> str:
        """The name of a part of the adapter of this matrix, if it has one."""
        layer, _, kind = name.rpartition(".")
        return f"{layer}.{part}.weight" if kind == "weight" else ""

    def __str__(self) -> str:
        return f"{self._source}, its adapters merged"


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
    """The plain weights of a state, by the names of a Hugging Face Llama, each computed when it is
    asked for; `settings` are those of the plain model, whose cuts are dense.
    """

    def __init__(self, source: Source):
        self._source = source = merged(source)
        trained = source.settings
        if why := why_not_folded(trained):
            raise CheckpointError(f"{source} does not fold into plain weights: {why}")
        self.settings = dataclasses.replace(
            trained, boundary=BoundaryConfig().resolved(trained.model.dim, trained.split())
        )
        self._like = _whole(self.settings).global_parameters()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._like.items()}
        """Of every folded tensor, in the model's order: known without reading any."""
        super().__init__(source.step, source.versions, self.shapes)
        self._axes = {n: layer.axis for n, layer in _whole(trained).reparametrised().items()}

    def _read(self, name: str) -> Tensor:
        tensor = self.in_full(name, self._source.tensor(name))
        self.check_shape(name, tensor, self._like[name])
        model, boundary = self.settings.model, self._source.settings.boundary
        is_anchored = boundary.is_constrained and not boundary.shares_embedding
        if is_anchored and name == f"{architecture(model).layers()[0].name}.weight":
            seed, std = boundary.basis_seed, model.embed_std
            tensor = tensor + fixed_table(model.vocab, model.dim, seed, std)
        return tensor

    def in_full(self, name: str, coordinates: Tensor) -> Tensor:
        """What the form of a matrix makes of a tensor in its place: U A, or E U^T for a table."""
        axis = self._axes.get(name)
        if axis is None:
            return coordinates
        basis_DK = self._basis_DK.double()  # added up in float64, rounded once
        if axis == 0:
            return (basis_DK @ coordinates.double()).to(coordinates.dtype)
        rows = coordinates.split(ROWS)
        return torch.cat([(part.double() @ basis_DK.T).to(part.dtype) for part in rows])

    @functools.cached_property
    def _basis_DK(self) -> Tensor:
        return basis_of(self._source)

    def __str__(self) -> str:
        return f"{self._source}, folded into plain weights"


def basis_of(source: Source) -> Tensor:
    """The basis in the precision in which the model computes with it; a moved one is saved."""
    trained, boundary = source.settings, source.settings.boundary
    if BASIS in source.names():
        basis_DK = source.tensor(BASIS)
    else:
        basis_DK = random_basis(trained.model.dim, boundary.rank, boundary.basis_seed)
    return basis_DK.to(WEIGHT_TYPES[trained.run.precision])


def _whole(settings: Settings) -> Stage:
    """The model of these settings in one stage, without memory."""
    pipeline = dataclasses.replace(settings.pipeline, stages=1, split=[])
    one = dataclasses.replace(settings, pipeline=pipeline)
    return StageBuilder(one, torch.device("meta")).build(0)


class Transfer:
    """Fills the stages of a new run from a source, one after the other."""

    def __init__(self, source: Source, builder: StageBuilder):
        settings, self._space = builder.settings, builder.space
        self.fresh: list[str] = []  # what the source does not have, and starts anew
        self._saved, self._now = saved, now = _forms(source.settings), _forms(settings)
        before, after = (
            (s.boundary.is_constrained, s.boundary.rank, s.boundary.basis_seed, s.model.embed_std)
            for s in (source.settings, settings)
        )
        # Whether both hold one shared basis, and the same fixed token table.
        self._keeps_space = source.settings.boundary.mode != "dense" and before == after
        # Adapters go along where the new run has the same ones; else they are merged.
        is_alike = saved == now and (not now or self._keeps_space)
        keeps_adapters = is_alike and source.settings.lora == settings.lora
        self._source = source if keeps_adapters else merged(source)
        self._settings, self._names = settings, self._source.names()
        # It goes on with the source's basis where both runs share one.
        if self._space is not None and self._keeps_space and BASIS in self._names:
            self._space.basis_DK.copy_(self._source.tensor(BASIS))
        self._folded: Folded | None = None
        self._lost = self._size = 0.0  # squares, of what was to lie in the subspace

    @property
    def lost(self) -> float:
        """The relative size of what did not fit into the subspace."""
        return math.sqrt(self._lost / self._size) if self._size else 0.0

    @torch.no_grad()
    def fill(self, stage: Stage) -> None:
        """Lay the source's weights over the starting weights of a stage."""
        for name, tensor in stage.owned_parameters().items():
            form = self._now.get(name)
            if name.startswith("boundary.") or is_adapter(name):
                self._take_own(name, tensor)
            elif self._saved.get(name) == form and (form is None or self._keeps_space):
                self._put(tensor, self._source.tensor(name), name)
            else:
                self._take_folded(name, tensor, stage)

    def _take_own(self, name: str, tensor: Tensor) -> None:
        """Of a cut or an adapter: the source's if it has the same one, else it starts anew."""
        saved, now = self._source.settings, self._settings
        before, after = (projected_cuts(s).get(name.rpartition(".")[0]) for s in (saved, now))
        # A table goes along only with the basis that it was trained beside.
        has_basis = before == after and saved.boundary.basis_seed == now.boundary.basis_seed
        if name in self._names and (is_adapter(name) or has_basis):
            value = self._source.tensor(name)
            if self._fits(value, tensor):
                self._put(tensor, value, name)
                return
        self.fresh.append(name)

    def _take_folded(self, name: str, tensor: Tensor, stage: Stage) -> None:
        self._folded = self._folded or Folded(self._source)
        full = self._folded.tensor(name)
        layers = stage.reparametrised()
        axes = {held.name: held.axis for held in stage.held_parameters()}
        axis = axes.get(name) if name not in layers else layers[name].axis
        if axis is None:
            self._put(tensor, full, name)
            return
        space = self._space
        assert space is not None, "only a model with a space holds weights in it"
        if axis == 1 and space.table_VD is not None:  # the embedding
            full = full - space.table_VD[: len(full)].to(full)
        basis_DK = space.basis_DK.to(full)
        inside = project(full, basis_DK, axis)
        self._size += float(full.double().square().sum())
        self._lost += float((full - inside).double().square().sum())
        if name in layers:
            layers[name].set_full(full)
        else:
            self._put(tensor, inside, name)

    def _fits(self, value: Tensor, target: Tensor) -> bool:
        """Whether a tensor has the shape that is needed, or its first rows: one for each token."""
        grows = self._source.settings.model.vocab, self._settings.model.vocab
        more_rows = (*value.shape[:1], *target.shape[:1]) == grows
        return value.shape == target.shape or (more_rows and value.shape[1:] == target.shape[1:])

    def _put(self, target: Tensor, value: Tensor, name: str) -> None:
        if not self._fits(value, target):
            self._source.check_shape(name, value, target)
        (target[: len(value)] if value.dim() else target).copy_(value)


def projected_cuts(settings: Settings) -> dict[str, tuple[int, int]]:
    """The block above each projected cut and its rank, by the name that its parameters have."""
    name_of, boundary = architecture(settings.model).block_name, settings.boundary
    above = settings.split()[1:] if boundary.mode == "projected" else []
    return {f"boundary.{name_of(blocks.start)}": (blocks.start, boundary.rank) for blocks in above}


def _forms(settings: Settings) -> dict[str, str]:
    """Which tensors of a model are not plain: held in the subspace, or coordinates in it."""
    whole = _whole(settings)
    held = {held.name: "held" for held in whole.held_parameters()}
    return held | dict.fromkeys(whole.reparametrised(), "coordinates")
