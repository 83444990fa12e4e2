"""Optimizers and learning-rate schedules (floor 2)."""

from typing import TYPE_CHECKING

from thinwire.lazy import on_first_use
from thinwire.optim.config import OptimConfig, learning_rate, rate_change, share_changes

if TYPE_CHECKING:
    from thinwire.optim.build import StageOptimizer, state_like
    from thinwire.optim.muon import Muon
    from thinwire.optim.rows import RowAdamW
    from thinwire.optim.subspace import SubspaceAdamW

__all__ = [
    "Muon",
    "OptimConfig",
    "RowAdamW",
    "StageOptimizer",
    "SubspaceAdamW",
    "learning_rate",
    "rate_change",
    "share_changes",
    "state_like",
]

__getattr__ = on_first_use(
    __name__,
    {
        "build": ("StageOptimizer", "state_like"),
        "muon": ("Muon",),
        "rows": ("RowAdamW",),
        "subspace": ("SubspaceAdamW",),
    },
)
