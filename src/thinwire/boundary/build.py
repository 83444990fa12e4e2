"""The boundary that a config names."""

from thinwire.boundary.base import Boundary
from thinwire.boundary.config import BoundaryConfig
from thinwire.boundary.dense import DenseBoundary
from thinwire.boundary.narrow import ProjectedBoundary, SubspaceBoundary
from thinwire.subspace import Space


def build_boundary(
    config: BoundaryConfig, dim: int, vocab: int, space: Space | None, receives: bool
) -> Boundary:
    """One end of the boundary that a resolved config names; `space` is None for dense."""
    if space is None:
        return DenseBoundary(dim)
    if config.is_constrained:
        return SubspaceBoundary(space)
    table = (vocab, config.table) if receives and config.table else None
    return ProjectedBoundary(space, config.anchor == "fixed", config.learn, table)
