from concurrent.futures import ThreadPoolExecutor

import pytest
from wiring import read_all, writing

from thinwire.errors import WireError
from thinwire.wire import memory_pair
from waiting import PATIENCE, wait_until


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
    writer, written = writing(here, [b"a", b"b", b"c"])
    wait_until(lambda: len(written) == 2)
    writer.join(0.05)
    assert len(written) == 2
    assert there.read() == b"a"
    wait_until(lambda: len(written) == 3)
