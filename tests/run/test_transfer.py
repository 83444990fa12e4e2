"""Files in pieces: whole and right, or a reason; from where they stopped; at a bounded rate."""

import hashlib
import os
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from thinwire.background import on_daemon_thread
from thinwire.errors import BreachError, CheckpointError, WireError
from thinwire.run import transfer as tr
from thinwire.wire import Frame, FrameKind, memory_pair
from thinwire.wire.door import Allowance


@pytest.fixture
def file(tmp_path):
    def make(size):
        path, content = tmp_path / "stage-1.safetensors", os.urandom(size)
        path.write_bytes(content)
        return path, tr.Want(5, 1, hashlib.sha256(content).hexdigest(), size)

    return make


def serve(pipe, path, rate=None):
    """Answer every request with this file."""
    talk = tr.Talk(pipe)
    on_daemon_thread("giver", lambda: tr.serve_files(talk, lambda want: path, rate))
    return talk


def pieces_sent(giver):
    return giver.meter.snapshot()["sent"]["PIECE"]


@pytest.mark.parametrize("size", [1, tr.PIECE_BYTES, 3 * tr.PIECE_BYTES + 17])
@pytest.mark.parametrize(
    "have", [0, 1, tr.PIECE_BYTES, 2 * tr.PIECE_BYTES + 5, 3 * tr.PIECE_BYTES + 17]
)
def test_a_file_arrives_whole_from_where_it_stopped(size, have, file, tmp_path):
    here, there = memory_pair()
    path, want = file(size)
    part, done = tmp_path / "in" / "part", list[int]()
    part.parent.mkdir()
    part.write_bytes(path.read_bytes()[:have])
    giver = serve(there, path)
    tr.take(tr.Talk(here), want, part, done.append)
    assert part.read_bytes() == path.read_bytes()
    assert done[-1] == size and done == sorted(done)
    if have >= size:
        assert giver.meter.sent_bytes() == 0, "nothing was asked for"
    else:
        assert pieces_sent(giver)["payload_bytes"] == size - have + have % tr.PIECE_BYTES


def test_a_silent_connection_keeps_what_has_come(file, tmp_path, monkeypatch):
    path, want = file(3 * tr.PIECE_BYTES)
    part = tmp_path / "part"
    here, there = memory_pair()
    there.close()
    with pytest.raises(WireError):
        tr.take(tr.Talk(here), want, part)
    here, there = memory_pair()
    tr.Talk(there).send(Frame(FrameKind.PIECE, payload=path.read_bytes()[: tr.PIECE_BYTES]))
    monkeypatch.setattr("thinwire.run.transfer.SILENCE_S", 2.0)
    with pytest.raises(WireError, match="said nothing for 2"):
        tr.take(tr.Talk(here), want, part)
    monkeypatch.undo()
    assert part.stat().st_size == tr.PIECE_BYTES
    here, there = memory_pair()
    giver = serve(there, path)
    tr.take(tr.Talk(here), want, part)
    assert pieces_sent(giver)["frames"] == 2


def test_a_wrong_hash_is_sent_again_once_and_then_named(file, tmp_path):
    path, want = file(tr.PIECE_BYTES + 9)
    part = tmp_path / "part"
    part.write_bytes(bytes(tr.PIECE_BYTES))  # of the right size so far, with other bits
    here, there = memory_pair()
    giver = serve(there, path)
    tr.take(tr.Talk(here), want, part)
    assert part.read_bytes() == path.read_bytes() and pieces_sent(giver)["frames"] == 1 + 2
    part.unlink()
    path.write_bytes(bytes(want.bytes))
    with pytest.raises(CheckpointError, match=rf"instead of {want.sha256[:12]}, twice"):
        tr.take(tr.Talk(here), want, part)
    assert not part.exists()


def test_a_full_disk_is_known_before_anything_is_asked(file, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    talk = tr.Talk(memory_pair()[0])
    with pytest.raises(CheckpointError, match=r"1,000 bytes do not fit into .*67,108,864 are free"):
        tr.take(talk, file(1000)[1], tmp_path / "part")
    assert talk.meter.sent_bytes() == 0


@pytest.mark.parametrize(("answer", "error", "words"), [
    (tr.Refusal("it is gone"), CheckpointError, "does not send it: it is gone"),
    (Frame(FrameKind.PIECE, step=1, payload=bytes(10)), BreachError, "another piece"),
    (Frame(FrameKind.PIECE, payload=bytes(11)), BreachError, "another piece"),
    (Frame(FrameKind.FORWARD, payload=bytes(10)), BreachError, "FORWARD frame"),
    (Frame(FrameKind.CONTROL, payload=b"nonsense"), BreachError, "cannot be read"),
    (Frame(FrameKind.PIECE, payload=bytes(tr.MOST_SAID + 1)), BreachError, "at most"),
])  # fmt: skip
def test_what_was_not_due_is_refused(answer, error, words, file, tmp_path):
    here, there = memory_pair()
    talk = tr.Talk(there)
    talk.send(answer) if isinstance(answer, Frame) else talk.say(answer)
    with pytest.raises(error, match=words):
        tr.take(tr.Talk(here), file(10)[1], tmp_path / "part")


@pytest.mark.parametrize("change", [{"bytes": 11}, {"offset": 5}, {"offset": tr.PIECE_BYTES}])
def test_a_request_that_does_not_fit_is_refused(change, file):
    path, want = file(10)
    cases = (replace(want, **change), path), (want, path.with_name("missing"))
    for (asked, place), words in zip(cases, ("has 10 bytes", "No such file"), strict=True):
        here, there = memory_pair()
        serve(there, place)
        talk = tr.Talk(here)
        talk.say(asked)
        answer = talk.hear()
        assert isinstance(answer, tr.Refusal) and words in answer.reason


def test_a_file_is_given_at_its_rate(file, tmp_path, monkeypatch):
    """Which changes at any time, and is never so low that it passes for silence."""
    clock = SimpleNamespace(now=50.0, monotonic=lambda: clock.now)
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr("thinwire.run.transfer.time", clock)
    here, there = memory_pair()
    path, want = file(8 * tr.PIECE_BYTES)
    rate = Allowance(tr.PIECE_BYTES * 8e-6 / 2, burst_s=0)
    serve(there, path, rate)
    tr.take(tr.Talk(here), want, tmp_path / "part")
    assert clock.now == pytest.approx(50 + 8 * 2)
    clock.now += 3600  # a pause saves no rate for later
    tr.take(tr.Talk(here), want, tmp_path / "again")
    assert clock.now == pytest.approx(3650 + 16 * 2)
    rate.mbps = tr.uplink_share(0.0)  # training is over: the whole uplink is free
    tr.take(tr.Talk(here), want, tmp_path / "free")
    assert clock.now == pytest.approx(3650 + 16 * 2)
    assert 4 * tr.PIECE_BYTES * 8e-6 / tr.uplink_share(1e-9) == pytest.approx(tr.SILENCE_S)
    assert tr.uplink_share(5.0) == 5.0
