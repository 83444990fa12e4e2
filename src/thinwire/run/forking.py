"""A process that imports what stages need once, and forks a stage for each order.

Importing torch takes seconds of a core. Here one process does it for all stages of a machine, and
does nothing else before it forks: no thread of ours runs. It then waits for its stages, says which
process each one is and how it ended, and leaves with the last. Its arguments are the module of a
stage, the descriptor to say that on and, of each stage, two descriptors: of what it reads its order
from, and of its log. See `spawn.spawn_all`, which starts it.
"""

import gc

from thinwire.run.bond import die_with_coordinator

if __name__ == "__main__":
    die_with_coordinator()  # before the imports, which take seconds: it may be stopped meanwhile
    gc.disable()  # imports make no garbage, and looking for it takes a fifth of their time

import importlib
import itertools
import os
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple, NoReturn


class Ends(NamedTuple):
    """The descriptors of one stage."""

    order: int
    log: int


def _become_stage(
    ends: Ends, descriptors: list[int], parent: int, live: Callable[[], None]
) -> NoReturn:
    """Be a stage from here on, as if this process had been started for it alone."""
    try:
        die_with_coordinator()
        if os.getppid() == parent:  # it could have died in between
            os.dup2(ends.order, 0)
            os.dup2(ends.log, 1)
            os.dup2(ends.log, 2)
            for descriptor in descriptors:
                os.close(descriptor)
            live()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def main(arguments: list[str]) -> None:
    """Entry point of `python -m thinwire.run.forking MODULE REPORT ORDER,LOG...`."""
    module, report, *pairs = arguments
    stages = [Ends(*map(int, pair.split(","))) for pair in pairs]
    try:
        live = importlib.import_module(module).main
    except BaseException:
        for ends in stages:
            os.write(ends.log, traceback.format_exc().encode())
        sys.exit(1)
    gc.freeze()  # stages share these pages for as long as nobody writes to them
    parent, running, said = os.getpid(), {}, os.fdopen(int(report), "w")
    for number, ends in enumerate(stages):
        process = os.fork()
        if process == 0:
            _become_stage(ends, [said.fileno(), *itertools.chain(*stages)], parent, live)
        running[process] = number
        print(f"{number} runs {process}", file=said, flush=True)
    while running:
        process, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        print(f"{running.pop(process)} ended {code}", file=said, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
