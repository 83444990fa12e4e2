"""`[boundary]`: what crosses the cut, and which combinations can work."""

import contextlib
import dataclasses
import re
from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.typed import by_cut, option

NARROW = ("subspace", "reparam", "projected")
CONSTRAINED = ("subspace", "reparam")
TABLES = ("trainable", "per-stage")
EMBEDDING = "embedding"


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
    ranks: list[str] = option(  # noqa: RUF009 -- option makes a fresh list each time
        [], 'projected: ranks of single cuts, counted from 0, such as "2: 96"'
    )
    basis_seed: int = option(0, "seed of the basis and of the fixed token table")
    basis_update_every: int = option(
        0, "steps between updates of the shared basis; 0 = never", least=0, most=10**9
    )
    basis_rate: float = option(
        0.5, "step size of such an update; 1 is about one power iteration", above=0
    )
    basis: str = option(
        "shared",
        "projected: one random basis for all cuts, one per cut, or one per cut calibrated to what "
        "crosses there in the model of train.init_from",
        ("shared", "per-cut", "calibrated"),
    )
    calibrate: int = option(
        16384, 'basis = "calibrated": tokens of training data to find it with', least=1, most=10**9
    )
    learn: bool = option(False, "projected: train the basis of each cut (kept orthonormal)")
    anchor: str = option(
        "auto",
        "token table that both sides know and need not send: none; fixed (random); trainable, "
        "added by the receiver; per-stage, taken off again where that stage sends; embedding "
        "(subspace, reparam), the model's own, of which all stages have a copy; auto = fixed "
        "for subspace and reparam, none for projected",
        ("auto", "none", "fixed", *TABLES, EMBEDDING),
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
        "anchor = trainable, per-stage: width of the table, widened by a matrix; 0 = model.dim",
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
    def is_calibrated(self) -> bool:
        """Whether each cut has a basis of its own that a trained model's activations gave it."""
        return self.mode == "projected" and self.basis == "calibrated"

    @property
    def has_tables(self) -> bool:
        """Whether the receiver of each cut has a trainable token table."""
        return self.anchor in TABLES

    @property
    def shares_embedding(self) -> bool:
        """Whether every stage has a copy of the embedding, which all of them train together."""
        return self.anchor == EMBEDDING

    @property
    def own_tables(self) -> bool:
        """Whether that table is its stage's own, taken off again where the stage sends."""
        return self.anchor == "per-stage"

    def resolved(self, dim: int, split: list[range]) -> "BoundaryConfig":
        """The same config with `auto` and -1 filled in, refused if it cannot work."""
        if self.table and not self.has_tables:
            raise ConfigError(
                f"boundary.table = {self.table} has no meaning without boundary.anchor = "
                '"trainable" or "per-stage", whose tables it narrows: leave it at 0'
            )
        if self.ranks and self.mode != "projected":
            why = "all channels cross" if self.mode == "dense" else "all stages share one basis"
            raise ConfigError(
                f'boundary.ranks cannot work with boundary.mode = "{self.mode}": {why}; use '
                "projected, or leave it empty"
            )
        if self.mode == "dense":
            return self._resolved_dense(dim)
        rank = self.rank or (max(1, int(dim / self.ratio)) if self.ratio else 0)
        filled = dataclasses.replace(self, rank=rank)
        filled._check_rank(rank, f"boundary.rank = {rank}", dim)
        if self.is_constrained:
            return filled._resolved_constrained(len(split[-1]))
        return filled._resolved_projected(dim, len(split) - 1)

    def _resolved_projected(self, dim: int, cuts: int) -> "BoundaryConfig":
        for place, rank in enumerate(self._ranks(cuts).values()):
            self._check_rank(rank, f'boundary.ranks[{place}] = "{self.ranks[place]}"', dim)
        if self.ranks and self.basis_update_every:
            raise ConfigError(
                "boundary.basis_update_every cannot work with boundary.ranks, which gives each cut "
                "another part of the basis: leave one of them out"
            )
        if self.free_layers > 0:
            raise ConfigError(
                "boundary.free_layers has no meaning with projected: all its weights are free"
            )
        if self.learn and self.basis == "shared":
            raise ConfigError(
                'boundary.learn = true needs boundary.basis = "per-cut" or "calibrated": a shared '
                "basis is moved by boundary.basis_update_every instead"
            )
        if self.basis_update_every and self.basis != "shared":
            raise ConfigError(
                f'boundary.basis_update_every cannot move boundary.basis = "{self.basis}": the '
                "whole gradient is known at the last cut only, so the other bases could not "
                "follow; use boundary.learn = true, or the shared basis"
            )
        if self.own_tables and self.is_calibrated:
            raise ConfigError(
                'boundary.anchor = "per-stage" cannot work with boundary.basis = "calibrated", '
                "whose tables start from what crosses in a model that takes nothing off: use "
                '"trainable"'
            )
        if self.shares_embedding:
            raise ConfigError(
                'boundary.anchor = "embedding" cannot work with boundary.mode = "projected", whose '
                'weights write outside the basis too: use subspace, or anchor = "per-stage"'
            )
        anchor = "none" if self.anchor == "auto" else self.anchor
        table = (self.table or dim) if self.has_tables else 0
        if table > dim:
            raise ConfigError(
                f"boundary.table = {self.table} must lie between 1 and model.dim = {dim}: a wider "
                "table holds nothing more"
            )
        return dataclasses.replace(self, anchor=anchor, table=table, free_layers=0)

    def rank_at(self, cut: int) -> int:
        """Coordinates that cross a cut; 0 where all channels do."""
        return self._ranks().get(cut, self.rank)

    @property
    def widest(self) -> int:
        """The largest rank of any cut."""
        return max(self.rank, *self._ranks().values(), 0)

    def _ranks(self, cuts: int | None = None) -> dict[int, int]:
        """What `ranks` says, in its order."""
        found = by_cut(self.ranks, "boundary.ranks", "2: 96", cuts)
        for place, text in enumerate(found.values()):
            if not re.fullmatch(r"\d{1,9}", text):
                raise ConfigError(
                    f'boundary.ranks[{place}] = "{self.ranks[place]}" must look like "2: 96"'
                )
        return {cut: int(text) for cut, text in found.items()}

    def _check_rank(self, rank: int, where: str, dim: int) -> None:
        if not 0 < rank < dim + self.has_tables:  # the full width with tables: a control
            most = f"model.dim = {dim}" if self.has_tables else f"model.dim - 1 = {dim - 1}"
            raise ConfigError(
                f"{where} must lie between 1 and {most} with boundary.mode = "
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
        if self.learn or self.basis_update_every or self.anchor not in ("auto", "none"):
            raise ConfigError(
                "boundary.learn, basis_update_every and anchor have no meaning with "
                'boundary.mode = "dense", which has no basis: leave them at false, 0 and "auto"'
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
        if self.learn or self.basis != "shared":
            raise ConfigError(
                f'boundary.mode = "{self.mode}" holds the weights of all stages in one basis: '
                "basis_update_every can move it, but it cannot be learned or chosen per cut"
            )
        free = last_stage if self.free_layers == -1 else self.free_layers
        if not 0 <= free <= last_stage:
            raise ConfigError(
                f"boundary.free_layers = {free}, but only the {last_stage} blocks of the last "
                "stage may be free: what a block below the last cut writes must lie in the subspace"
            )
        anchor = EMBEDDING if self.shares_embedding else "fixed"
        return dataclasses.replace(self, anchor=anchor, free_layers=free)
