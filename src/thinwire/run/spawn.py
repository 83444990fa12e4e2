"""The processes of stages: started with their orders, and what a log says once one has ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, BinaryIO, Protocol

from thinwire.errors import ConfigError, StageError, printable
from thinwire.run.order import Order

LOG_LINES = 12
TRAINING = "thinwire.run.peer"  # the module that a stage runs, to train
FORKING = "thinwire.run.forking"
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


class StageProcess(Protocol):
    """A stage's process, as far as its coordinator deals with it: a part of `subprocess.Popen`."""

    stdin: IO[bytes] | None

    def poll(self) -> int | None:
        """How it ended; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """How it ended, once it has."""

    def kill(self) -> None:
        """End it at once."""


def make_log_folder(folder: Path) -> None:
    """Have a folder for the logs of stages."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create the folder {folder} for the stages' logs: {error}"
        ) from error


def spawn(order: Order, log: Path, module: str = TRAINING) -> subprocess.Popen[bytes]:
    """Start the process of a stage on the thread that also ends it (bond.py says why)."""
    try:
        with log.open("ab") as output:
            process = run(output, module)
    except OSError as error:
        raise _no_start(order, log, error) from error
    assert process.stdin is not None
    _give(order, process.stdin)
    return process


def _give(order: Order, to: IO[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):  # it has died: its exit code says how
        to.write(json.dumps(order.to_plain()).encode() + b"\n")
        to.flush()


def run(output: BinaryIO, module: str = TRAINING) -> subprocess.Popen[bytes]:
    """The process, which waits for its order."""
    return _python(module, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT)


def _python(
    *arguments: str,
    stdin: int,
    stdout: int | BinaryIO,
    stderr: int,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # -P: a file in the user's folder must not pass for a module
        [sys.executable, "-P", "-m", *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # Ctrl-C reaches the coordinator alone
    )


def forks(device: str) -> bool:
    """Whether stages for this `run.device` are forked from one process that has imported torch.

    On Linux, and without a GPU: elsewhere system libraries may not survive a fork, and a machine
    with a GPU has cores enough for every stage to import torch by itself.
    """
    has_gpu = device != "cpu" and any(Path(place).exists() for place in GPU_DRIVERS)
    return sys.platform.startswith("linux") and device in ("auto", "cpu") and not has_gpu


def spawn_all(
    orders: Sequence[Order], logs: Sequence[Path], module: str, fork: bool
) -> Sequence[StageProcess]:
    """Start the processes of all stages of this machine, each by itself or forked from one.

    If one cannot be started, none is left.
    """
    if len(orders) > 1 and fork:
        return _fork_all(orders, logs, module)
    started: list[StageProcess] = []
    try:
        for order, log in zip(orders, logs, strict=True):
            started.append(spawn(order, log, module))
    except StageError:
        for process in started:
            end(process)
        raise
    return started


def _fork_all(orders: Sequence[Order], logs: Sequence[Path], module: str) -> Sequence[StageProcess]:
    with contextlib.ExitStack() as ours:
        outputs = []
        for order, log in zip(orders, logs, strict=True):
            try:
                outputs.append(ours.enter_context(log.open("ab")))
            except OSError as error:
                raise _no_start(order, log, error) from error
        heard, report = _pipe()
        theirs = [ours.enter_context(report)]
        inputs, pairs = [], []
        for output in outputs:
            source, to = _pipe()
            theirs += [ours.enter_context(source), output]
            inputs.append(to)
            pairs.append(f"{source.fileno()},{output.fileno()}")
        try:
            process = _python(
                FORKING,
                module,
                str(report.fileno()),
                *pairs,
                stdin=subprocess.DEVNULL,
                stdout=outputs[0],
                stderr=subprocess.STDOUT,
                pass_fds=[file.fileno() for file in theirs],
            )
        except OSError as error:
            for file in (heard, *inputs):
                file.close()
            raise _no_start(orders[0], logs[0], error) from error
    for order, to in zip(orders, inputs, strict=True):
        _give(order, to)
    stages = [_Forked(process, to) for to in inputs]
    threading.Thread(target=_hear, args=(heard, process, stages), daemon=True).start()
    return stages


def _pipe() -> tuple[BinaryIO, BinaryIO]:
    """What one end reads of what the other end writes."""
    read, write = os.pipe()
    return os.fdopen(read, "rb"), os.fdopen(write, "wb")


def _no_start(order: Order, log: Path, error: OSError) -> StageError:
    return StageError(f"stage {order.stage} cannot be started with its log in {log}: {error}")


class _Forked:
    """The process of a stage that another process has forked and waits for."""

    def __init__(self, parent: subprocess.Popen[bytes], stdin: IO[bytes]):
        self.stdin: IO[bytes] | None = stdin
        self.process: int | None = None  # unknown until it runs
        self._parent = parent
        self._ended = threading.Event()
        self._code: int | None = None

    def poll(self) -> int | None:
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(self._parent.args, timeout or 0.0)
        assert self._code is not None
        return self._code

    def kill(self) -> None:
        """If it does not run yet, none of the stages do: the process that would fork them ends."""
        if self._code is not None:
            return
        if self.process is None:
            self._parent.kill()
            return
        with contextlib.suppress(ProcessLookupError):  # it ends just now
            os.kill(self.process, signal.SIGKILL)

    def has_ended(self, code: int) -> None:
        """Let all who wait know."""
        if self._code is None:
            self._code = code
            self._ended.set()


def _hear(said: BinaryIO, parent: subprocess.Popen[bytes], stages: Sequence[_Forked]) -> None:
    """Take down which process each stage is and how it ends. All end with their parent."""
    with said:
        for line in said:
            number, verb, value = line.split()
            if verb == b"runs":
                stages[int(number)].process = int(value)
            else:
                stages[int(number)].has_ended(int(value))
    code = parent.wait()
    for stage in stages:
        stage.has_ended(code or -signal.SIGKILL)


def end(process: StageProcess) -> None:
    """End a process at once, if it has not ended, and let go of it."""
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdin:
        with contextlib.suppress(BrokenPipeError):  # of an order that it never read
            process.stdin.close()


def last_lines(log: Path, trace: str) -> str:
    """The end of a log, or where it is lost, as on a full disk, the trace that the stage sent."""
    try:
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    except OSError:
        lines = []
    source = f"last lines of {log}" if lines else f"its log {log} is empty; its last output"
    lines = lines or trace.splitlines()
    if not lines:
        return f"its log {log} is empty"
    shown = [f"  | {printable(line)}" for line in lines[-LOG_LINES:]]
    return f"{source}:\n" + "\n".join(shown)
