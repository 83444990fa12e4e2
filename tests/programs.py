"""Real `thinwire` processes, for tests that start them, signal them and look for what is left."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

from thinwire.run.processes import Forker, forks, start_process
from waiting import PROCESS_PATIENCE, wait_until

_forker = Forker("command_process")


class Command:
    """A running command, forked by a process that has imported what commands use."""

    def __init__(self, arguments, log, cwd, env, said, imports):
        paths = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths))):
            self._process, ours = start_process(log, forker=_forker)
        order = {"arguments": [*arguments], "cwd": str(cwd), "env": dict(env), "imports": imports}
        with contextlib.suppress(BrokenPipeError), ours as there:
            there.sendall(json.dumps(order).encode() + b"\n" + said.encode())
            there.shutdown(socket.SHUT_WR)
        self.poll, self.wait = self._process.poll, self._process.wait
        while self._process.pid is None:  # the first waits for the imports
            assert self.poll() is None, log.read_text()
            time.sleep(0.01)
        self.pid = self._process.pid

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class Program:
    """A running `thinwire` command, with what it has printed so far."""

    def __init__(self, arguments, cache, cwd, into=None, said="", imports=False, **variables):
        """`into`: a descriptor that gets the output instead of a file. `said`: its input.
        `imports`: its stages import torch by themselves, as outside of tests.

        With variables that its libraries read at the start, it imports them itself.
        """
        self.log = cwd / f"output-{time.monotonic_ns()}.txt"
        own = {"THINWIRE_CACHE": str(cache), "COLUMNS": "100", "PYTHONFAULTHANDLER": "1"}
        own |= {name: str(value) for name, value in variables.items()}
        self.process: Command | subprocess.Popen[bytes]
        if forks("cpu") and into is None and {*variables} <= {"HOME", "THINWIRE_DATA"}:
            env = {**os.environ, **own}
            self.process = Command(arguments, self.log, cwd, env, said, imports)
            return
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "thinwire", *arguments],
                stdin=subprocess.PIPE,
                stdout=output if into is None else into,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env={**os.environ, **own},
            )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(said.encode())
            self.process.stdin.close()

    def text(self):
        return self.log.read_text()

    def wait(self, timeout=PROCESS_PATIENCE):
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.text()) from None

    def stop(self, number=signal.SIGINT, code=130):
        """Send it a signal, at which it ends with this exit code."""
        self.process.send_signal(number)
        assert self.wait() == code, self.text()

    def wait_for(self, pattern, times=1):
        """Wait until it has printed something so many times."""
        self.wait_until(lambda: len(re.findall(pattern, self.text())) >= times)

    def wait_until(self, holds):
        """Wait for something that it brings about."""
        deadline = time.monotonic() + PROCESS_PATIENCE
        while not holds():  # nor once it has ended
            assert self.process.poll() is None or holds(), self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def stages(self):
        """Process ids of the stages, in the order they were started.

        A process that is still a copy of its coordinator is no stage: to stop it would stop both.
        """
        watching = [pid for forker in self.forking() for pid in _children(forker)]
        forked = [stage for pid in watching for stage in _children(pid)]
        return forked or self._running("thinwire.run.peer")  # the latter of a run of one stage

    def forking(self, *module):
        """The process that imports (this) for all stages and forks them, where there are more."""
        return self._running("thinwire.run.processes", *module)

    def _running(self, *module):
        words = "\0".join(["", "-m", *module, ""]).encode()
        return [pid for pid in _children(self.process.pid) if words in _command(pid)]


def _children(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    return []


def _command(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def gone(pids):
    """Wait until all these processes have ended (a zombie waits only for its parent to look)."""

    def alive(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            return state != "Z"
        return False

    wait_until(lambda: not any(map(alive, pids)))
    return True


def long_run(config, **changes):
    """Steps without end, which leave the processor to other tests: links are slow."""
    slow = {"link__latency_ms": 30.0, "train__checkpoint_every": 0}
    return config(train__steps=100_000, train__eval_every=0, **{**slow, **changes})
