import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from wiring import read_all

from thinwire.errors import WireError
from thinwire.wire import memory_pair
from waiting import PATIENCE


def test_messages_keep_their_order_and_bounds_in_both_directions(pipes):
    here, there = pipes
    sent_here = [bytes([i]) * (i * 997 + 64) for i in range(40)]
    sent_there = [bytes([i]) * (i * 31 + 64) for i in range(40)]
    with ThreadPoolExecutor(2) as pool:
        at_there = pool.submit(lambda: [there.read() for _ in sent_here])
        at_here = pool.submit(lambda: [here.read() for _ in sent_there])
        for a, b in zip(sent_here, sent_there, strict=True):
            here.write(a)
            there.write(b)
        assert at_there.result(PATIENCE) == sent_here
        assert at_here.result(PATIENCE) == sent_there


def test_what_was_written_before_closing_still_arrives(pipes):
    here, there = pipes
    sent = [bytes([i]) * (1 << 20) for i in range(12)]
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(read_all, there)
        for message in sent:
            here.write(message)
        here.close(None)
        assert received.result(PATIENCE) == sent


def test_closing_ends_a_waiting_read_and_all_writing_at_both_ends(pipes):
    here, there = pipes
    with ThreadPoolExecutor(2) as pool:
        waiting, ended = pool.submit(here.read), pool.submit(read_all, there)
        here.close()
        here.close()  # a second time does nothing
        assert waiting.result(PATIENCE) is None and ended.result(PATIENCE) == []
    with pytest.raises(WireError):
        here.write(b"x" * 64)
    with pytest.raises(WireError):
        for _ in range(100):  # the transport may take a few before it knows
            there.write(b"x" * 64)


def test_a_full_pipe_holds_its_writer_until_there_is_room():
    here, there = memory_pair(limit=2)
    written = threading.Semaphore(0)

    def write():
        for i in range(3):
            here.write(bytes([i]))
            written.release()

    writer = threading.Thread(target=write)
    writer.start()
    assert written.acquire(timeout=PATIENCE)
    assert written.acquire(timeout=PATIENCE)
    assert not written.acquire(timeout=0.05)
    assert there.read() == b"\0"
    assert written.acquire(timeout=PATIENCE)
    writer.join(PATIENCE)
