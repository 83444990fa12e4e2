"""Optimizers and learning-rate schedules (floor 2)."""

from thinwire.optim.build import StageOptimizer
from thinwire.optim.config import OptimConfig, check_optim, learning_rate, rate_change
from thinwire.optim.subspace import SubspaceAdamW

__all__ = [
    "OptimConfig",
    "StageOptimizer",
    "SubspaceAdamW",
    "check_optim",
    "learning_rate",
    "rate_change",
]
