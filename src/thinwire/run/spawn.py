"""The process of a stage: started with its order, and what its log says once it has ended."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

from thinwire.errors import ConfigError, StageError, printable
from thinwire.run.order import Order

LOG_LINES = 12
TRAINING = "thinwire.run.peer"  # the module that a stage runs, to train


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
        raise StageError(
            f"stage {order.stage} cannot be started with its log in {log}: {error}"
        ) from error
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has died: its exit code says how
        process.stdin.write(json.dumps(order.to_plain()).encode() + b"\n")
        process.stdin.flush()
    return process


def run(output: BinaryIO, module: str = TRAINING) -> subprocess.Popen[bytes]:
    """The process, which waits for its order."""
    return subprocess.Popen(
        # -P: a file in the user's folder must not pass for a module
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # Ctrl-C reaches the coordinator alone
    )


def end(process: subprocess.Popen[bytes]) -> None:
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
