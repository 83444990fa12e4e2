"""A stage: a run of layers with its own ends of the boundaries on either side."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from thinwire.boundary import Boundary
from thinwire.model.config import ModelConfig
from thinwire.model.llama import LayerPlan, initialise


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
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled() and x.is_floating_point():
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x if self.outgoing is None else self.outgoing.encode(x, ids_BT)

    def global_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by the name they have in the whole model, whatever the split."""
        return {
            f"{name}.{local}": parameter
            for name, layer in zip(self.names, self.layers, strict=True)
            for local, parameter in layer.named_parameters()
        }

    def initialise(self, config: ModelConfig, seed: int) -> None:
        """Give every parameter its starting value: the same for any split into stages."""
        for name, parameter in self.global_parameters().items():
            initialise(name, parameter, config, seed)

    def describe(self) -> str:
        """The layers in a few characters, such as `embed+0..1`."""
        blocks = [n.rsplit(".", 1)[1] for n in self.names if n.startswith("model.layers.")]
        parts = ["embed"] if "model.embed_tokens" in self.names else []
        if blocks:
            parts.append(blocks[0] if len(blocks) == 1 else f"{blocks[0]}..{blocks[-1]}")
        if "lm_head" in self.names:
            parts.append("head")
        return "+".join(parts)


def token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy per token, in float32 at least."""
    wide = logits_BTV if logits_BTV.dtype == torch.float64 else logits_BTV.float()
    return F.cross_entropy(wide.flatten(0, 1), targets_BT.flatten())
