"""The engine: runner, worker, peer, host and checkpoints (floor 4)."""

from typing import TYPE_CHECKING

from thinwire.lazy import on_first_use

if TYPE_CHECKING:
    from thinwire.engine.checkpoint import Checkpoint, list_checkpoints
    from thinwire.engine.host import Host
    from thinwire.engine.settings import RunConfig, Settings, TrainConfig, apply_override
    from thinwire.engine.worker import Assignment, Worker

__all__ = [
    "Assignment",
    "Checkpoint",
    "Host",
    "RunConfig",
    "Settings",
    "TrainConfig",
    "Worker",
    "apply_override",
    "list_checkpoints",
]

__getattr__ = on_first_use(
    __name__,
    {
        "checkpoint": ("Checkpoint", "list_checkpoints"),
        "host": ("Host",),
        "settings": ("RunConfig", "Settings", "TrainConfig", "apply_override"),
        "worker": ("Assignment", "Worker"),
    },
)
