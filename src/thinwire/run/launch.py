"""The peers of a run as processes on this machine, and the loop that leads them.

Peers dial the coordinator, never the other way round. All that happens to them arrives in one
queue, and one thread reads it.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from thinwire.errors import (
    BreachError,
    ConfigError,
    StageError,
    ThinwireError,
    WireError,
    printable,
)
from thinwire.run.control import CONTROL_KEEPALIVE, Channel
from thinwire.run.coordinator import Coordinator
from thinwire.run.events import Command, End, Exited, Lost, StopAsked, Suspect, Tell
from thinwire.run.hearing import Hearing
from thinwire.run.messages import MAX_MESSAGE, FromCoordinator, FromPeer
from thinwire.settings import Settings
from thinwire.wire import Authority, Listener, raise_descriptor_limit

LOG_LINES = 12
EXIT_SECONDS = 10.0  # for processes to end once their stages have said goodbye


def lead(
    coordinator: Coordinator, peers: "LocalPeers", carry_out: Callable[[Command], None]
) -> None:
    """Lead a run to its end; raises the error that ends it. Commands that are not for
    peers go to `carry_out`.
    """
    while True:
        event = peers.said.next(coordinator.rest(time.monotonic()))
        for command in coordinator.on(event, time.monotonic()):
            match command:
                case Tell(stage, message):
                    peers.tell(stage, message)
                case End(error, culprit):
                    if error is None:
                        return peers.wait_for_exits()
                    if culprit is not None:
                        raise StageError(f"{error}{peers.last_words(culprit)}")
                    raise error
                case _:
                    carry_out(command)


class LocalPeers:
    """A process for each stage with its control stream; a context manager: no orphans."""

    def __init__(self, settings: Settings, run_folder: Path):
        self._stages = range(settings.pipeline.stages)
        self._logs = run_folder / "logs"
        self.said = Hearing(settings.pipeline.stages)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: dict[int, Channel] = {}
        self._accepting: list[threading.Thread] = []
        raise_descriptor_limit()  # for the stages too, which inherit it
        authority = Authority.create(settings.run.name)
        self._issue = authority.issue
        self._listener = Listener(
            authority.issue("coordinator"),
            settings.link.listen,
            settings.link.port,
            MAX_MESSAGE,
            CONTROL_KEEPALIVE,
        )

    def __enter__(self) -> "LocalPeers":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
            if process.stdin:
                with contextlib.suppress(BrokenPipeError):  # of an order that it never read
                    process.stdin.close()
        self._listener.close()

    def start(self) -> None:
        """Start all processes, and wait for each to dial on a thread of its own."""
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot create the folder {self._logs} for the stages' logs: {error}"
            ) from error
        for stage in self._stages:
            self._spawn(stage)
            self._accepting.append(self._begin(self._accept, stage))

    def ask_to_stop(self) -> None:
        """Ask the run to end; safe in a signal handler, for it only queues a note."""
        self.said.note(StopAsked())

    def tell(self, stage: int, message: FromCoordinator) -> None:
        """Send a message to a stage that has said hello; one that is gone shows as an event."""
        self._accepting[stage].join()  # its hello may be heard before its channel is filed
        with contextlib.suppress(WireError):
            self._channels[stage].send(message)

    def control_bytes(self) -> int:
        """Every byte of the control streams so far, both ways, frame headers included."""
        meters = [channel.meter for channel in self._channels.values()]
        return sum(meter.sent_bytes() + meter.received_bytes() for meter in meters)

    def wait_for_exits(self) -> None:
        """Let stages that have said goodbye end by themselves."""
        deadline = time.monotonic() + EXIT_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))

    def last_words(self, culprit: Suspect) -> str:
        """The end of a stage's log, or where the log is lost, as on a full disk, what it sent.

        A known error explains itself: then this only says where the log is.
        """
        log = self._log(culprit.stage)
        if culprit.known:
            return f"\n  its log is {log}"
        try:
            lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        except OSError:
            lines = []
        source = f"last lines of {log}" if lines else f"its log {log} is empty; its last output"
        lines = lines or culprit.trace.splitlines()
        if not lines:
            return f"\n  its log {log} is empty"
        shown = [f"  | {printable(line)}" for line in lines[-LOG_LINES:]]
        return f"\n  {source}:\n" + "\n".join(shown)

    def _log(self, stage: int) -> Path:
        return self._logs / f"stage-{stage}.log"

    def _spawn(self, stage: int) -> None:
        order = {
            "stage": stage,
            "coordinator": self._listener.address,
            "identity": self._issue(f"stage-{stage}").to_plain(),
        }
        log = self._log(stage)
        try:
            with log.open("ab") as output:
                process = self._run(output)
        except OSError as error:
            raise StageError(
                f"stage {stage} cannot be started with its log in {log}: {error}"
            ) from error
        self._processes.append(process)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: `_await` says how
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
        self._begin(self._await, stage, process)

    def _run(self, output: BinaryIO) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            # -P: a file in the user's folder must not pass for a module
            [sys.executable, "-P", "-m", "thinwire.run.peer"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C reaches the coordinator alone
        )

    def _begin(self, target: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        return thread

    def _await(self, stage: int, process: subprocess.Popen[bytes]) -> None:
        self.said.note(Exited(stage, process.wait()))

    def _accept(self, stage: int) -> None:
        try:
            pipe = self._listener.accept(f"control-{stage}", None, f"stage-{stage}")
        except WireError as error:
            self.said.note(Lost(stage, str(error)))
            return

        def on_lost(error: ThinwireError) -> None:
            self.said.note(Lost(stage, str(error), isinstance(error, BreachError)))

        self._channels[stage] = Channel(
            pipe,
            f"control of stage {stage}",
            FromPeer,
            on_message=lambda message: self.said.hear(stage, message),
            on_lost=on_lost,
        )
