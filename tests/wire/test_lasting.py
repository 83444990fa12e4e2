"""A pipe that lasts: whatever happens to its connections, every message comes once, in order."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from wiring import Passed, in_background, read_all, writing

from thinwire.errors import AdmissionError, BreachError, WireError
from thinwire.wire import LastingPipe, Pipe, lasting, memory_pair
from thinwire.wire.lasting import HEAD, LASTING_BYTES, LastingKind
from waiting import PATIENCE, wait_until


class Network:
    """Joins two ends anew each time both ask, and cuts what it has joined, messages and all."""

    def __init__(self):
        self.connections = 0
        self.is_down = False
        self._waiting: dict[int, list[Pipe]] = {0: [], 1: []}
        self._open: tuple[Pipe, Pipe] | None = None
        self._changed = threading.Lock()

    def opener(self, side):
        def reopen(timeout):
            with self._changed:
                if self.is_down:
                    raise WireError("no route")
                if not self._waiting[side]:
                    self._open = memory_pair()
                    self.connections += 1
                    self._waiting[1 - side].append(self._open[1 - side])
                    return self._open[side]
                return self._waiting[side].pop()

        return reopen

    def cut(self):
        with self._changed:
            pair, self._open = self._open, None
            self._waiting = {0: [], 1: []}
        for end in pair or ():
            end.close()


def join(network, outage=PATIENCE):
    openers = [network.opener(side) for side in (0, 1)]
    return [LastingPipe(opener(1), opener, outage) for opener in openers]


class Losable(Passed):
    """The end of a connection that can be lost, where one in memory only ends in good order."""

    is_lost = False

    def read(self):
        message = super().read()
        if message is None and self.is_lost:
            raise WireError("the connection was lost")
        return message


class ByHand:
    """The other end of a lasting pipe, spoken by the test, message by message."""

    def __init__(self, outage=PATIENCE):
        self._next: list[Pipe] = []
        self._connect(0, bytes(8))
        self.pipe = LastingPipe(self._next.pop(), self._reopen, outage)
        assert self.hear()[:2] == (LastingKind.OPEN, 0)

    def _connect(self, have, who):
        self.connection, theirs = memory_pair()
        self._theirs = Losable(theirs)
        self.say(LastingKind.OPEN, have, who)
        self._next.append(self._theirs)

    def _reopen(self, timeout):
        if not self._next:
            raise WireError("no route")
        return self._next.pop()

    def say(self, kind, number, content=b""):
        self.connection.write(HEAD.pack(kind, number) + content)

    def hear(self):
        raw = self.connection.read()
        return (*HEAD.unpack_from(raw), raw[LASTING_BYTES:])

    def lose(self):
        self._theirs.is_lost = True
        self.connection.close()

    def reconnect(self, have, who=bytes(8)):
        """Lose the connection, open another, and say how many messages came; what the pipe has."""
        self.lose()
        self._connect(have, who)
        kind, number, _ = self.hear()
        assert kind == LastingKind.OPEN
        return number


@pytest.fixture
def keep_little(monkeypatch):
    monkeypatch.setattr(lasting, "MOST_KEPT", 20_000)
    monkeypatch.setattr(lasting, "ACKNOWLEDGE_BYTES", 5_000)
    monkeypatch.setattr(lasting, "LEAST_COUNTED", 300)


def test_without_outages_it_is_a_pipe():
    left, right = join(Network())
    left.write(b"there")
    right.write(b"back")
    assert (right.read(), left.read()) == (b"there", b"back")
    in_background(left.close)
    assert right.read() is None
    with pytest.raises(WireError, match="the other end is gone"):
        right.write(b"late")
    right.close()
    with pytest.raises(WireError, match="closed"):
        left.write(b"late")
    assert left.outages == right.outages == 0


@pytest.mark.usefixtures("keep_little")
@pytest.mark.parametrize("seed", range(2))
def test_every_message_comes_once_and_in_order_however_often_connections_are_lost(seed):
    network, chance = Network(), random.Random(seed)
    ends = join(network)
    sizes = [chance.choice((1, 100, 5_000, 30_000)) for _ in range(300)]
    messages = [number.to_bytes(2, "big") + bytes(size) for number, size in enumerate(sizes)]

    def send(pipe, cuts):
        for number, message in enumerate(messages):
            pipe.write(message)
            if number in cuts:  # these come however slow the thread is that cuts by the clock
                before = network.connections
                network.cut()
                wait_until(lambda before=before: network.connections > before)

    arrived: list[list[bytes]] = [[], []]
    with ThreadPoolExecutor(4) as pool:
        cuts = set(chance.sample(range(len(messages)), 4)), set()
        sent = [pool.submit(send, end, own) for end, own in zip(ends, cuts, strict=True)]
        read = [
            pool.submit(lambda end=end, got=got: got.extend(iter(end.read, None)))
            for end, got in zip(ends, arrived, strict=True)
        ]
        for _ in range(30):  # and then no more: a slow machine must come to an end
            time.sleep(chance.random() * 0.03)
            network.cut()
        for future in sent:
            future.result(PATIENCE)
        wait_until(lambda: all(len(got) == len(messages) for got in arrived))
        ends[0].close(None)
        for future in read:
            future.result(PATIENCE)
    assert arrived == [messages, messages]
    assert network.connections > 3


@pytest.mark.parametrize("have", [1, 3])
def test_what_was_not_acknowledged_is_sent_again_and_no_more(have):
    """Of three messages the other end got `have`; its acknowledgements were lost."""
    other = ByHand()
    in_background(other.pipe.read)
    for number in range(3):
        other.pipe.write(bytes([number]))
        assert other.hear() == (LastingKind.DATA, number, bytes([number]))
    assert other.reconnect(have) == 0
    other.pipe.write(b"next")
    heard = [other.hear() for _ in range(4 - have)]
    again = [(LastingKind.DATA, number, bytes([number])) for number in range(have, 3)]
    assert heard == [*again, (LastingKind.DATA, 3, b"next")]


def test_what_comes_twice_is_dropped():
    other = ByHand()
    for number in (0, 1, 1, 0, 2):
        other.say(LastingKind.DATA, number, bytes([number]))
    assert [other.pipe.read() for _ in range(3)] == [b"\0", b"\1", b"\2"]
    in_background(other.pipe.read)
    assert other.reconnect(0) == 3, "on another connection it says that it has three"


@pytest.mark.usefixtures("keep_little")
def test_a_writer_is_held_back_while_too_much_is_not_acknowledged():
    """Whoever reads and never acknowledges must not fill the memory of the other end."""
    other = ByHand()
    in_background(other.pipe.read)
    _, written = writing(other.pipe, [bytes(2000)] * 30)
    wait_until(lambda: len(written) == 10)
    time.sleep(0.2)
    assert len(written) == 10, "ten messages of 2,009 bytes are all that may be kept"
    for have in (10, 20):
        other.say(LastingKind.HAVE, have)
        wait_until(lambda have=have: len(written) == have + 10)


def test_a_writer_waits_during_an_outage_which_is_told_of_and_timed():
    network, told = Network(), []
    left = LastingPipe(network.opener(0)(1), network.opener(0), PATIENCE, told.append, told.append)
    right = LastingPipe(network.opener(1)(1), network.opener(1), PATIENCE)
    left.write(b"before")
    assert right.read() == b"before" and not told
    network.is_down = True
    network.cut()
    in_background(left.read)
    wait_until(lambda: told)  # by who reads, before a write can fail
    thread, written = writing(left, [bytes([number]) for number in range(5)])
    time.sleep(0.3)
    assert len(written) <= 1
    network.is_down = False
    assert [right.read() for _ in range(5)] == [bytes([number]) for number in range(5)]
    thread.join(PATIENCE)
    assert left.outages == right.outages == 1
    reason, seconds = told
    assert reason == "the other end closed the connection" and seconds > 0.3


def test_an_outage_beyond_the_limit_breaks_both_ends():
    network = Network()
    left, right = join(network, outage=3.0)
    network.is_down = True
    network.cut()
    for end in (left, right):
        with pytest.raises(WireError, match="down for 3 s: no route") as broken:
            end.read()
        assert not isinstance(broken.value, BreachError), "nobody broke the contract"
        with pytest.raises(WireError, match="down for"):
            end.write(b"x")
        end.close(None)


def test_whoever_is_not_welcome_any_more_stops_trying():
    def refused(timeout):
        raise AdmissionError("'ada' is not welcome there")

    ours, theirs = memory_pair()
    pipe = LastingPipe(ours, refused, outage=3600)
    other = LastingPipe(theirs, refused, outage=3600)
    pipe.write(b"hello")
    assert other.read() == b"hello"
    ours.close()
    with pytest.raises(AdmissionError, match="not welcome"):
        pipe.read()


def test_another_process_in_the_place_of_the_other_end_is_refused():
    """It has not got what was sent before, and would take the rest for the whole."""
    other = ByHand()
    in_background(lambda: other.reconnect(0, b"stranger"))
    with pytest.raises(BreachError, match="the other end restarted"):
        other.pipe.read()


@pytest.mark.parametrize(("raw", "reason"), [
    (b"x", "shorter than a header"),
    (HEAD.pack(LastingKind.DATA, 7) + b"x", "message 7 arrived, but 0 was due"),
    (HEAD.pack(9, 0), "message 0 arrived, but 0 was due"),
    (HEAD.pack(LastingKind.OPEN, 0), "message 0 arrived, but 0 was due"),
    (HEAD.pack(LastingKind.HAVE, 3), "3 messages are acknowledged, but only 0"),
])  # fmt: skip
def test_nonsense_is_a_breach(raw, reason):
    other = ByHand()
    other.connection.write(raw)
    with pytest.raises(BreachError, match=reason):
        other.pipe.read()


def test_what_fails_unexpectedly_ends_it_for_whoever_reads_too():
    class Failing(Passed):
        def write(self, message):
            if message[0] == LastingKind.DATA:
                raise MemoryError
            super().write(message)

    ours, theirs = memory_pair()
    theirs.write(HEAD.pack(LastingKind.OPEN, 0) + bytes(8))
    pipe = LastingPipe(Failing(ours), Network().opener(0), PATIENCE)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(pipe.read)
        pipe.write(b"x")
        with pytest.raises(WireError, match="a connection failed: MemoryError"):
            reading.result(PATIENCE)


def test_both_ends_may_close_at_once():
    for _ in range(20):
        ends = join(Network())
        for end in ends:
            end.write(b"unread")
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(end.close, None) for end in ends]:
                future.result(PATIENCE)
        assert [end.read() for end in ends] == [None, None]
        assert [end.outages for end in ends] == [0, 0], "neither waits for another connection"


def test_whoever_still_writes_when_the_other_end_hangs_up_has_lost_no_connection():
    """The writer of a connection may notice first that the other end closed it in good order."""
    hung_up = threading.Event()

    class NoticedLate(Passed):
        def write(self, message):
            if message[0] == LastingKind.END:
                hung_up.set()
                raise WireError("the pipe is closed")
            super().write(message)

        def read(self):
            message = super().read()
            if message is None:
                hung_up.wait(PATIENCE)
                time.sleep(0.05)  # long enough for the writer to have its say
            return message

    ours, theirs = memory_pair()
    theirs.write(HEAD.pack(LastingKind.OPEN, 0) + bytes(8))
    theirs.write(HEAD.pack(LastingKind.END, 0))
    pipe = LastingPipe(NoticedLate(ours), Network().opener(0), PATIENCE)
    reading = in_background(pipe.read)
    assert [theirs.read()[0], theirs.read()[0]] == [LastingKind.OPEN, LastingKind.HAVE]
    theirs.close()
    pipe.close(None)
    reading.join(PATIENCE)
    assert pipe.outages == 0


def test_a_connection_that_is_lost_with_the_last_word_is_opened_again():
    other = ByHand()
    closing = in_background(lambda: other.pipe.close(None))
    assert other.hear() == (LastingKind.END, 0, b"")
    assert other.reconnect(0) == 0  # the word was lost
    assert other.hear() == (LastingKind.END, 0, b"")
    assert other.reconnect(1) == 0  # its acknowledgement was lost
    closing.join(PATIENCE)
    assert not closing.is_alive()


def test_whoever_heard_the_last_word_waits_a_moment_for_the_other_to_know(monkeypatch):
    monkeypatch.setattr(lasting, "CLOSE_GRACE_S", PATIENCE)
    other = ByHand()
    other.say(LastingKind.END, 0)
    reading = in_background(lambda: read_all(other.pipe))
    assert other.hear() == (LastingKind.HAVE, 1, b"")
    assert other.reconnect(0) == 1, "we may have missed that"
    other.connection.close()  # now we know
    reading.join(PATIENCE)
    assert not reading.is_alive()
    monkeypatch.setattr(lasting, "CLOSE_GRACE_S", 0.2)
    other = ByHand(outage=3600)
    other.say(LastingKind.END, 0)
    in_background(lambda: (other.hear(), other.lose()))
    assert other.pipe.read() is None, "it does not wait as long as for a link"


def test_closing_during_an_outage_gives_up_after_its_grace():
    network = Network()
    left, _right = join(network, outage=3600)
    network.is_down = True
    network.cut()
    left.close(0.3)
    assert left.read() is None


def test_what_it_adds_to_messages_is_what_the_page_says():
    """docs/wire.md: 9 bytes a message, 17 to open each way, 9 to acknowledge 16 small ones."""
    written: list[int] = []

    class Counted(Passed):
        def write(self, message):
            written.append(len(message))
            super().write(message)

    first = [Counted(end) for end in memory_pair()]
    left, right = (LastingPipe(end, lambda timeout: first[0], PATIENCE) for end in first)
    got = in_background(lambda: read_all(right))
    for number in range(32):
        left.write(bytes(1000))
        wait_until(lambda number=number: written.count(9) >= (number + 1) // 16)
    left.close(None)
    got.join(PATIENCE)
    opened, messages, acknowledged, end = 2 * 17, 32 * 1009, (2 + 1) * 9, 9
    assert sum(written) == opened + messages + acknowledged + end


def test_whoever_closes_it_hangs_up_however_late_it_gets_to_that():
    """When all is said the thread that writes ends, and it may be the first to take the lock."""
    network = Network()
    near, far = network.opener(0)(1), network.opener(1)(1)
    closed = threading.Event()

    class Noted(Passed):
        def close(self, grace=5.0):
            super().close(grace)
            closed.set()

    left, right = (LastingPipe(end, opener, PATIENCE) for end, opener in (
        (Noted(near), network.opener(0)), (far, network.opener(1)),
    ))  # fmt: skip
    in_background(right.read)
    closing, lock_again = threading.current_thread(), left._changed._acquire_restore

    def late(state):
        if threading.current_thread() is closing:
            wait_until(lambda: left._stopped is not None)
            time.sleep(2 * lasting._PAUSE_S)
        lock_again(state)

    left._changed._acquire_restore = late
    left.close()
    assert closed.is_set()
