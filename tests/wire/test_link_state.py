"""The state of a logged link, and the pipe that goes by it."""

from pathlib import Path

from thinwire.wire import Frame, FrameKind, FrameLog, LinkState, Position, encode


def frame(step: int, kind: FrameKind = FrameKind.FORWARD) -> bytes:
    return encode(Frame(kind, step=step))


def test_frames_are_left_out_by_kind_for_a_validation_may_be_cut_short(tmp_path: Path) -> None:
    state = LinkState(FrameLog(tmp_path, 1 << 20), is_new=True)
    received = [(3, FrameKind.EVALUATE, 2), (3, FrameKind.FORWARD, 1)]
    assert state.go_on(Position(0, 2, received)) == []
    assert state.keep(frame(3, FrameKind.VALIDATED)), "the two before it are not made again"
    assert not state.keep(frame(3))
    assert state.keep(frame(3))
    assert state.sent_again == 4, "the other end has all that it needs for the next step"


def test_what_waits_on_the_uplink_is_not_sent_twice_when_the_log_was_lost(tmp_path: Path) -> None:
    log = FrameLog(tmp_path, 2 * len(frame(0)))
    state = LinkState(log)
    for step in (0, 0, 0, 1, 1):  # the third finds no room, and the log begins anew
        state.keep(frame(step))
    assert log.reaches(1) and not log.reaches(0)
    assert state.go_on(Position(start=1, latest=0, received=[])) == []
