"""What torchrun tells a process of itself, and which rank holds which stages: pipelines of equal
shape, one beside the other. Without torch, so that errors come at once.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.settings import Settings

SINGLE = ("gpipe", "1f1b")
"""Schedules with one stage on each rank, as pipeline.schedule names them."""
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}
"""All of them, with PyTorch's own names; the last three have several stages on each rank."""


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


@dataclass(frozen=True)
class Grid:
    """`replicas` pipelines of `ranks` ranks each; a rank's number counts along its pipeline."""

    schedule: str
    stages: int
    replicas: int
    ranks: int
    microbatches: int  # of one replica in a step

    @property
    def holders(self) -> list[int]:
        """The rank, within its pipeline, that holds each stage."""
        if self.schedule != "zbv":
            return [stage % self.ranks for stage in range(self.stages)]
        return [min(stage, self.stages - 1 - stage) for stage in range(self.stages)]

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank of a pipeline holds, in order."""
        return [stage for stage, holder in enumerate(self.holders) if holder == rank]

    def numbers(self, replica: int) -> range:
        """The microbatches of a step that a replica has."""
        return range(replica * self.microbatches, (replica + 1) * self.microbatches)


def lay_out(settings: Settings, world: int, schedule: str, replicas: int) -> Grid:
    """The grid of a run on `world` processes; ConfigError says why there is none.

    Without a number of replicas there are as many as fit, where a rank holds one stage, and else
    one.
    """
    schedule = schedule or settings.pipeline.schedule
    stages, total = settings.pipeline.stages, settings.pipeline.microbatches
    ranks = stages if schedule in SINGLE else world // (replicas or 1)
    replicas = replicas or max(1, world // max(1, ranks))
    _check_world(world, schedule, stages, ranks, replicas)
    if total % replicas:
        raise ConfigError(
            f"pipeline.microbatches = {total} do not divide over {replicas} replicas: every "
            "replica takes as many microbatches of a step. Change one of the two numbers"
        )
    grid = Grid(schedule, stages, replicas, ranks, total // replicas)
    _check_microbatches(grid)
    _check_settings(settings, grid)
    return grid


def _check_world(world: int, schedule: str, stages: int, ranks: int, replicas: int) -> None:
    if schedule in SINGLE and world != stages * replicas:
        raise ConfigError(
            f"torchrun started {world} processes, but pipeline.stages = {stages} and {schedule} "
            f"has one stage on each: start {stages} (torchrun --nproc-per-node {stages} on one "
            f"machine), or a multiple of {stages} for replicas"
        )
    if schedule in SINGLE:
        return
    if world != ranks * replicas:
        raise ConfigError(
            f"torchrun started {world} processes, which do not divide into {replicas} replicas"
        )
    chunks = stages // ranks
    if stages % ranks or chunks < 2 or (schedule == "zbv" and chunks != 2):
        wanted = "exactly two stages" if schedule == "zbv" else "two or more stages, all as many,"
        raise ConfigError(
            f"{schedule} has {wanted} on each rank, but pipeline.stages = {stages} and each "
            f"pipeline has {ranks} ranks: set pipeline.stages to {2 * ranks}, or start "
            f"{max(1, stages // 2) * replicas} processes"
        )


def _check_microbatches(grid: Grid) -> None:
    """What PyTorch's schedules ask for."""
    count, each = grid.microbatches, "" if grid.replicas == 1 else " of each replica"
    if grid.schedule == "1f1b" and count < grid.ranks:
        raise ConfigError(
            f"1f1b needs at least one microbatch{each} for each stage: {grid.stages} stages, but "
            f"{count} microbatches. Raise pipeline.microbatches to {grid.stages * grid.replicas}, "
            "or use gpipe"
        )
    rounds = max(1, count // grid.ranks)
    if grid.schedule in ("interleaved", "zero-bubble") and count % rounds:
        fitting = grid.ranks * max(1, count // grid.ranks) * grid.replicas
        raise ConfigError(
            f"{grid.schedule} cannot order {count} microbatches{each} on {grid.ranks} ranks: set "
            f"pipeline.microbatches to a multiple of the ranks, such as {fitting}"
        )


def _check_settings(settings: Settings, grid: Grid) -> None:
    if settings.boundary.shares_embedding:
        raise ConfigError(
            'boundary.anchor = "embedding" does not work on a cluster yet: rows of the embedding '
            'would have to cross between its ranks. Use "fixed" (with boundary.ratio = 12.5 it was '
            "measured), or train with thinwire train or join"
        )
    if settings.pipeline.delay:
        raise ConfigError(
            f"pipeline.delay = {settings.pipeline.delay} does not work on a cluster: PyTorch's "
            "schedules end a step before the next begins. Set it to 0, or train with thinwire "
            "train or join"
        )
    if grid.schedule in ("zero-bubble", "zbv"):
        for key, is_on in (
            ("run.compile", settings.run.compile),
            ("pipeline.recompute", settings.pipeline.recompute),
        ):
            if is_on:
                raise ConfigError(
                    f"{key} = true does not work with {grid.schedule}, which computes the "
                    "gradients of inputs and of weights apart: set it to false, or use "
                    "interleaved"
                )
        if settings.boundary.own_tables:
            raise ConfigError(
                f'boundary.anchor = "per-stage" does not work with {grid.schedule}: PyTorch would '
                "compute the gradient of a table that is used at both ends of a stage from what "
                "it has freed. Use interleaved"
            )
    if grid.replicas > 1 and settings.boundary.basis_update_every:
        raise ConfigError(
            "boundary.basis_update_every does not work with replicas: a replica sees the "
            "gradients of its own microbatches alone. Set it to 0, or start one replica"
        )
