"""The processes of stages on this machine: started, tied to whoever started them, and their logs.

A process speaks with whoever started it over a socket on its standard input. When that closes, the
starter is gone and the process leaves at once: no orphans, whatever happened. Where it helps, one
process imports torch, which takes seconds of a core, and forks a process for each of several; and
later one for each that is lost.

This file imports nothing slow, for it comes first in a process that is to die with its starter.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn

from thinwire.errors import ConfigError, StageError, printable

LOG_LINES = 12
PEER = "thinwire.run.peer"  # the module that a process of stages runs
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_PR_SET_PDEATHSIG = 1
_FORK_SECONDS = 30.0  # for a process that has imported all, to fork another


def die_with_starter() -> None:
    """Have Linux end this process, even a stopped one, with the thread that started it."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class StageProcess:
    """A process of stages, started by itself or by a Forker; `ours` is this end of its socket."""

    def __init__(self, ours: socket.socket, log: Path):
        self.ours, self.log = ours, log
        self.process: int | None = None  # its number, once it runs
        self._parent: subprocess.Popen[bytes] | None = None
        self._runs, self._ended = threading.Event(), threading.Event()
        self._code: int | None = None

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """How it ended, once it has; TimeoutExpired if it does not in time."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.log), timeout or 0.0)
        assert self._code is not None
        return self._code

    def kill(self) -> None:
        """End it at once. If it is not forked yet, none is: the process that would do it ends."""
        if self._code is None and self.process is not None:
            with contextlib.suppress(ProcessLookupError):  # it ends just now
                os.kill(self.process, signal.SIGKILL)
        elif self._code is None and self._parent is not None:
            self._parent.kill()

    def end(self) -> None:
        """End it at once, if it has not ended, and let go of it."""
        self.kill()
        self.wait()
        self.ours.close()

    def last_lines(self) -> str:
        """The end of its log."""
        log, lines = self.log, list[str]()
        with contextlib.suppress(OSError):
            lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        if not lines:
            return f"its log {log} is empty"
        shown = [f"  | {printable(line)}" for line in lines[-LOG_LINES:]]
        return f"last lines of {log}:\n" + "\n".join(shown)

    def _has_ended(self, code: int) -> None:
        if self._code is None:
            self._code = code
            self._runs.set()
            self._ended.set()

    def _follow(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process.pid
        threading.Thread(target=lambda: self._has_ended(process.wait()), daemon=True).start()


def forks(device: str) -> bool:
    """Whether processes for this `run.device` are forked from one that has imported torch."""
    # Elsewhere than on Linux libraries may not survive it; with a GPU there are cores enough.
    has_gpu = device != "cpu" and any(Path(place).exists() for place in GPU_DRIVERS)
    return sys.platform.startswith("linux") and device in ("auto", "cpu") and not has_gpu


def start_processes(logs: Sequence[Path], forker: "Forker | None" = None) -> list[StageProcess]:
    """Start a process for each log, on the thread that also ends it; all of them or none."""
    for folder in {log.parent for log in logs}:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"cannot create the folder {folder} for the stages' logs: {error}"
            raise ConfigError(what) from error
    started: list[StageProcess] = []
    theirs: list[socket.socket] = []
    with contextlib.ExitStack() as files:
        try:
            outputs = []
            for log in logs:
                outputs.append(files.enter_context(log.open("ab")))
                ours, end = socket.socketpair()
                theirs.append(files.enter_context(end))
                started.append(StageProcess(ours, log))
            if forker is not None:
                forker.fork(started, theirs, outputs)
            else:
                for process, end, output in zip(started, theirs, outputs, strict=True):
                    process._follow(python_module(PEER, stdin=end.fileno(), output=output))
        except OSError as error:
            for process in started:
                if process.process is not None:
                    process.end()
                process.ours.close()
            where = logs[min(len(started), len(logs) - 1)]
            what = f"a stage cannot be started with its log in {where}: {error}"
            raise StageError(what) from error
    return started


def python_module(*arguments: str, stdin: int, output: BinaryIO) -> "subprocess.Popen[bytes]":
    """Start a module of Python with these arguments, in a session of its own."""
    return subprocess.Popen(
        # -P: a file in the user's folder must not pass for a module
        [sys.executable, "-P", "-m", *arguments],
        stdin=stdin,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # Ctrl-C reaches the coordinator alone
    )


class Forker:
    """A process that imports a module once, and forks others that run it. All end with it."""

    def __init__(self, module: str = PEER):
        self._module = module
        self._parent: subprocess.Popen[bytes] | None = None  # once the first are wanted
        self._ours: socket.socket | None = None
        self._stages: list[StageProcess] = []

    def fork(
        self,
        stages: Sequence[StageProcess],
        theirs: Sequence[socket.socket],
        outputs: Sequence[BinaryIO],
    ) -> None:
        """Have these run, each with its end of a socket and its log; OSError if that fails."""
        is_new = self._parent is None or self._parent.poll() is not None
        if is_new:
            self._start(outputs[0])
        assert self._ours is not None
        for stage, end, output in zip(stages, theirs, outputs, strict=True):
            stage._parent = self._parent
            self._stages.append(stage)
            socket.send_fds(self._ours, [b"."], [end.fileno(), output.fileno()])
        if not is_new and not all(stage._runs.wait(_FORK_SECONDS) for stage in stages):
            raise OSError("the process that forks stages does not answer")

    def close(self) -> None:
        """End it, and all that it has forked."""
        if self._parent is not None and self._ours is not None:
            self._parent.kill()
            self._parent.wait()
            self._ours.close()

    def _start(self, output: BinaryIO) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                parent = python_module(__name__, self._module, stdin=theirs.fileno(), output=output)
            except OSError:
                ours.close()
                raise
        stages: list[StageProcess] = []
        self._parent, self._ours, self._stages = parent, ours, stages

        def hear() -> None:
            """Take down which process each is and how it ends. All end with their parent."""
            with contextlib.suppress(OSError), ours.makefile("rb") as said:
                for line in said:
                    number, verb, value = line.split()
                    if verb == b"runs":
                        stages[int(number)].process = int(value)
                        stages[int(number)]._runs.set()
                    else:
                        stages[int(number)]._has_ended(int(value))
            code = parent.wait()
            for stage in stages:
                stage._has_ended(code or -signal.SIGKILL)

        threading.Thread(target=hear, daemon=True).start()


def _become_stage(
    end: int, log: int, others: list[int], parent: int, live: Callable[[], None]
) -> NoReturn:
    """Be the process of a stage from here on, as if it had been started for that alone."""
    try:
        die_with_starter()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if os.getppid() == parent:  # it could have died in between
            os.dup2(end, 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            for descriptor in others:
                os.close(descriptor)
            live()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def main(arguments: list[str]) -> None:
    """`python -m thinwire.run.processes MODULE`: import it, and fork a process for each socket and
    log that come on standard input; say there by number which it is and how it ended. No threads.
    """
    (module,) = arguments
    starter = socket.socket(fileno=0)
    try:
        live = importlib.import_module(module).main
    except BaseException:
        starter.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while descriptors := socket.recv_fds(starter, 1, 2)[1]:
                os.write(descriptors[1], traceback.format_exc().encode())
        sys.exit(1)
    gc.freeze()  # stages share these pages for as long as nobody writes to them
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    parent, count, running = os.getpid(), 0, dict[int, int]()
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            starter.sendall(f"{running.pop(ended[0])} ended {code}\n".encode())
        if 0 not in ready:
            continue
        _, descriptors, _, _ = socket.recv_fds(starter, 1, 2)
        if len(descriptors) < 2:
            return  # whoever started this is gone, and all that was forked goes too
        end, log = descriptors
        process = os.fork()
        if process == 0:
            _become_stage(end, log, [end, log, woken, wakes], parent, live)
        os.close(end)
        os.close(log)
        running[process] = count
        starter.sendall(f"{count} runs {process}\n".encode())
        count += 1


if __name__ == "__main__":
    die_with_starter()  # before the imports, which take seconds: it may be stopped meanwhile
    gc.disable()  # imports make no garbage, and looking for it takes a fifth of their time
    main(sys.argv[1:])
