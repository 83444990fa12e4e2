"""A stage: a run of layers with its own ends of the boundaries on either side."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from thinwire.boundary import Boundary
from thinwire.model.config import ModelConfig
from thinwire.model.llama import BLOCKS, EMBEDDING, WRITERS, LayerPlan, initialise
from thinwire.model.narrow import Reparametrised
from thinwire.subspace import Held


class Stage(nn.Module):
    """Consecutive layers of the model, from token ids or a decoded activation onward.

    Without an incoming boundary the input is token ids; without an outgoing one the output is
    what the last layer says (logits). A stage without either is the whole model.
    """

    def __init__(
        self,
        plans: list[LayerPlan],
        incoming: Boundary | None = None,
        outgoing: Boundary | None = None,
        recompute: bool = False,
    ):
        super().__init__()
        self.names = [plan.name for plan in plans]
        self.layers = nn.ModuleList(plan.make() for plan in plans)
        self.incoming = incoming
        self.outgoing = outgoing
        self.recompute = recompute
        self.loss = token_loss
        self._watched: tuple[int, Callable[[Tensor], None]] | None = None

    @property
    def needs_ids(self) -> bool:
        """Whether this stage reads token ids: to embed them, or at a boundary."""
        ends = (self.incoming, self.outgoing)
        return self.incoming is None or any(end is not None and end.needs_ids for end in ends)

    def forward(self, received: Tensor | None, ids_BT: Tensor | None) -> Tensor:
        """From what was received (or the ids, on the first stage) to what is sent on."""
        if self.incoming is None:
            assert ids_BT is not None, "the first stage starts from token ids"
            x = ids_BT
        else:
            assert received is not None, "a later stage starts from what crossed the boundary"
            x = self.incoming.decode(received, ids_BT)
        for index, layer in enumerate(self.layers):
            if self._watched and self._watched[0] == index and x.requires_grad:
                x.register_hook(self._watched[1])
            if self.recompute and torch.is_grad_enabled() and x.is_floating_point():
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x if self.outgoing is None else self.outgoing.encode(x, ids_BT)

    def compile_layers(self, backend: str = "inductor") -> None:
        """Have torch fuse what is inside each layer. Equal blocks share one compiled graph."""
        for layer in self.layers:
            layer.compile(dynamic=False, backend=backend)
        for end in (self.incoming, self.outgoing):
            if end is not None:
                end.compile_ends(backend)
        self.loss = torch.compile(self.loss, dynamic=False, backend=backend)

    def global_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by the name they have in the whole model, whatever the split.

        A boundary's own parameters are named after the block that follows the cut.
        """
        named = list(zip(self.names, self.layers, strict=True))
        if self.incoming is not None:
            named.append((f"boundary.{self.names[0]}", self.incoming))
        if self.outgoing is not None:
            last = int(self.names[-1].removeprefix(BLOCKS))
            named.append((f"boundary.{BLOCKS}{last + 1}", self.outgoing))
        return {
            f"{name}.{local}": parameter
            for name, module in named
            for local, parameter in module.named_parameters()
        }

    def owned_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this stage updates and saves.

        A learned basis belongs to the sender of its cut; the receiver holds a copy.
        """
        borrowed = getattr(self.incoming, "basis", None)
        return {n: p for n, p in self.global_parameters().items() if p is not borrowed}

    @torch.no_grad()
    def initialise(self, config: ModelConfig, seed: int) -> None:
        """Give every parameter its starting value: the same for any split into stages.

        A reparametrised layer takes the part in S of what the full layer would start with.
        """
        for name, layer in zip(self.names, self.layers, strict=True):
            for local, module in layer.named_modules():
                prefix = f"{name}.{local}" if local else name
                if isinstance(module, Reparametrised):
                    full = torch.empty(module.full_shape, dtype=module.weight.dtype)
                    initialise(f"{prefix}.weight", full, config, seed)
                    module.set_full(full)
                    continue
                for own, parameter in module.named_parameters(recurse=False):
                    initialise(f"{prefix}.{own}", parameter, config, seed)

    def held_parameters(self, blocks: int) -> list[Held]:
        """What a subspace constraint holds here: the embedding, writers of the first blocks."""
        held = []
        for name, parameter in self.global_parameters().items():
            if name == f"{EMBEDDING}.weight":
                held.append(Held(name, parameter, axis=1))
            elif name.endswith(WRITERS) and int(name.split(".")[2]) < blocks:
                held.append(Held(name, parameter, axis=0))
        return held

    def reparametrised(self) -> dict[str, Reparametrised]:
        """The reparametrised layers by the global name of their weight."""
        return {
            f"{name}.{local}.weight" if local else f"{name}.weight": module
            for name, layer in zip(self.names, self.layers, strict=True)
            for local, module in layer.named_modules()
            if isinstance(module, Reparametrised)
        }

    def watch_gradient(self, layer_name: str, watcher: Callable[[Tensor], None]) -> None:
        """Show `watcher` the gradient of the stream at the input of a layer, on each backward."""
        self._watched = (self.names.index(layer_name), watcher)

    def describe(self) -> str:
        """The layers in a few characters, such as `embed+0..1`."""
        blocks = [n.removeprefix(BLOCKS) for n in self.names if n.startswith(BLOCKS)]
        parts = ["embed"] if EMBEDDING in self.names else []
        if blocks:
            parts.append(blocks[0] if len(blocks) == 1 else f"{blocks[0]}..{blocks[-1]}")
        if "lm_head" in self.names:
            parts.append("head")
        return "+".join(parts)


def token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy per token, in float32 at least."""
    wide = logits_BTV if logits_BTV.dtype == torch.float64 else logits_BTV.float()
    return F.cross_entropy(wide.flatten(0, 1), targets_BT.flatten())
