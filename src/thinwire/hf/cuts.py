"""A model with its cuts as one module, whose tensors have the names that a checkpoint gives them.

Both ends of a cut are one module here, and it holds its basis: nothing is left to a seed, so the
tensors of a folder are the whole model. Codecs are not part of it.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.engine.build import Joined
from thinwire.engine.checkpoint import Source
from thinwire.engine.conversion import basis_of, merged
from thinwire.model import ProjectedBoundary
from thinwire.settings import Settings

MODEL_TYPE, MODEL_CLASS = "thinwire", "ThinwireForCausalLM"
ENDS = "boundary"


def settings_of(plain: dict[str, Any]) -> Settings:
    """The settings of a model from what a config.json keeps of them."""
    kept = ("model", "boundary", "pipeline")  # others could name plugins, which are code
    return Settings.from_plain({key: plain[key] for key in kept if key in plain})


def config_with_cuts(settings: Settings) -> dict[str, Any]:
    """The config.json of a model with its cuts: what must be known to build it again."""
    plain, split = settings.to_plain(), [len(blocks) for blocks in settings.split()]
    kept = {key: plain[key] for key in ("model", "boundary")}
    one_by_one = {"stages": len(split), "split": split, "microbatches": 1, "schedule": "gpipe"}
    return {
        "model_type": MODEL_TYPE,
        "architectures": [MODEL_CLASS],
        "settings": {**kept, "pipeline": one_by_one},
    }


class Whole(Joined):
    """All stages of a model, hung into a module under their names."""

    def __init__(self, settings: Settings, device: torch.device, root: nn.Module):
        super().__init__(settings, device)
        for below, above in itertools.pairwise(self.stages):
            below.outgoing = end = above.incoming  # one boundary for both ends
            if isinstance(end, ProjectedBoundary):  # with the basis among its tensors
                end.basis = nn.Parameter(end.basis_DK.clone(), requires_grad=False)
        for stage in self.stages:
            for name, layer in zip(stage.names, stage.layers, strict=True):
                _hang(root, name, layer)
            if stage.incoming is not None:
                _hang(root, f"{ENDS}.{stage.names[0]}", stage.incoming)


def _hang(root: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module under a dotted name, with empty modules on the way there."""
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    root.add_module(last, module)


class WithCuts(Source):
    """The weights of a model whose narrow cuts stay, with each cut's basis; adapters are merged."""

    def __init__(self, source: Source):
        self._source = source = merged(source)
        self.settings, root = source.settings, nn.Module()
        Whole(self.settings, torch.device("meta"), root)
        # Of every tensor, in the model's order: known without reading any.
        self.shapes = {name: tuple(tensor.shape) for name, tensor in root.state_dict().items()}
        super().__init__(source.step, source.versions, self.shapes)
        self._bases = {n for n in self.shapes if n.startswith(ENDS) and n.endswith(".basis")}

    def _read(self, name: str) -> Tensor:
        return basis_of(self._source) if name in self._bases else self._source.tensor(name)

    def __str__(self) -> str:
        return f"{self._source} with its cuts"
