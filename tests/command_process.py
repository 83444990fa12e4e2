"""What a process becomes that is forked to be a `thinwire` command (programs.py).

Whoever forks imports all of this once, which takes seconds of a core. Stages are forked too: by a
process that each command forks of itself while it has no threads.
"""

import atexit
import contextlib
import gc
import json
import os
import signal
import sys
import threading
import traceback
from unittest import mock

import torch.utils.tensorboard  # noqa: F401

import thinwire.demo
import thinwire.engine
import thinwire.hf.export
import thinwire.hf.importer
import thinwire.inference.serve
import thinwire.report.plots
import thinwire.run.doctor
import thinwire.run.host
import thinwire.run.join
import thinwire.web.server  # noqa: F401
from thinwire import cli
from thinwire.run import peers, processes


class Forked:
    """A process forked from this one, which runs a module of ours; as Popen shows one."""

    def __init__(self, *module, stdin, output):
        self.pid, self._code = os.fork(), None
        if self.pid == 0:
            processes.die_with_starter()
            os.setsid()
            for ours, its in enumerate((stdin, output.fileno(), output.fileno())):
                os.dup2(its, ours)
            os.closerange(3, 1024)
            processes.main(list(module[1:]))
            os._exit(0)

    def poll(self, how=os.WNOHANG):
        with contextlib.suppress(ChildProcessError):  # another thread has seen its end
            pid, status = os.waitpid(self.pid, how)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self):
        return self.poll(0)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)


def fork_stages():
    """Have the stages of this command forked by a process that need not import for them."""
    forker, start = processes.Forker(), processes.start_process
    with mock.patch.object(processes, "python_module", Forked):
        forker._start(sys.stdout.buffer)

    def start_forked(log, own=None):
        return start(log, forker)

    peers.start_process = start_forked


def main():
    """Be the command of the first line on standard input; the rest of that is its input."""
    gc.enable()
    line = bytearray()
    while not line.endswith(b"\n"):
        line += os.read(0, 1)  # and no byte of what the command reads
    order = json.loads(line)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv = ["thinwire", *order["arguments"]]
    os.setpriority = lambda *how: None  # at the lowest a text waits for all other tests
    if not order["imports"]:
        fork_stages()
    code: object = 0
    try:
        cli.main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # as an interpreter does at its end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
