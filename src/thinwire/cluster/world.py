"""All ranks of a run as one of them sees them: who it is, and what all of them agree on.

Carriers travel in a group for each pipeline, over NCCL where every rank has a GPU of its own. What
ranks tell each other beside that is small, and travels as plain tensors of numbers and bytes over
gloo. Nothing is pickled.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from thinwire.cluster.carry import CARRIER, Crossing
from thinwire.cluster.grid import Grid
from thinwire.codec import Leg
from thinwire.engine.build import choose_device
from thinwire.errors import ConfigError

_SIZE_BYTES = 8


@dataclass(frozen=True)
class Seat:
    """What torchrun tells a process of itself."""

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


class World:
    """The ranks of a run, joined."""

    def __init__(self, seat: Seat, grid: Grid, wanted_device: str):
        self.seat = seat
        self.grid = grid
        self.device = choose_device(wanted_device, seat.local_rank)
        on_gpu = self.device.type == "cuda" and seat.local_world <= torch.cuda.device_count()
        self.backend = "nccl" if on_gpu else "gloo"
        self.carriers = self.device if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        if not dist.is_initialized():
            dist.init_process_group(self.backend)
        mesh = init_device_mesh(
            self.carriers.type, (grid.replicas, grid.ranks), mesh_dim_names=("replica", "rank")
        )
        self.replica, self.place = divmod(seat.rank, grid.ranks)
        self.pipeline = mesh["rank"].get_group()
        self.twins = mesh["replica"].get_group()
        self._all = dist.new_group(backend="gloo")

    @property
    def leads(self) -> bool:
        """Whether this rank keeps the record of the run."""
        return self.seat.rank == 0

    def close(self) -> None:
        """Leave in good order."""
        dist.barrier(group=self._all)
        dist.destroy_process_group()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, entry by entry; exact where one rank alone has an entry."""
        totals = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(totals, group=self._all)
        return totals.tolist()

    def gather(self, said: bytes) -> list[bytes]:
        """What every rank says, in their order, on the rank that leads; elsewhere nothing."""
        framed = len(said).to_bytes(_SIZE_BYTES, "little") + said
        longest = torch.tensor(len(framed))
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self._all)
        room = torch.zeros(int(longest), dtype=torch.uint8)
        room[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        rooms = [torch.empty_like(room) for _ in range(self.seat.world)] if self.leads else None
        dist.gather(room, rooms, 0, group=self._all)
        texts = [room.numpy().tobytes() for room in rooms or []]
        return [
            text[_SIZE_BYTES : _SIZE_BYTES + int.from_bytes(text[:_SIZE_BYTES], "little")]
            for text in texts
        ]

    def share(self, said: bytes) -> bytes:
        """What the rank that leads says, on every rank."""
        size = torch.tensor([len(said)])
        dist.broadcast(size, 0, group=self._all)
        room = torch.zeros(int(size), dtype=torch.uint8)
        if self.leads and said:
            room.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
        dist.broadcast(room, 0, group=self._all)
        return room.numpy().tobytes()

    def wait_for_all(self) -> None:
        """Until every rank has come to this point."""
        dist.barrier(group=self._all)

    def add_twins(self, tensors: Sequence[Tensor]) -> None:
        """Add up, in place, what the replicas of this rank have in its stead."""
        if self.grid.replicas == 1:
            return
        works = [dist.all_reduce(t, group=self.twins, async_op=True) for t in tensors]
        for work in works:
            work.wait()

    def exchange(
        self, out: Mapping[int, Sequence[Tensor]], into: Mapping[int, Sequence[Tensor]], up: bool
    ) -> dict[int, list[Tensor]]:
        """Send tensors of stages to the stage above or below each; returns those that arrive.

        `out` has what leaves, by the stage that sends it; `into` what tensors that arrive are like,
        by the stage that receives them.
        """
        holders, step = self.grid.holders, 1 if up else -1
        arrived = {
            stage: [torch.empty_like(tensor, device="cpu") for tensor in like]
            for stage, like in into.items()
        }
        works = []
        for stage, tensors in out.items():
            to = stage + step
            for number, tensor in enumerate(tensors):
                value = tensor.detach().cpu().contiguous()
                if self.holds(to):
                    arrived[to][number].copy_(value)
                else:
                    works.append(dist.isend(value, self._number_of(holders[to]), self._all, stage))
        for stage, tensors in arrived.items():
            source = stage - step
            for tensor in () if self.holds(source) else tensors:
                number = self._number_of(holders[source])
                works.append(dist.irecv(tensor, number, self._all, source))
        for work in works:
            assert work is not None, "all ranks are in this group"
            work.wait()
        return {
            stage: [t.to(like.device) for t, like in zip(arrived[stage], into[stage], strict=True)]
            for stage in into
        }

    def holds(self, stage: int) -> bool:
        """Whether this rank holds a stage."""
        return self.grid.holders[stage] == self.place

    def send(self, carrier: Tensor, crossing: Crossing, stage: int) -> None:
        """A carrier to the rank of the stage above, outside a training step."""
        part = carrier[: crossing.floats(Leg.FORWARD)]
        dist.send(part, group=self.pipeline, group_dst=self.grid.holders[stage])

    def receive(self, crossing: Crossing, stage: int) -> Tensor:
        """A carrier from the rank of the stage below, outside a training step."""
        room = torch.empty(crossing.floats(Leg.FORWARD), dtype=CARRIER, device=self.carriers)
        dist.recv(room, group=self.pipeline, group_src=self.grid.holders[stage])
        return room

    def spread(self, tensor: Tensor, stage: int) -> Tensor:
        """What the holder of a stage has, on every rank of its pipeline."""
        room = tensor.detach().cpu().contiguous().clone()
        # Over all ranks, one pipeline: replicas do not share such things.
        dist.broadcast(room, self._number_of(self.grid.holders[stage]), group=self._all)
        return room.to(tensor.device)

    def _number_of(self, place: int) -> int:
        return self.replica * self.grid.ranks + place
