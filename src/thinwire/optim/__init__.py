"""Optimizers and learning-rate schedules (floor 2)."""

from thinwire.optim.build import StageOptimizer
from thinwire.optim.config import OptimConfig, check_optim, learning_rate

__all__ = ["OptimConfig", "StageOptimizer", "check_optim", "learning_rate"]
