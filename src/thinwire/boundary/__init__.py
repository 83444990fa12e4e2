"""Boundaries: what crosses the cut, inside autograd (floor 2)."""

from thinwire.boundary.base import Boundary, BoundaryConfig, check_boundary
from thinwire.boundary.dense import DenseBoundary


def build_boundary(config: BoundaryConfig, dim: int) -> Boundary:
    """The boundary that the config names, for a model of width `dim`."""
    check_boundary(config, dim)
    return DenseBoundary(dim)


__all__ = ["Boundary", "BoundaryConfig", "DenseBoundary", "build_boundary", "check_boundary"]
