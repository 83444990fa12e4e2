"""Boundaries: what crosses the cut, inside autograd (floor 2)."""

from typing import TYPE_CHECKING

from thinwire.boundary.config import BoundaryConfig
from thinwire.lazy import on_first_use

if TYPE_CHECKING:
    from thinwire.boundary.boundary import (
        Boundary,
        DenseBoundary,
        EmbeddedBoundary,
        ProjectedBoundary,
        SubspaceBoundary,
    )

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
    {"boundary": tuple(name for name in __all__ if name != "BoundaryConfig")},
)
