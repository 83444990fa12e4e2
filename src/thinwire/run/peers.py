"""The stages of a run as whoever leads them sees them, wherever they are; and the loop that leads.

Peers dial the coordinator, never the other way round. All that happens to them arrives in one
queue, and one thread reads it.
"""

import contextlib
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from types import UnionType
from typing import Any

from thinwire.errors import BreachError, StageError, ThinwireError, WireError
from thinwire.run.control import Channel
from thinwire.run.coordinator import Coordinator
from thinwire.run.events import Command, End, Event, Lost, StopAsked, Suspect, Tell
from thinwire.run.hearing import Hearing
from thinwire.run.messages import CONTROL, FromCoordinator, FromPeer
from thinwire.run.vocabulary import Vocabulary
from thinwire.wire import Pipe


class StageFailedError(StageError):
    """A run ended because of one stage; `culprit` says which, and what shows it."""

    def __init__(self, text: str, culprit: Suspect):
        super().__init__(text)
        self.culprit = culprit


def lead(coordinator: Coordinator, peers: "Peers", carry_out: Callable[[Command], None]) -> None:
    """Lead a run to its end; raises the error that ends it. Commands that are not for
    peers go to `carry_out`.
    """
    while not coordinator.is_over:
        heed(coordinator, peers, carry_out, peers.next_event(coordinator))


def heed(
    coordinator: Coordinator, peers: "Peers", carry_out: Callable[[Command], None], event: Event
) -> None:
    """Do what the coordinator says to one event; raises the error with which it ends the run."""
    for command in coordinator.on(event, time.monotonic()):
        match command:
            case Tell(stage, message):
                peers.tell(stage, message)
            case End(error, culprit):
                if culprit is not None:
                    raise StageFailedError(f"{error}{peers.last_words(culprit)}", culprit)
                if error is not None:
                    raise error
                peers.wait_for_exits()
            case _:
                carry_out(command)


class Peers(contextlib.AbstractContextManager[Any]):
    """A control stream to each stage; leaving the context ends what is still there of them."""

    hears: UnionType = FromPeer
    words: Vocabulary = CONTROL

    def __init__(self, stages: int):
        self._stages = range(stages)
        self.said = Hearing(stages)
        self._channels: dict[int, Channel] = {}
        self._accepting: list[threading.Thread] = []

    @abstractmethod
    def start(self) -> None:
        """Have a process started for each stage; each dials by itself."""

    @abstractmethod
    def wait_for_exits(self) -> None:
        """Let stages that have said goodbye end by themselves."""

    @abstractmethod
    def last_words(self, culprit: Suspect) -> str:
        """What the log of a stage says of its end, as lines that go behind an error."""

    @abstractmethod
    def _open(self, stage: int) -> Pipe:
        """Wait for the control stream of a stage."""

    def next_event(self, coordinator: Coordinator) -> Event:
        """What happens next, or a Tick when the coordinator needs one."""
        return self.said.next(coordinator.rest(time.monotonic()))

    def ask_to_stop(self, who: str = "") -> None:
        """Ask the run to end; safe in a signal handler, for it only queues a note."""
        self.said.note(StopAsked(who))

    def tell(self, stage: int, message: FromCoordinator) -> None:
        """Send a message to a stage that has said hello; one that is gone shows as an event."""
        self._accepting[stage].join()  # its hello may be heard before its channel is filed
        with contextlib.suppress(WireError):
            self._channels[stage].send(message)

    def control_bytes(self) -> int:
        """Every byte of the control streams so far, both ways, frame headers included."""
        meters = [channel.meter for channel in self._channels.values()]
        return sum(meter.sent_bytes() + meter.received_bytes() for meter in meters)

    def _hear(self, stage: int, message: FromPeer) -> None:
        """A stage has said something; on the thread of its control stream, which may wait."""
        self.said.hear(stage, message)

    def _expect(self, stage: int) -> None:
        """Wait for a stage to dial, on a thread of its own; stages in order."""
        self._accepting.append(self._begin(self._accept, stage))

    def _begin(self, target: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        return thread

    def _accept(self, stage: int) -> None:
        try:
            pipe = self._open(stage)
        except WireError as error:
            self.said.note(Lost(stage, str(error)))
            return

        def on_lost(error: ThinwireError) -> None:
            self.said.note(Lost(stage, str(error), isinstance(error, BreachError)))

        self._channels[stage] = Channel(
            pipe,
            f"control of stage {stage}",
            self.hears,
            on_message=lambda message: self._hear(stage, message),
            on_lost=on_lost,
            words=self.words,
        )
