"""A model with its cuts as one module, whose tensors have the names that a checkpoint gives them.

Both ends of a cut are one module here, and it holds its basis: nothing is left to a seed, so the
tensors of a folder are the whole model. Codecs are not part of it.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.boundary import ProjectedBoundary
from thinwire.engine.build import StageBuilder
from thinwire.engine.keeper import BASIS
from thinwire.engine.merge import merged
from thinwire.engine.source import Source
from thinwire.model import Stage
from thinwire.settings import Settings
from thinwire.subspace import Space, fixed_table

MODEL_TYPE, MODEL_CLASS = "thinwire", "ThinwireForCausalLM"
ENDS = "boundary"
ANCHOR = "anchor"


def settings_of(plain: dict[str, Any]) -> Settings:
    """The settings of a model from what a config.json keeps of them."""
    kept = ("model", "boundary", "pipeline")  # others could name plugins, which are code
    return Settings.from_plain({key: plain[key] for key in kept if key in plain})


def config_with_cuts(settings: Settings) -> dict[str, Any]:
    """The config.json of a model with its cuts: what must be known to build it again."""
    plain, split = settings.to_plain(), [len(blocks) for blocks in settings.split()]
    one_by_one = {"stages": len(split), "split": split, "microbatches": 1, "schedule": "gpipe"}
    boundary = plain["boundary"]
    if settings.boundary.is_calibrated:  # which needs a model to start from: here it is a tensor
        boundary = {**boundary, "basis": "per-cut"}
    return {
        "model_type": MODEL_TYPE,
        "architectures": [MODEL_CLASS],
        "settings": {
            "model": plain["model"],
            "boundary": boundary,
            "pipeline": one_by_one,
        },
    }


class Whole:
    """All stages of a model, joined without codecs, hung into a module under their names."""

    def __init__(self, settings: Settings, device: torch.device, root: nn.Module):
        self.builder = StageBuilder(settings, device)
        self.stages = [self.builder.build(index) for index in range(settings.pipeline.stages)]
        self._spaces: list[Space] = []
        for below, above in itertools.pairwise(self.stages):
            self._join(below, above)
        for stage in self.stages:
            for name, layer in zip(stage.names, stage.layers, strict=True):
                _hang(root, name, layer)
            if stage.incoming is not None:
                _hang(root, f"{ENDS}.{stage.names[0]}", stage.incoming)
        self._ends: nn.Module | None = getattr(root, ENDS, None)
        if self._ends is not None and settings.boundary.anchor == "fixed":
            model = settings.model
            table_VD = torch.empty(model.vocab, model.dim, dtype=self.builder.dtype, device=device)
            self._ends.register_buffer(ANCHOR, table_VD)

    def _join(self, below: Stage, above: Stage) -> None:
        """One boundary for both ends, with the basis among its tensors."""
        end = above.incoming
        below.outgoing = end
        if not isinstance(end, ProjectedBoundary):
            return
        if end.basis is None:
            end.basis = nn.Parameter(end.basis_DK.clone(), requires_grad=False)
        self._spaces.append(end.space)

    def logits(self, ids_BT: Tensor, pasts: list[Any] | None = None) -> Tensor:
        """What the model says at every position; with a past, of those that follow it."""
        anchors_VD = getattr(self._ends, ANCHOR, None)
        for space in self._spaces:  # which is no module: it cannot follow the table to a device
            space.table_VD = anchors_VD
        x = ids_BT
        for index, stage in enumerate(self.stages):
            x = stage(x, ids_BT) if pasts is None else stage.extend(x, pasts[index], ids_BT)
        return x


def _hang(root: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module under a dotted name, with empty modules on the way there."""
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    root.add_module(last, module)


class WithCuts(Source):
    """The weights of a model whose narrow cuts stay; each cut's basis is among them, and
    adapters are merged.

    A checkpoint has the bases that were learned or have moved; the others come from their seed.
    """

    def __init__(self, source: Source):
        source = merged(source)
        super().__init__(source.step, source.versions)
        self._source = source
        settings, root = source.settings, nn.Module()
        Whole(settings, torch.device("meta"), root)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in root.state_dict().items()}
        """Of every tensor, in the model's order: known without reading any."""
        self._bases = {
            f"{ENDS}.model.layers.{blocks.start}.basis": cut
            for cut, blocks in enumerate(settings.split()[1:])
        }

    @property
    def settings(self) -> Settings:
        return self._source.settings

    def names(self) -> set[str]:
        return set(self.shapes)

    def _read(self, names: set[str]) -> dict[str, Tensor]:
        return {name: self._tensor(name) for name in sorted(names)}

    def _tensor(self, name: str) -> Tensor:
        settings = self.settings
        if name not in self._source.names():
            if name == f"{ENDS}.{ANCHOR}":
                model, seed = settings.model, settings.boundary.basis_seed
                return fixed_table(model.vocab, model.dim, seed, model.embed_std)
            if name in self._bases:
                return self._basis(self._bases[name])
        return self._source.tensors([name])[name]

    def _basis(self, cut: int) -> Tensor:
        boundary = self.settings.boundary
        if BASIS in self._source.names():
            return self._source.tensors([BASIS])[BASIS][:, : boundary.rank_at(cut)]
        end = StageBuilder(self.settings, torch.device("cpu")).boundary(cut, receives=False)
        assert isinstance(end, ProjectedBoundary), "only narrow cuts have a basis"
        return end.basis_DK

    def __str__(self) -> str:
        return f"{self._source} with its cuts"
