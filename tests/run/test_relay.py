"""`thinwire relay`: a real process, the line it prints, and two who meet there."""

import io
import re
import signal
import stat

import pytest

from programs import Program
from thinwire.errors import ConfigError
from thinwire.run.relay import parse_relay, run_relay
from thinwire.wire import Standby, ping
from thinwire.wire.door import call
from waiting import wait_until

NAME = "0123456789abcdef/cut-0@1"


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("THINWIRE_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def start(tmp_path, *arguments):
    words = ["relay", "--listen", "127.0.0.1:0", *arguments]
    program = Program(words, tmp_path, tmp_path)
    program.wait_for(r"--relay \S+\n")
    return program, parse_relay(re.search(r"--relay (\S+)\n", program.text())[1])


def test_two_meet_at_a_relay_and_its_pass_is_kept(tmp_path, data):
    program, relay = start(tmp_path)

    def take(connection, home):
        with connection:
            connection.sendall(b"hello")

    with Standby(NAME, relay, take) as standby:
        wait_until(lambda: standby.waiting)
        with call(relay, "reach", NAME, 30)[0] as caller:
            assert caller.recv(5) == b"hello"
    program.stop(code=0)
    text = program.text()
    assert "at most 200 Mbit/s for each link" in text
    assert "note: 127.0.0.1 is not an address of the" in text
    assert text.endswith("the relay is closed; 5 B passed\n")

    kept = data / "relay-pass"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert kept.read_text().strip() == relay.token and relay.token not in repr(relay)
    program, again = start(tmp_path, "--mbps", "20", "--pass-file", str(kept))
    assert again.token == relay.token
    assert ping(again, NAME).address.startswith("127.0.0.1:")
    program.stop(signal.SIGTERM, 0)
    assert "at most 20 Mbit/s for each run" in program.text()


def test_what_is_no_relay_or_pass_is_refused_and_not_quoted(tmp_path):
    path = tmp_path / "pass"
    for content in (None, b"", b"short", b"spaces in it", b"\xff" * 20):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=str(path)) as caught:
            run_relay("127.0.0.1:0", 0, path, io.StringIO())
        assert "short" not in str(caught.value)
    for text in ("/long-enough-pass", ":4617", ":4617/short", ":4617/long enough pass"):
        with pytest.raises(ConfigError, match="is written HOST:PORT/PASS") as caught:
            parse_relay(f"host{text}")
        assert "short" not in str(caught.value) and "enough" not in str(caught.value)
    for address in ("relay.example.org:4617", "[2001:db8::1]:4617", "203.0.113.5:1"):
        assert parse_relay(f" {address}/pass_of-a-relay\n").address == address
