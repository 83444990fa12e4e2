"""The engine: a stage at work, and what it leaves."""

from typing import TYPE_CHECKING

from thinwire.lazy import on_first_use

if TYPE_CHECKING:
    from thinwire.engine.checkpoint import Checkpoint, list_checkpoints
    from thinwire.engine.worker import Assignment, Worker

__all__ = ["Assignment", "Checkpoint", "Worker", "list_checkpoints"]

__getattr__ = on_first_use(
    __name__,
    {"checkpoint": ("Checkpoint", "list_checkpoints"), "worker": ("Assignment", "Worker")},
)
