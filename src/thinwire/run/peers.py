"""The peers of a run as whoever leads them sees them, wherever they are; and the loop that leads.

All that happens to them arrives in one queue, and one thread reads it.
"""

import contextlib
import dataclasses
import itertools
import subprocess
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.engine.checkpoint import Checkpoint
from thinwire.errors import BreachError, ConfigError, StageError, ThinwireError, WireError
from thinwire.run import events as ev
from thinwire.run.channel import Channel, Hearing, SocketPipe
from thinwire.run.conduct import Course
from thinwire.run.coordinator import Coordinator
from thinwire.run.processes import Forker, StageProcess, forks, start_processes
from thinwire.run.protocol import FROM_PEER, Assignment, Connect, Envelope, Failed, ToStage
from thinwire.run.record import RunRecord
from thinwire.settings import Settings
from thinwire.wire import Identity, raise_descriptor_limit

EXPLODED = ev.StopAsked('the loss has exploded, and run.on_explosion = "stop"')
LAST_WORDS_SECONDS = 2.0  # to hear what a process said before it ended
EXIT_SECONDS = 10.0  # for processes to end once their stages have said goodbye


class StageFailedError(StageError):
    """A run ended because of one stage; `culprit` says which, and what shows it."""

    def __init__(self, text: str, culprit: ev.Suspect):
        super().__init__(text)
        self.culprit = culprit


def coordinator_of(
    settings: Settings,
    folder: Path,
    checkpoint: Checkpoint | None,
    held: list[list[int]],
    parts_travel: bool = False,
) -> Coordinator:
    """The coordinator of a run, perhaps from a checkpoint on; `held`: the stages by process."""
    stages = settings.pipeline.stages
    return Coordinator(
        stages,
        settings.run.patience,
        settings.pipeline.microbatches,
        parts_travel,
        outage=settings.link.outage,
        course=Course(settings, checkpoint.step if checkpoint else 0, stages),
        placement=placement(settings, held),
        audits=settings.train.audit,
    )


def lead(coordinator: Coordinator, peers: "Peers", record: RunRecord) -> None:
    """Lead a run from its start to its end, and record it; raises the error that ends it."""
    completed: list[ev.Event] = []  # heard before anything else: others may be replaced from it

    def carry_out(command: ev.Command) -> None:
        record.carry_out(command)
        if isinstance(command, ev.Begin):
            peers.on_begin()
        if isinstance(command, ev.Commit) and command.step not in record.checkpoints.failed:
            peers.saved = record.checkpoints.latest
            completed.append(ev.Completed(command.step))
        if record.is_to_stop and not coordinator.stop_asked and EXPLODED not in completed:
            completed.append(EXPLODED)

    peers.start()
    try:
        while not coordinator.is_over:
            event = completed.pop(0) if completed else peers.next_event(coordinator)
            heed(coordinator, peers, carry_out, event)
    finally:
        record.close()


def heed(
    coordinator: Coordinator,
    peers: "Peers",
    carry_out: Callable[[ev.Command], None],
    event: ev.Event,
) -> None:
    """Do what the coordinator says to an event; raises the error that ends the run."""
    for command in coordinator.on(event, time.monotonic()):
        match command:
            case ev.Tell(stage, message, follows):
                with contextlib.suppress(WireError):  # a peer that is gone shows as an event
                    peers.tell(stage, message, follows)
            case ev.End(error, ev.Suspect() as culprit):
                raise StageFailedError(f"{error}{peers.last_words(culprit)}", culprit)
            case ev.End(BaseException() as error):
                raise error
            case ev.End():
                peers.wait_for_exits()
            case ev.Replace(stages, by_follower):
                peers.replace(stages, by_follower)
            case ev.DropFollower(stages):
                peers.drop_follower(stages)
            case _:
                carry_out(command)


class Peers(contextlib.AbstractContextManager[Any]):
    """Those who hold the stages of a run; leaving the context ends what they run for it."""

    def __init__(self, stages: int):
        self._stages = range(stages)
        self.said = Hearing(stages)
        self.saved: Path | None = None  # the newest complete checkpoint of this life

    @abstractmethod
    def start(self) -> None:
        """Have all stages built; each says by itself when it is."""

    @abstractmethod
    def tell(self, stage: int, message: ToStage, follows: bool = False) -> None:
        """Send a message to a stage; or to the process that follows it, where one does."""

    @abstractmethod
    def replace(self, stages: list[int], by_follower: bool = False) -> None:
        """Have another process hold these stages, which shared one that is lost."""

    def on_begin(self) -> None:
        """All stages train from now on."""

    def drop_follower(self, stages: list[int]) -> None:
        """Let go of the process that follows these stages, where there is one."""

    @abstractmethod
    def wait_for_exits(self) -> None:
        """Let stages that have said goodbye end by themselves."""

    @abstractmethod
    def last_words(self, culprit: ev.Suspect) -> str:
        """What the log of a stage says of its end, as lines that go behind an error."""

    def next_event(self, coordinator: Coordinator) -> ev.Event:
        """What happens next, or a Tick when the coordinator needs one."""
        return self.said.next(coordinator.rest(time.monotonic()))

    def ask_to_stop(self, why: str = "") -> None:
        """Ask the run to end; safe in a signal handler, for it only queues a note."""
        self.said.note(ev.StopAsked(why))


def neighbours(stages: int, peers: int) -> list[list[int]]:
    """Which stages each of so many peers holds: neighbouring ones, as evenly as can be."""
    if not 1 <= peers <= stages:
        raise ConfigError(
            f"--peers {peers}: the {stages} stages of this model are held by 1 to {stages} peers"
        )
    bounds = [stages * peer // peers for peer in range(peers + 1)]
    return [[*range(start, end)] for start, end in itertools.pairwise(bounds)]


class StagesHere:
    """Stages that a process of this machine runs, by its order: what they say, and how it ends.

    On other threads `on_said` gets what a stage says, `on_lost` why nothing can be heard any more,
    `on_exit` how it ended, and of which stages: of those that failed, if any did.
    """

    def __init__(
        self,
        order: Assignment,
        process: StageProcess,
        on_said: Callable[[int, Any], None],
        on_lost: Callable[[ThinwireError], None],
        on_exit: Callable[[list[int], int], None],
    ):
        self.stages, self.process = order.stages, process
        self._on_said, self._on_lost, self._on_exit = on_said, on_lost, on_exit
        self.is_replaced = False  # then nothing more is heard of it
        self._all_heard = threading.Event()
        self._failed: list[int] = []
        name = f"control of {process.log.stem}"
        self.channel = Channel(
            SocketPipe(process.ours), name, FROM_PEER, self._hear, self._lose, self._all_heard.set
        )
        threading.Thread(target=self._await_exit, daemon=True).start()
        with contextlib.suppress(WireError):  # it has died: its exit code says how
            self.channel.send(order)

    def _hear(self, said: Envelope) -> None:
        if said.stage not in self.stages:
            raise WireError(f"a message of stage {said.stage} came from stages {self.stages}")
        if isinstance(said.message, Failed):
            self._failed.append(said.stage)
        if not self.is_replaced:
            self._on_said(said.stage, said.message)

    def _lose(self, error: ThinwireError) -> None:
        if not self.is_replaced:
            self._on_lost(error)
        self._all_heard.set()

    def _await_exit(self) -> None:
        """Its last words come first: they say more than how it ended."""
        code = self.process.wait()
        self._all_heard.wait(LAST_WORDS_SECONDS)
        if not self.is_replaced:
            self._on_exit(self._failed or self.stages, code)


def placement(settings: Settings, held: list[list[int]]) -> list[list[int]]:
    """Which stages share a process, if one that is lost can be replaced: there are logs of frames
    where links outlive a connection, and one process alone has no neighbours.
    """
    return held if settings.train.log_mb and settings.link.outage and len(held) > 1 else []


class LocalPeers(Peers):
    """Processes on this machine, each by the `order` with its own stages; no orphans are left."""

    def __init__(
        self,
        settings: Settings,
        run_folder: Path,
        order: Assignment,
        peers: int = 0,
        began: int = 0,
    ):
        """`began`: the step from which the run goes on, for those who replace a lost process."""
        stages = settings.pipeline.stages
        super().__init__(stages)
        self._orders: list[Assignment] = []
        self._seats: list[str] = []
        for group in neighbours(stages, peers or stages):
            identity = Identity.create(f"stage-{group[0]}")
            whose = dataclasses.asdict(identity)
            self._orders.append(dataclasses.replace(order, stages=group, identity=whose))
            self._seats += [identity.fingerprint] * len(group)
        self._logs = run_folder / "logs"
        is_worth_it = forks(settings.run.device) and len(self._orders) > 1
        self._forker = Forker() if is_worth_it else None
        self._here: list[StagesHere] = []
        self._began = began
        raise_descriptor_limit()  # for the stages too, which inherit it

    def __exit__(self, *error: object) -> None:
        for here in self._here:
            here.process.kill()
        for here in self._here:
            here.process.end()
        if self._forker is not None:
            self._forker.close()

    def start(self) -> None:
        logs = [self._log(order) for order in self._orders]
        started = start_processes(logs, self._forker)
        for order, process in zip(self._orders, started, strict=True):
            self._here.append(self._attended(order, process))

    def replace(self, stages: list[int], by_follower: bool = False) -> None:
        place = next(i for i, here in enumerate(self._here) if here.stages == stages)
        lost, order = self._here[place], self._orders[place]
        lost.is_replaced = True
        lost.process.end()  # it may be frozen
        self.said.forget(stages)
        resume = str(self.saved.resolve()) if self.saved else order.resume
        order = dataclasses.replace(order, resume=resume, began=self._began)
        (process,) = start_processes([self._log(order)], self._forker)
        self._here[place] = self._attended(order, process)
        self.said.note(ev.Given(stages))

    def tell(self, stage: int, message: ToStage, follows: bool = False) -> None:
        if isinstance(message, Connect):
            message = dataclasses.replace(message, seats=self._seats)
        self._with(stage).channel.send(message, stage)

    def wait_for_exits(self) -> None:
        deadline = time.monotonic() + EXIT_SECONDS
        for here in self._here:
            with contextlib.suppress(subprocess.TimeoutExpired):
                here.process.wait(max(0.1, deadline - time.monotonic()))

    def last_words(self, culprit: ev.Suspect) -> str:
        process = self._with(culprit.stage).process
        # A known error explains itself: then this only says where the log is.
        log = f"its log is {process.log}"
        return f"\n  {log if culprit.known else process.last_lines()}"

    def control_bytes(self) -> int:
        """Every byte of the streams of messages so far, both ways, frame headers included."""
        return sum(here.channel.moved_bytes() for here in self._here)

    def _with(self, stage: int) -> StagesHere:
        return next(here for here in self._here if stage in here.stages)

    def _log(self, order: Assignment) -> Path:
        return self._logs / f"stage-{'-'.join(map(str, order.stages))}.log"

    def _attended(self, order: Assignment, process: StageProcess) -> StagesHere:
        def on_lost(error: ThinwireError) -> None:
            for stage in order.stages:
                self.said.note(ev.Lost(stage, str(error), isinstance(error, BreachError)))

        def on_exit(stages: list[int], code: int) -> None:
            for stage in stages:
                self.said.note(ev.Exited(stage, code))

        return StagesHere(order, process, self.said.hear, on_lost, on_exit)
