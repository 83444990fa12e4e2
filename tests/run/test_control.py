"""A control stream between machines survives its connections."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

from thinwire.errors import ThinwireError, WireError
from thinwire.run.control import Channel, lasting_control
from thinwire.run.messages import FromCoordinator, FromPeer, Pulse, Start, Stop
from thinwire.wire import Pipe, memory_pair


class Ways:
    """Connections between two ends, made when both ask for one; `cut` breaks the latest."""

    def __init__(self) -> None:
        self.outages = 0
        self._waiting: tuple[Pipe, ...] = ()
        self._latest: tuple[Pipe, ...] = ()
        self._lock = threading.Lock()

    def open(self, timeout: float = 10.0) -> Pipe:
        with self._lock:
            if not self._waiting:
                self._latest = self._waiting = memory_pair()
            pipe, *rest = self._waiting
            self._waiting = tuple(rest)
            return pipe

    def cut(self) -> None:
        self.outages += 1
        for pipe in self._latest:
            pipe.close()


def test_what_is_said_over_many_connections_arrives_once_and_in_order() -> None:
    ways, heard, lost = Ways(), queue.SimpleQueue[FromPeer](), queue.SimpleQueue[ThinwireError]()
    away, back = queue.SimpleQueue[str](), queue.SimpleQueue[float]()
    with ThreadPoolExecutor(2) as pool:
        first, other = pool.submit(ways.open).result(), pool.submit(ways.open).result()
    pipe = lasting_control(first, ways.open, 30.0, away.put, back.put)
    here = Channel(pipe, "coordinator", FromPeer, heard.put, lost.put)
    there = Channel(lasting_control(other, ways.open, 30.0), "stage", FromCoordinator)
    total, every = 60, 20
    for number in range(total):
        there.send(Pulse(number, "works"))
        if number % every == every - 1:
            assert heard.get(timeout=30) is not None
            ways.cut()
            assert away.get(timeout=30) and back.get(timeout=30) >= 0
    here.send(Start())
    here.send(Stop())
    begun = [message.begun for message in iter(lambda: heard.get(timeout=30), Pulse(59, "works"))]
    assert begun == list(range(total // every, total - 1))
    assert there.receive(Start) == Start() and there.receive(Stop) == Stop()
    assert lost.empty() and ways.outages == total // every
    there.close()
    here.close()


def test_without_an_outage_allowed_the_first_loss_is_the_end() -> None:
    ways, lost = Ways(), queue.SimpleQueue[ThinwireError]()
    pipe = ways.open()
    assert lasting_control(pipe, ways.open, 0.0) is pipe
    Channel(pipe, "coordinator", FromPeer, lambda message: None, lost.put)
    ways.cut()
    assert isinstance(lost.get(timeout=30), WireError)
