"""What it costs to start the stages of a run: each process by itself, against forked from one.

Stages import what a training stage imports, and leave. Wall time and CPU time of both ways, in
turn on one machine; the first round is not counted, for files are not in memory yet.
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path

from thinwire.run.order import Order
from thinwire.run.spawn import spawn_all
from thinwire.wire import Identity, Routes

STAGE = """
import os
import thinwire.run.peer

def main():
    os._exit(0)

if __name__ == "__main__":
    main()
"""


def start(stages: int, fork: bool, folder: Path) -> tuple[float, float]:
    """Seconds until all stages have imported and left, and the CPU seconds they took."""
    nowhere = Routes("", "127.0.0.1:1")
    orders = [Order(stage, nowhere, Identity.create(f"stage-{stage}")) for stage in range(stages)]
    logs = [folder / f"{stage}.log" for stage in range(stages)]
    before, begun = _cpu_seconds(), time.perf_counter()
    processes = spawn_all(orders, logs, "imports_a_stage", fork)
    codes = [process.wait() for process in processes]
    wall = time.perf_counter() - begun
    if any(codes):
        raise SystemExit(f"stages ended with {codes}:\n{logs[0].read_text()}")
    while _cpu_seconds() == before:  # the process that has forked them has not left yet
        time.sleep(0.01)
    return wall, _cpu_seconds() - before


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Entry point of `python lab/tools/start_cost.py`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=4, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "imports_a_stage.py").write_text(STAGE)
        os.environ["PYTHONPATH"] = place
        found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for number in range(options.rounds + 1):
            for fork, times in found.items():
                taken = start(options.stages, fork, folder)
                if number > 0:
                    times.append(taken)
    print(f"{options.stages} stages, medians of {options.rounds} rounds")
    print("| | seconds until all have imported | CPU seconds |\n|---|---|---|")
    medians = {
        fork: [statistics.median(column) for column in zip(*times, strict=True)]
        for fork, times in found.items()
    }
    for fork, name in ((False, "each by itself"), (True, "forked from one")):
        print(f"| {name} | {medians[fork][0]:.2f} | {medians[fork][1]:.2f} |")
    ratios = [alone / forked for alone, forked in zip(medians[False], medians[True], strict=True)]
    print(f"| ratio | {ratios[0]:.2f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main()
