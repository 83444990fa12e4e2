"""Shards on their way to the host: which travel, in which order, and what stops them."""

import hashlib
import os
import threading

import pytest

from thinwire.background import on_daemon_thread
from thinwire.engine.checkpoint import Shard, Versions, partial_folder, sha256_of
from thinwire.engine.reports import ShardWritten
from thinwire.errors import WireError
from thinwire.run import transfer as tr
from thinwire.wire import FrameKind, memory_pair
from thinwire.wire.door import Allowance
from waiting import PATIENCE, wait_until

LIMIT = 4 << 20
SIZE = 2 * tr.PIECE_BYTES + 99


class Host:
    """A collector of two stages, and all that it has said."""

    def __init__(self, folder, patience=0.0):
        self.folder = folder
        self.said: list[tuple] = []
        self.objection = ""  # to what is in a file
        self.progress: list[tuple[int, int]] = []
        self._changed = threading.Condition()
        self.collector = tr.ShardCollector(
            folder, [LIMIT, LIMIT], lambda stage, written, path: self.objection, self._note,
            patience, on_progress=lambda done, total: self.progress.append((done, total)),
        )  # fmt: skip

    def _note(self, event):
        what = "refused" if event.at_fault else "lost" if event.error else "arrived"
        with self._changed:
            self.said.append((what, event.stage, event.step, *filter(None, [event.error])))
            self._changed.notify_all()

    def announce(self, stage, step, shard):
        self.collector.announce(stage, ShardWritten(step, Versions(step, 0), shard, {}))

    def written(self, member, step, size=0):
        """Both stages have written their shards of a step on a machine, and say so."""
        shards = [write(member, stage, step, size or SIZE) for stage in (0, 1)]
        for stage, shard in enumerate(shards):
            self.announce(stage, step, shard)
        return shards

    def wait(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.said) >= count, PATIENCE), self.said
            return self.said

    def join(self, name, sender, stages):
        """Join a member by a connection; returns its end of it."""
        here, there = memory_pair(2)
        on_daemon_thread("host", lambda: self.collector.collect_from(name, lambda: stages, here))
        on_daemon_thread("member", lambda: sender.serve(there))
        return there


@pytest.fixture
def host(tmp_path):
    host = Host(tmp_path / "host")
    yield host
    host.collector.close()


def write(folder, stage, step, size=SIZE):
    """What the process of a stage leaves on its machine."""
    place = partial_folder(folder, step)
    place.mkdir(parents=True, exist_ok=True)
    content = os.urandom(size)
    (place / f"stage-{stage}.safetensors").write_bytes(content)
    return Shard(f"stage-{stage}.safetensors", hashlib.sha256(content).hexdigest(), size, ["w"])


def arrived(host, stage, step):
    return sha256_of(partial_folder(host.folder, step) / f"stage-{stage}.safetensors")


def test_shards_of_two_machines_arrive(host, tmp_path):
    shards = [write(tmp_path / f"member-{stage}", stage, 10) for stage in (0, 1)]
    for stage in (0, 1):
        host.join(f"peer-{stage}", tr.ShardSender(tmp_path / f"member-{stage}"), [stage])
        host.announce(stage, 10, shards[stage])
    assert sorted(host.wait(2)) == [("arrived", 0, 10), ("arrived", 1, 10)]
    assert [arrived(host, s, 10) for s in (0, 1)] == [shard.sha256 for shard in shards]
    moved = host.collector.meter.snapshot()["received"]["PIECE"]
    whole = sum(shard.bytes for shard in shards)
    assert moved["payload_bytes"] == whole
    assert {total for _, total in host.progress} == {whole}
    assert max(host.progress) == (whole, whole)


def test_of_those_that_wait_the_newest_goes_next(host, tmp_path):
    """Step 10 travels; 20 and 30 come due meanwhile; 40 only on one stage so far."""
    member = tmp_path / "member"
    for step in (10, 20, 30):
        host.written(member, step)
    host.announce(0, 40, write(member, 0, 40))
    assert host.said == []
    host.join("peer", tr.ShardSender(member), [0, 1])
    said = host.wait(6)
    why = "that of step 30 came due before it could be sent"
    assert said == [
        ("arrived", 0, 10), ("arrived", 1, 10),
        ("lost", 0, 20, why), ("lost", 1, 20, why),
        ("arrived", 0, 30), ("arrived", 1, 30),
    ]  # fmt: skip
    host.collector.give_up(40, "disk full")  # that stage could not write its part
    host.announce(1, 40, write(member, 1, 40))
    assert host.wait(8)[6:] == [("lost", 0, 40, "disk full"), ("lost", 1, 40, "disk full")]


def test_members_forget_what_is_of_no_more_use(host, tmp_path):
    """Beside the last few that it wrote, a member keeps those that the host wanted last."""
    member = tmp_path / "member"
    for step in (10, 30, 50):
        write(member, 0, step)
    for step in (20, 40):
        host.written(member, step)
    there = host.join("peer", tr.ShardSender(member), [0, 1])
    host.wait(4)

    def left():
        return sorted(int(folder.name[-2:]) for folder in member.glob("checkpoints/.partial-*"))

    wait_until(lambda: left() == [20, 30, 40, 50])
    kept = tr.incoming_folder(host.folder)
    wait_until(lambda: len(list(kept.iterdir())) == 2)  # those of the last step alone
    host.collector.forget()
    assert not tr.incoming_folder(host.folder).exists()
    there.close()


def test_a_run_that_is_formed_again_may_go_on_before_what_the_host_wanted(host, tmp_path):
    """The host wants step 40, is killed before that is proven, and goes on from step 20."""
    member = tmp_path / "member"
    sender = tr.ShardSender(member)
    host.written(member, 40)
    there = host.join("peer", sender, [0, 1])
    host.wait(2)
    there.close()
    again = Host(tmp_path / "again")
    shards = [write(member, stage, 22) for stage in (0, 1)]
    sender.remove_spare()  # as when a stage has said that it has written
    for stage, shard in enumerate(shards):
        again.announce(stage, 22, shard)
    there = again.join("peer", sender, [0, 1])
    assert again.wait(2) == [("arrived", 0, 22), ("arrived", 1, 22)]
    again.collector.close()
    there.close()


def test_what_a_stage_cannot_have_written_is_not_asked_for(host, tmp_path):
    shard = write(tmp_path, 0, 7, 1000)
    host.announce(0, 7, Shard(**{**vars(shard), "bytes": LIMIT + 1}))
    *what, error = host.said[-1]
    assert what == ["lost", 0, 7]
    assert "4,194,305 bytes, but its state takes at most 4,194,304" in error
    assert not host.folder.exists(), "nothing is written for it"


def test_a_shard_that_is_not_there_or_wrong_is_named(host, tmp_path):
    member = tmp_path / "member"
    host.written(member, 10)
    changed = partial_folder(member, 10) / "stage-0.safetensors"
    changed.write_bytes(bytes(changed.stat().st_size))
    host.join("peer-a", tr.ShardSender(member), [0, 1])
    said = host.wait(3)
    assert [what[:3] for what in said] == [("refused", 0, 10), ("lost", 0, 10), ("lost", 1, 10)]
    assert "the shard of stage 0 from peer-a: it arrived with the hash" in said[0][3]
    assert said[0][3].endswith("twice")
    host.written(tmp_path / "elsewhere", 20)
    assert "file of stage 0 and step 20 cannot be had: No such file" in host.wait(5)[3][3]


def test_a_shard_counts_only_once_it_was_opened(host, tmp_path):
    """Its size and hash are right, and its content is not: the peer that sent it is named."""
    member = tmp_path / "member"
    host.objection = "it cannot be opened"
    host.written(member, 10)
    host.join("peer-a", tr.ShardSender(member), [0, 1])
    why = "the shard of stage 0 from peer-a: it is not its state: it cannot be opened"
    assert host.wait(3) == [("refused", 0, 10, why), ("lost", 0, 10, why), ("lost", 1, 10, why)]
    assert arrived(host, 0, 10) == "missing"
    assert list(tr.incoming_folder(host.folder).iterdir()) == []


def cut_after(messages, pipe):
    """A pipe that breaks after some messages."""
    left, whole = iter(range(messages)), pipe.write

    def write(message):
        if next(left, None) is None:
            pipe.close()
            raise WireError("the connection was lost")
        whole(message)

    pipe.write = write
    return pipe


def pieces_sent(sender):
    return sender.meter.snapshot()["sent"].get("PIECE", {"frames": 0})["frames"]


def test_a_transfer_goes_on_after_a_lost_connection_and_a_restarted_host(tmp_path):
    member, pieces = tmp_path / "member", 8
    host = Host(tmp_path / "host")
    shards = host.written(member, 10, pieces * tr.PIECE_BYTES)
    sender = tr.ShardSender(member)
    here, there = memory_pair(1)
    on_daemon_thread("member", lambda: sender.serve(cut_after(5, there)))
    host.collector.collect_from("peer", lambda: [0], here)  # returns when the connection is lost
    assert host.said == [] and pieces_sent(sender) == 6
    host.collector.close()
    for sent_before in (6, 2 * pieces):  # the run was formed again, twice, and wrote the same bits
        again, sender = Host(tmp_path / "host"), tr.ShardSender(member)
        for stage in (0, 1):
            again.announce(stage, 10, shards[stage])
        again.join("peer", sender, [0, 1])
        again.wait(2)
        assert [arrived(again, s, 10) for s in (0, 1)] == [shard.sha256 for shard in shards]
        kept = 2 * pieces - pieces_sent(sender)
        assert 0 < kept <= sent_before, "what had come was not sent again"
        again.collector.close()
    assert kept == 2 * pieces, "all of it was here"


def test_a_checkpoint_of_which_nothing_comes_is_given_up(tmp_path):
    host = Host(tmp_path / "host", patience=0.2)
    host.written(tmp_path / "member", 10)
    said = host.wait(2)
    assert [what[:3] for what in said] == [("lost", 0, 10), ("lost", 1, 10)]
    assert "nothing of the shard of stage 0, stage 1 has come for" in said[0][3]
    host.collector.close()


def test_a_member_gives_nothing_but_its_shards(tmp_path):
    here, there = memory_pair()
    on_daemon_thread("member", lambda: tr.ShardSender(tmp_path).serve(there))
    talk = tr.Talk(here)
    (tmp_path / "stage-0.safetensors").write_bytes(b"secret")
    talk.say(tr.Want(0, 0, "ab" * 32, 6))
    answer = talk.hear(PATIENCE)
    assert not isinstance(answer, tr.Frame) and "of stage 0 and step 0 cannot be" in str(answer)
    talk.send(tr.Frame(FrameKind.PIECE, payload=b"x"))
    assert talk.hear(PATIENCE) is None, "it hangs up on nonsense"


def test_a_host_that_says_nothing_of_shards_does_not_fill_the_disk(tmp_path):
    sender = tr.ShardSender(tmp_path)
    here, there = memory_pair()
    serving = on_daemon_thread("member", lambda: sender.serve(there))
    talk = tr.Talk(here)
    for step in range(20):
        write(tmp_path, 0, step)
        os.utime(partial_folder(tmp_path, step), ns=(step, step))
        if step in (0, 5):
            talk.say(tr.Want(step, 1, "0" * 64, 1))
            assert isinstance(talk.hear(PATIENCE), tr.Refusal)
    sender.remove_spare()
    kept = [int(folder.name[-2:]) for folder in sorted(tmp_path.glob("checkpoints/.partial-*"))]
    assert kept == [0, 5, *range(20 - tr.KEPT_SHARDS, 20)], "those it wanted, and the newest"
    here.close()
    serving.result(PATIENCE)


class Held(Allowance):
    """Lets nothing pass until a moment."""

    def __init__(self):
        super().__init__(1.0)
        self.begun, self.ended = threading.Event(), threading.Event()

    def book(self, count, now):
        self.begun.set()
        self.ended.wait(PATIENCE)
        return 0.0


def test_a_stage_that_changed_hands_is_fetched_over_one_connection_at_a_time(host, tmp_path):
    member, rate = tmp_path / "member", Held()
    shards = host.written(member, 10, 8 * tr.PIECE_BYTES)
    before, after = tr.ShardSender(member, rate), tr.ShardSender(member)
    host.join("ana", before, [0])
    assert rate.begun.wait(PATIENCE)
    host.join("ben", after, [0, 1])
    rate.ended.set()
    assert sorted(host.wait(2)) == [("arrived", 0, 10), ("arrived", 1, 10)]
    assert [arrived(host, stage, 10) for stage in (0, 1)] == [shard.sha256 for shard in shards]
    assert pieces_sent(before) + pieces_sent(after) == 16, "nothing was sent twice"


def test_what_was_under_way_from_a_former_holder_is_not_the_new_one_s(host, tmp_path):
    """It arrives once another holds the stage, and the two may have written different bytes."""
    member, other, rate, held = tmp_path / "member", tmp_path / "other", Held(), [0]
    host.written(member, 10, 8 * tr.PIECE_BYTES)
    host.join("ana", tr.ShardSender(member, rate), held)
    assert rate.begun.wait(PATIENCE)
    held.clear()
    host.collector.retract([0])
    rate.ended.set()
    sent = host.collector._fetching[0]
    wait_until(lambda: not sent.locked())
    assert host.said == []
    shard = write(other, 0, 10)
    host.announce(0, 10, shard)
    host.join("ben", tr.ShardSender(other), [0])
    assert host.wait(1) == [("arrived", 0, 10)] and arrived(host, 0, 10) == shard.sha256


@pytest.mark.parametrize("why", ["given up", "the epoch is over"])
def test_a_transfer_ends_with_the_wish_for_it(why, host, tmp_path):
    member, rate = tmp_path / "member", Held()
    host.written(member, 10, 8 * tr.PIECE_BYTES)
    sender, (here, there) = tr.ShardSender(member, rate), memory_pair(2)
    serving = on_daemon_thread("member", lambda: sender.serve(there))
    collect = host.collector.collect_from
    fetching = on_daemon_thread("host", lambda: collect("peer", lambda: [0, 1], here))
    assert rate.begun.wait(PATIENCE)
    host.collector.give_up(10, why) if why == "given up" else host.collector.close()
    rate.ended.set()
    fetching.result(PATIENCE)
    with pytest.raises(WireError):
        serving.result(PATIENCE)
    assert pieces_sent(sender) < 8
    if why == "given up":
        host.written(member, 20)
        host.join("peer", tr.ShardSender(member), [0, 1])
        assert host.wait(4)[2:] == [("arrived", 0, 20), ("arrived", 1, 20)]
