"""The coordinator: starts a peer process per stage, introduces neighbours, relays what they say.

Peers dial the coordinator, never the other way round. Everything they say arrives in one queue,
and the coordinator reads it from one thread.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from thinwire.errors import (
    BreachError,
    ConfigError,
    StageError,
    ThinwireError,
    WireError,
    printable,
)
from thinwire.run.control import CONTROL_KEEPALIVE, MAX_MESSAGE, Channel, Message
from thinwire.run.hearing import Hearing
from thinwire.run.messages import PeerConduct
from thinwire.run.watch import Watch
from thinwire.settings import Settings
from thinwire.wire import Authority, Listener, raise_descriptor_limit

SETTLE_SECONDS = 1.5  # after a failure, how long to listen for the stage that caused it
LOG_LINES = 12
# What takes time before training: importing torch, then building and filling the layers.
_STARTING = {"hello": "stages are running", "ready": "stages have their layers"}


class Coordinator:
    """Coordinates one run of peers on this machine; a context manager that leaves no orphans."""

    def __init__(
        self,
        settings: Settings,
        run_folder: Path,
        corpus: Path,
        resume: Path | None,
        on_wait: Callable[[str], None] = lambda text: None,
        on_start: Callable[[int, str], None] = lambda stages, what: None,
    ):
        """`on_wait` is told when stages make no progress for long, `on_start` how many are up."""
        self.settings = settings
        self.stages = settings.pipeline.stages
        self.run_folder = run_folder
        self.descriptions: list[dict[str, str]] = [{} for _ in range(self.stages)]
        self.versions: dict[str, str] = {}
        self._corpus = corpus
        self._resume = resume
        self._said = Hearing(self.stages)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: dict[int, Channel] = {}
        self._last_step = [0] * self.stages
        self._on_wait = on_wait
        self._on_start = on_start
        self._watched = Watch(self.stages, settings.run.patience)
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

    def __enter__(self) -> "Coordinator":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self._listener.close()

    def launch(self) -> None:
        """Start all peers and bring them to the point where training can begin."""
        logs = self.run_folder / "logs"
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot create the folder {logs} for the stages' logs: {error}"
            ) from error
        accepting = []
        for stage in range(self.stages):
            self._spawn(stage, logs / f"stage-{stage}.log")
            accepting.append(threading.Thread(target=self._accept, args=(stage,), daemon=True))
            accepting[-1].start()
        assignment = {
            "type": "assign",
            "settings": self.settings.to_plain(),
            "corpus": str(self._corpus.resolve()),
            "run_folder": str(self.run_folder.resolve()),
            "resume": str(self._resume.resolve()) if self._resume else "",
        }
        hellos = self._gather("hello")
        for thread in accepting:
            thread.join()
        self.versions = hellos[0]["versions"]
        self._tell_all(assignment)
        ready = self._gather("ready")
        self.descriptions = [{k: m[k] for k in ("layers", "device")} for m in ready]
        for stage, channel in self._channels.items():
            below = ready[stage - 1]["address"] if stage > 0 else ""
            channel.send({"type": "connect", "below": below})
        self._gather("linked")
        self._tell_all({"type": "start"})
        self._watched.begin_training()

    def messages(self) -> Iterator[tuple[int, Message]]:
        """What the stages report, until all have finished; StageError when one fails."""
        finished: set[int] = set()
        while len(finished) < self.stages:
            stage, message = self._next()
            if message["type"] in ("failed", "exit", "lost", "breach"):
                if message["type"] != "failed" and stage in finished:
                    continue
                raise self._explain(stage, message)
            if message["type"] == "stopping":
                if 0 in finished:
                    continue  # too late to ask, and the end is near
                for channel in self._channels.values():
                    with contextlib.suppress(WireError):  # it is about to say that it has finished
                        channel.send({"type": "stop"})
            elif message["type"] == "step":
                self._last_step[stage] = message["step"] + 1
            elif message["type"] == "finished":
                finished.add(stage)
                self._watched.dismiss(stage)
            yield stage, message
        self._wait_for_exits()

    def control_bytes(self) -> int:
        """Every byte of the control streams so far, both ways, frame headers included."""
        meters = [channel.meter for channel in self._channels.values()]
        return sum(meter.sent_bytes() + meter.received_bytes() for meter in meters)

    def interrupt(self) -> None:
        """Ask the run to end after the step under way, with a checkpoint.

        Safe in a signal handler: it only queues a note to ourselves.
        """
        self._said.note(0, {"type": "stopping"})

    def kill(self) -> None:
        """End every peer that still runs, at once."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
            if process.stdin:
                with contextlib.suppress(BrokenPipeError):  # of an order that it never read
                    process.stdin.close()

    def _spawn(self, stage: int, log: Path) -> None:
        order = {
            "stage": stage,
            "coordinator": self._listener.address,
            "identity": self._issue(f"stage-{stage}").to_plain(),
        }
        try:
            with log.open("ab") as output:
                process = self._start(output)
        except OSError as error:
            raise StageError(
                f"stage {stage} cannot be started with its log in {log}: {error}"
            ) from error
        self._processes.append(process)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: `_watch` says how
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
        threading.Thread(target=self._watch, args=(stage, process), daemon=True).start()

    def _start(self, output: BinaryIO) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            # -P: a file in the user's folder must not pass for a module
            [sys.executable, "-P", "-m", "thinwire.run.peer"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C reaches the coordinator alone
        )

    def _watch(self, stage: int, process: subprocess.Popen[bytes]) -> None:
        self._said.note(stage, {"type": "exit", "code": process.wait()})

    def _accept(self, stage: int) -> None:
        """Wait for a peer to dial and listen to it; runs on a thread of its own per peer."""
        try:
            pipe = self._listener.accept(f"control-{stage}", None, f"stage-{stage}")
        except WireError as error:
            self._said.note(stage, {"type": "lost", "error": str(error)})
            return
        self._channels[stage] = Channel(
            pipe,
            f"control of stage {stage}",
            on_message=lambda message: self._said.hear(stage, message),
            on_lost=lambda error: self._said.note(stage, _lost_by(error)),
            check=PeerConduct(stage, self.stages).check,
        )

    def _next(self) -> tuple[int, Message]:
        """The next message; StageError when no stage has made any progress for too long."""
        while True:
            try:
                said = self._said.next(self._watched.tick)
            except queue.Empty:
                said = None
            self._watched.pass_time()
            if said is not None:
                stage, message = said
                is_pulse = message["type"] == "pulse"
                self._watched.heard(stage, message.get("begun"), message.get("doing", ""))
                if not is_pulse:
                    return stage, message
            if complaint := self._watched.complaint():
                self._on_wait(complaint)
            self._watched.check()

    def _gather(self, wanted: str) -> list[Message]:
        """One message of the wanted type from every stage, in stage order.

        Waits for as long as all stages live and get on: a death is a message too.
        """
        got: dict[int, Message] = {}
        while len(got) < self.stages:
            stage, message = self._next()
            if message["type"] != wanted:
                raise self._explain(stage, message)
            got[stage] = message
            if wanted in _STARTING:
                self._on_start(len(got), _STARTING[wanted])
        return [got[stage] for stage in range(self.stages)]

    def _tell_all(self, message: Message) -> None:
        for channel in self._channels.values():
            channel.send(message)

    def _explain(self, stage: int, message: Message) -> StageError:
        """The error of the stage that failed first in truth, not the first to be heard of.

        A stage that dies takes its neighbours' links down, and they may complain before the
        coordinator sees the death. So listen a moment before blaming anyone.
        """
        heard = [(stage, message)]
        deadline = time.monotonic() + SETTLE_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            try:
                heard.append(self._said.next(left))
            except queue.Empty:
                break
        culprit, evidence = blame(heard)
        step = self._last_step[culprit]
        where = f"at step {step}" if step else "at the start"
        if evidence["type"] == "failed":
            reason = f"failed {where}: {evidence['error']}"
        elif evidence["type"] == "exit" and evidence["code"] < 0:
            reason = f"died {where}: killed by {signal.Signals(-evidence['code']).name}"
        elif evidence["type"] == "exit":
            reason = f"died {where}: exit code {evidence['code']}"
        elif evidence["type"] == "breach":
            reason = f"broke the contract {where}: {evidence['error']}"
        else:
            reason = f"was lost {where}: {evidence.get('error', evidence['type'])}"
        # An error that was foreseen says all there is to say; any other needs its traceback.
        lines = 0 if evidence.get("known") else LOG_LINES
        last_words = self._last_words(culprit, lines, evidence.get("trace", ""))
        return StageError(f"stage {culprit} {reason}" + last_words)

    def _last_words(self, stage: int, count: int, trace: str) -> str:
        """The end of a stage's log, or where the log is lost, as on a full disk, what it sent."""
        log = self.run_folder / "logs" / f"stage-{stage}.log"
        if not count:
            return f"\n  its log is {log}"
        try:
            lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        except OSError:
            lines = []
        source = f"last lines of {log}" if lines else f"its log {log} is empty; its last words"
        lines = lines or trace.splitlines()
        if not lines:
            return f"\n  its log {log} is empty"
        shown = [f"  | {printable(line)}" for line in lines[-count:]]
        return f"\n  {source}:\n" + "\n".join(shown)

    def _wait_for_exits(self) -> None:
        deadline = time.monotonic() + 10.0
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def _lost_by(error: ThinwireError) -> Message:
    """What became of a stage whose control stream is broken."""
    kind = "breach" if isinstance(error, BreachError) else "lost"
    return {"type": kind, "error": str(error), "known": kind == "breach"}


def blame(heard: list[tuple[int, Message]]) -> tuple[int, Message]:
    """The stage that failed first in truth, and the message that shows it.

    A stage whose link broke accuses the neighbour at its other end. Who was accused and has said
    nothing is lost; who has complained too was a victim, and its exit is no news. A stage that sent
    what the contract forbids is convicted by its neighbour, whatever it says itself.
    """
    spoke = {stage for stage, message in heard if message["type"] == "failed"}
    suspects = [item for item in heard if item[1]["type"] != "exit" or item[0] not in spoke]
    for stage, message in heard:
        for accused in set(message.get("accuses", ())) - spoke:
            error = f"stage {stage} says: {message['error']}"
            suspects.append((accused, {"type": "lost", "error": error}))
        for convicted in message.get("convicts", ()):
            error = f"stage {stage} says: {message['error']}"
            suspects.append((convicted, {"type": "breach", "error": error, "known": True}))
    return min(suspects, key=lambda suspect: _doubt(suspect[1]))


def _doubt(message: Message) -> int:
    """How unsure a message leaves us that its stage is the cause."""
    if message["type"] == "breach":
        return -1
    if message["type"] == "exit" and message["code"] != 0:
        return 0
    if message["type"] == "failed" and message["kind"] not in ("WireError", "BreachError"):
        return 1
    if message["type"] == "lost":
        return 2
    if message["type"] == "failed":
        return 4 if message["accuses"] else 3
    return 5
