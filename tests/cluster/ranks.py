"""Real ranks for the tests: one process loads torch, then becomes as many as are asked for.

    python ranks.py cases.json 4

Each case is a run: its settings, its schedule and the number of replicas. All ranks go through the
cases one after the other, in the environment that torchrun would give them. A run leaves its losses
in results.json, and the shards of a checkpoint that nobody completes.
"""

import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.cluster.grid import lay_out
from thinwire.cluster.seat import Seat
from thinwire.cluster.trainer import Trainer
from thinwire.cluster.world import World
from thinwire.settings import Settings


def go_through(cases: list[dict[str, Any]], rank: int, ranks: int) -> None:
    """All cases, as one rank."""
    seat = Seat(rank, ranks, rank, ranks, 0)
    for case in cases:
        settings = Settings.from_plain(case["settings"])
        folder = Path(settings.run.out) / settings.run.name
        grid = lay_out(settings, ranks, case["schedule"], case["replicas"])
        world = World(seat, grid, settings.run.device)
        data = settings.model.task.open(Path(case["data"]))
        trainer = Trainer(settings, world, data, folder, None)
        valid = [trainer.evaluate().loss]
        steps = [trainer.train_step() for _ in range(settings.train.steps)]
        valid.append(trainer.evaluate().loss)
        trainer.save()
        if rank == 0:
            losses = [loss for _, loss, _ in steps]
            sent = [step[0].meters for _, _, step in steps][-1:]
            results = {"losses": losses, "valid": valid, "sent": sent}
            (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()


def main() -> None:
    """Fork the ranks and wait for them; the exit code says how many failed."""
    cases, ranks = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    os.environ.update(environment)
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
            try:
                go_through(cases, rank, ranks)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))


if __name__ == "__main__":
    main()
