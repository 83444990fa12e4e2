"""Real ranks for the tests: one process loads torch, then becomes as many as are asked for.

    python ranks.py cases.json PROGRAM

Each case is a run on four ranks: its settings, its schedule and the number of replicas. All ranks
go through the cases one after the other, in the environment that torchrun would give them. A run
leaves its losses in results.json, and the shards of a checkpoint that nobody completes. Then two
ranks run PROGRAM, a script.
"""

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import torch.distributed as dist

from thinwire.cluster.engine import Rank, World
from thinwire.cluster.grid import Seat, lay_out
from thinwire.data import Corpus
from thinwire.settings import Settings

RANKS = 4


def go_through(cases):
    """All cases, as one rank."""
    seat = Seat.read()
    for case in cases:
        settings = Settings.from_plain(case["settings"])
        folder = Path(settings.run.out) / settings.run.name
        grid = lay_out(settings, seat.world, case["schedule"], case["replicas"])
        world = World(seat, grid, settings.run.device)
        trainer = Rank(settings, world, Corpus.open(Path(case["data"])), folder, None)
        valid, losses = [evaluated(trainer)], []
        for _ in range(settings.train.steps):
            _, [(_, report), *_] = trainer.train_step()
            losses.append(trainer.loss)
        valid.append(evaluated(trainer))
        trainer.save()
        trainer.stop_requested = seat.rank == 1
        assert trainer.evaluate() == [], "all ranks leave it if one is asked to"
        if world.leads:
            results = {"losses": losses, "valid": valid, "sent": report.meters["cut-0"]["sent"]}
            (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()


def evaluated(trainer):
    """The loss of a validation, which the rank of the last stage knows, on every rank."""
    said, world = [report.loss for _, report in trainer.evaluate()], trainer.world
    return json.loads(world.share(json.dumps(said).encode(), world.grid.stages - 1))[0]


def become(ranks, work):
    """Fork the ranks and wait for them; returns how many failed."""
    here = "127.0.0.1"  # where they meet, as torchrun does it: a port let go of may be taken
    store = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR=here, MASTER_PORT=str(store.port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
            try:
                work()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def main():
    """The exit code says how many ranks failed."""
    cases, program = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    failed = become(RANKS, lambda: go_through(cases))
    sys.exit(failed or become(2, lambda: runpy.run_path(program)))


if __name__ == "__main__":
    main()
