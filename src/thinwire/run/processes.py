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
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from thinwire.background import on_daemon_thread
from thinwire.errors import ConfigError, StageError, printable

LOG_LINES = 12
PEER = "thinwire.run.peer"  # the module that a process of stages runs
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_PR_SET_PDEATHSIG = 1


def die_with_starter() -> None:
    """Have Linux end this process, even a stopped one, with the thread that started it."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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


def forks(device: str) -> bool:
    """Whether processes for this `run.device` are forked from one that has imported torch."""
    # Elsewhere than on Linux libraries may not survive it; with a GPU there are cores enough.
    has_gpu = device != "cpu" and any(Path(place).exists() for place in GPU_DRIVERS)
    return sys.platform.startswith("linux") and device in ("auto", "cpu") and not has_gpu


class Forked:
    """A process that another forks once it has its imports, as Popen shows one. `said` is a pipe
    that tells which process it is, and then how it ended; it closes with that.
    """

    def __init__(self, said: BinaryIO, parent: "subprocess.Popen[bytes]"):
        self.pid: int | None = None  # once it runs
        self._parent = parent
        self._ended = on_daemon_thread("thinwire process", lambda: self._follow(said))

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        return self._ended.result() if self._ended.done() else None

    def wait(self, timeout: float | None = None) -> int:
        """How it ended, once it has; TimeoutError if it does not in time."""
        return self._ended.result(timeout)

    def kill(self) -> None:
        """End it at once. If it is not forked yet, none is: the process that would do it ends."""
        if self._ended.done():  # or it could not be forked, and the others live on
            return
        if self.pid is None:
            self._parent.kill()
            return
        with contextlib.suppress(ProcessLookupError):  # it ends just now
            os.kill(self.pid, signal.SIGKILL)

    def _follow(self, said: BinaryIO) -> int:
        with said:
            self.pid = int(said.readline() or 0) or None
            return int(said.readline() or -signal.SIGKILL)


StageProcess = subprocess.Popen[bytes] | Forked


class Forker:
    """A process that imports a module once, and forks others that run it. All end with it."""

    def __init__(self, module: str = PEER):
        self._module = module
        self._parent: subprocess.Popen[bytes] | None = None  # once the first is wanted
        self._ours = socket.socket(socket.AF_UNIX)

    def fork(self, end: socket.socket, log: BinaryIO) -> Forked:
        """Have another run, with its end of a socket and its log; OSError if that fails."""
        reading, writing = os.pipe()
        said = open(reading, "rb")  # noqa: SIM115 - closed at its end
        with open(writing, "wb"):
            descriptors = [end.fileno(), log.fileno(), writing]
            try:
                socket.send_fds(self._ours, [b"."], descriptors)
            except OSError:  # nobody is there yet, or any more
                self._start(log)
                socket.send_fds(self._ours, [b"."], descriptors)
        assert self._parent is not None
        return Forked(said, self._parent)

    def close(self) -> None:
        """End it, and all that it has forked."""
        self._ours.close()
        if self._parent is not None:
            self._parent.kill()
            self._parent.wait()

    def _start(self, output: BinaryIO) -> None:
        self.close()
        self._ours, theirs = socket.socketpair()
        with theirs:
            self._parent = python_module(
                __name__, self._module, stdin=theirs.fileno(), output=output
            )


def start_process(log: Path, forker: Forker | None = None) -> tuple[StageProcess, socket.socket]:
    """Start a process of stages, on the thread that also ends it; and our end of its socket."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot create the folder {log.parent} for the stages' logs: {error}"
        raise ConfigError(what) from error
    ours, theirs = socket.socketpair()
    try:
        with theirs, log.open("ab") as output:
            if forker is not None:
                return forker.fork(theirs, output), ours
            return python_module(PEER, stdin=theirs.fileno(), output=output), ours
    except OSError as error:
        ours.close()
        raise StageError(f"a stage cannot be started with its log in {log}: {error}") from error


def last_lines(log: Path) -> str:
    """The end of a process' log."""
    lines = list[str]()
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    if not lines:
        return f"its log {log} is empty"
    shown = [f"  | {printable(line)}" for line in lines[-LOG_LINES:]]
    return f"last lines of {log}:\n" + "\n".join(shown)


# In the process that forks


def _watch(live: Callable[[], None], forker: int, end: int, log: int, said: int) -> None:
    """Fork a process that lives with a socket and a log; say which it is, and how it ended."""
    _die_with(forker)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    watcher = os.getpid()
    process = os.fork()
    if process == 0:  # from here on as if it had been started for this alone
        _die_with(watcher)
        for standard, its in enumerate((end, log, log)):
            os.dup2(its, standard)
        for descriptor in (end, log, said):
            os.close(descriptor)
        live()
        return
    for descriptor in (0, end, log):
        os.close(descriptor)
    os.write(said, f"{process}\n".encode())
    _, status = os.waitpid(process, 0)
    os.write(said, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _die_with(parent: int) -> None:
    die_with_starter()
    if os.getppid() != parent:  # it has died in between
        os._exit(1)


def _fail(error: BaseException) -> None:
    raise error


def main(arguments: list[str]) -> None:
    """`python -m thinwire.run.processes MODULE`: import it, and fork a process that runs it for
    each socket, log and pipe that come on standard input, and one that watches that. No threads.
    """
    (module,) = arguments
    live: Callable[[], None]
    try:
        live = importlib.import_module(module).main
    except BaseException as error:
        live = partial(_fail, error)  # which all logs tell then
    gc.freeze()  # stages share these pages for as long as nobody writes to them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for who watches
    starter, forker = socket.socket(fileno=0), os.getpid()
    while len(descriptors := socket.recv_fds(starter, 1, 3)[1]) == 3:
        if os.fork() == 0:
            try:
                _watch(live, forker, *descriptors)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    die_with_starter()  # before the imports, which take seconds: it may be stopped meanwhile
    gc.disable()  # imports make no garbage, and looking for it takes a fifth of their time
    main(sys.argv[1:])
