"""`[boundary]`: what crosses the cut, and which combinations can work."""

import contextlib
import dataclasses
from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.typed import option

NARROW = ("subspace", "reparam", "projected")
CONSTRAINED = ("subspace", "reparam")
PER_STAGE, EMBEDDING = "per-stage", "embedding"


@dataclass(frozen=True)
class BoundaryConfig:
    """`[boundary]`: what crosses the cut."""

    mode: str = option(
        "dense",
        "dense: send whole activations; subspace: constrain the weights to a subspace; reparam: "
        "the same by parametrization; projected: free weights, compress at the cut only",
        ("dense", *NARROW),
    )
    rank: int = option(
        0,
        "dimension of the subspace, less than model.dim; 0 = from ratio, or for dense",
        least=0,
    )
    ratio: float = option(
        0.0,
        "with rank = 0: the rank is model.dim / ratio, rounded down",
        least=1,
        auto=0,
    )
    basis_seed: int = option(0, "seed of the basis and of the fixed token table")
    basis_update_every: int = option(
        0, "steps between updates of the shared basis; 0 = never", least=0, most=10**9
    )
    basis_rate: float = option(
        0.5, "step size of such an update; 1 is about one power iteration", above=0
    )
    anchor: str = option(
        "auto",
        "what stages know of a token and need not send: none; fixed (subspace, reparam), a random "
        "table; per-stage (projected), a trainable table of each stage's own; embedding (subspace, "
        "reparam), the model's own, of which all stages have a copy; auto = fixed for subspace and "
        "reparam, none for projected",
        ("auto", "none", "fixed", PER_STAGE, EMBEDDING),
    )
    row_tokens: int = option(
        16,
        "anchor = embedding: a row is updated on all stages once its token was seen so often",
        least=1,
        most=10**9,
    )
    row_steps: int = option(
        100,
        "anchor = embedding: steps after which a row is updated if it was seen at all",
        least=1,
        most=10**9,
    )
    table: int = option(
        0,
        "anchor = per-stage: width of the table, widened by a matrix; 0 = model.dim",
        least=0,
    )
    free_layers: int = option(
        -1,
        "subspace, reparam: last blocks left unconstrained; -1 = those of the last stage",
        least=0,
        auto=-1,
    )

    @property
    def is_constrained(self) -> bool:
        """Whether weights are held in the subspace (by projection or by construction)."""
        return self.mode in CONSTRAINED

    @property
    def shares_embedding(self) -> bool:
        """Whether every stage has a copy of the embedding, which all of them train together."""
        return self.anchor == EMBEDDING

    @property
    def own_tables(self) -> bool:
        """Whether every stage has a trainable token table of its own, which it adds where the
        stream enters and takes off where it leaves.
        """
        return self.anchor == PER_STAGE

    def resolved(self, dim: int, split: list[range]) -> "BoundaryConfig":
        """The same config with `auto` and -1 filled in, refused if it cannot work."""
        if self.table and not self.own_tables:
            raise ConfigError(
                f"boundary.table = {self.table} has no meaning without boundary.anchor = "
                '"per-stage", whose tables it narrows: leave it at 0'
            )
        if self.mode == "dense":
            return self._resolved_dense(dim)
        rank = self.rank or (max(1, int(dim / self.ratio)) if self.ratio else 0)
        filled = dataclasses.replace(self, rank=rank)
        filled._check_rank(dim)
        if self.is_constrained:
            return filled._resolved_constrained(len(split[-1]))
        return filled._resolved_projected(dim)

    def _resolved_projected(self, dim: int) -> "BoundaryConfig":
        if self.free_layers > 0:
            raise ConfigError(
                "boundary.free_layers has no meaning with projected: all its weights are free"
            )
        if self.anchor in ("fixed", EMBEDDING):
            raise ConfigError(
                f'boundary.anchor = "{self.anchor}" cannot work with boundary.mode = "projected", '
                'whose weights write outside the basis too: use subspace, or anchor = "per-stage"'
            )
        anchor = "none" if self.anchor == "auto" else self.anchor
        table = (self.table or dim) if self.own_tables else 0
        if table > dim:
            raise ConfigError(
                f"boundary.table = {self.table} must lie between 1 and model.dim = {dim}: a wider "
                "table holds nothing more"
            )
        return dataclasses.replace(self, anchor=anchor, table=table, free_layers=0)

    def _check_rank(self, dim: int) -> None:
        if not 0 < self.rank < dim + self.own_tables:  # the full width with tables: a control
            most = f"model.dim = {dim}" if self.own_tables else f"model.dim - 1 = {dim - 1}"
            raise ConfigError(
                f"boundary.rank = {self.rank} must lie between 1 and {most} with boundary.mode = "
                f'"{self.mode}": at the full width nothing is saved, use dense'
            )

    def relaxed(self, dim: int, split: list[range]) -> "BoundaryConfig":
        """The inverse of `resolved`: auto, 0 and -1 where they give the same."""
        auto = self
        for key, value in (("rank", 0), ("table", 0), ("anchor", "auto"), ("free_layers", -1)):
            freer = dataclasses.replace(auto, **{key: value})  # type: ignore[arg-type]
            with contextlib.suppress(ConfigError):  # a table of its own width needs its anchor
                if freer.resolved(dim, split) == self:
                    auto = freer
        return auto

    def _resolved_dense(self, dim: int) -> "BoundaryConfig":
        if self.rank not in (0, dim):
            raise ConfigError(
                f'boundary.rank = {self.rank} has no meaning with boundary.mode = "dense", where '
                f"all {dim} channels cross: leave it at 0"
            )
        if self.basis_update_every or self.anchor not in ("auto", "none"):
            raise ConfigError(
                "boundary.basis_update_every and anchor have no meaning with "
                'boundary.mode = "dense", which has no basis: leave them at 0 and "auto"'
            )
        if self.free_layers > 0:
            raise ConfigError(
                'boundary.free_layers has no meaning with boundary.mode = "dense": all its weights '
                "are free"
            )
        return dataclasses.replace(self, anchor="none", free_layers=0)

    def _resolved_constrained(self, last_stage: int) -> "BoundaryConfig":
        if self.anchor not in ("auto", "fixed", EMBEDDING):
            raise ConfigError(
                f'boundary.anchor = "{self.anchor}" cannot work with mode = "{self.mode}": all '
                "stages must know of each token what lies outside the subspace, a fixed table or "
                'the embedding; set it to "auto" or "embedding"'
            )
        if self.shares_embedding and self.basis_update_every:
            raise ConfigError(
                'boundary.basis_update_every cannot work with boundary.anchor = "embedding": leave '
                "it at 0"
            )
        free = last_stage if self.free_layers == -1 else self.free_layers
        if not 0 <= free <= last_stage:
            raise ConfigError(
                f"boundary.free_layers = {free}, but only the {last_stage} blocks of the last "
                "stage may be free: what a block below the last cut writes must lie in the subspace"
            )
        anchor = EMBEDDING if self.shares_embedding else "fixed"
        return dataclasses.replace(self, anchor=anchor, free_layers=free)
