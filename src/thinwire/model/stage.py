"""A stage: a run of layers with its own ends of the boundaries on either side; and how well a model
does, by the loss that trains it and the score of a validation.
"""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from thinwire.model.boundary import Boundary, ProjectedBoundary, SubspaceBoundary
from thinwire.model.config import ModelConfig
from thinwire.model.layers import InSpace
from thinwire.model.llama import EMBEDDING, HEAD, Block, KeyValues, LayerPlan, architecture
from thinwire.model.optim import Role
from thinwire.model.subspace import Held

WEIGHT_TYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}
"""The type weights are kept in, by `run.precision`; bf16 computes under autocast."""
GRAPHS = 64  # that the code of a layer may be compiled to: for each shape, in training and not

Past = list[KeyValues | None]  # of the layers of a stage; None of those that look at one position


class _Bounded(torch.autograd.Function):
    """Its input; on the way back no token has more than `bound` times the mean token's gradient."""

    @staticmethod
    def forward(ctx, x_BTC: Tensor, bound: float) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.bound = bound
        return x_BTC.view_as(x_BTC)

    @staticmethod
    def backward(ctx, gradient_BTC: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        norms_BT1 = torch.linalg.vector_norm(gradient_BTC, dim=-1, keepdim=True)
        most = ctx.bound * norms_BT1.sum() / (norms_BT1 != 0).sum().clamp_min(1)
        smallest = torch.finfo(norms_BT1.dtype).tiny
        return gradient_BTC * (most / norms_BT1.clamp_min(smallest)).clamp_max(1), None


def entered(incoming: Boundary, z: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What a first layer reads behind a cut, and what of it the stage has added of its own."""
    x, known = incoming.decode(z, ids), incoming.known(ids)
    return (x, None) if known is None else (x + known, known)


def with_ends(
    layer: Callable[[Tensor], Tensor],
    incoming: Boundary | None,
    outgoing: Boundary | None,
    x: Tensor,
    ids: Tensor | None,
    known: Tensor | None,
    bound: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """A layer with the ends of the cuts beside it. What the stage knows of the tokens is added at
    its first end and taken off at its last; it is returned too. `bound`: of a token's gradient.
    """
    if bound and x.is_floating_point():
        x = _Bounded.apply(x, bound)
    if incoming is not None:
        x, known = entered(incoming, x, ids)
    x = layer(x)
    if outgoing is None:
        return x, known
    return outgoing.encode(x if known is None else x - known, ids), None


class Stage(nn.Module):
    """Consecutive layers of the model with an end of a cut on either side, or from token ids or to
    logits. `next_name` is the layer behind the outgoing one. `bound` is the most gradient
    that a layer sends back for one token, as a multiple of the mean token's.
    """

    def __init__(
        self,
        plans: list[LayerPlan],
        incoming: Boundary | None = None,
        outgoing: Boundary | None = None,
        recompute: bool = False,
        next_name: str = "",
        bound: float = 0.0,
    ):
        super().__init__()
        self.bound = bound
        self.names = [plan.name for plan in plans]
        self._next_name = next_name
        self.layers = nn.ModuleList(plan.make() for plan in plans)
        self.incoming = incoming
        self.outgoing = outgoing
        self.recompute = recompute
        self.loss = token_loss
        self.summed_loss: Callable[..., Tensor] = functools.partial(token_loss, reduction="sum")
        self._with_ends = with_ends
        self._watched: tuple[int, Callable[[Tensor], None]] | None = None

    @property
    def needs_ids(self) -> bool:
        """Whether a boundary reads token ids beside what this stage receives."""
        ends = (self.incoming, self.outgoing)
        return self.incoming is not None and any(end is not None and end.needs_ids for end in ends)

    def forward(self, x: Tensor, ids: Tensor | None = None, past: Past | None = None) -> Tensor:
        """From the model's inputs, or what was received, to what is sent on. `ids` are its token
        ids, where `needs_ids`. With a past, of the positions that follow, and then not compiled.
        """
        incoming, outgoing, ids = self.incoming, self.outgoing, x if self.incoming is None else ids
        if isinstance(outgoing, SubspaceBoundary) and outgoing.anchored:
            outgoing.space.anchor_coordinates()  # compiled code does not see that a basis moved
        last, known = len(self.layers) - 1, None
        for index, layer in enumerate(self.layers):
            if self._watched and self._watched[0] == index:
                if incoming is not None:
                    (x, known), incoming = entered(incoming, x, ids), None
                if x.requires_grad:
                    x.register_hook(self._watched[1])
            end = outgoing if index == last else None
            is_more = any(isinstance(cut, SubspaceBoundary) for cut in (incoming, end))
            run = self._with_ends if (is_more or self.bound) and past is None else with_ends
            act: Callable[..., Tensor] = layer if past is None else layer.forward
            if past is not None and past[index] is not None:
                act = functools.partial(act, past=past[index])
            call = (act, incoming, end, x, ids, known, self.bound)
            if self.recompute and torch.is_grad_enabled() and x.is_floating_point():
                x, known = checkpoint(run, *call, use_reentrant=False)
            else:
                x, known = run(*call)
            incoming = None
            if outgoing is None:
                known = None  # nothing takes it off again, so it need not be kept
            elif index == 0 and self.incoming is None and outgoing.own_tables:
                known = x  # the embedding is the first stage's own token table
        return x

    def new_past(self) -> Past:
        """The past of each block before the first position."""
        return [KeyValues() if isinstance(layer, Block) else None for layer in self.layers]

    def compile_layers(self, backend: str = "inductor") -> None:
        """Have torch fuse what is inside each layer, with the end of a cut beside it."""
        torch._dynamo.config.recompile_limit = GRAPHS  # beyond it torch gives up compiling
        for layer in self.layers:
            layer.compile(dynamic=False, backend=backend)
        self._with_ends = torch.compile(with_ends, dynamic=False, backend=backend)
        self.loss = torch.compile(self.loss, dynamic=False, backend=backend)
        self.summed_loss = torch.compile(self.summed_loss, dynamic=False, backend=backend)

    def global_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by name in the whole model; a boundary's after the block that follows."""
        named = [*zip(self.names, self.layers, strict=True), *self._ends().items()]
        return {
            (f"{EMBEDDING}.weight" if parameter is self._copy else f"{name}.{local}"): parameter
            for name, module in named
            for local, parameter in module.named_parameters()
        }

    def embedding_copy(self) -> nn.Parameter | None:
        """Where stages share the embedding: it on the first stage, this stage's copy on others."""
        if self.incoming is not None:
            return self._copy
        weight = self.layers[0].weight if self.names[0] == EMBEDDING else None
        return weight if isinstance(weight, nn.Parameter) else None

    def roles(self) -> dict[str, Role]:
        """What parameters are to an optimizer, by global name, of those that have a role."""
        found = {}
        for name, parameter in self.owned_parameters().items():
            if name == f"{EMBEDDING}.weight" or name.endswith(".table"):
                found[name] = Role.TABLE
            elif parameter.ndim > 1:
                found[name] = Role.HEAD if name == f"{HEAD}.weight" else Role.MATRIX
        return found

    def _ends(self) -> dict[str, Boundary]:
        """The boundaries by global name."""
        ends = {self.names[0]: self.incoming, self._next_name: self.outgoing}
        return {f"boundary.{name}": end for name, end in ends.items() if end is not None}

    @property
    def _copy(self) -> nn.Parameter | None:
        end = self.incoming
        return end.table if isinstance(end, ProjectedBoundary) and end.shared else None

    def owned_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this stage saves: all but copies of what the stage below saves."""
        return {name: p for name, p in self.global_parameters().items() if p is not self._copy}

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this stage updates: of those it owns, all that are not frozen."""
        return {name: p for name, p in self.owned_parameters().items() if p.requires_grad}

    def share_frozen(self, other: "Stage") -> None:
        """Hold the frozen parameters of another copy of this stage in place of equal ones."""
        for mine, theirs in zip(self.modules(), other.modules(), strict=True):
            for name, parameter in theirs.named_parameters(recurse=False):
                if not parameter.requires_grad:
                    setattr(mine, name, parameter)

    @torch.no_grad()
    def initialise(self, config: ModelConfig, seed: int) -> None:
        """Give every parameter its starting value: the same for any split into stages."""
        family = architecture(config)
        for name, module in self._named_modules():
            if isinstance(module, InSpace) and module.reparam:
                full = torch.empty(module.full_shape, dtype=module.weight.dtype)
                family.initialise(f"{name}.weight", full, seed)
                module.set_full(full)
                continue
            for own, parameter in module.named_parameters(recurse=False):
                family.initialise(f"{name}.{own}", parameter, seed)

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """All within the layers, by global name."""
        for name, layer in zip(self.names, self.layers, strict=True):
            for local, module in layer.named_modules():
                yield f"{name}.{local}" if local else name, module

    def held_parameters(self) -> list[Held]:
        """What a subspace constraint holds here: the embedding and writers of the first blocks."""
        return [
            Held(name, layer.weight, layer.axis)
            for name, layer in self._in_space().items()
            if not layer.reparam
        ]

    def reparametrised(self) -> dict[str, InSpace]:
        """The reparametrised layers by the global name of their weight."""
        return {name: layer for name, layer in self._in_space().items() if layer.reparam}

    def _in_space(self) -> dict[str, InSpace]:
        found = self._named_modules()
        return {f"{name}.weight": module for name, module in found if isinstance(module, InSpace)}

    def first_free_layer(self) -> str:
        """The layer behind the last one here that writes into the subspace; the first if none."""
        layers = enumerate(map(nn.Module.modules, self.layers), start=1)
        held = [n for n, parts in layers if any(isinstance(part, InSpace) for part in parts)]
        return self.names[held[-1] if held else 0]

    def watch_gradient(self, layer_name: str, watcher: Callable[[Tensor], None]) -> None:
        """Show `watcher` the gradient of the stream at the input of a layer, on each backward."""
        self._watched = (self.names.index(layer_name), watcher)

    def describe(self) -> str:
        """The layers in a few characters, such as `embed+0..1`."""
        blocks = [name.split(".")[-1] for name in self.names if name.startswith("model.layers.")]
        parts = [blocks[0] if len(blocks) == 1 else f"{blocks[0]}..{blocks[-1]}"]
        parts[:0] = ["embed"] if EMBEDDING in self.names else []
        parts += ["head"] if HEAD in self.names else []
        return "+".join(parts)


def token_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of tokens (B, T, V), in float32 at least; a target of -100 is none."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction=reduction)


class Score:
    """The loss over batches: every token that counts weighs the same. Sums stay on the device in
    one tensor: small ones of each batch would sit between logits, whose memory is used again.
    """

    def __init__(self) -> None:
        self._total: Tensor | None = None  # loss times count, count; in float64

    def add(self, loss: Tensor, targets: Tensor) -> None:
        """Take in a batch with its mean loss."""
        count = (targets >= 0).sum().double()
        part = torch.stack((loss.detach().double() * count, count))
        self._total = part if self._total is None else self._total.add_(part)

    @property
    def loss(self) -> float:
        """The mean loss."""
        total, count = self._sums()
        return total / count

    @property
    def count(self) -> int:
        """Tokens that count."""
        return int(self._sums()[1])

    def _sums(self) -> list[float]:
        assert self._total is not None, "a score of no batch"
        return self._total.tolist()
