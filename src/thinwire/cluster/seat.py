"""What torchrun tells a process of itself; without torch, so that errors come at once."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Seat:
    """A process among all that torchrun started, and among those of its machine."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    restarts: int

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> "Seat":
        """From the environment; ConfigError when it was not torchrun that started this."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if any(name not in environment for name in names):
            raise ConfigError(
                "this is for torchrun, which starts one process for each stage: torchrun "
                "--nproc-per-node 4 -m thinwire.cluster run.toml. For a run without it: thinwire "
                "train run.toml"
            )
        restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
        rank, world, local_rank, local_world = (int(environment[name]) for name in names)
        return cls(rank, world, local_rank, local_world, restarts)
