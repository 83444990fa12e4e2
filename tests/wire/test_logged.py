"""Pipes that outlive the process at their other end: what is sent again, and what is left out."""

import contextlib
from collections.abc import Callable

import msgspec
import pytest
from wiring import MAX_PAYLOAD, Recorder, in_background

from thinwire import wire
from thinwire.background import on_daemon_thread
from thinwire.errors import BreachError, WireError
from waiting import PATIENCE, wait_until

NICS: dict[str, Callable[[], wire.Nic | None]] = {
    "direct": lambda: None,
    "emulated": lambda: wire.Nic(80, 80, latency_ms=3, jitter_ms=1),
}
MICROBATCHES = 2


class Side:
    """A process at one end of a link: it sends the same frames for a step, whoever it is."""

    def __init__(self, folder, pipe, start=0, nic=None):
        self.state = wire.LinkState(wire.FrameLog(folder, 1 << 20), start, is_new=pipe is None)
        meter, self.heard = wire.Meter(), Recorder()
        self.pipe = wire.LoggedPipe(pipe, self.state, nic, meter)
        self.link = wire.Link(self.pipe, meter, folder.name, MAX_PAYLOAD)
        self.kind = wire.FrameKind.FORWARD if "below" in folder.name else wire.FrameKind.BACKWARD
        if pipe is not None:
            self.start()

    def start(self):
        self.link.start(self.heard.on_frame, self.heard.on_broken, self.heard.on_end)
        return self

    def send(self, *steps, microbatches=MICROBATCHES):
        for step in steps:
            for number in range(microbatches):
                payload = f"{self.kind.name} {step}.{number}".encode()
                self.link.send(wire.Frame(self.kind, step=step, microbatch=number, payload=payload))

    def got(self):
        return [(frame.step, frame.microbatch) for frame in self.heard.frames]

    def wait_for(self, count):
        self.heard.wait(lambda: len(self.heard.frames) >= count or self.heard.errors)
        assert not self.heard.errors


def frames_of(*steps):
    return [(step, number) for step in steps for number in range(MICROBATCHES)]


def meet(staying, new):
    """Both say where they stand; the one that stays sends its log again."""
    ours, theirs = wire.memory_pair()
    staying.state.start = max(staying.state.start, new.state.start)  # nobody begins after others
    going = in_background(lambda: staying.pipe.go_on(ours))
    new.pipe.go_on(theirs)
    new.start()
    going.join(PATIENCE)
    assert not going.is_alive()


@pytest.fixture(params=NICS)
def nic(request):
    return NICS[request.param]


def joined(folder, nic=lambda: None):
    """A stage below, the stage above it and the pipe of that, which dies with it."""
    ours, theirs = wire.memory_pair()
    below = Side(folder / "below", ours, nic=nic())
    return below, Side(folder / "above", theirs, nic=nic()), theirs


@pytest.fixture
def pair(tmp_path, nic):
    return joined(tmp_path, nic)


def die(above, its_pipe, below):
    """The process above is gone; whoever leads says so before the link gives up."""
    below.pipe.await_another()
    above.link.close(0)
    its_pipe.close()


def after_a_death(below, above, its_pipe, new):
    """What the stage below gets in all, if the one above dies in step 3 and begins anew at 2."""
    below.send(0, 1, 2, 3)
    above.wait_for(4 * MICROBATCHES)
    above.send(0, 1, 2)
    above.send(3, microbatches=1)
    below.wait_for(3 * MICROBATCHES + 1)
    die(above, its_pipe, below)
    below.pipe.trim(2)
    meet(below, new)
    new.wait_for(2 * MICROBATCHES)
    assert new.got() == frames_of(2, 3), "its log since that state, in order"
    new.send(2, 3, 4)
    below.send(4)
    new.wait_for(3 * MICROBATCHES)
    assert new.got() == frames_of(2, 3, 4)
    below.wait_for(5 * MICROBATCHES)
    return below.got()


def test_a_new_process_gets_what_it_needs_and_the_other_end_nothing_twice(pair, tmp_path, nic):
    new = Side(tmp_path / "new", None, start=2, nic=nic())
    assert after_a_death(*pair, new) == frames_of(0, 1, 2, 3, 4)
    assert new.state.sent_again == 4, "it has what it needs to send that"
    sent = [side.link.meter.snapshot()["sent"] for side in (new, pair[0])]
    assert sent[0]["BACKWARD"]["frames"] == MICROBATCHES + 1, "what the other end had was not sent"
    assert sent[1]["FORWARD"]["frames"] == 7 * MICROBATCHES, "what is sent again is counted again"


@pytest.mark.parametrize("error", [-1, 1])
def test_a_wrong_count_of_what_arrived_would_show(error, tmp_path, monkeypatch):
    """The failing side of the test above: a frame comes twice, or one is missing."""
    below, above, theirs = joined(tmp_path)
    new, true = Side(tmp_path / "new", None, start=2), wire.LinkState.position

    def wrong(state):
        said = true(state)
        wrong = [(step, kind, n + error * (step == 3)) for step, kind, n in said.received]
        return wire.Position(said.start, said.latest, wrong)

    monkeypatch.setattr(wire.LinkState, "position", wrong)
    below.send(0, 1, 2, 3)
    above.send(0, 1, 2)
    above.send(3, microbatches=1)
    below.wait_for(3 * MICROBATCHES + 1)
    die(above, theirs, below)
    meet(below, new)
    new.send(2, 3, 4)
    below.wait_for(4 * MICROBATCHES + 1 + (error < 0))
    missing = set(frames_of(0, 1, 2, 3)) - set(below.got())
    assert (error < 0 and below.got().count((3, 0)) == 2) or missing == {(3, 1)}


def test_who_is_lost_again_is_replaced_again(pair, tmp_path):
    """Both in the middle of what is sent again, and before it has said where it stands."""
    below, above, its_pipe = pair
    nic = below.pipe._nic
    below.send(*range(20))
    above.wait_for(20 * MICROBATCHES)
    die(above, its_pipe, below)

    ours, theirs = wire.memory_pair(limit=1)
    silent = on_daemon_thread("silent", lambda: below.pipe.go_on(ours))
    assert theirs.read(), "where the other end stands; and no answer"
    below.pipe.await_another()
    with pytest.raises(WireError):  # it does not wait for an answer that cannot come
        silent.result(PATIENCE / 3)

    ours, theirs = wire.memory_pair(limit=1)
    stuck = on_daemon_thread("stuck", lambda: below.pipe.go_on(ours))
    state = wire.LinkState(wire.FrameLog(tmp_path / "second", 1 << 20), 0, True)
    second = wire.LoggedPipe(None, state, nic)
    second.go_on(theirs)
    assert second.read() and second.read(), "it dies after the first frames"
    below.pipe.await_another()
    with pytest.raises(WireError) if nic is None else contextlib.suppress(WireError):
        stuck.result(PATIENCE)  # an emulated link may have taken all, and loses it

    third = Side(tmp_path / "third", None, start=0, nic=nic)
    meet(below, third)
    third.wait_for(20 * MICROBATCHES)
    assert third.got() == frames_of(*range(20))


def test_a_goodbye_in_the_log_waits_until_the_new_process_is_done(pair, tmp_path, nic):
    """Else it would end a link over which there is still something to say."""
    below, above, its_pipe = pair
    below.send(0, 1)
    above.send(0)
    above.wait_for(2 * MICROBATCHES)
    below.wait_for(MICROBATCHES)
    closing = in_background(lambda: below.link.close(None))
    above.heard.wait(lambda: above.heard.ends)
    closing.join(PATIENCE)  # long before another process could be there
    die(above, its_pipe, below)
    new = Side(tmp_path / "new", None, nic=nic())
    meet(below, new)
    new.wait_for(2 * MICROBATCHES)
    new.send(0)  # which the other end has
    new.link.wait_for_room(1)
    assert new.got() == frames_of(0, 1) and not new.heard.ends and not new.heard.errors
    new.link.close(PATIENCE)
    assert not new.heard.errors


def test_without_a_word_that_another_comes_a_loss_is_the_end(tmp_path):
    ours, theirs = wire.memory_pair()
    below = Side(tmp_path / "below", ours)
    theirs.close()
    below.heard.wait(lambda: below.heard.errors)
    assert "closed it without a goodbye" in str(below.heard.errors[0])


def test_what_is_sent_while_nobody_is_there_is_sent_to_who_comes(pair, tmp_path, nic):
    below, above, its_pipe = pair
    below.send(0)
    above.wait_for(MICROBATCHES)
    die(above, its_pipe, below)
    below.send(1, 2)
    below.link.wait_for_room(1)
    new = Side(tmp_path / "new", None, start=1, nic=nic())
    below.send(3)  # may still wait for its time on the uplink
    meet(below, new)
    new.wait_for(3 * MICROBATCHES)
    assert new.got() == frames_of(1, 2, 3)


@pytest.mark.parametrize("answer", [b"\xc1", b"\x93\1\2\3", b"x" * (wire.logged.MOST_SAID + 1)])
def test_an_answer_that_is_no_position_is_refused(answer, tmp_path):
    ours, theirs = wire.memory_pair()
    theirs.write(answer)
    state = wire.LinkState(wire.FrameLog(tmp_path, 1 << 20))
    with pytest.raises(WireError, match="did not say where it stands") as caught:
        wire.LoggedPipe(None, state).go_on(ours)
    assert isinstance(caught.value, BreachError) or len(answer) > wire.logged.MOST_SAID


def message(step, kind=wire.FrameKind.FORWARD, size=100):
    return wire.encode(wire.Frame(kind, step=step, payload=bytes([step]) * size))


def test_a_log_gives_back_what_it_was_given_and_forgets_what_is_safe(tmp_path, monkeypatch):
    monkeypatch.setattr(wire.logged, "SEGMENT_BYTES", 1000)
    (tmp_path / "000007.frames").write_bytes(b"of an earlier process")
    log = wire.FrameLog(tmp_path, 1 << 20)
    for step in range(50):
        log.add(step, wire.FrameKind.FORWARD, message(step))
    log.add(wire.logged.GOODBYE, wire.FrameKind.BYE, message(0, wire.FrameKind.BYE, 0))
    assert log.latest == 49 and log.reach == 0
    held = len(list(tmp_path.iterdir()))
    log.trim(40)
    assert log.reach == 40
    wanted = [*(message(step) for step in range(40, 50)), message(0, wire.FrameKind.BYE, 0)]
    assert [log.read(entry) for entry in log.after(None)[1]] == wanted
    later = wire.LinkState(log, 45).go_on(wire.Position(45, 0, []))
    assert len(later) == 6, "with the goodbye"
    assert log.bytes == sum(map(len, wanted))
    assert len(list(tmp_path.iterdir())) < held / 2, "files go with what they hold"
    for file in tmp_path.iterdir():
        file.write_bytes(b"")
    with pytest.raises(WireError, match="was cut off"):
        log.read(later[0])


@pytest.mark.parametrize("reason", ["limit", "disk"])
def test_a_log_without_room_costs_no_training_and_helps_again_after_a_state(reason, tmp_path):
    full = tmp_path / "full"
    log = wire.FrameLog(full, 1000 if reason == "limit" else 1 << 20)
    if reason == "disk":
        full.write_text("a file where the folder should be")
    for step in range(10):
        log.add(step, wire.FrameKind.FORWARD, message(step))
    assert log.reach > 0 and log.trouble
    state = wire.LinkState(log)
    with pytest.raises(WireError, match="does not reach back to step 0: ") as caught:
        state.go_on(wire.Position(0, 0, {}))
    assert log.trouble in str(caught.value)
    if reason == "disk":
        full.unlink()
    log.trim(10)
    log.add(10, wire.FrameKind.FORWARD, message(10))
    assert log.reach <= 10
    assert [log.read(entry) for entry in state.go_on(wire.Position(10, 0, {}))] == [message(10)]


def test_what_both_ends_do_at_once_keeps_its_order(tmp_path):
    """Frames are sent by one thread while another sends the log again."""
    below, above, theirs = joined(tmp_path)
    below.send(*range(10))
    above.wait_for(10 * MICROBATCHES)
    die(above, theirs, below)
    sending = in_background(lambda: below.send(*range(10, 300)))
    new = Side(tmp_path / "new", None)
    meet(below, new)
    sending.join(PATIENCE)
    wait_until(lambda: len(new.heard.frames) >= 300 * MICROBATCHES)
    assert new.got() == frames_of(*range(300))


def test_a_follower_gets_what_another_gets_sends_nothing_and_takes_its_place(tmp_path):
    below, above, theirs = joined(tmp_path)
    below.send(0, 1)
    fed, follows = wire.memory_pair()

    def feed():
        with contextlib.suppress(WireError):  # at the end of the test
            below.pipe.feed(fed)

    feeding = in_background(feed)
    follower = Side(tmp_path / "follower above", None)
    follower.state.follows, follower.state.sent_again = True, 1 << 60
    follower.pipe.follow(follows)
    follower.start()
    follower.wait_for(2 * MICROBATCHES)
    below.send(2)
    follower.wait_for(3 * MICROBATCHES)
    above.send(0, 1)
    above.send(2, microbatches=1)
    below.wait_for(2 * MICROBATCHES + 1)
    follower.send(0, 1, 2)
    wait_until(lambda: follower.state.log.latest == 2)
    assert below.got() == [*frames_of(0, 1), (2, 0)], "it sends nothing"
    die(above, theirs, below)
    ours, theirs = wire.memory_pair()
    going = in_background(lambda: below.pipe.go_on(ours))
    follower.pipe.await_another()
    follower.pipe.go_on(theirs)
    going.join(PATIENCE)
    below.send(3)
    follower.wait_for(4 * MICROBATCHES)
    follower.send(3)
    below.wait_for(4 * MICROBATCHES)
    assert below.got() == frames_of(0, 1, 2, 3), "what the lost one had not sent, and nothing twice"
    assert follower.got() == frames_of(0, 1, 2, 3)
    fed.close()
    below.pipe.close()
    feeding.join(PATIENCE)


def test_a_follower_that_is_fed_no_more_says_so(tmp_path):
    ours, theirs = wire.memory_pair()
    log = wire.FrameLog(tmp_path / "follower", 1 << 20)
    state = wire.LinkState(log, 0, is_new=True, follows=True)
    pipe = wire.LoggedPipe(None, state)
    going = in_background(lambda: pipe.follow(theirs))
    assert ours.read()
    ours.write(msgspec.msgpack.encode(wire.Position(0, 0, [])))
    going.join(PATIENCE)
    ours.close()
    with pytest.raises(WireError, match="feeds this follower no more"):
        pipe.read()


@pytest.mark.parametrize("how", ["feed", "go_on"])
def test_a_log_of_more_than_a_lasting_pipe_keeps_arrives(how, tmp_path, monkeypatch):
    """Acknowledgements are heard by whoever reads: on a link that is over, and from one that
    follows, nobody else does.
    """
    monkeypatch.setattr(wire.lasting, "MOST_KEPT", 3000)
    monkeypatch.setattr(wire.lasting, "ACKNOWLEDGE_BYTES", 1000)
    ours, theirs = (wire.LastingPipe(end, cannot_dial, PATIENCE) for end in wire.memory_pair())
    state = wire.LinkState(wire.FrameLog(tmp_path, 1 << 20))
    pipe = wire.LoggedPipe(None, state)
    for step in range(50):
        pipe.write(message(step))
    if how == "go_on":
        pipe.close()
    theirs.write(msgspec.msgpack.encode(wire.Position(0, 0, [])))
    on_daemon_thread(how, lambda: getattr(pipe, how)(ours))
    got = on_daemon_thread("other end", lambda: [theirs.read() for _ in range(51)][1:])
    assert got.result(PATIENCE) == [message(step) for step in range(50)]
    theirs.close()
    pipe.close()


def cannot_dial(timeout):
    raise WireError("it was one connection")


@pytest.mark.parametrize("wanted", [[True, False], [False, False]], ids=["meanwhile", "before"])
def test_whoever_is_wanted_no_more_is_not_gone_on_with(wanted, tmp_path):
    """Lost while both say where they stand, and another may be here; or before, and then nobody
    waits for its answer.
    """
    pipe = wire.LoggedPipe(None, wire.LinkState(wire.FrameLog(tmp_path, 1 << 20)))
    ours, theirs = wire.memory_pair()
    if is_asked := wanted[0]:
        theirs.write(msgspec.msgpack.encode(wire.Position(0, 0, [])))
    with pytest.raises(WireError, match="is lost too"):
        pipe.go_on(ours, lambda: wanted.pop(0))
    assert bool(theirs.read()) is is_asked and theirs.read() is None and pipe._pipe is None


def test_of_two_that_audit_one_may_end(tmp_path):
    """What waits for each is told apart also while it is the same."""
    pipe = wire.LoggedPipe(None, wire.LinkState(wire.FrameLog(tmp_path, 1 << 20)))
    for count in (1, 2):
        ours, theirs = wire.memory_pair()
        theirs.write(msgspec.msgpack.encode(wire.Position(0, 0, [])))
        on_daemon_thread("feed", lambda ours=ours: pipe.feed(ours, True))
        wait_until(lambda count=count: len(pipe._unwitnessed) == count)
    first, second = pipe._unwitnessed
    ours.close()
    pipe.write(message(0))
    wait_until(lambda: len(pipe._unwitnessed) == 1)
    assert pipe._unwitnessed[0] is first is not second
    pipe.close()


def test_frames_are_left_out_by_kind_for_a_validation_may_be_cut_short(tmp_path):
    state = wire.LinkState(wire.FrameLog(tmp_path, 1 << 20), is_new=True)
    received = [(3, wire.FrameKind.EVALUATE, 2), (3, wire.FrameKind.FORWARD, 1)]
    assert state.go_on(wire.Position(0, 2, received)) == []
    assert state.keep(message(3, wire.FrameKind.VALIDATED)), "the two before it are not made again"
    assert not state.keep(message(3))
    assert state.keep(message(3))
    assert state.sent_again == 4, "the other end has all that it needs for the next step"
