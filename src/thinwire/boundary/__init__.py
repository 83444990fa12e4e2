"""Boundaries: what crosses the cut, inside autograd (floor 2)."""

from typing import TYPE_CHECKING

from thinwire.boundary.config import BoundaryConfig
from thinwire.lazy import on_first_use

if TYPE_CHECKING:
    from thinwire.boundary.base import Boundary
    from thinwire.boundary.dense import DenseBoundary
    from thinwire.boundary.narrow import EmbeddedBoundary, ProjectedBoundary, SubspaceBoundary

__all__ = [
    "Boundary",
    "BoundaryConfig",
    "DenseBoundary",
    "EmbeddedBoundary",
    "ProjectedBoundary",
    "SubspaceBoundary",
]

__getattr__ = on_first_use(
    __name__,
    {
        "base": ("Boundary",),
        "dense": ("DenseBoundary",),
        "narrow": ("EmbeddedBoundary", "ProjectedBoundary", "SubspaceBoundary"),
    },
)
