"""The peers of a run as processes on this machine."""

import contextlib
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from thinwire.run.control import CONTROL_KEEPALIVE
from thinwire.run.events import Exited, Suspect
from thinwire.run.order import Order, control_name
from thinwire.run.peers import Peers
from thinwire.run.spawn import (
    TRAINING,
    StageProcess,
    end,
    forks,
    last_lines,
    make_log_folder,
    spawn_all,
)
from thinwire.run.vocabulary import MAX_MESSAGE
from thinwire.settings import Settings
from thinwire.wire import Identity, Listener, Pipe, Routes, raise_descriptor_limit

EXIT_SECONDS = 10.0  # for processes to end once their stages have said goodbye


class LocalPeers(Peers):
    """A process for each stage with its control stream; a context manager: no orphans."""

    module = TRAINING

    def __init__(self, settings: Settings, run_folder: Path):
        super().__init__(settings.pipeline.stages)
        self._logs = run_folder / "logs"
        self._fork = forks(settings.run.device)
        self._processes: Sequence[StageProcess] = []
        raise_descriptor_limit()  # for the stages too, which inherit it
        own = Identity.create("coordinator")
        self._identities = [Identity.create(f"stage-{s}", own.public) for s in self._stages]
        self._listener = Listener(
            own,
            settings.link.listen,
            settings.link.port,
            MAX_MESSAGE,
            CONTROL_KEEPALIVE,
        )

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            end(process)
        self._listener.close()

    def start(self) -> None:
        make_log_folder(self._logs)
        orders = [
            Order(stage, Routes("", self._listener.address), self._identities[stage])
            for stage in self._stages
        ]
        logs = [self._log(stage) for stage in self._stages]
        self._processes = spawn_all(orders, logs, self.module, self._fork)
        for stage, process in zip(self._stages, self._processes, strict=True):
            self._begin(self._await, stage, process)
            self._expect(stage)

    def wait_for_exits(self) -> None:
        deadline = time.monotonic() + EXIT_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))

    def last_words(self, culprit: Suspect) -> str:
        log = self._log(culprit.stage)
        # A known error explains itself: then this only says where the log is.
        said = f"its log is {log}" if culprit.known else last_lines(log, culprit.trace)
        return f"\n  {said}"

    def _log(self, stage: int) -> Path:
        return self._logs / f"stage-{stage}.log"

    def _await(self, stage: int, process: StageProcess) -> None:
        self.said.note(Exited(stage, process.wait()))

    def _open(self, stage: int) -> Pipe:
        return self._listener.accept(
            control_name(stage, 0), None, self._identities[stage].fingerprint
        )
