"""Stages that the host's machine holds itself: peers like all others, started by the host."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from thinwire.errors import StageError
from thinwire.remote.invite import Invite

LEAVE_SECONDS = 5.0  # to end after the host has said goodbye


@contextlib.contextmanager
def own_peers(count: int, invite: Invite, run_folder: Path, device: str) -> Iterator[None]:
    """So many peers on this machine, each with a folder of its own; ended with the context."""
    logs = run_folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(count):
            folder = run_folder / "here" / str(number)
            started.append(_start(number, invite, folder, logs / f"here-{number}.log", device))
        yield
    finally:
        deadline = time.monotonic() + LEAVE_SECONDS
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()


def _start(
    number: int, invite: Invite, folder: Path, log: Path, device: str
) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", "thinwire", "join", "-", "--tied", "--no-listen"]
    command += ["--name", f"here-{number}", "--folder", str(folder.resolve()), "--device", device]
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the host alone
            )
    except OSError as error:
        raise StageError(f"a peer on this machine cannot be started: {error}") from error
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has died: its log says why
        process.stdin.write(f"{invite}\n".encode())
        process.stdin.flush()
    return process
