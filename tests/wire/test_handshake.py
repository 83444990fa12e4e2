from concurrent.futures import ThreadPoolExecutor

import pytest
from wiring import Passed

from thinwire.errors import AdmissionError, BreachError, WireError
from thinwire.wire import Frame, FrameKind, encode, handshake, memory_pair
from thinwire.wire.link import MAX_HELLO
from waiting import PATIENCE


def both(pipes, mine, expect, theirs, they_expect):
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(handshake, pipes[1], theirs, they_expect, PATIENCE)
        here = handshake(pipes[0], mine, expect, PATIENCE)
        return here, there.result()


def hello(payload):
    return encode(Frame(FrameKind.HELLO, payload=payload))


def test_each_end_learns_what_the_other_said(pipes):
    mine = {"stage": 0, "config_hash": "ab12", "note": "spruce"}
    theirs = {"stage": 1, "config_hash": "ab12"}
    same = {"config_hash": "ab12"}
    assert both(pipes, mine, {**same, "stage": 1}, theirs, {**same, "stage": 0}) == (theirs, mine)


def test_every_difference_is_named_in_one_message(pipes):
    expect = {"config_hash": "ab12", "stage": 1, "release": "0.1", "steps": 5}
    theirs = {"config_hash": "cd34", "stage": 2, "steps": 5}
    with pytest.raises(WireError) as failure:
        both(pipes, {}, expect, theirs, {})
    text = str(failure.value)
    assert "config_hash: this stage has ab12, the other end has cd34" in text
    assert "stage: this stage has 1, the other end has 2" in text
    assert "release: this stage has 0.1, the other end does not say" in text
    assert "steps" not in text


def test_after_a_failed_handshake_the_other_end_is_not_left_waiting():
    here, there = memory_pair()
    there.write(hello(b'{"stage": 2}'))
    with pytest.raises(WireError):
        handshake(here, {}, {"stage": 1}, PATIENCE)
    assert there.read() is not None  # the HELLO
    assert there.read() is None


@pytest.mark.parametrize(("message", "reason"), [
    (hello(b"{not json"), "not a JSON object"),
    (hello(b"\xff\xfe\xff"), "not a JSON object"),
    (hello(b"[" * 30_000), "not a JSON object"),
    (hello(b"[1, 2]"), "not a JSON object"),
    (hello(b'"' + b"x" * MAX_HELLO + b'"'), f"at most {MAX_HELLO} are accepted"),
    (encode(Frame(FrameKind.FORWARD)), "expected HELLO first, got FORWARD"),
    (b"junk", "malformed frame, length"),
])  # fmt: skip
def test_a_malformed_hello_is_refused(message, reason):
    here, there = memory_pair()
    there.write(message)
    with pytest.raises(WireError, match=reason):
        handshake(here, {}, {}, PATIENCE)


def test_silence_ends_in_an_error(pipes):
    with pytest.raises(WireError, match=r"said nothing for 0\.05 s"):
        handshake(pipes[0], {}, {}, 0.05)


@pytest.mark.parametrize("error", [BreachError("it restarted"), AdmissionError("it left")])
def test_whatever_ends_a_handshake_convicts_nobody(error):
    """Whoever links to the next holder of a lost stage names one that breaks a contract: here there
    is none yet, and the connection may break in many ways.
    """

    class Broken(Passed):
        def read(self):
            raise error

    with pytest.raises(WireError, match=f"handshake: {error}") as caught:
        handshake(Broken(memory_pair()[0]), {}, {}, PATIENCE)
    assert type(caught.value) is WireError
