"""What all stages say, in one queue that the coordinator reads from one thread."""

import queue
import threading

from thinwire.run.messages import Message

MOST_UNHEARD = 64
"""Messages of one stage that wait to be heard; its control stream holds back what comes after.
One message may be large, and a stage may send without end."""


class Hearing:
    """A queue of (stage, message): our own notes come in at once, a stage's words in turn."""

    def __init__(self, stages: int) -> None:
        self._queue: queue.SimpleQueue[tuple[int, Message, bool]] = queue.SimpleQueue()
        self._room = [threading.Semaphore(MOST_UNHEARD) for _ in range(stages)]

    def note(self, stage: int, message: Message) -> None:
        """Add what is known about a stage; never waits, so a signal handler may call it."""
        self._queue.put((stage, message, False))

    def hear(self, stage: int, message: Message) -> None:
        """Add what a stage has said, once there is room for it; called by its control stream."""
        self._room[stage].acquire()
        self._queue.put((stage, message, True))

    @property
    def waiting(self) -> int:
        """How many wait to be heard."""
        return self._queue.qsize()

    def next(self, timeout: float) -> tuple[int, Message]:
        """The next of them; queue.Empty if none comes in time."""
        stage, message, is_its_own = self._queue.get(timeout=timeout)
        if is_its_own:
            self._room[stage].release()
        return stage, message
