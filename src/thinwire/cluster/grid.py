"""What torchrun tells a process of itself, and which rank holds which stages: pipelines of equal
shape, one beside the other. Without torch, so that errors come at once.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinwire.errors import ConfigError
from thinwire.settings import Settings

if TYPE_CHECKING:
    from thinwire.codec import Codec

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
    def read(cls) -> "Seat":
        """From the environment; ConfigError when it was not torchrun that started this."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if any(name not in os.environ for name in names):
            raise ConfigError(
                "this is for torchrun, which starts one process for each stage: torchrun "
                "--nproc-per-node 4 -m thinwire.cluster run.toml. For a run without it: thinwire "
                "train run.toml"
            )
        rank, world, local_rank, local_world = (int(os.environ[name]) for name in names)
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
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


def lay_out(settings: Settings, world: int, schedule: str, replicas: int) -> Grid:
    """The grid of a run on `world` processes; ConfigError says why there is none. With `replicas` 0
    there are as many as fit, or one where a rank holds several stages.
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
    # What PyTorch's schedules ask for.
    count, least = total // replicas, ranks if schedule == "1f1b" else 1
    is_in_rounds = schedule in ("interleaved", "zero-bubble")
    if count < least or (is_in_rounds and count % max(1, count // ranks)):
        fitting = ranks * max(1, count // ranks) * replicas
        raise ConfigError(
            f"{schedule} cannot order {count} microbatches of each replica on {ranks} ranks: set "
            f"pipeline.microbatches to a multiple of the ranks, such as {fitting}, or use gpipe"
        )
    grid = Grid(schedule, stages, replicas, ranks, count)
    _check_settings(settings, grid)
    return grid


def _check_world(world: int, schedule: str, stages: int, ranks: int, replicas: int) -> None:
    if world != ranks * replicas:
        raise ConfigError(
            f"torchrun started {world} processes, but pipeline.stages = {stages} and {schedule} "
            f"has one stage on each: start {stages}, or a multiple of {stages} for replicas"
            if schedule in SINGLE
            else f"torchrun started {world} processes, which do not divide into {replicas} replicas"
        )
    chunks = stages // ranks
    is_right = chunks == 2 if schedule == "zbv" else chunks > 1
    if schedule not in SINGLE and (stages % ranks or not is_right):
        wanted = "exactly two stages" if schedule == "zbv" else "two or more stages, all as many,"
        raise ConfigError(
            f"{schedule} has {wanted} on each rank, but pipeline.stages = {stages} and each "
            f"pipeline has {ranks} ranks: set pipeline.stages to {2 * ranks}, or start "
            f"{max(1, stages // 2) * replicas} processes"
        )


def _check_settings(settings: Settings, grid: Grid) -> None:
    """Refuse what works with our own engine alone, or not with every schedule."""
    boundary, is_split = settings.boundary, grid.schedule in ("zero-bubble", "zbv")
    delay, moves = settings.pipeline.delay, boundary.basis_update_every and grid.replicas > 1
    shared = 'on a cluster yet. Use "fixed", or train with thinwire train or join'
    late = "on a cluster. Set it to 0, or train with thinwire train or join"
    apart = f"with {grid.schedule}, which parts gradients of inputs and weights: use interleaved"
    alone = "with replicas, which see their own gradients alone: start one replica"
    for is_on, what, why in (
        (boundary.shares_embedding, 'boundary.anchor = "embedding"', shared),
        (delay, f"pipeline.delay = {delay}", late),
        (settings.run.compile and is_split, "run.compile = true", apart),
        (settings.pipeline.recompute and is_split, "pipeline.recompute = true", apart),
        (boundary.own_tables and is_split, 'boundary.anchor = "per-stage"', apart),
        (moves, "boundary.basis_update_every", alone),
    ):
        if is_on:
            raise ConfigError(f"{what} does not work {why}")
    from thinwire.engine.cut import codecs_of  # slow to import

    for codecs in codecs_of(settings).values():
        for codec in codecs.values():
            check_size(codec)
            if grid.replicas > 1 and codec.remembers:
                raise ConfigError(
                    f"{codec.name} remembers what crossed, and does not work with replicas: "
                    "each would remember its own microbatches. Choose a codec without memory, or "
                    "start one replica"
                )


def check_size(codec: "Codec") -> None:
    """Refuse a codec whose payloads differ in size in training."""
    if codec.content_decides_size or codec.remembers_examples:
        raise ConfigError(
            f"{codec.name} makes payloads of different sizes, but a stage of PyTorch's "
            "pipelining always receives the same number of bytes: padded to the largest "
            "they would save nothing. Choose a codec without +zstd and +aqsgd, or train "
            "with thinwire train"
        )
