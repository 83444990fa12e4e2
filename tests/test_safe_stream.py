"""Output that cannot fail, and that waits for no reader once a run is shown."""

import os
import threading

import pytest

from thinwire import safe_stream as stream_module
from thinwire.background import on_daemon_thread
from thinwire.safe_stream import SafeStream
from waiting import PATIENCE


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w", encoding="utf-8")
    yield reading, stream
    os.close(reading)
    stream.close()


def never_waiting(stream):
    safe = SafeStream(stream)
    safe.never_wait()
    return safe


def arrived(safe, reading, stream):
    """All that a reader gets who begins to read now, to the end of the stream."""
    got: list[bytes] = []

    def read():
        while part := os.read(reading, 65536):
            got.append(part)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    safe.finish(None)
    stream.close()
    reader.join(30)
    return b"".join(got).decode()


def test_everything_arrives_in_order_at_a_slow_reader(pipe):
    safe = never_waiting(pipe[1])
    lines = [f"line {number} {'x' * 200}\n" for number in range(2000)]
    for line in lines:
        safe.write(line)  # far more than the pipe holds, and nobody reads yet
    assert arrived(safe, *pipe) == "".join(lines)


def test_the_oldest_gives_way_and_the_newest_stays(pipe, monkeypatch):
    monkeypatch.setattr(stream_module, "_MOST_HELD", 100)
    safe = never_waiting(pipe[1])
    for number in range(5000):
        safe.write(f"line {number:06d} {'x' * 100}\n")
    safe.finish(0.1)  # nobody reads: it gives up
    text = arrived(safe, *pipe)
    assert "earlier pieces of output were dropped unread\n" in text
    assert len(text) < 110_000
    assert text.splitlines()[-1].startswith("line 004999")


def test_who_waits_for_a_reader_that_has_stopped_is_not_kept_by_what_others_write(pipe):
    safe, is_over = never_waiting(pipe[1]), threading.Event()
    safe.write("x" * 200_000)  # more than the pipe holds

    def go_on():
        while not is_over.wait(0.01):
            safe.write("more\n")

    on_daemon_thread("others", go_on)
    on_daemon_thread("end", lambda: safe.finish(0.2)).result(PATIENCE)
    is_over.set()
