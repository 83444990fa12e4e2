"""All ranks of a run as one of them sees them: who it is, and what all of them agree on.

Carriers travel in a group for each pipeline, over NCCL where every rank has a GPU of its own; all
else as tensors of numbers and bytes over gloo. Nothing is pickled.
"""

import secrets
import time
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from thinwire.cluster.grid import Grid, Seat
from thinwire.cluster.pipelining import CARRIER, Crossing
from thinwire.codec import Leg
from thinwire.engine.build import choose_device


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
            # torchrun's store outlives a restart and still has the addresses of dead processes:
            # all ranks meet by names of this attempt alone.
            store, _, _ = next(dist.rendezvous("env://"))
            own = dist.PrefixStore(_name_of_attempt(store, seat), store)
            dist.init_process_group(self.backend, store=own, rank=seat.rank, world_size=seat.world)
        mesh = init_device_mesh(
            self.carriers.type, (grid.replicas, grid.ranks), mesh_dim_names=("replica", "rank")
        )
        self.replica, self.place = divmod(seat.rank, grid.ranks)
        self.pipeline = mesh["rank"].get_group()
        self.twins = mesh["replica"].get_group()
        # One rank may prepare data for hours while the others wait.
        self._all = dist.new_group(backend="gloo", timeout=timedelta(hours=24))

    def __str__(self) -> str:
        grid = self.grid
        copies = f", {grid.replicas} replicas" if grid.replicas > 1 else ""
        where = f"{grid.stages} stages on {grid.ranks} ranks{copies}"
        return f"{where}, schedule {grid.schedule} of PyTorch, {self.backend}"

    @property
    def leads(self) -> bool:
        """Whether this rank keeps the record of the run."""
        return self.seat.rank == 0

    def close(self) -> None:
        """Leave in good order."""
        self.wait_for_all()
        dist.destroy_process_group()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, entry by entry; exact where one rank alone has an entry."""
        totals = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(totals, group=self._all)
        return totals.tolist()

    def gather(self, said: bytes) -> list[bytes]:
        """What every rank says, in their order, on every rank."""
        mine = [len(said) * (rank == self.seat.rank) for rank in range(self.seat.world)]
        sizes = [int(size) for size in self.sum(mine)]
        rooms = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
        dist.all_gather(rooms, _as_tensor(said.ljust(max(sizes))), group=self._all)
        return [room.numpy().tobytes()[:size] for room, size in zip(rooms, sizes, strict=True)]

    def share(self, said: bytes, stage: int = 0) -> bytes:
        """What the rank that holds a stage, in the first pipeline, says: on every rank."""
        source = self.grid.holders[stage]
        is_own = self.seat.rank == source
        size = int(self.sum([len(said) * is_own])[0])
        room = _as_tensor(said) if is_own else torch.empty(size, dtype=torch.uint8)
        dist.broadcast(room, source, group=self._all)
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

    def holds(self, stage: int) -> bool:
        """Whether this rank holds a stage."""
        return self.grid.holders[stage] == self.place

    def send(self, carrier: Tensor, crossing: Crossing, stage: int) -> None:
        """A carrier to the rank of the stage above, outside a training step."""
        part = carrier[: crossing.floats[Leg.FORWARD]]
        dist.send(part, group=self.pipeline, group_dst=self.grid.holders[stage])

    def receive(self, crossing: Crossing, stage: int) -> Tensor:
        """A carrier from the rank of the stage below, outside a training step."""
        room = torch.empty(crossing.floats[Leg.FORWARD], dtype=CARRIER, device=self.carriers)
        dist.recv(room, group=self.pipeline, group_src=self.grid.holders[stage])
        return room


def _as_tensor(said: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(said, dtype=np.uint8).copy())


def _name_of_attempt(store: dist.Store, seat: Seat) -> str:
    """A name that the living ranks agree on, in a store that also has what dead ones wrote. (Each
    machine's torchrun counts only the restarts that it saw itself.)
    """
    mine = secrets.token_hex(8)
    if seat.rank:
        store.set(f"asks-{seat.rank}", mine)
        name = store.get(f"answer-{mine}").decode()
        store.set(f"{name}-{seat.rank}", "")
        return name
    others = range(1, seat.world)
    while not all(store.check([f"{mine}-{rank}"]) for rank in others):
        for rank in others:
            store.set(f"answer-{store.get(f'asks-{rank}').decode()}", mine)
        time.sleep(0.02)
    return mine
