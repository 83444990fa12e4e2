"""`[lora]`: low-rank adapters beside frozen matrices, and which combinations can work."""

from dataclasses import dataclass

from thinwire.boundary import BoundaryConfig
from thinwire.errors import ConfigError
from thinwire.typed import nearest, option

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices of a block that an adapter can stand beside."""


@dataclass(frozen=True)
class LoraConfig:
    """`[lora]`: what is trained while the model itself stays frozen."""

    rank: int = option(
        0,
        "rank of the adapters (LoRA): they are trained, and the model's own weights stay as they "
        "are; 0 = no adapters, all weights are trained",
        least=0,
        most=2**16,
    )
    alpha: float = option(16.0, "what an adapter adds is scaled by alpha / rank", above=0)
    targets: list[str] = option(  # noqa: RUF009 -- option makes a fresh list each time
        list(TARGETS), "matrices of each block that get an adapter"
    )

    @property
    def scale(self) -> float:
        """The factor of what an adapter adds."""
        return self.alpha / self.rank

    def check(self, boundary: BoundaryConfig) -> None:
        """Refuse what cannot work."""
        if not self.rank:
            return
        for place, target in enumerate(self.targets):
            if target not in TARGETS:
                near = nearest(target, TARGETS)
                raise ConfigError(f'lora.targets[{place}] = "{target}" is not allowed{near}')
            if target in self.targets[:place]:
                raise ConfigError(f'lora.targets lists "{target}" twice')
        if not self.targets:
            raise ConfigError(
                f"lora.targets is empty, but lora.rank = {self.rank}: name the matrices that get "
                f"an adapter ({', '.join(TARGETS)}), or set lora.rank = 0"
            )
        if boundary.shares_embedding:
            raise ConfigError(
                f"lora.rank = {self.rank} leaves the embedding frozen, so "
                'boundary.anchor = "embedding", which trains it on all stages, has no meaning; set '
                'it to "auto"'
            )
        if boundary.is_constrained and boundary.basis_update_every:
            raise ConfigError(
                f"boundary.basis_update_every = {boundary.basis_update_every} cannot work with "
                f'lora.rank = {self.rank} and boundary.mode = "{boundary.mode}": a move of the '
                "basis cuts off what lies outside it, and frozen weights could not learn that "
                "again; set it to 0"
            )
