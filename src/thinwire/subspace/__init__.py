"""The subspace method's mathematics as plain tensor functions (floor 1)."""

from thinwire.subspace.constraint import Constraint, Held
from thinwire.subspace.grassmann import (
    BasisMove,
    captured_energy,
    grassmann_step,
    principal_angles,
    retract,
    riemannian_gradient,
)
from thinwire.subspace.projection import drift, orthonormality_error, project
from thinwire.subspace.random import fixed_table, random_basis
from thinwire.subspace.space import Space

__all__ = [
    "BasisMove",
    "Constraint",
    "Held",
    "Space",
    "captured_energy",
    "drift",
    "fixed_table",
    "grassmann_step",
    "orthonormality_error",
    "principal_angles",
    "project",
    "random_basis",
    "retract",
    "riemannian_gradient",
]
