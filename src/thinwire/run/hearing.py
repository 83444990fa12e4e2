"""What happens to all stages, in one queue that the coordinator's loop reads."""

import queue
import threading

from thinwire.engine.reports import Report
from thinwire.run.events import Event, Said, Tick
from thinwire.run.messages import FromPeer
from thinwire.run.pace import Pace

MOST_UNHEARD = 64
"""Messages of one stage that wait to be heard; its control stream holds back what comes after.
One message may be large, and a stage may send without end."""


class Hearing:
    """A queue of events: our own notes come in at once, a stage's words in turn."""

    def __init__(self, stages: int) -> None:
        self._queue: queue.SimpleQueue[tuple[Event, threading.Semaphore | None]]
        self._queue = queue.SimpleQueue()
        self._room = [threading.Semaphore(MOST_UNHEARD) for _ in range(stages)]
        self._pace = [Pace(f"stage {stage}") for stage in range(stages)]

    def note(self, event: Event) -> None:
        """Add what has happened; never waits, so a signal handler may call it."""
        self._queue.put((event, None))

    def hear(self, stage: int, message: FromPeer) -> None:
        """Add what a stage has said, once there is room for it; called by its control stream.

        WireError if it speaks too often, which breaks its stream. Results of its work are bounded
        by the work of the others (coordinator.py).
        """
        if not isinstance(message, Report):
            self._pace[stage].count()
        self._room[stage].acquire()
        self._queue.put((Said(stage, message), self._room[stage]))

    @property
    def waiting(self) -> int:
        """How many wait to be heard."""
        return self._queue.qsize()

    def next(self, timeout: float) -> Event:
        """The next of them, or a Tick if none comes in time."""
        try:
            event, room = self._queue.get(timeout=timeout)
        except queue.Empty:
            return Tick()
        if room is not None:
            room.release()
        return event
