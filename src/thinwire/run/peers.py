"""The peers of a run as whoever leads them sees them, wherever they are; and the loop that leads.

All that happens to them arrives in one queue, and one thread reads it.
"""

import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from thinwire.engine.reports import Report
from thinwire.errors import BreachError, ConfigError, StageError, ThinwireError, WireError
from thinwire.run import events as ev
from thinwire.run.channel import Channel, SocketPipe
from thinwire.run.conduct import Course
from thinwire.run.coordinator import Coordinator
from thinwire.run.processes import Forker, forks, last_lines, start_process
from thinwire.run.protocol import FROM_PEER, Assignment, Connect, Envelope, Failed, ToStage
from thinwire.run.record import RunRecord
from thinwire.run.watch import Pace
from thinwire.settings import Settings
from thinwire.wire import Identity, Meter, raise_descriptor_limit

EXPLODED = ev.StopAsked('the loss has exploded, and run.on_explosion = "stop"')
LAST_WORDS_SECONDS = 2.0  # to hear what a process said before it ended


class StageFailedError(StageError):
    """A run ended because of one stage; `culprit` says which, and what shows it."""

    def __init__(self, text: str, culprit: ev.Suspect):
        super().__init__(text)
        self.culprit = culprit


def coordinator_of(
    settings: Settings, step: int, held: list[list[int]], parts_travel: bool = False
) -> Coordinator:
    """The coordinator of a run from the checkpoint of a step on; `held`: the stages by process."""
    stages = settings.pipeline.stages
    return Coordinator(
        stages,
        settings.run.patience,
        settings.pipeline.microbatches,
        parts_travel,
        outage=settings.link.outage,
        course=Course(settings, step, stages),
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
                peers.tell(stage, message, follows)
            case ev.End(error, ev.Suspect() as culprit):
                raise StageFailedError(f"{error}{peers.last_words(culprit)}", culprit)
            case ev.End(BaseException() as error):
                raise error
            case ev.End():
                pass  # all stages have said goodbye
            case ev.Replace(stages, by_follower):
                peers.replace(stages, by_follower)
            case ev.DropFollower(stages):
                peers.drop_follower(stages)
            case _:
                carry_out(command)


# Messages of one stage that wait to be heard; its stream holds back what comes after.
MOST_UNHEARD = 64  # one may be large, and a stage may send without end


class Hearing:
    """What happens to all stages, in one queue: our notes come in at once, a stage's in turn.

    One thread takes it out. What is of a stage goes with the room of whoever holds it: another
    holder has another room, and what came of the one before is dropped on its way out.
    """

    def __init__(self, stages: int) -> None:
        self._queue = queue.SimpleQueue[tuple[ev.Event, threading.Semaphore | None]]()
        self._room = [threading.Semaphore(MOST_UNHEARD) for _ in range(stages)]
        self._pace = [Pace(f"stage {stage}") for stage in range(stages)]

    def note(self, event: ev.Event) -> None:
        """Add what has happened; never waits, so a signal handler may call it."""
        room = self._room[event.stage] if isinstance(event, ev.Exited | ev.Lost) else None
        self._queue.put((event, room))

    def hear(self, stage: int, message: Any) -> None:
        """Add what a stage has said, once there is room; WireError if it speaks too often."""
        if not isinstance(message, Report):  # the work of the others bounds these (coordinator.py)
            self._pace[stage].count()
        room = self._room[stage]
        room.acquire()
        self._queue.put((ev.Said(stage, message), room))

    def next(self, timeout: float) -> ev.Event:
        """The next of them, or a Tick if none comes in time."""
        while True:
            try:
                event, room = self._queue.get(timeout=timeout)
            except queue.Empty:
                return ev.Tick()
            if room is not None and isinstance(event, ev.Said):
                room.release()
            if room is None or room in self._room:
                return event

    def forget(self, stages: Collection[int]) -> None:
        """Others hold these now: what came of those before would pass for theirs."""
        for stage in stages:
            self._room[stage] = threading.Semaphore(MOST_UNHEARD)


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
    """Stages that a process of this machine runs, once it has its order."""

    def __init__(self, stages: list[int], logs: Path, forker: Forker | None = None):
        """Start the process, on the thread that also ends it; it imports torch meanwhile."""
        self.stages, self.log = stages, logs / f"stage-{'-'.join(map(str, stages))}.log"
        self.process, self._ours = start_process(self.log, forker)
        self.has_begun = False
        self._is_let_go = False

    def begin(
        self,
        order: Assignment,
        on_said: Callable[[int, Any], None],
        on_exit: Callable[[list[int], int], None],
        on_lost: Callable[[ThinwireError], None] = lambda error: None,
        meter: Meter | None = None,
    ) -> None:
        """Have the process be these stages. On other threads `on_said` gets what a stage says,
        `on_lost` why nothing can be heard any more, `on_exit` how the process ended, and of which
        stages: of those that failed, if any did.
        """
        self.has_begun, all_heard, failed = True, threading.Event(), list[int]()

        def hear(said: Envelope) -> None:
            if said.stage not in self.stages:
                raise WireError(f"a message of stage {said.stage} came from stages {self.stages}")
            if isinstance(said.message, Failed):
                failed.append(said.stage)
            if not self._is_let_go:
                on_said(said.stage, said.message)

        def on_over(error: ThinwireError | None) -> None:
            if error is not None and not self._is_let_go:
                on_lost(error)
            all_heard.set()

        def await_exit() -> None:
            """Its last words come first: they say more than how it ended."""
            code = self.process.wait()
            all_heard.wait(LAST_WORDS_SECONDS)
            if not self._is_let_go:
                on_exit(failed or self.stages, code)

        pipe, name = SocketPipe(self._ours), f"control of {self.log.stem}"
        self.channel = Channel(pipe, name, FROM_PEER, hear, on_over, meter)
        threading.Thread(target=await_exit, daemon=True).start()
        self.channel.send(order)

    def end(self) -> None:
        """End the process at once, if it has not ended; nothing more is heard of it."""
        self._is_let_go = True
        self.process.kill()
        self.process.wait()
        self._ours.close()


def placement(settings: Settings, held: list[list[int]]) -> list[list[int]]:
    """Which stages share a process, if one that is lost can be replaced: there are logs of frames
    where links outlive a connection, and one process alone has no neighbours.
    """
    return held if settings.train.log_mb and settings.link.outage and len(held) > 1 else []


class LocalPeers(Peers):
    """Processes on this machine, each by the `order` with its own stages; no orphans are left."""

    def __init__(self, device: str, order: Assignment, held: list[list[int]], began: int = 0):
        """`held`: the stages by process; `began`: the step from which the run goes on."""
        super().__init__(sum(map(len, held)))
        self._orders: list[Assignment] = []  # of each process
        self._seats: list[str] = []
        for group in held:
            identity = Identity.create(f"stage-{group[0]}")
            self._orders.append(dataclasses.replace(order, stages=group, identity=identity))
            self._seats += [identity.fingerprint] * len(group)
        self._logs = Path(order.run_folder) / "logs"
        self._forker = Forker() if forks(device) and len(held) > 1 else None
        self._here: list[StagesHere] = []
        self.meter = Meter()  # of the streams of messages
        self._began = began
        raise_descriptor_limit()  # for the stages too, which inherit it

    def __exit__(self, *error: object) -> None:
        if self._forker is not None:
            self._forker.close()
        for here in self._here:
            here.end()

    def start(self) -> None:
        for order in self._orders:
            self._here.append(self._started(order))

    def replace(self, stages: list[int], by_follower: bool = False) -> None:
        place = next(i for i, here in enumerate(self._here) if here.stages == stages)
        lost, order = self._here[place], self._orders[place]
        lost.end()  # it may be frozen
        self.said.forget(stages)
        resume = str(self.saved.resolve()) if self.saved else order.resume
        order = dataclasses.replace(order, resume=resume, began=self._began)
        self._here[place] = self._started(order)
        self.said.note(ev.Given(stages))

    def tell(self, stage: int, message: ToStage, follows: bool = False) -> None:
        if isinstance(message, Connect):
            message = dataclasses.replace(message, seats=self._seats)
        self._with(stage).channel.send(message, stage)

    def last_words(self, culprit: ev.Suspect) -> str:
        log = self._with(culprit.stage).log
        # A known error explains itself: then this only says where the log is.
        return f"\n  {f'its log is {log}' if culprit.known else last_lines(log)}"

    def _with(self, stage: int) -> StagesHere:
        return next(here for here in self._here if stage in here.stages)

    def _started(self, order: Assignment) -> StagesHere:
        def on_lost(error: ThinwireError) -> None:
            for stage in order.stages:
                self.said.note(ev.Lost(stage, str(error), isinstance(error, BreachError)))

        def on_exit(stages: list[int], code: int) -> None:
            for stage in stages:
                self.said.note(ev.Exited(stage, code))

        here = StagesHere(order.stages, self._logs, self._forker)
        here.begin(order, self.said.hear, on_exit, on_lost, self.meter)
        return here
